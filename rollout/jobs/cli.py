"""`rollout run`. In: command-line options. Out: an exit code, progress on stderr, the summary as one JSON line on stdout."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import batchgen
from batchgen.errors import BatchGenError
from rollout.jobs.backend import Backend, EmbeddedBackend
from rollout.jobs.config import JobConfig
from rollout.jobs.progress import Summary, default_reporter
from rollout.jobs.runner import Job
from rollout.jobs.service_backend import ServiceBackend

BUNDLED_MODEL = Path(batchgen.__file__).parent / "assets" / "tiny-moe"


def run_command(
    input_path: Annotated[Path, typer.Argument(metavar="INPUT.jsonl", help="OpenAI batch lines or plain prompts, one a line.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUTPUT.jsonl", help="One result a row, as rows finish. Also the progress.")],
    url: Annotated[str | None, typer.Option(help="Use a running service, for example tcp://127.0.0.1:5757.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="With --url: key file made by `rollout keys`.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder for an engine in this process. Default: the bundled model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Default for rows that do not say: most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default for rows that do not say.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default for rows that do not say.")] = None,
    n: Annotated[int | None, typer.Option(help="Default for rows that do not say: samples a row.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Put token ids into the results.")] = False,
    set_fields: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=JSON", help="Default for any other sampling field, e.g. --set min_p=0.05.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the job; every row's seed follows from it and the row's id.")] = 0,
    resume: Annotated[str, typer.Option(help="never, auto or must.")] = "auto",
    dedupe: Annotated[str, typer.Option(help="off, or exact: identical rows share one result.")] = "off",
    sort: Annotated[bool, typer.Option("--sort", help="Rewrite the output in input order at the end.")] = False,
    window: Annotated[int, typer.Option(help="Samples in flight.")] = 1024,
    retries: Annotated[int, typer.Option(help="Further attempts after an error that may pass.")] = 2,
    row_timeout: Annotated[float, typer.Option(help="Seconds after which a row is an error row.")] = 3600.0,
    max_error_rate: Annotated[float, typer.Option(help="Stop when, of 200 rows or more, a larger share failed; 1 never stops.")] = 0.5,
    dtype: Annotated[str, typer.Option(help="Embedded engine: auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="Embedded engine: cpu, cuda or cuda:N.")] = "cpu",
    kv_gb: Annotated[float | None, typer.Option(help="Embedded engine: GB of KV pages.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Embedded engine: CPU threads.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Embedded engine: bit-identical whatever the batch.")] = False,
) -> None:
    """Generate a file of requests. Run the same command again after any interruption: no row is lost or done twice.

    Exit codes: 0 every row has its result (failed rows are error rows, see the summary); 2 refused before any work;
    3 too many rows failed; 4 the service or engine was lost; 5 a result could not be written; 130 interrupted. After 3, 4, 5 and 130
    the same command goes on where it stopped.
    """
    try:
        sampling = _sampling(set_fields or [], max_tokens=max_tokens, temperature=temperature, top_p=top_p, n=n)
        if token_ids:
            sampling["return_token_ids"] = True
        config = JobConfig(
            input_path=input_path,
            output_path=output_path,
            sampling=sampling,
            seed=seed,
            resume=resume,  # type: ignore[arg-type]
            dedupe=dedupe,  # type: ignore[arg-type]
            sort=sort,
            window=window,
            retries=retries,
            row_timeout_s=row_timeout,
            max_error_rate=max_error_rate,
        )
        engine = {"dtype": dtype, "device": device, "kv_gb": kv_gb, "num_threads": num_threads, "deterministic": deterministic}
        summary = asyncio.run(run(config, make_backend(url, model, engine, keys=key_file, row_timeout_s=row_timeout)))
    except (BatchGenError, ValueError) as error:
        print(f"rollout run: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    if summary.message:
        print(f"rollout run: {summary.message}", file=sys.stderr)
    print(msgspec.json.encode(summary).decode())
    raise typer.Exit(summary.exit_code)


async def run(config: JobConfig, backend: Backend) -> Summary:
    """Run a job on this terminal. The first Ctrl-C or SIGTERM keeps finished rows and stops; the second ends at once."""
    job = Job(config, backend, default_reporter())
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        job.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await job.run()


def make_backend(
    url: str | None, model: str | None, engine: dict[str, Any], *, keys: Path | None = None, row_timeout_s: float = 3600.0
) -> Backend:
    """The service at `url`, else an engine of our own. `engine` holds EngineConfig fields. Raises ValueError for a mixture."""
    if url is not None:
        given = ["model"] if model is not None else []
        given += [name for name, value in engine.items() if value not in (None, False, "auto", "cpu")]
        if given:
            raise ValueError(f"--url goes without --{given[0].replace('_', '-')}: the service has its own model and settings")
        return ServiceBackend(url, keys=keys, request_timeout_s=row_timeout_s)
    if keys is not None:
        raise ValueError("--key-file goes with --url")

    def make_llm() -> Any:
        from batchgen.llm import LLM

        return LLM(model or str(BUNDLED_MODEL), **engine)

    return EmbeddedBackend(make_llm)


def _sampling(pairs: list[str], **named: float | None) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=JSON, got {pair!r}")
        if name in fields:
            raise ValueError(f"{name} is given twice on the command line")
        try:
            fields[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            raise ValueError(f"--set {name}: {text!r} is not JSON; quote strings, for example --set 'stop=[\"###\"]'") from None
    return fields
