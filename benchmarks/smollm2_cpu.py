"""A real model on this machine's CPU: batchgen, vLLM's CPU build and transformers. In: options. Out: a table and, last, one JSON line.

SmolLM2-135M-Instruct, dense and as a mixture of experts with the same output (examples/smollm2.py). The engines take turns in one run under
the rules of cpu_vs_vllm.py, whose page also says how to make vLLM's venv.

    python benchmarks/smollm2_cpu.py runs/smollm2 --vllm-python /tmp/vllm-cpu-venv/bin/python
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu_vs_vllm import BatchGen, Peer, Taken, Transformers, Vllm, cpu_name, measure

from rollout.bench.workloads import SHAPES

MODELS = ("dense", "moe")
DTYPES = ("float32", "bfloat16")


def start(options: argparse.Namespace, model: str, dtype: str) -> dict[str, Peer]:
    """The engines, loaded and idle."""
    folder, max_model_len = options.folder / model, 2 * sum(SHAPES[options.workload][1:])
    peers: dict[str, Peer] = {}
    for engine in options.engines:
        print(f"starting {engine}: {model} in {dtype}", file=sys.stderr, flush=True)
        if engine == "batchgen":
            peers[engine] = BatchGen(folder, dtype, max_model_len, options.threads)
        elif engine == "vllm":
            log = Path(tempfile.gettempdir()) / f"smollm2-vllm-{model}-{dtype}.log"
            peers[engine] = Vllm(options.vllm_python, folder, dtype, max_model_len, options.threads, options.deadline_s, log)
        else:
            peers[engine] = Transformers(folder, dtype, options.threads)
    return peers


def rows(model: str, dtype: str, taken: dict[str, list[Taken]], num_tokens: int) -> list[dict[str, Any]]:
    """One row an engine; `batchgen_is_x_times_faster` compares medians."""
    medians = {engine: statistics.median(wall for wall, _ in rounds) for engine, rounds in taken.items()}
    ours = medians.get("batchgen")
    return [
        {
            "model": model,
            "dtype": dtype,
            "engine": engine,
            "seconds": [round(wall, 3) for wall, _ in rounds],
            "cpu_seconds": [round(cpu, 3) for _, cpu in rounds],
            "output_tok_s": round(num_tokens / medians[engine], 1),
            "batchgen_is_x_times_faster": round(medians[engine] / ours, 3) if ours else None,
        }
        for engine, rounds in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what examples/smollm2.py wrote")
    parser.add_argument("--vllm-python", type=Path, help="python of a venv with vllm-cpu; without it vLLM is left out")
    parser.add_argument("--engines", nargs="+", choices=["batchgen", "vllm", "transformers"], help="default: all that can run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--workload", choices=SHAPES, default="short")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per engine, after one to warm up (default %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores for each engine (default: all)")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="longest wait for one answer of vLLM (default %(default)g)")
    options = parser.parse_args()
    missing = [name for name in options.models if not (options.folder / name / "config.json").is_file()]
    if missing:
        parser.error(f"{options.folder} has no {', '.join(missing)}; make them with: python examples/smollm2.py {options.folder}")
    options.engines = options.engines or ["batchgen", *(["vllm"] if options.vllm_python else []), "transformers"]
    if "vllm" in options.engines and (options.vllm_python is None or not options.vllm_python.is_file()):
        parser.error(f"--vllm-python is {options.vllm_python}, not a file; give the python of a venv with vllm-cpu")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load average is {load:.1f}; figures from a busy machine mean little", file=sys.stderr)

    num_sequences, num_prompt, num_output = SHAPES[options.workload]
    results: list[dict[str, Any]] = []
    for model in options.models:
        vocab_size = json.loads((options.folder / model / "config.json").read_text())["vocab_size"]
        for dtype in options.dtypes:
            peers = start(options, model, dtype)
            try:
                taken = measure(peers, options.workload, vocab_size, options.rounds)
            finally:
                for peer in peers.values():
                    peer.close()
            results += rows(model, dtype, taken, num_sequences * num_output)

    print(f"\n{cpu_name()}, {options.threads} threads; {num_sequences} sequences, {num_prompt} in, {num_output} out")
    print(f"{'model':8}{'dtype':10}{'engine':14}{'median s':>10}{'cpu s':>10}{'output tok/s':>14}{'we are x':>10}")
    for row in results:
        ratio = row["batchgen_is_x_times_faster"]
        print(
            f"{row['model']:8}{row['dtype']:10}{row['engine']:14}{statistics.median(row['seconds']):10.2f}"
            f"{statistics.median(row['cpu_seconds']):10.2f}{row['output_tok_s']:14.0f}{'-' if ratio is None else f'{ratio:.2f}':>10}"
        )
    summary = {"benchmark": "smollm2_cpu", "workload": options.workload, "cpu": cpu_name(), "threads": options.threads}
    print(json.dumps(summary | {"load_before": load, "results": results}))


if __name__ == "__main__":
    main()
