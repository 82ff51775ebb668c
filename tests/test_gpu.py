"""GPU kernels against plain torch, on the GPU or else in Triton's interpreter in float32; and whole generations on a GPU."""

import itertools
import random

import pytest
import torch
from tiny_models import plain_layout
from torch.nn import functional as F

from batchgen import LLM, SamplingParams, rng
from batchgen.attention.flash import FlashPrefill
from batchgen.attention.reference import ReferenceAttention
from batchgen.attention.triton_paged import TritonAttention
from batchgen.draw import draw, greedy
from batchgen.kernels import sampling
from batchgen.kernels.experts import _sort_rows
from batchgen.kernels.gpu import GpuKernels
from batchgen.kv_cache import CacheLayout, KVCache, PageShape
from batchgen.models.rotary import Rope, rotary_table
from batchgen.moe.activation import Activation, gate
from batchgen.moe.expert_sum import ExpertSum
from batchgen.moe.router import _route as plain_route
from batchgen.moe.routing import Routing
from batchgen.packing import PackedBatch
from batchgen.prefixes import SharedPrefixes, shared_runs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_gpu)]
CONTEXTS, SIZES, NUM_DECODE = [1, 130, 17, 64, 65, 3, 129], [1, 1, 1, 64, 65, 2, 129], 3
PAGE_SIZE = 4


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
        prefill_contexts=CONTEXTS[NUM_DECODE:],
    )


def batch_with_common_pages() -> tuple[PackedBatch, list[list[int]]]:
    """Decode rows, of which the first three and three later ones begin alike; 400 pages."""
    contexts = [97, 130, 101, 3, 300, 301, 260, 1]
    free = iter(torch.randperm(400).tolist())
    common = [[next(free) for _ in range(24)] for _ in range(2)]
    pages = [common[0], common[0], common[0], [], common[1], common[1], common[1], []]
    lacking = [-(-context // PAGE_SIZE) - len(known) for known, context in zip(pages, contexts, strict=True)]
    pages = [known + [next(free) for _ in range(number)] for known, number in zip(pages, lacking, strict=True)]
    table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int64)
    for row, values in enumerate(pages):
        table[row, : len(values)] = torch.tensor(values)
    batch = PackedBatch(
        input_ids_T=torch.zeros(8, dtype=torch.int64, device=DEVICE),
        positions_T=torch.tensor(contexts, device=DEVICE) - 1,
        kv_slots_T=torch.ones(8, dtype=torch.int64, device=DEVICE),
        query_starts=list(range(9)),
        num_decode=8,
        context_lens_B=torch.tensor(contexts, device=DEVICE),
        page_table_BP=table.to(DEVICE),
        logit_index_M=torch.arange(8, device=DEVICE),
        prefill_contexts=[],
    )
    return batch, pages


def share(batch: PackedBatch, pages: list[list[int]], max_rows: int) -> None:
    runs = shared_runs(pages, max_rows)
    assert [(run.first, run.count) for run in runs] == [(0, 3), (4, 3)]
    prefixes = SharedPrefixes(8, PAGE_SIZE, batch.page_table_BP)
    prefixes.fill(runs, torch.arange(8).numpy())
    batch.shared = prefixes.view(8)


def randomise(kv: KVCache) -> None:
    for store in kv.stores:
        store.k_PHSD.normal_()
        store.v_PHSV.normal_()


def copy_stores(target: KVCache, source: KVCache) -> None:
    for new, old in zip(target.stores, source.stores, strict=True):
        new.k_PHSD.copy_(old.k_PHSD)
        new.v_PHSV.copy_(old.v_PHSV)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 64), (16, 1, 32)])
def test_attention_over_pages_equals_plain_torch(dtype, heads):
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    kv = KVCache(plain_layout(*heads[1:]), 150, PAGE_SIZE, dtype, DEVICE)
    randomise(kv)
    batch = ragged_batch()
    q_THGd = torch.randn(sum(SIZES), num_kv_heads, num_heads // num_kv_heads, head_dim, device=DEVICE).to(dtype)
    fast, plain = TritonAttention(num_kv_heads, num_heads // num_kv_heads, head_dim), ReferenceAttention(deterministic=False)
    got = fast.attend(q_THGd, kv.stores[1], fast.plan(batch, kv), 0.3)
    wide = KVCache(plain_layout(*heads[1:]), 150, PAGE_SIZE, torch.float32, DEVICE)
    copy_stores(wide, kv)
    expected = plain.attend(q_THGd.float(), wide.stores[1], plain.plan(batch, wide), 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rows", ["mixed", "decode", "sharing"])
def test_windows_and_sinks_are_those_of_plain_torch(dtype, window, with_sinks, rows):
    torch.manual_seed(0)
    kv = KVCache(plain_layout(2, 32), 400, PAGE_SIZE, dtype, DEVICE)
    randomise(kv)
    wide = KVCache(plain_layout(2, 32), 400, PAGE_SIZE, torch.float32, DEVICE)
    copy_stores(wide, kv)
    fast, plain = TritonAttention(2, 3, 32), ReferenceAttention(deterministic=False)
    batch, pages = (ragged_batch(), []) if rows == "mixed" else batch_with_common_pages()
    limits = {"window": window, "sinks_N": torch.randn(6, device=DEVICE) * 3 if with_sinks else None}
    q_THGd = torch.randn(len(batch.positions_T), 2, 3, 32, device=DEVICE).to(dtype)
    expected = plain.attend(q_THGd.float(), wide.stores[1], plain.plan(batch, wide), 0.3, **limits)
    if rows == "sharing":
        share(batch, pages, fast.max_shared_rows)
    near(fast.attend(q_THGd, kv.stores[1], fast.plan(batch, kv), 0.3, **limits), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads, depth, extra", [(6, 16, 16), (33, 32, 0), (40, 256, 32)])
@pytest.mark.parametrize("rows", ["mixed", "decode", "sharing"])
def test_values_that_are_a_part_of_the_keys_are_attended_to_in_blocks_of_heads(dtype, num_heads, depth, extra, rows):
    torch.manual_seed(0)
    layout = CacheLayout(pages=(PageShape(1, depth + extra, depth, shares_keys=True),))
    kv, wide = (KVCache(layout, 400, PAGE_SIZE, each, DEVICE) for each in (dtype, torch.float32))
    kv.stores[0].k_PHSD.normal_()
    wide.stores[0].k_PHSD.copy_(kv.stores[0].k_PHSD)
    fast, plain = TritonAttention(1, num_heads, depth), ReferenceAttention(deterministic=False)
    batch, pages = (ragged_batch(), []) if rows == "mixed" else batch_with_common_pages()
    q_T1NC = torch.randn(len(batch.positions_T), 1, num_heads, depth + extra, device=DEVICE).to(dtype)
    expected = plain.attend(q_T1NC.float(), wide.stores[0], plain.plan(batch, wide), 0.05)
    if rows == "sharing" and fast.max_shared_rows >= 3:
        share(batch, pages, fast.max_shared_rows)
    near(fast.attend(q_T1NC, kv.stores[0], fast.plan(batch, kv), 0.05), expected)


def varlen_attention(q_THd, k_CHd, v_CHd, query_starts, key_starts, max_queries, max_keys, softmax_scale, causal):
    """What a FlashAttention package computes, in plain torch."""
    outputs = []
    for row, (start, end) in enumerate(itertools.pairwise(query_starts.tolist())):
        keys = slice(*key_starts[row : row + 2].tolist())
        assert end - start <= max_queries and keys.stop - keys.start <= max_keys and causal
        q, k, v = (x.transpose(0, 1).float() for x in (q_THd[start:end], k_CHd[keys], v_CHd[keys]))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=softmax_scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).to(q_THd.dtype))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("installed", [False, pytest.param(True, marks=needs_gpu)])
def test_prefill_rows_attend_through_a_flash_attention_package(dtype, installed):
    heads = (4, 2, 64)
    flash = FlashPrefill.load(64) if installed else FlashPrefill(varlen_attention)
    if flash is None or (installed and dtype == torch.float32):
        pytest.skip("no FlashAttention package for this type")
    torch.manual_seed(0)
    kv = KVCache(plain_layout(*heads[1:]), 150, PAGE_SIZE, dtype, DEVICE)
    randomise(kv)
    batch = ragged_batch()
    q_THGd = torch.randn(sum(SIZES), 2, 2, 64, device=DEVICE).to(dtype)
    with_flash, without = TritonAttention(2, 2, 64, flash), TritonAttention(2, 2, 64)
    near(
        with_flash.attend(q_THGd, kv.stores[1], with_flash.plan(batch, kv), 0.125),
        without.attend(q_THGd, kv.stores[1], without.plan(batch, kv), 0.125),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2, 16), (8, 1, 64)])
@pytest.mark.parametrize("sharing", [False, True])
def test_decode_rows_are_split_over_programs_and_read_shared_keys_once(dtype, heads, sharing):
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    kv = KVCache(plain_layout(*heads[1:]), 400, PAGE_SIZE, dtype, DEVICE)
    randomise(kv)
    batch, pages = batch_with_common_pages()
    q_THGd = torch.randn(8, num_kv_heads, num_heads // num_kv_heads, head_dim, device=DEVICE).to(dtype)
    fast, plain = TritonAttention(num_kv_heads, num_heads // num_kv_heads, head_dim), ReferenceAttention(deterministic=False)
    wide = KVCache(plain_layout(*heads[1:]), 400, PAGE_SIZE, torch.float32, DEVICE)
    copy_stores(wide, kv)
    expected = plain.attend(q_THGd.float(), wide.stores[1], plain.plan(batch, wide), 0.3)
    if sharing:
        share(batch, pages, fast.max_shared_rows)
    near(fast.attend(q_THGd, kv.stores[1], fast.plan(batch, kv), 0.3), expected)


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
    table = rotary_table(40, depth, Rope(theta=100.0), torch.device("cpu"))[torch.arange(3, 12)].to(DEVICE)
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
    ids, weights = GpuKernels().route(logits, Routing(num_experts=logits.shape[1], num_experts_per_tok=k, normalise=normalise))
    expected = logits.softmax(-1).topk(k).values
    near(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)
    near(logits.softmax(-1).gather(1, ids), expected)
    assert ids[3].tolist() == list(range(k))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 2, 1), (8, 3, 2)])
def test_the_router_scores_corrects_and_keeps_groups_as_plain_torch_does(scoring, corrected, groups):
    num_groups, kept, top = groups
    if scoring == "chosen" and (corrected or num_groups > 1):
        pytest.skip("no model asks for it")
    sizes = {"num_groups": num_groups, "num_kept_groups": kept, "group_top": top}
    routing = Routing(num_experts=64, num_experts_per_tok=6, scoring=scoring, normalise=scoring == "sigmoid", scale=2.5, **sizes)
    assert GpuKernels().takes_routing(routing)
    logits, bias = randn(37, 64), randn(64) * 0.2 if corrected else None
    ids, weights = GpuKernels().route(logits, routing, bias)
    expected_ids, expected = plain_route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    near(weights, expected)


def summed(experts: ExpertSum) -> torch.Tensor:
    (num_tokens, k), depth = experts.weights_TK.shape, experts.y_RD.shape[1]
    y_TKD = experts.y_RD[experts.place_R.long()].view(num_tokens, k, depth).float()
    return (y_TKD * experts.weights_TK[..., None]).sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_over_experts_is_taken_with_the_norm(dtype):
    y, weights, x, gains = randn(27, 40, dtype=dtype), randn(9, 3), randn(9, 40, dtype=dtype), randn(40, dtype=dtype)
    place = torch.randperm(27, generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    delta = ExpertSum(y_RD=y, place_R=place, weights_TK=weights)
    total, normed = GpuKernels().add_norm(x, delta, gains, 1e-6)
    expected = x.float() + summed(delta)
    near(total, expected)
    near(normed, F.rms_norm(expected, (40,), eps=1e-6) * gains.float())


@pytest.mark.parametrize("num_tokens, k, num_experts", [(1, 8, 128), (40, 3, 5), (300, 8, 128), (700, 8, 60)])
def test_rows_are_sorted_by_expert(num_tokens, k, num_experts):
    ids = randn(num_tokens, num_experts).topk(k).indices
    ends, places, tokens = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in (num_experts, num_tokens * k, num_tokens * k))
    _sort_rows(ids, ends, places, tokens)
    assert ends.tolist() == torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0).tolist()
    assert places.sort().values.tolist() == list(range(num_tokens * k))
    assert torch.equal(torch.searchsorted(ends, places, right=True), ids.flatten())
    assert torch.equal(tokens[places.long()].long(), torch.arange(num_tokens * k, device=DEVICE) // k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_experts_equal_a_loop_over_tokens(dtype, num_tokens):
    x = randn(num_tokens, 32, dtype=dtype)
    gate_up, down = randn(8, 48, 32, dtype=dtype) * 0.3, randn(8, 32, 24, dtype=dtype) * 0.3
    weights, ids = randn(num_tokens, 6).softmax(-1).topk(3)
    got = summed(GpuKernels().experts(x, gate_up, down, ids, weights))
    expected = torch.zeros(num_tokens, 32, device=DEVICE)
    for i in range(3):
        gate, up = torch.einsum("td,tfd->tf", x.float(), gate_up[ids[:, i]].float()).chunk(2, -1)
        expected += weights[:, i : i + 1] * torch.einsum("tf,tdf->td", F.silu(gate) * up, down[ids[:, i]].float())
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "clamped", "limited", "situ"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_have_biases_and_any_activation(dtype, kind, biased):
    x, activation = randn(9, 40, dtype=dtype) * 2, Activation(kind, a=1.7, b=0.8)
    gate_up, down = randn(4, 36, 40, dtype=dtype) * 0.3, randn(4, 40, 18, dtype=dtype) * 0.3
    biases = (randn(4, 36, dtype=dtype), randn(4, 40, dtype=dtype)) if biased else None
    ids = torch.arange(9, device=DEVICE)[:, None] % 4
    got = summed(GpuKernels().experts(x, gate_up, down, ids, torch.ones(9, 1, device=DEVICE), activation, biases))
    for token, expert in enumerate(ids[:, 0].tolist()):
        first, last = (0.0, 0.0) if biases is None else (biases[0][expert].double(), biases[1][expert].double())
        hidden = gate(gate_up[expert].double() @ x[token].double() + first, activation)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        expected = down[expert].double() @ hidden.to(dtype).double() + last
        torch.testing.assert_close(got[token].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("depth, width", [(129, 257), (300, 140)])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_experts_of_any_size_are_computed_with_all_tokens_on_one_of_them(depth, width, num_tokens):
    x, gate_up, down = randn(num_tokens, depth), randn(2, 2 * width, depth) * 0.1, randn(2, depth, width) * 0.1
    ids = torch.ones(num_tokens, 1, dtype=torch.int64, device=DEVICE)
    got = summed(GpuKernels().experts(x, gate_up, down, ids, torch.ones(num_tokens, 1, device=DEVICE)))
    gate, up = (x.double() @ gate_up[1].double().T).chunk(2, -1)
    torch.testing.assert_close(got, ((F.silu(gate) * up) @ down[1].double().T).float(), atol=1e-3, rtol=1e-3)


SEEDS = [0, 1, 2**64 - 1, 2**63 + 12345, 987654321987]
POSITIONS = [0, 5, 1 << 33, 7, 2]


def signed_seeds() -> torch.Tensor:
    return torch.tensor([seed - (seed >> 63 << 64) for seed in SEEDS], device=DEVICE)


def test_random_numbers_are_the_cpus_bit_for_bit():
    key = torch.tensor([rng.seed_words(seed) for seed in SEEDS]).T
    expected = rng.uniforms(key, torch.tensor(POSITIONS)[:, None])[:, 0]
    got = sampling.uniforms(signed_seeds(), torch.arange(5, device=DEVICE), torch.tensor(POSITIONS, device=DEVICE))
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 4096, 10007])
def test_tokens_and_logprobs_are_those_of_plain_sampling(dtype, vocab):
    temperatures = torch.tensor([1.0, 0.0, 0.7, 2.0, 0.0])
    logits = (3 * randn(5, vocab)).to(dtype)
    logits[1, 2] = logits[1, 1] = 20.0
    slots, positions = torch.arange(5, device=DEVICE), torch.tensor(POSITIONS, device=DEVICE)
    tokens, logprobs, failed = sampling.draw_plain(logits, slots, temperatures.to(DEVICE), signed_seeds(), positions)
    scaled = logits.float().cpu() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    uniform = sampling.uniforms(signed_seeds(), slots, positions).cpu()
    assert tokens.cpu().tolist() == torch.where(temperatures == 0, greedy(scaled), draw(scaled.softmax(1), uniform)).tolist()
    assert tokens[1] == 1
    expected = scaled.log_softmax(1).gather(1, tokens.cpu()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert not failed.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside the interpreter
def test_a_row_whose_logits_are_not_finite_fails_alone():
    logits = randn(4, 5000)
    logits[0, 4500], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    slots = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    tokens, logprobs, failed = sampling.draw_plain(logits, slots, torch.ones(1, device=DEVICE), signed_seeds(), slots)
    assert failed.tolist() == [True, True, True, False]
    assert tokens[:3].tolist() == [0, 0, 0] and logprobs.isfinite().all()


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
