"""Rotary position embedding and the ways checkpoints stretch it. In: config.json's rope fields. Out: a table of angles.

Shapes: P positions, d head size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.reader import MAX_TABLE, ConfigReader

TYPES = ("default", "linear", "llama3", "yarn")
NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
MSCALES = ("mscale", "mscale_all_dim")
"""Absent, too, if they are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Frequencies theta ** (-2i / d), stretched according to `type`."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context length before stretching; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: scale of cosines and sines; None: from the factor."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(reader: ConfigReader, default_theta: float, partial: bool = False) -> Rope:
    """Rope of a config.json, under its new (`rope_parameters`) or old (`rope_theta`, `rope_scaling`) names. `partial`: the family may
    rotate a part of each head, see `read_rotary_dim`."""
    own = _rope_fields(reader)
    kind = own.get("rope_type", "type", default="default")
    if kind not in TYPES:
        raise ModelError(f"config.json: rope_type is {kind!r:.100}; supported: {', '.join(TYPES)}")
    if not partial and own.number("partial_rotary_factor", default=1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor is set; this family rotates whole heads")
    theta = own.number("rope_theta", default=default_theta, above=1.0)
    if kind == "default":
        return Rope(theta=theta)
    names = [*filter(own.has, NUMBERS), *(name for name in MSCALES if own.values.get(name)), "factor"]
    fields: dict[str, Any] = {name: own.number(name) for name in names}
    if kind in ("llama3", "yarn"):
        stretched = own.integer("original_max_position_embeddings", "max_position_embeddings", most=MAX_TABLE)
        fields |= {"original_max_position_embeddings": stretched, "truncate": own.flag("truncate", default=True)}
    rope = Rope(theta=theta, type=kind, **fields)
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(f"config.json: low_freq_factor is {rope.low_freq_factor}, not below high_freq_factor, {rope.high_freq_factor}")
    return rope


def read_rotary_dim(reader: ConfigReader, head_dim: int) -> int:
    """Dimensions of a head that are rotated: `rotary_dim`, or the part of it that `partial_rotary_factor` says."""
    if reader.has("rotary_dim"):
        return reader.integer("rotary_dim")
    return int(head_dim * _rope_fields(reader).number("partial_rotary_factor", default=1.0))


def _rope_fields(reader: ConfigReader) -> ConfigReader:
    """What is said of positions, with what is lacking taken from the whole."""
    name = next((each for each in ("rope_parameters", "rope_scaling") if reader.values.get(each)), None)
    return reader if name is None else reader.nested(name)


def rotary_table(max_positions: int, head_dim: int, rope: Rope, device: torch.device) -> Tensor:
    """float32 [max_positions, 2, head_dim]: cosines, and sines whose first half is negated, of each position's angles."""
    if device.type == "meta":
        return torch.empty(max_positions, 2, head_dim, device=device)
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)


def _frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [d / 2], and the scale of cosines and sines."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_scale(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn more than `beta_fast` times within the original context are kept, those below `beta_slow` stretched, with a
    ramp between (Peng et al. 2023)."""

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1.0 - ramp)


def _yarn_scale(rope: Rope) -> float:
    def grown(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)
