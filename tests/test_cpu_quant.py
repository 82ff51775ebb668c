"""Products with packed weights have the bits of products with the decoded ones, at odd sizes, in parts, and whatever the threads."""

import pytest
import torch

from batchgen.kernels import cpu, cpu_quant
from batchgen.moe.activation import SILU, Activation
from batchgen.quant.format import Format
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import Mxfp4Blocks, Mxfp4Packed
from batchgen.quant.packed import Packed

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="needs a C compiler")
FORMATS = [Fp8(), Fp8(block=(3, 5)), Fp8(block=(16, 24), powers_of_two=True), Mxfp4Blocks(), Mxfp4Packed(), Int4(), Int4(group=64)]


def every_format(test):
    return pytest.mark.parametrize("form", FORMATS, ids=str)(test)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(form: Format, *shape: int, seed: int = 0) -> Packed:
    return Packed(form, form.encode(randn(*shape, seed=seed)))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@every_format
@pytest.mark.parametrize("sizes", [(1, 1, 64), (3, 7, 128), (5, 130, 192), (300, 97, 64), (2, 5, 12800), (0, 4, 64)])
def test_a_packed_product_has_the_bits_of_the_decoded_one(form: Format, sizes, threads):
    num_tokens, num_outputs, depth = sizes
    x, weight = randn(num_tokens, depth, seed=1), packed(form, num_outputs, depth)
    assert torch.equal(cpu.load().packed_linear(x, weight), cpu.load().linear(x, weight.decode()))


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 31, 129, 250, 300])
def test_fp8_blocks_may_end_anywhere(depth):
    x, weight = randn(5, depth, seed=1), packed(Fp8(), 200, depth)
    assert torch.equal(cpu.load().packed_linear(x, weight), cpu.load().linear(x, weight.decode()))


def test_every_code_and_scale_has_its_value_in_the_kernel():
    identity = torch.eye(256)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    for scale in (1.0, 2.0**-126, 3e-5, 2.0**110):
        weight = Packed(Fp8(), {"": codes.view(1, 256).view(torch.float8_e4m3fn), "_scale_inv": torch.full((1, 2), scale)})
        assert torch.equal(cpu.load().packed_linear(identity, weight), weight.decode().T)
    for exponent in (0, 1, 127, 252):
        parts = {"_packed": codes.view(1, 256), "_scale": torch.full((1, 16), exponent, dtype=torch.uint8)}
        weight = Packed(Mxfp4Packed(), parts)
        assert torch.equal(cpu.load().packed_linear(torch.eye(512), weight), weight.decode().T)
    words = torch.randint(-(2**31), 2**31, (1, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    weight = Packed(Int4(), {"_packed": words, "_scale": randn(1, 16).bfloat16(), "_shape": torch.tensor([1, 512])})
    assert torch.equal(cpu.load().packed_linear(torch.eye(512), weight), weight.decode().T)


@every_format
def test_an_output_depends_on_its_own_row_alone(form: Format, threads):
    x, weight = randn(301, 128, seed=1), packed(form, 130, 128)
    whole = cpu.load().packed_linear(x, weight)
    for start, end in ((0, 1), (5, 8), (299, 301)):
        assert torch.equal(cpu.load().packed_linear(x[start:end], weight), whole[start:end])


@every_format
def test_parts_are_multiplied_where_they_lie(form: Format):
    stack = packed(form, 3, 288, 128)
    x_wide = randn(9, 300, seed=1)
    x, weight = x_wide[:, 100:228], stack[1].rows(144 if form.row_block != 128 else 128, 288)
    out = torch.zeros(9, 200)
    columns = out[:, 20 : 20 + weight.shape[0]]
    assert cpu.load().packed_linear(x, weight, out_TN=columns) is columns
    assert torch.equal(columns, cpu.load().linear(x, stack.decode()[1, 288 - weight.shape[0] :]))
    assert out[:, :20].count_nonzero() == 0
    assert out[:, 20 + weight.shape[0] :].count_nonzero() == 0


@every_format
@pytest.mark.parametrize("activation", [SILU, Activation(kind="clamped", a=1.702, b=7.0)], ids=["silu", "clamped"])
@pytest.mark.parametrize("num_tokens", [1, 13, 300])
def test_a_layer_of_packed_experts_has_the_bits_of_the_decoded_one(form: Format, activation, num_tokens, threads):
    num_experts, depth, width = 5, 128, 192
    gate, up = packed(form, num_experts, width, depth), packed(form, num_experts, width, depth, seed=1)
    down = packed(form, num_experts, depth, width, seed=2)
    x, (weights, ids) = randn(num_tokens, depth, seed=3), randn(num_tokens, num_experts, seed=4).softmax(-1).topk(2)
    for biases in (None, (randn(num_experts, 2 * width), randn(num_experts, depth))):
        got = cpu.load().packed_experts(x, gate, up, down, ids, weights, activation, biases)
        gate_up = torch.cat((gate.decode(), up.decode()), dim=1)
        assert torch.equal(got, cpu.load().experts(x, gate_up, down.decode(), ids, weights, activation, biases))


def test_a_product_holds_a_panel_and_never_the_matrix(monkeypatch):
    made = []
    empty = torch.empty

    def watched(*shape, **options):
        made.append(tensor := empty(*shape, **options))
        return tensor

    weight = packed(Mxfp4Packed(), 3000, 1024)
    monkeypatch.setattr(cpu_quant.torch, "empty", watched)
    cpu.load().packed_linear(randn(2, 1024), weight)
    assert sum(tensor.nbytes for tensor in made) <= cpu_quant.PANEL_BYTES * torch.get_num_threads()
    assert weight.nbytes < 0.54 * 3000 * 1024
