"""Memory of an engine at work. In: options. Out: a table and, last, one JSON line.

A float32 model is loaded with a stated KV budget and runs the `cpu` workload; the peak of the process's resident memory, loading
included, less what the process held before it (the interpreter and torch), is compared with weights + KV.

    python benchmarks/engine_memory.py               # the target: at most 1.10 times weights + KV
"""

import argparse
import gc
import json
import tempfile
import threading
from pathlib import Path

import psutil
from workloads import write_model

from batchgen import LLM, SamplingParams
from rollout.bench.workloads import workload

SAMPLE_EVERY_S = 0.005


class Peak:
    """Highest resident memory of this process while open, bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._process, self._over = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-gb", type=float, default=0.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model = write_model("cpu-moe", options.dtype, Path(tempfile.gettempdir()) / "batchgen-bench")
    gc.collect()
    before = psutil.Process().memory_info().rss
    with Peak() as peak:
        llm = LLM(str(model), dtype=options.dtype, kv_gb=options.kv_gb)
        plan = llm.engine.memory
        loaded = psutil.Process().memory_info().rss
        prompts, lengths = workload("cpu", llm.engine.facts.vocab_size)
        llm.generate(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
    planned = plan.weights_bytes + plan.kv_bytes
    rows = {"before": before, "weights": plan.weights_bytes, "kv": plan.kv_bytes, "loaded": loaded - before, "peak": peak.bytes - before}
    for name, size in rows.items():
        print(f"{name:8} {size / 1e6:10.1f} MB")
    ratio = (peak.bytes - before) / planned
    print(f"peak / (weights + kv) {ratio:.3f}")
    print(json.dumps({"benchmark": "engine_memory", "dtype": options.dtype, **{f"{k}_bytes": v for k, v in rows.items()}, "ratio": ratio}))


if __name__ == "__main__":
    main()
