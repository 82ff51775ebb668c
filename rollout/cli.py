"""The `rollout` command. In: command line. Out: exit code. Starts without torch; other builders' commands are imported when they run."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Rollouts and synthetic data from mixture-of-experts models.")

Model = Annotated[Path, typer.Option("--model", help="Folder with config.json, safetensors and tokenizer files.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
KvGb = Annotated[float | None, typer.Option(help="GB for the KV cache.")]
DeviceGb = Annotated[float | None, typer.Option(help="GB on the device for weights, KV and workspace.")]
Seqs = Annotated[int | None, typer.Option(help="Most sequences decoded together.")]
BatchedTokens = Annotated[int | None, typer.Option(help="Most tokens in one forward pass.")]
MaxLen = Annotated[int | None, typer.Option(help="Longest prompt + output in tokens. Default: the model's limit.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of each node.")]
Seed = Annotated[int | None, typer.Option(help="Run seed of the engine.")]
Speculative = Annotated[
    int | None, typer.Option("--num-speculative-tokens", help="Most tokens guessed at a time while few sequences are live.")
]
Deterministic = Annotated[bool, typer.Option(help="Bit-identical results whatever the batch mates.")]
KeyFile = Annotated[Path | None, typer.Option(help="Key file made by `rollout keys`.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        import batchgen

        typer.echo(f"batchgen {batchgen.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Rollouts and synthetic data from mixture-of-experts models."""


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs --keys and --allow-remote.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Public port: clients and nodes. 0 lets the system choose.")] = 5757,
    admin_port: Annotated[int, typer.Option(help="Admin port: weights, pause, abort, shutdown.")] = 5758,
    nodes: Annotated[int, typer.Option(help="Engine processes to start here.")] = 1,
    keys: Annotated[Path | None, typer.Option(help="Folder made by `rollout keys`.")] = None,
    node_key: Annotated[Path | None, typer.Option(help="Key file with role node, for the nodes started here.")] = None,
    allow_remote: Annotated[bool, typer.Option(help="Listen where other machines can reach; needs --keys.")] = False,
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 5.0,
    dtype: Dtype = None,
    device: Device = None,
    kv_gb: KvGb = None,
    device_memory_gb: DeviceGb = None,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    max_model_len: MaxLen = None,
    num_threads: Threads = None,
    seed: Seed = None,
    num_speculative_tokens: Speculative = None,
    deterministic: Deterministic = False,
) -> None:
    """Start the service and its engine nodes on this machine."""
    from rollout.launch import ServeConfig, node_command, run
    from rollout.security import ServerKeys
    from rollout.service import ServiceConfig

    _log()
    engine = _engine(
        model=str(model), dtype=dtype, device=device, kv_gb=kv_gb, device_memory_gb=device_memory_gb, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, num_threads=num_threads, seed=seed,
        num_speculative_tokens=num_speculative_tokens, deterministic=deterministic,
    )  # fmt: skip
    _check_model(model)
    with _told():
        if not 0 <= nodes <= 64:
            raise ValueError(f"nodes is 0 to 64, got {nodes}")
        if keys is not None and nodes and node_key is None:
            raise ValueError("with --keys, nodes started here need --node-key, a file with the role node")
        service = ServiceConfig(
            url=f"tcp://{host}:{port}",
            admin_url=f"tcp://{host}:{admin_port}",
            keys=ServerKeys.load(keys) if keys is not None else None,
            allow_remote=allow_remote,
        )
        commands = [node_command(engine, f"node-{number}", node_key) for number in range(nodes)]
        config = ServeConfig(service=service, node_commands=commands, drain_s=drain_s)
    raise typer.Exit(run(config, lambda line: typer.echo(line)))


@app.command()
def node(
    join: Annotated[str, typer.Option(help="The service's public address, for example tcp://127.0.0.1:5757.")],
    model: Model,
    name: Annotated[str, typer.Option(help="Shown in health. Default: host and process id.")] = "",
    key_file: KeyFile = None,
    dtype: Dtype = None,
    device: Device = None,
    kv_gb: KvGb = None,
    device_memory_gb: DeviceGb = None,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    max_model_len: MaxLen = None,
    num_threads: Threads = None,
    seed: Seed = None,
    num_speculative_tokens: Speculative = None,
    deterministic: Deterministic = False,
) -> None:
    """Start one more engine that shares the work of a running service."""
    from rollout.node import NodeConfig
    from rollout.node_main import default_window, engine_factory, run
    from rollout.security import ClientKeys

    _log()
    engine = _engine(
        model=str(model), dtype=dtype, device=device, kv_gb=kv_gb, device_memory_gb=device_memory_gb, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, num_threads=num_threads, seed=seed,
        num_speculative_tokens=num_speculative_tokens, deterministic=deterministic,
    )  # fmt: skip
    _check_model(model)
    with _told():
        keys = ClientKeys.load(key_file) if key_file is not None else None
        config = NodeConfig(url=join, name=name, window=default_window(engine), keys=keys)
    raise typer.Exit(run(config, engine_factory(engine)))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where keys are kept (0700); the server's are made on first use.")],
    name: Annotated[str, typer.Option(help="Whose key: a client, node or trainer.")],
    role: Annotated[list[str], typer.Option(help="submit, node, admin or metrics; may be given several times.")],
) -> None:
    """Make a CURVE key file (0600) and put it on the service's allow-list."""
    from rollout.security import ROLES, make_keys

    with _told():
        unknown = [one for one in role if one not in ROLES]
        if unknown:
            raise ValueError(f"unknown role {unknown[0]!r}; roles are {', '.join(ROLES)}")
        path = make_keys(folder, name, role)  # type: ignore[arg-type]
    typer.echo(f"{path} (roles: {', '.join(role)}); give this file to {name}, keep {folder} for the service")


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A model folder, or a service's address (tcp://…, ipc://…).")],
    key_file: KeyFile = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for a service.")] = 5.0,
) -> None:
    """Say what a model folder or a running service is, and whether it can be used."""
    with _told():
        facts = _service_facts(target, key_file, timeout_s) if "://" in target else _model_facts(Path(target))
    for name, value in facts.items():
        typer.echo(f"{name:>20}  {value}")


def _service_facts(url: str, key_file: Path | None, timeout_s: float) -> dict[str, Any]:
    from rollout.client_sync import RolloutClient

    with RolloutClient(url, keys=key_file, connect_timeout_s=timeout_s, name="rollout check") as client:
        health = client.health(timeout_s)
        facts: dict[str, Any] = {"status": f"{health.status}: {health.message}", "weights version": health.weights_version}
        if health.model is not None:
            facts |= {name: getattr(health.model, name) for name in health.model.__struct_fields__}
        for one in health.nodes:
            state = "serves" if one.serving else f"set aside until the next update: holds weights version {one.weights_version}"
            facts[f"node {one.name}"] = f"{state}, {one.outstanding} samples, heard {one.silent_s:.1f} s ago"
        return facts


def _model_facts(folder: Path) -> dict[str, Any]:
    _check_model(folder)
    from batchgen.config import EngineConfig
    from batchgen.engine import Engine

    engine = Engine(EngineConfig(model=str(folder)))
    facts = {name: getattr(engine.facts, name) for name in engine.facts.__struct_fields__}
    return facts | {"tokenizer": "yes" if engine.tokenizer is not None else "no: only token ids can be served"}


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        typer.echo(f"{folder} is not a model folder: it has no config.json; give a folder in Hugging Face layout", err=True)
        raise typer.Exit(2)


def _engine(**fields: Any) -> Any:
    """An EngineConfig; what the user did not say is the engine's default."""
    from batchgen.config import EngineConfig

    with _told():
        return EngineConfig(**{name: value for name, value in fields.items() if value is not None})


class _told:
    """Turns our errors into one line and exit code 3."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        from batchgen.errors import BatchGenError

        if isinstance(error, ValueError | BatchGenError):
            typer.echo(f"rollout: {error}", err=True)
            raise typer.Exit(3)


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def _register(name: str, home: str, function: str, summary: str) -> None:
    """A command of another package of rollout, imported when it is called; it parses its own arguments."""

    @app.command(name, help=summary, context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
    def command(context: typer.Context) -> None:
        from importlib import import_module

        inner = typer.Typer(add_completion=False)
        inner.command(name)(getattr(import_module(home), function))
        inner(args=context.args, prog_name=f"rollout {name}")


_register("run", "rollout.jobs.cli", "run_command", "Run a file of prompts through the model, with resume.")
_register("bench", "rollout.bench.cli", "bench_command", "Time batches of known shape, beside the least they can take.")
_register("demo", "rollout.demo.cli", "demo_command", "Watch the bundled model learn a task through this service, in minutes.")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
