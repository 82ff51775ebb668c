"""Parts of the decoder against obvious versions of themselves: router, dispatch, experts, paged attention, page copies."""

import random

import pytest
import torch
from tiny_models import PAGE_SIZE, Runner, plain_layout, tiny_moe
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.attention.backend import choose_attention
from batchgen.kv_cache import KVCache
from batchgen.models.registry import load_model
from batchgen.moe.dispatch import dispatch
from batchgen.moe.experts import Experts
from batchgen.moe.router import route
from batchgen.moe.routing import Routing
from batchgen.packing import PackedBatch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("moe"))


def test_router_weights_are_the_softmax_of_the_chosen_over_all_experts(products):
    arithmetic = Arithmetic(storage_dtype=torch.float32, device=CPU, deterministic=False)
    logits_TE = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    ids_TK, weights_TK = route(arithmetic, logits_TE, Routing(num_experts=6, num_experts_per_tok=3))
    torch.testing.assert_close(weights_TK, logits_TE.softmax(-1).gather(1, ids_TK), atol=1e-6, rtol=1e-6)
    assert torch.equal(weights_TK, weights_TK.sort(-1, descending=True).values)
    torch.testing.assert_close(
        route(arithmetic, logits_TE, Routing(num_experts=6, num_experts_per_tok=3, normalise=True))[1].sum(-1), torch.ones(9)
    )


@pytest.mark.parametrize("block, multiple", [(1, 1), (4, 1), (1, 16), (2, 3)])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_every_token_finds_its_own_row_in_its_experts_range(block, multiple, num_tokens):
    ids_TK = torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(num_tokens)).topk(3).indices
    batch = dispatch(ids_TK, 8, block=block, multiple=multiple)
    edges = torch.tensor([0, *batch.rows_E]).cumsum(0)
    assert torch.equal(batch.token_R[batch.row_TK], torch.arange(num_tokens)[:, None].expand(-1, 3))
    assert bool(((batch.row_TK >= edges[ids_TK]) & (batch.row_TK < edges[ids_TK + 1])).all())
    assert batch.row_TK.unique().numel() == ids_TK.numel()
    assert all(rows % multiple == 0 for rows in batch.rows_E)
    assert all(len(set(batch.rows_E[first : first + block])) == 1 for first in range(0, 8, block))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 200])
@pytest.mark.parametrize("skewed", [False, True])
def test_experts_equal_a_loop_over_tokens(products, deterministic, dtype, num_tokens, skewed):
    generator = torch.Generator().manual_seed(num_tokens)
    arithmetic = Arithmetic(storage_dtype=dtype, device=CPU, deterministic=deterministic)
    experts = Experts(8, 24, 20, arithmetic)
    experts.gate_up_E2FD.normal_(generator=generator)
    experts.down_EDF.normal_(generator=generator)
    x_TD = torch.randn(num_tokens, 24, generator=generator).to(arithmetic.compute_dtype)
    ids_TK = torch.rand(num_tokens, 8, generator=generator).topk(2).indices
    if skewed:
        ids_TK = torch.tensor([5, 2]).expand(num_tokens, 2).contiguous()
    weights_TK = torch.rand(num_tokens, 2, generator=generator)
    expected = torch.zeros(num_tokens, 24)
    for token in range(num_tokens):
        for expert, weight in zip(ids_TK[token].tolist(), weights_TK[token], strict=True):
            gate, up = experts.gate_up_E2FD[expert].float() @ x_TD[token].float()
            expected[token] += weight * (experts.down_EDF[expert].float() @ (F.silu(gate) * up))
    padded = arithmetic.pad_rows(num_tokens) - num_tokens
    inputs = (F.pad(value, (0, 0, 0, padded)) for value in (x_TD, ids_TK, weights_TK))
    torch.testing.assert_close(experts(*inputs)[:num_tokens], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_paged_attention_equals_plain_attention_on_ragged_rows(products, deterministic, heads):
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    contexts = [1, 2, 130, 300, 17, 64, 65, 200, 3, 129]
    sizes = [1, 1, 1, 1, 1, 64, 65, 130, 2, 129]
    kv = KVCache(plain_layout(heads[1], 8), 300, PAGE_SIZE, torch.float32, "cpu")
    for store in kv.stores:
        store.k_PHSD.normal_(generator=generator)
        store.v_PHSV.normal_(generator=generator)
    pages = iter(rng.sample(range(300), 300))
    table = torch.zeros(len(contexts), max(contexts) // PAGE_SIZE + 1, dtype=torch.int64)
    for row, context in enumerate(contexts):
        for column in range(-(-context // PAGE_SIZE)):
            table[row, column] = next(pages)
    positions = [torch.arange(context - size, context) for context, size in zip(contexts, sizes, strict=True)]
    num_tokens = sum(sizes)
    batch = PackedBatch(
        input_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.cat(positions),
        kv_slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        query_starts=[0, *torch.tensor(sizes).cumsum(0).tolist()],
        num_decode=5,
        context_lens_B=torch.tensor(contexts),
        page_table_BP=table,
        logit_index_M=torch.zeros(0, dtype=torch.int64),
        prefill_contexts=contexts[5:],
    )
    num_heads, num_kv_heads = heads
    q_THGd = torch.randn(num_tokens, num_kv_heads, num_heads // num_kv_heads, 8, generator=generator)
    attention = choose_attention(
        Arithmetic(storage_dtype=torch.float32, device=CPU, deterministic=deterministic), (*heads, 8, 0), plain=True
    )
    got = attention.attend(q_THGd, kv.stores[1], attention.plan(batch, kv), 0.3)
    for row, (context, size) in enumerate(zip(contexts, sizes, strict=True)):
        start = batch.query_starts[row]
        own = table[row, : -(-context // PAGE_SIZE)]
        k, v = (
            cache[own].transpose(1, 2).flatten(0, 1)[:context].repeat_interleave(num_heads // num_kv_heads, 1)
            for cache in (kv.stores[1].k_PHSD, kv.stores[1].v_PHSV)
        )
        mask = torch.arange(context) <= positions[row][:, None]
        q = q_THGd[start : start + size].flatten(1, 2)
        expected = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=0.3)
        torch.testing.assert_close(got[start : start + size], expected.transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-4)


def test_a_sample_goes_on_from_a_copied_partly_filled_page(folder):
    runner = Runner(load_model(str(folder), "float32", "cpu", deterministic=True), 2)
    prompt = [4, 8, 15, 16, 23, 42]
    runner.step({0: prompt})
    runner.kv.copy_pages(runner.pages[0][:2].tolist(), runner.pages[1][:2].tolist())
    runner.lengths[1] = len(prompt)
    got = runner.step({0: [7], 1: [7]})
    assert torch.equal(got[0], got[1])


def test_nan_of_one_sequence_never_reaches_another_not_even_through_a_reused_page(products, folder):
    loaded = load_model(str(folder), "float32", "cpu", deterministic=False)
    healthy = Runner(loaded, 2).step({1: [1, 2, 3, 4, 5]})[1]
    runner = Runner(loaded, 2)
    saved = loaded.model.embedding_VD[99].clone()
    loaded.model.embedding_VD[99] = float("nan")
    got = runner.step({0: [99, 1, 2, 3, 4, 6], 1: [1, 2, 3, 4, 5]})
    assert bool(got[0].isnan().all())
    torch.testing.assert_close(got[1], healthy)
    runner.lengths = [0, 0]
    torch.testing.assert_close(runner.step({0: [1, 2, 3, 4, 5]})[0], healthy)
    loaded.model.embedding_VD[99] = saved


def test_routed_experts_are_those_of_transformers_in_router_order(tmp_path):
    from transformers import AutoModelForCausalLM

    tokens = [9, 8, 7, 100, 200, 3]
    folder = tiny_moe(tmp_path, mlp_only_layers=[1])
    runner = Runner(load_model(str(folder), "float32", "cpu", deterministic=False), 1)
    runner.step({0: tokens[:4]}, return_routed=True)
    first = runner.routed
    runner.step({0: tokens[4:]}, return_routed=True)
    with torch.no_grad():
        output = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens]), output_router_logits=True)
    expected = torch.stack([logits.topk(3).indices for logits in output.router_logits], dim=1)
    got = torch.cat((first, runner.routed))
    assert got.dtype == torch.int16
    assert got.shape == (6, 2, 3)
    assert torch.equal(got.long(), expected)
    runner.step({0: [1]})
    assert runner.routed is None


def test_bfloat16_stays_close_to_transformers_in_float32(tmp_path):
    from transformers import AutoModelForCausalLM

    tokens = list(range(40, 60))
    folder = tiny_moe(tmp_path, dtype="bfloat16", initializer_range=0.05)
    got = Runner(load_model(str(folder), "bfloat16", "cpu", deterministic=False), 1).step({0: tokens})[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    assert got.dtype == torch.float32
    assert (got - expected).norm() < 0.05 * expected.norm()
