"""Compiles every GPU kernel for compute capability 9.0, as a model of Qwen3-30B-A3B's shapes launches it. Needs no GPU.

Launches are replaced by compilations; tensors lie on the CPU and are not read. Prints the shared memory that each kernel takes, in bytes.
"""

import json
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

MAX_SHARED_BYTES = 227 * 1024
"""Of one program on such a card."""

compiled: dict[str, list[int]] = {}
launch = JITFunction.run


def compile_only(self, *args, grid, warmup=False, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    compiled.setdefault(self.fn.__name__, []).append(kernel.metadata.shared)
    return kernel


class Sm90(SimpleNamespace):
    """A driver without a device."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


triton.runtime.driver.set_active(Sm90())
JITFunction.run = compile_only

from batchgen.attention.triton_paged import TritonAttention  # noqa: E402
from batchgen.kernels import delta, experts, paged_attention, sampling  # noqa: E402
from batchgen.kernels.gpu import GpuKernels  # noqa: E402
from batchgen.kv_cache import CacheLayout, KVCache, PageShape  # noqa: E402
from batchgen.moe.activation import SILU, Activation  # noqa: E402
from batchgen.moe.routing import Routing  # noqa: E402
from batchgen.packing import PackedBatch, Spans  # noqa: E402
from batchgen.prefixes import SharedPrefixes, shared_runs  # noqa: E402

HIDDEN, WIDTH, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD, VOCAB, PAGE = 2048, 768, 128, 8, 32, 4, 128, 151936, 16


def bfloat16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def compile_layers(kernels: GpuKernels, num_tokens: int, dtype: torch.dtype, activation=SILU, biases=None) -> None:
    x = torch.empty(num_tokens, HIDDEN, dtype=dtype)
    routing = Routing(num_experts=EXPERTS, num_experts_per_tok=TOP_K, normalise=True)
    ids, weights = kernels.route(bfloat16(num_tokens, EXPERTS), routing)
    ids.zero_()
    gate_up, down = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype), torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=dtype)
    out = kernels.experts(x, gate_up, down, ids, weights, activation, biases)
    kernels.add_norm(x, out, bfloat16(HIDDEN), 1e-6)
    kernels.add_norm(x, x, bfloat16(HIDDEN), 1e-6)
    kernels.rms_norm(x, bfloat16(HIDDEN), 1e-6)


def make_batch(num_rows: int, num_prefill: int) -> PackedBatch:
    sizes = [1] * num_rows + [64] * num_prefill
    contexts = torch.full((len(sizes),), 128)
    return PackedBatch(
        input_ids_T=torch.zeros(sum(sizes), dtype=torch.int64),
        positions_T=torch.full((sum(sizes),), 127),
        kv_slots_T=torch.zeros(sum(sizes), dtype=torch.int64),
        query_starts=[0, *torch.tensor(sizes).cumsum(0).tolist()],
        num_decode=num_rows,
        context_lens_B=contexts,
        page_table_BP=torch.zeros(len(sizes), 8, dtype=torch.int64),
        logit_index_M=torch.zeros(0, dtype=torch.int64),
        prefill_contexts=[128] * num_prefill,
    )


def compile_attention(kernels: GpuKernels) -> None:
    kv = KVCache(CacheLayout(pages=(PageShape(KV_HEADS, HEAD, HEAD),)), 9, PAGE, torch.bfloat16, "cpu")
    attention = TritonAttention(KV_HEADS, HEADS // KV_HEADS, HEAD)
    for num_rows, num_prefill, sharing in ((64, 0, False), (1, 0, False), (4, 2, False), (16, 0, True)):
        batch = make_batch(num_rows, num_prefill)
        if sharing:
            prefixes = SharedPrefixes(num_rows, PAGE, torch.zeros(num_rows + 1, 8, dtype=torch.int64))
            pages = [[1, 2, 3, 4, 5 + row] for row in range(num_rows)]
            prefixes.fill(shared_runs(pages, attention.max_shared_rows), torch.arange(num_rows).numpy())
            batch.shared = prefixes.view(num_rows)
        q = bfloat16(len(batch.positions_T), KV_HEADS, HEADS // KV_HEADS, HEAD)
        for limits in ({}, {"window": 128, "sinks_N": torch.zeros(HEADS)}):
            attention.attend(q, kv.stores[0], attention.plan(batch, kv), 0.1, **limits)
        qkv, slots = bfloat16(len(q), (HEADS + 2 * KV_HEADS) * HEAD), torch.zeros(len(q) * KV_HEADS, dtype=torch.int64)
        kernels.place_heads(qkv, (bfloat16(HEAD), bfloat16(HEAD)), 1e-6, torch.empty(len(q), 2, HEAD), slots, *kv.stores[0].rows())
    latent = KVCache(CacheLayout(pages=(PageShape(1, 576, 512, shares_keys=True),)), 9, PAGE, torch.bfloat16, "cpu")
    for num_heads in (16, 128):
        attention = TritonAttention(1, num_heads, 512)
        for batch in (make_batch(4, 0), make_batch(64, 0), make_batch(4, 2)):
            q = bfloat16(len(batch.positions_T), 1, num_heads, 576)
            attention.attend(q, latent.stores[0], attention.plan(batch, latent), 0.1)
    store = kv.stores[0]
    copied = bfloat16(64, KV_HEADS, HEAD), bfloat16(64, KV_HEADS, HEAD)
    paged_attention.copy_pages(store.k_PHSD, store.v_PHSV, torch.zeros(3, 4, dtype=torch.int64), *copied)


def compile_states() -> None:
    """Kimi-Linear's and Qwen3-Next's sizes."""
    starts = torch.tensor([0, 3, 4])
    spans = Spans(starts=starts.tolist(), start_B=starts, state_B=torch.tensor([0, 1]), fresh_B=torch.tensor([1, 0]))
    for num_heads, num_values, wide in ((32, 32, True), (16, 32, False)):
        channels = (2 * num_heads + num_values) * HEAD
        delta.convolve(bfloat16(4, channels), torch.empty(channels, 4), torch.empty(2, channels, 3), spans)
        q, v = torch.empty(4, num_heads, HEAD), torch.empty(4, num_values, HEAD)
        decay = torch.empty(4, num_values, HEAD) if wide else torch.empty(4, num_values)
        delta.delta_rule(q, q, v, decay, torch.empty(4, num_values), torch.empty(2, num_values, HEAD, HEAD), spans)


def main() -> None:
    kernels = GpuKernels()
    for choice in experts.TILES:
        rows_per_expert = min(choice.max_rows_per_expert, 1024)
        compile_layers(kernels, int(rows_per_expert * EXPERTS) // TOP_K, torch.bfloat16)
    compile_layers(kernels, 8, torch.float32)
    biases = bfloat16(EXPERTS, 2 * WIDTH), bfloat16(EXPERTS, HIDDEN)
    compile_layers(kernels, 1024, torch.bfloat16, Activation("clamped", 1.7, 7.0), biases)
    grouped = Routing(num_experts=256, num_experts_per_tok=8, scoring="sigmoid", num_groups=8, num_kept_groups=4, group_top=2, scale=2.5)
    kernels.route(torch.empty(64, 256), grouped, torch.empty(256))
    compile_attention(kernels)
    compile_states()
    ints, floats = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    sampling.uniforms(ints, ints, ints)
    sampling.draw_plain(bfloat16(4, VOCAB), ints, floats, ints, ints)
    assert all(max(shared) <= MAX_SHARED_BYTES for shared in compiled.values()), compiled
    print(json.dumps({name: sorted(set(shared)) for name, shared in compiled.items()}))


if __name__ == "__main__":
    main()
