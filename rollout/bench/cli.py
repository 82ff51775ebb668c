"""The `rollout bench` command. In: a model folder, workloads. Out: a table of batch completion times, as text and as one line of JSON."""

import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.bench.workloads import NAMES, workload

DEFAULT_WORKLOADS = "uniform,longtail,group,prefill"
WARM_UP_PART = 10
"""Before it is timed, a workload runs at one part in so many of its lengths."""


def bench_command(
    model: Annotated[Path, typer.Option(help="Folder with config.json and safetensors files.")],
    workloads: Annotated[str, typer.Option(help=f"Separated by commas; there are {', '.join(NAMES)}.")] = DEFAULT_WORKLOADS,
    scale: Annotated[float, typer.Option(help="Part of each workload's sequences, for small machines.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kv_gb: Annotated[float | None, typer.Option(help="GB for the KV cache.")] = None,
    device_memory_gb: Annotated[float | None, typer.Option(help="GB on the device for weights, KV and workspace.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences decoded together.")] = 1024,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one forward pass.")] = 16384,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt + output in tokens.")] = 4096,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Bit-identical results whatever the batch mates.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Time whole batches of known shape on this machine, beside the least that their bytes and operations can take."""
    from batchgen.errors import BatchGenError

    names = [name for name in workloads.split(",") if name]
    options: dict[str, Any] = {
        "dtype": dtype, "device": device, "kv_gb": kv_gb, "device_memory_gb": device_memory_gb, "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len, "num_threads": num_threads,
        "deterministic": deterministic,
    }  # fmt: skip
    try:
        for name in names:
            workload(name, 1000, scale=scale)
        figures = run(model, names, scale, options)
    except (ValueError, BatchGenError) as error:
        typer.echo(f"rollout: {error}", err=True)
        raise typer.Exit(3) from error
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def run(model: Path, names: list[str], scale: float, options: dict[str, Any]) -> dict[str, Any]:
    """Print each row as it is measured; returns all figures."""
    import torch

    from batchgen import LLM
    from rollout.bench.floor import Cost, measure

    length = min(options["max_model_len"], _longest(model))
    start = time.perf_counter()
    llm = LLM(str(model), **(options | {"max_model_len": length}))
    where, engine = torch.device(options["device"]), llm.engine
    decoder = engine.model
    rates = measure(where, decoder.arithmetic.compute_dtype)
    cost = Cost.of(decoder, engine.residency.kv.dtype)
    card = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    facts = engine.facts
    typer.echo(f"{facts.name} ({facts.architecture}, {facts.dtype}) on {card}, loaded in {time.perf_counter() - start:.1f} s")
    typer.echo(f"measured: copy {rates.bytes_per_s / 1e9:,.0f} GB/s, products {rates.flop_per_s / 1e12:,.2f} TFLOP/s")
    typer.echo(f"{engine.memory.table()}\n")
    typer.echo("| workload | sequences | seconds | output tok/s | all tok/s | floor, s | of the floor's speed |")
    typer.echo("|---|---|---|---|---|---|---|")
    rows = {}
    for name in names:
        prompts, lengths = workload(name, facts.vocab_size, scale=scale)
        needed = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
        if needed > facts.max_model_len:
            typer.echo(f"| {name} | {len(prompts)} | needs a context of {needed}, there is one of {facts.max_model_len} | | | | |")
            continue
        timed(llm, prompts, [max(1, length // WARM_UP_PART) for length in lengths])
        seconds, floor = timed(llm, prompts, lengths), cost.floor_s(prompts, lengths, rates)
        rows[name] = {"sequences": len(prompts), "seconds": seconds, "floor_s": floor, "output_tokens": sum(lengths)}
        rows[name]["all_tokens"] = sum(lengths) + sum(map(len, prompts))
        rates_of = [f"{rows[name][kind] / seconds:,.0f}" for kind in ("output_tokens", "all_tokens")]
        typer.echo(f"| {name} | {len(prompts)} | {seconds:.2f} | {' | '.join(rates_of)} | {floor:.2f} | {floor / seconds:.0%} |")
    return {
        "model": facts.name,
        "card": card,
        "dtype": facts.dtype,
        "bytes_per_s": rates.bytes_per_s,
        "flop_per_s": rates.flop_per_s,
        "workloads": rows,
    }


def timed(llm: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds from handing over the batch to having all of it; the prefix cache is emptied before."""
    from batchgen import SamplingParams

    llm.engine.pool.drop_cache()
    start = time.perf_counter()
    groups = llm.generate(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
    seconds = time.perf_counter() - start
    if faults := [sample.error.message for group in groups for sample in group.samples if sample.error is not None]:
        raise ValueError(f"{len(faults)} samples failed: {faults[0]}")
    return seconds


def _longest(model: Path) -> int:
    from batchgen.loader import Checkpoint
    from batchgen.models.registry import read_model_config

    return read_model_config(Checkpoint(model)).max_position_embeddings
