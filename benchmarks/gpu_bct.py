"""Batch completion times on one GPU. In: a model's name, workloads. Out: a table and, last, one JSON line.

Weights are random and made on the device (61 GB need not be written first), bfloat16; EOS is ignored, lengths are forced, temperature
is 1, every sampled token comes with its logprob. Each workload runs once to warm up, at a tenth of its length, and then whole, with the
prefix cache emptied.

    python benchmarks/gpu_bct.py --model qwen3-30b-a3b --workloads uniform longtail group prefill
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from workloads import MODELS

from batchgen import LLM, SamplingParams
from batchgen.models import registry
from rollout.bench.cli import timed
from rollout.bench.workloads import workload

PEER_S = {
    "qwen3-30b-a3b": {"uniform": 35.6, "longtail": 51.8, "group": 13.1, "prefill": 4.07},
    "olmoe-1b-7b": {"uniform": 21.5, "longtail": 25.9, "group": 9.15, "prefill": 1.66},
}
"""vLLM 0.24.0 on the same kind of card, from the project's shared benchmark notes."""
FLOOR_S = {
    "qwen3-30b-a3b": {"uniform": 15.4, "longtail": 32.6, "group": 4.9, "prefill": 2.1},
    "olmoe-1b-7b": {"uniform": 10.7, "longtail": 14.3, "group": 2.2, "prefill": 0.76},
}
"""The bytes and operations of the work at the card's measured rates, from the same notes."""


class RandomCheckpoint:
    """A configuration without weights."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        self.generation_config: dict[str, Any] = {}
        self.stored = dict.fromkeys(range(self.config["num_hidden_layers"]))
        self.float_dtype = torch.bfloat16

    def fingerprint(self) -> str:
        return "random"


def fill_randomly(checkpoint: RandomCheckpoint, table: Any) -> None:
    """Weights of a freshly initialised model; norms are ones."""
    for slot in table.slots.values():
        if slot.view.dim() == 1:
            slot.view.fill_(1.0)
        elif not slot.covers:
            slot.view.normal_(0.0, 0.02)


def load(name: str, **options: Any) -> LLM:
    """An LLM of that architecture on the first GPU."""
    folder = Path(tempfile.mkdtemp()) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name] | {"torch_dtype": "bfloat16"}))
    with mock.patch.multiple(registry, Checkpoint=RandomCheckpoint, check_weights=lambda *_: None, load_weights=fill_randomly):
        return LLM(str(folder), device="cuda", dtype="bfloat16", **options)


def breakdown(llm: LLM, prompts: list[list[int]]) -> str:
    """Device time by kernel over decode steps of the whole batch: its prompts lie in the prefix cache."""
    from torch.profiler import ProfilerActivity, profile

    seconds = {}
    for num_tokens in (1, 65):
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        seconds[num_tokens] = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as prof:
        llm.generate(prompts, SamplingParams(max_tokens=33, ignore_eos=True))
    table = prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=60)
    return f"a decode step of {len(prompts)} takes {(seconds[65] - seconds[1]) / 64 * 1e3:.1f} ms; over 33 tokens:\n{table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PEER_S), default="qwen3-30b-a3b")
    parser.add_argument("--workloads", nargs="+", choices=list(PEER_S["olmoe-1b-7b"]), default=["uniform", "longtail", "group", "prefill"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--profile", action="store_true", help="print device time by kernel for decode steps of the first workload")
    options = parser.parse_args()
    start = time.perf_counter()
    llm = load(options.model, max_num_seqs=1024, max_num_batched_tokens=options.max_num_batched_tokens, max_model_len=4096)
    torch.cuda.synchronize()
    print(f"loaded in {time.perf_counter() - start:.1f} s\n{llm.engine.memory.table()}", flush=True)
    results = {}
    for name in options.workloads:
        prompts, lengths = workload(name, llm.engine.facts.vocab_size)
        timed(llm, prompts, [max(1, length // 10) for length in lengths])
        seconds = timed(llm, prompts, lengths)
        results[name] = seconds
        tokens, peer, floor = sum(lengths), PEER_S[options.model][name], FLOOR_S[options.model][name]
        rates = f"{tokens / seconds:9.0f} output tok/s, {floor / seconds:.0%} of the floor's speed"
        print(f"{name:10} {seconds:8.2f} s  {rates}  (vLLM 0.24.0: {peer} s)", flush=True)
    if options.profile:
        print(breakdown(llm, workload(options.workloads[0], llm.engine.facts.vocab_size)[0]), flush=True)
    peak = torch.cuda.max_memory_allocated()
    print(
        json.dumps(
            {
                "benchmark": "gpu_bct",
                "model": options.model,
                "card": torch.cuda.get_device_name(),
                "seconds": results,
                "peak_bytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
