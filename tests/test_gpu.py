"""GPU kernels against plain torch, on the GPU or else in Triton's interpreter in float32; and whole generations on a GPU."""

import os
import random

import pytest
import torch
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from batchgen import LLM, SamplingParams  # noqa: E402
from batchgen.attention.reference import ReferenceAttention  # noqa: E402
from batchgen.attention.triton_paged import TritonAttention  # noqa: E402
from batchgen.kernels.gpu import GpuKernels  # noqa: E402
from batchgen.kv_cache import KVCache  # noqa: E402
from batchgen.models.blocks import rotary_table  # noqa: E402
from batchgen.models.config import ModelConfig  # noqa: E402
from batchgen.packing import PackedBatch  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_gpu)]
CONTEXTS, SIZES, NUM_DECODE = [1, 130, 17, 64, 65, 3, 129], [1, 1, 1, 64, 65, 2, 129], 3
PAGE_SIZE = 4


def config(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="test",
        vocab_size=8,
        hidden_size=8,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_bias=False,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_experts=0,
        num_experts_per_tok=0,
        norm_topk_prob=True,
        moe_layers=(),
        eos_token_ids=(),
        dtype="float32",
    )


def ragged_batch() -> PackedBatch:
    pages = iter(random.Random(5).sample(range(150), 150))
    table = torch.zeros(len(CONTEXTS), max(CONTEXTS) // PAGE_SIZE + 1, dtype=torch.int64)
    for row, context in enumerate(CONTEXTS):
        for column in range(-(-context // PAGE_SIZE)):
            table[row, column] = next(pages)
    num_tokens = sum(SIZES)
    return PackedBatch(
        input_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
        positions_T=torch.cat([torch.arange(c - s, c) for c, s in zip(CONTEXTS, SIZES, strict=True)]).to(DEVICE),
        kv_slots_T=torch.ones(num_tokens, dtype=torch.int64, device=DEVICE),
        query_starts=[0, *torch.tensor(SIZES).cumsum(0).tolist()],
        num_decode=NUM_DECODE,
        context_lens_B=torch.tensor(CONTEXTS, device=DEVICE),
        page_table_BP=table.to(DEVICE),
        logit_index_M=torch.zeros(0, dtype=torch.int64, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 64), (16, 1, 32)])
def test_attention_over_pages_equals_plain_torch(dtype, heads):
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    kv = KVCache(config(*heads), 150, PAGE_SIZE, dtype, DEVICE)
    kv.k_LPHSD.normal_()
    kv.v_LPHSD.normal_()
    batch = ragged_batch()
    q_THGd = torch.randn(sum(SIZES), num_kv_heads, num_heads // num_kv_heads, head_dim, device=DEVICE).to(dtype)
    fast, plain = TritonAttention(num_heads // num_kv_heads), ReferenceAttention(deterministic=False)
    got = fast.attend(q_THGd, kv, 1, fast.plan(batch, kv), 0.3)
    wide = KVCache(config(*heads), 150, PAGE_SIZE, torch.float32, DEVICE)
    wide.k_LPHSD.copy_(kv.k_LPHSD)
    wide.v_LPHSD.copy_(kv.v_LPHSD)
    expected = plain.attend(q_THGd.float(), wide, 1, plain.plan(batch, wide), 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 40), (1, 40), (7, 2048), (5, 3, 24)])
def test_norms_equal_plain_torch(dtype, shape):
    x, gains = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    near(GpuKernels().rms_norm(x, gains, 1e-6), F.rms_norm(x.float(), shape[-1:], eps=1e-6) * gains.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_equal_plain_torch(dtype):
    x, delta, gains = randn(7, 40, dtype=dtype), randn(7, 40, dtype=dtype) * 2, randn(40, dtype=dtype)
    total, normed = GpuKernels().add_norm(x, delta, gains, 1e-6)
    assert torch.equal(total, x + delta)
    near(normed, F.rms_norm((x + delta).float(), (40,), eps=1e-6) * gains.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalise", [False, True])
def test_heads_are_normed_rotated_and_written_where_they_lie(dtype, normalise):
    num_heads, num_kv_heads, depth = 5, 2, 6
    qkv = randn(9, 9 * depth, dtype=dtype)
    table = rotary_table(40, depth, 100.0, torch.device("cpu"))[torch.arange(3, 12)].to(DEVICE)
    cos, sin = table.unsqueeze(2).unbind(1)
    gains = (randn(depth, dtype=dtype), 2 + randn(depth, dtype=dtype)) if normalise else None
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:18].to(DEVICE)
    keys, values = torch.zeros(2, 40, depth, device=DEVICE, dtype=dtype)
    queries = GpuKernels().place_heads(qkv, gains, 1e-6, table, slots, keys, values)

    def rotated(heads: torch.Tensor, gains_d: torch.Tensor | None) -> torch.Tensor:
        heads = heads.float() if gains_d is None else F.rms_norm(heads.float(), (depth,), eps=1e-6) * gains_d.float()
        return heads * cos + heads.roll(3, -1) * sin

    q, k, v = qkv.view(9, 9, depth).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    near(queries, rotated(q, gains and gains[0]))
    near(keys[slots], rotated(k, gains and gains[1]).reshape(18, depth))
    assert torch.equal(values[slots], v.reshape(18, depth))
    assert int(values.any(1).sum()) == int(keys.any(1).sum()) == 18


@pytest.mark.parametrize("num_experts, k", [(5, 5), (8, 2), (128, 8), (33, 4)])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_router_chooses_the_likeliest_and_ranks_equals_by_number(num_experts, k, normalise):
    logits = randn(19, num_experts)
    logits[3] = 0.0
    ids, weights = GpuKernels().route(logits, k, normalise)
    expected = logits.softmax(-1).topk(k).values
    near(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)
    near(logits.softmax(-1).gather(1, ids), expected)
    assert ids[3].tolist() == list(range(k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_experts_equal_a_loop_over_tokens(dtype, num_tokens):
    x = randn(num_tokens, 32, dtype=dtype)
    gate_up, down = randn(8, 48, 32, dtype=dtype) * 0.3, randn(8, 32, 24, dtype=dtype) * 0.3
    weights, ids = randn(num_tokens, 6).softmax(-1).topk(3)
    got = GpuKernels().experts(x, gate_up, down, ids, weights)
    expected = torch.zeros(num_tokens, 32, device=DEVICE)
    for i in range(3):
        gate, up = torch.einsum("td,tfd->tf", x.float(), gate_up[ids[:, i]].float()).chunk(2, -1)
        expected += weights[:, i : i + 1] * torch.einsum("tf,tdf->td", F.silu(gate) * up, down[ids[:, i]].float())
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("depth, width", [(129, 257), (300, 140)])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_experts_of_any_size_are_computed_with_all_tokens_on_one_of_them(depth, width, num_tokens):
    x, gate_up, down = randn(num_tokens, depth), randn(2, 2 * width, depth) * 0.1, randn(2, depth, width) * 0.1
    ids = torch.ones(num_tokens, 1, dtype=torch.int64, device=DEVICE)
    got = GpuKernels().experts(x, gate_up, down, ids, torch.ones(num_tokens, 1, device=DEVICE))
    gate, up = (x.double() @ gate_up[1].double().T).chunk(2, -1)
    torch.testing.assert_close(got, ((F.silu(gate) * up) @ down[1].double().T).float(), atol=1e-3, rtol=1e-3)


@needs_gpu
def test_greedy_tokens_of_the_bundled_model_are_the_cpus():
    prompts = [[{"role": "user", "content": f"Calculate {a} + {b} * 3."}] for a in range(2, 6) for b in range(5)]
    params = SamplingParams(temperature=0, max_tokens=60)
    groups = [
        LLM("batchgen/assets/tiny-moe", device=device, dtype="float32", kv_gb=0.1).generate(prompts, params) for device in ("cpu", "cuda")
    ]
    for cpu, gpu in zip(*groups, strict=True):
        assert gpu.samples[0].token_ids == cpu.samples[0].token_ids
        torch.testing.assert_close(torch.tensor(gpu.samples[0].logprobs), torch.tensor(cpu.samples[0].logprobs), atol=1e-3, rtol=1e-3)


@needs_gpu
def test_bfloat16_on_a_gpu_scores_a_text_as_the_cpu_does_in_float32():
    prompt = [{"role": "user", "content": "Calculate 12 - 3 * 2."}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    llms = [LLM("batchgen/assets/tiny-moe", device=d, dtype=t, kv_gb=0.1) for d, t in (("cpu", "float32"), ("cuda", "bfloat16"))]
    scores = [llm.generate([prompt], params)[0].prompt_logprobs[1:] for llm in llms]
    torch.testing.assert_close(torch.tensor(scores[1]), torch.tensor(scores[0]), atol=0.25, rtol=0.05)


@needs_gpu
def test_captured_decode_steps_score_as_a_prefill_of_the_same_tokens_does():
    llm = LLM("batchgen/assets/tiny-moe", device="cuda", dtype="bfloat16", kv_gb=0.1)
    prompts = [[{"role": "user", "content": f"Calculate {a} + 5 * {a}."}] for a in range(2, 25)]
    lengths = [5 + 3 * i for i in range(len(prompts))]
    groups = llm.generate(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
    texts = [group.prompt_token_ids + group.samples[0].token_ids for group in groups]
    rescored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for group, again in zip(groups, rescored, strict=True):
        decoded, scored = (torch.tensor(x) for x in (group.samples[0].logprobs, again.prompt_logprobs[len(group.prompt_token_ids) :]))
        assert float((decoded - scored).abs().mean()) < 0.1  # in bfloat16 a router may choose another of two equally likely experts
