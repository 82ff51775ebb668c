"""Quantised formats: every code decodes as specified, encoding stays within the stated bounds, and what is broken is refused."""

import numpy as np
import pytest
import quant_reference as reference
import torch

from batchgen.errors import ModelError, WeightUpdateError
from batchgen.quant.format import Format, Parts
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import Mxfp4Blocks, Mxfp4Packed
from batchgen.quant.packed import Packed, linear

FORMATS = [
    Fp8(),
    Fp8(block=(3, 5)),
    Fp8(powers_of_two=True),
    Mxfp4Blocks(),
    Mxfp4Packed(),
    Int4(),
    Int4(group=64),
]
FP8_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def every_format(test):
    return pytest.mark.parametrize("form", FORMATS, ids=str)(test)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, low: int = 0, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def adversarial() -> torch.Tensor:
    """Rows of 128 that round badly: zeros, signed zeros, an outlier, subnormals, ties, a range of exponents, values out of one row."""
    rows = [
        torch.zeros(128),
        -torch.zeros(128),
        torch.cat((torch.tensor([1e30]), torch.full((127,), 1e-3))),
        torch.full((128,), 1e-42),
        torch.cat((torch.full((64,), 2.0**-149), torch.full((64,), -(2.0**-127)))),
        torch.linspace(-7, 7, 128),
        torch.arange(128) / 16.0,
        2.0 ** torch.arange(-120, 8).float(),
        torch.cat((torch.full((126,), 0.3), torch.tensor([-1.0, 1.0]))),
        torch.cat((torch.full((127,), 7.49), torch.tensor([7.5]))),
        torch.full((128,), 2.0**126),
        torch.full((128,), 2.71).bfloat16().float(),
        torch.full((128,), 6.999999) * torch.tensor([1.0, -0.5]).repeat(64),
    ]
    return torch.stack(rows)


def fp8_parts(shape: tuple[int, int], block: tuple[int, int]) -> Parts:
    parts = Fp8(block=block).allocate(shape)
    parts[""].view(torch.uint8).copy_(FP8_CODES[integers(len(FP8_CODES), *shape)])
    parts["_scale_inv"].copy_(randn(*parts["_scale_inv"].shape).exp())
    return parts


def mxfp4_parts(form: Mxfp4Blocks | Mxfp4Packed, *shape: int, scales: tuple[int, int] = (100, 140)) -> Parts:
    codes, exponents = form.suffixes
    parts = form.allocate(shape)
    parts[codes].copy_(integers(256, *parts[codes].shape))
    parts[exponents].copy_(integers(scales[1], *parts[exponents].shape, low=scales[0], seed=1))
    return parts


def int4_parts(form: Int4, *shape: int) -> Parts:
    parts = form.allocate(shape)
    parts["_packed"].copy_(integers(2**31, *parts["_packed"].shape, low=-(2**31)))
    parts["_scale"].copy_(randn(*parts["_scale"].shape))
    parts["_shape"].copy_(torch.tensor(shape[-2:]))
    return parts


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (3, 5)])
@pytest.mark.parametrize("shape", [(1, 1), (254, 130), (128, 256), (37, 61)])
def test_fp8_decodes_as_the_specification_says(shape, block):
    parts = fp8_parts(shape, block)
    expected = reference.fp8_matrix(parts[""].view(torch.uint8).numpy(), parts["_scale_inv"].numpy(), block)
    assert torch.equal(Fp8(block=block).decode(parts), torch.from_numpy(expected))


@pytest.mark.parametrize("form", [Mxfp4Blocks(), Mxfp4Packed()], ids=str)
def test_mxfp4_decodes_as_the_specification_says(form):
    for scales in ((0, 4), (100, 140), (249, 253)):
        parts = mxfp4_parts(form, 19, 96, scales=scales)
        codes, exponents = (parts[suffix] for suffix in form.suffixes)
        expected = reference.mxfp4_matrix(codes.view(19, 48).numpy(), exponents.numpy())
        decoded = form.decode(parts)
        assert torch.equal(decoded, torch.from_numpy(expected))
        assert np.array_equal(np.signbit(decoded.numpy())[expected != 0], np.signbit(expected)[expected != 0])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_decodes_as_the_specification_says(group):
    form = Int4(group=group)
    parts = int4_parts(form, 11, 256)
    expected = reference.int4_matrix(parts["_packed"].numpy(), parts["_scale"].view(torch.uint16).numpy(), group)
    assert torch.equal(form.decode(parts), torch.from_numpy(expected))


def test_fp8_decodes_as_transformers_does():
    op = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    parts = fp8_parts((256, 384), (128, 128))
    theirs = op._dequantize_one(parts[""], parts["_scale_inv"], torch.float32)
    assert torch.equal(Fp8().decode(parts), theirs)


def test_mxfp4_decodes_as_transformers_does():
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    form = Mxfp4Blocks()
    parts = mxfp4_parts(form, 3, 8, 64)
    assert torch.equal(form.decode(parts, torch.bfloat16), convert(parts["_blocks"], parts["_scales"]).mT)


@pytest.mark.parametrize(("form", "name"), [(Mxfp4Packed(), "MXFP4PackedCompressor"), (Int4(), "PackedQuantizationCompressor")], ids=str)
def test_packed_formats_decode_as_compressed_tensors_does(form, name):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    kind = "int" if isinstance(form, Int4) else "float"
    arguments = schemes.QuantizationArgs(num_bits=4, type=kind, strategy="group", group_size=32, symmetric=True)
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=arguments)
    parts = int4_parts(form, 8, 64) if isinstance(form, Int4) else mxfp4_parts(form, 8, 64)
    theirs = getattr(compressors, name).decompress({f"weight{suffix}": part for suffix, part in parts.items()}, scheme)
    assert torch.equal(form.decode(parts, torch.bfloat16), theirs["weight"].to(torch.bfloat16))


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoded_value_is_within_its_bound(form: Format, dtype):
    for weight in (randn(300, 256), randn(130, 128) * randn(130, 1).exp() ** 8, adversarial()):
        weight = weight.to(dtype)
        error = (form.decode(form.encode(weight)).double() - weight.double()).abs()
        assert bool((error <= form.bound(weight).double()).all())


@every_format
def test_the_largest_error_is_a_share_of_the_blocks_largest_value(form: Format):
    for seed in range(3):
        weight = randn(256, 256, seed=seed)
        error = (form.decode(form.encode(weight)) - weight).abs()
        height, width = form.block if isinstance(form, Fp8) else (1, form.group if isinstance(form, Int4) else 32)
        for first, left in ((0, 0), (255 // height * height, 255 // width * width)):
            block = (slice(first, first + height), slice(left, left + width))
            assert error[block].max() <= weight[block].abs().max() * form.largest_error * (1 + 2**-18)


@every_format
def test_bounds_are_reached_and_not_merely_safe(form: Format):
    share = max(
        ((form.decode(form.encode(weight)) - weight).abs() / form.bound(weight).clamp(min=1e-30)).max().item()
        for weight in (randn(256, 256, seed=seed) for seed in range(4))
    )
    assert 0.9 < share <= 1


@every_format
def test_zeros_stay_zeros(form: Format):
    assert torch.equal(form.decode(form.encode(torch.zeros(5, 128))), torch.zeros(5, 128))


@pytest.mark.parametrize("form", [Mxfp4Blocks(), Mxfp4Packed()], ids=str)
def test_mxfp4_values_are_encoded_to_themselves(form):
    weight = form.decode(mxfp4_parts(form, 40, 128))
    assert torch.equal(form.decode(form.encode(weight)), weight)
    assert torch.equal(form.decode(form.encode(weight.bfloat16())), weight)


def test_int4_values_of_an_encoder_are_encoded_to_themselves():
    form = Int4()
    first = form.encode(randn(40, 128))
    again = form.encode(form.decode(first))
    assert all(torch.equal(again[suffix], part) for suffix, part in first.items())
    rounded = form.encode(form.decode(first, torch.bfloat16))
    assert torch.equal(rounded["_packed"], first["_packed"])


def test_fp8_codes_of_an_encoder_are_encoded_to_themselves():
    for form in (Fp8(), Fp8(powers_of_two=True)):
        first = form.encode(randn(200, 300))
        again = form.encode(form.decode(first))
        assert torch.equal(again[""].view(torch.uint8), first[""].view(torch.uint8))
        torch.testing.assert_close(again["_scale_inv"], first["_scale_inv"], rtol=2**-23, atol=0)


def test_power_of_two_scales_are_powers_of_two_that_hold_the_block():
    parts = Fp8(powers_of_two=True).encode(randn(256, 256) * 1000)
    assert bool((parts["_scale_inv"].frexp().mantissa == 0.5).all())
    assert 224 <= parts[""].float().abs().max() <= 448


@every_format
def test_a_stack_is_its_matrices_and_storage_is_filled_in_place(form: Format):
    stack = randn(3, 70, 128)
    parts = form.allocate(tuple(stack.shape))
    addresses = {suffix: part.data_ptr() for suffix, part in parts.items()}
    assert form.encode(stack, into=parts) is parts
    assert {suffix: part.data_ptr() for suffix, part in parts.items()} == addresses
    decoded = form.decode(parts)
    for expert in range(3):
        alone = form.encode(stack[expert])
        assert all(torch.equal(part, form.select(parts, expert)[suffix]) for suffix, part in alone.items())
        assert torch.equal(form.decode(form.select(parts, expert)), decoded[expert])


@every_format
def test_large_matrices_are_encoded_and_decoded_in_chunks_alike(form: Format, monkeypatch):
    weight = randn(400, 256)
    whole = form.encode(weight)
    monkeypatch.setattr("batchgen.quant.format.CHUNK_VALUES", 256)
    pieces = form.encode(weight)
    assert all(torch.equal(pieces[suffix], part) for suffix, part in whole.items())
    assert torch.equal(form.decode(pieces), form.decode(whole))


@every_format
def test_memory_is_what_the_format_says(form: Format):
    shape = (4, 1536, 7680)
    values = 4 * 1536 * 7680
    assert form.nbytes(shape) / values == pytest.approx(form.bytes_per_value, rel=1e-3)
    parts = form.allocate((2, 256, 640))
    assert sum(part.nbytes for part in parts.values()) == form.nbytes((2, 256, 640))
    assert form.shape(parts) == (2, 256, 640)


def test_parts_are_named_as_checkpoints_name_them():
    assert Fp8().names("a.q_proj.weight") == {"": "a.q_proj.weight", "_scale_inv": "a.q_proj.weight_scale_inv"}
    assert Mxfp4Blocks().names("experts.down_proj") == {"_blocks": "experts.down_proj_blocks", "_scales": "experts.down_proj_scales"}
    assert set(Mxfp4Packed().names("w1.weight").values()) == {"w1.weight_packed", "w1.weight_scale"}
    assert set(Int4().names("w1.weight").values()) == {"w1.weight_packed", "w1.weight_scale", "w1.weight_shape"}


@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_values_that_cannot_be_encoded_are_refused_by_name(form: Format, value):
    weight = randn(4, 128)
    weight[2, 77] = value
    with pytest.raises(WeightUpdateError, match=r"w1\.weight has values that are not finite or beyond"):
        form.encode(weight, name="w1.weight")


def test_broken_storage_is_refused_by_name():
    fp8 = Fp8().encode(randn(4, 128))
    Fp8().check(fp8, "a.weight")
    fp8[""].view(torch.uint8)[1, 1] = 0xFF
    with pytest.raises(ModelError, match=r"a\.weight: a value is NaN"):
        Fp8().check(fp8, "a.weight")
    fp8 = Fp8().encode(randn(4, 128))
    fp8["_scale_inv"][0, 0] = float("inf")
    with pytest.raises(ModelError, match="scale is not finite"):
        Fp8().check(fp8, "a.weight")
    mxfp4 = Mxfp4Blocks().encode(randn(4, 128))
    Mxfp4Blocks().check(mxfp4, "b")
    mxfp4["_scales"][1, 1] = 255
    with pytest.raises(ModelError, match="b: a group's scale is NaN"):
        Mxfp4Blocks().check(mxfp4, "b")
    int4 = Int4().encode(randn(4, 128))
    Int4().check(int4, "c.weight")
    int4["_shape"][0] = 5
    with pytest.raises(ModelError, match=r"c\.weight: weight_shape says \[5, 128\], the packed tensor is \[4, 128\]"):
        Int4().check(int4, "c.weight")
    int4["_scale"][0, 0] = float("nan")
    with pytest.raises(ModelError, match="scale is not finite"):
        Int4().check(int4, "c.weight")


@pytest.mark.parametrize(
    ("form", "shape"), [(Mxfp4Packed(), (4, 48)), (Int4(group=64), (4, 96)), (Fp8(), (128,)), (Fp8(), (0, 4))], ids=str
)
def test_shapes_that_a_format_cannot_hold_are_refused(form: Format, shape):
    with pytest.raises(ModelError, match="holds"):
        form.storage(shape)


def test_a_files_tensor_is_checked_by_its_header_and_converted_without_loss():
    spec = Fp8().storage((130, 128))["_scale_inv"]
    spec.check("file: x", (2, 1), torch.bfloat16)
    with pytest.raises(ModelError, match=r"file: x has shape \[1, 2\], the model's is \[2, 1\]"):
        spec.check("file: x", (1, 2), torch.float32)
    with pytest.raises(ModelError, match="file: x has dtype float16; read in this format: float32, bfloat16"):
        spec.check("file: x", (2, 1), torch.float16)
    exponents = torch.tensor([[0], [130]], dtype=torch.uint8)
    wide = Fp8(powers_of_two=True).storage((130, 128))["_scale_inv"]
    expected = torch.tensor([[2.0**-127], [8.0]])
    assert torch.equal(wide.convert(exponents), expected)
    assert torch.equal(wide.convert(exponents.view(torch.float8_e8m0fnu)), expected)
    narrow = Mxfp4Packed().storage((2, 32))["_scale"]
    assert torch.equal(narrow.convert(exponents.view(torch.float8_e8m0fnu)), exponents)


def test_rows_are_cut_where_scales_begin():
    parts = Fp8().encode(weight := randn(300, 128))
    assert torch.equal(Fp8().decode(Fp8().rows(parts, 128, 300)), Fp8().decode(parts)[128:])
    with pytest.raises(ValueError, match="multiples of 128"):
        Fp8().rows(parts, 64, 128)
    assert weight.shape == Fp8().shape(parts)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_multiplies_piece_by_piece(form: Format, dtype, monkeypatch):
    stack = Packed(form, form.encode(randn(2, 300, 128)))
    x = randn(7, 128, seed=1).to(dtype)
    monkeypatch.setattr("batchgen.quant.format.CHUNK_VALUES", 128 * 40)
    got, expected = linear(x, stack[1]), x @ stack.decode(dtype)[1].T
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=1e-4 if dtype == torch.float32 else 0.3, rtol=1e-5 if dtype == torch.float32 else 0.02)
