"""An independent decoder of quantised tensors, from the specifications: one number at a time, in Python's integers and exact fractions."""

from fractions import Fraction

import numpy as np

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3(byte: int) -> Fraction:
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    assert byte & 0x7F != 0x7F, "NaN"
    if exponent == 0:
        return sign * Fraction(mantissa, 8) / 2**6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e2m1(code: int) -> Fraction:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def e8m0(byte: int) -> Fraction:
    return Fraction(2) ** (byte - 127)


def bfloat16(bits: int) -> Fraction:
    return Fraction(float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0]))


def rounded(value: Fraction) -> np.float32:
    """To float32: products of these codes and scales have at most 28 significant bits, so a double holds them exactly."""
    assert Fraction(float(value)) == value
    return np.float32(float(value))


def fp8_matrix(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    out = np.zeros(codes.shape, np.float32)
    for n, d in np.ndindex(codes.shape):
        out[n, d] = rounded(e4m3(int(codes[n, d])) * Fraction(float(scales[n // block[0], d // block[1]])))
    return out


def mxfp4_matrix(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """packed: bytes [N, D/2]."""
    out = np.zeros((packed.shape[0], packed.shape[1] * 2), np.float32)
    for n, d in np.ndindex(out.shape):
        byte = int(packed[n, d // 2])
        out[n, d] = rounded(e2m1(byte >> 4 if d % 2 else byte & 15) * e8m0(int(scales[n, d // 32])))
    return out


def int4_matrix(words: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """words: int32 [N, D/8]; scales: bits of bfloat16."""
    out = np.zeros((words.shape[0], words.shape[1] * 8), np.float32)
    for n, d in np.ndindex(out.shape):
        value = (int(words[n, d // 8]) % 2**32 >> 4 * (d % 8)) % 16 - 8
        out[n, d] = rounded(value * bfloat16(int(scales[n, d // group])))
    return out
