"""A node process: `python -m rollout.node_main`. In: command line. Out: exit code. The only module of rollout that makes a real engine."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from typing import Any, get_type_hints

from batchgen.config import EngineConfig
from batchgen.errors import BatchGenError
from rollout.engine_thread import EngineFactory, EngineLike
from rollout.node import Node, NodeConfig
from rollout.security import ClientKeys
from weights_sync.heap import keep_freed_buckets

EXIT_OK, EXIT_FAILED, EXIT_BAD_MODEL, EXIT_REFUSED = 0, 1, 2, 3
EXIT_CODES = {"engine_failed": EXIT_FAILED, "model_error": EXIT_BAD_MODEL, "memory_plan": EXIT_BAD_MODEL}

log = logging.getLogger("rollout.node")


def engine_factory(config: EngineConfig) -> EngineFactory:
    """Makes the real engine, in the thread that will own it."""

    def make() -> EngineLike:
        from batchgen.engine import Engine

        engine: EngineLike = Engine(config)
        gc.collect()
        gc.freeze()  # what a loaded model consists of is never garbage: collections between steps need not walk it (30 ms each)
        return engine

    return make


async def run_node(config: NodeConfig, factory: EngineFactory, watch_stdin: bool = False) -> None:
    """Work until stopped by a signal, by the service or, if asked to watch it, by the end of standard input."""
    loop = asyncio.get_running_loop()
    node = Node(config, factory)
    asked = False

    def on_signal(name: str) -> None:
        nonlocal asked
        if asked or watch_stdin:  # a launcher drains the service itself
            node.stop(f"the node got {name}")
        else:
            log.info("%s: finishing what runs; once more to stop now", name)
            node.drain()
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    if watch_stdin:
        # The launcher holds the other end of this pipe: when it dies, however it dies, the node ends too.
        def on_stdin() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                node.stop("the launcher is gone")

        loop.add_reader(0, on_stdin)
    try:
        await node.run()
    finally:
        if watch_stdin:
            loop.remove_reader(0)


def run(config: NodeConfig, factory: EngineFactory, watch_stdin: bool = False) -> int:
    """run_node in a new loop; returns the exit code, having said why it is not 0."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch is not loaded yet; spinning threads starve a trainer on the same cores
    keep_freed_buckets()
    try:
        asyncio.run(run_node(config, factory, watch_stdin))
    except BatchGenError as error:
        print(f"node: {error}", file=sys.stderr)
        return EXIT_CODES.get(error.code, EXIT_REFUSED)
    except Exception as error:
        log.exception("the node failed")
        print(f"node: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command line that parse_engine turns into this config again."""
    return [f"--{name}={getattr(config, name)}" for name in _fields() if getattr(config, name) is not None]


def parse_engine(values: dict[str, str | None]) -> EngineConfig:
    """An EngineConfig of command-line strings. ValueError names the field."""
    return EngineConfig(**{name: _fields()[name](value) for name, value in values.items() if value is not None})


def _fields() -> dict[str, Any]:
    """Field name → parser of its text."""
    parsers: dict[str, Any] = {}
    for name, hint in get_type_hints(EngineConfig).items():
        kinds = set(getattr(hint, "__args__", (hint,))) - {type(None)}
        kind = next((k for k in (bool, int, float) if k in kinds), str)
        parsers[name] = (lambda text: text == "True") if kind is bool else kind
    return parsers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollout.node_main", description="one engine that joins a rollout service")
    parser.add_argument("--join", required=True, help="the service's public address")
    parser.add_argument("--name", default="")
    parser.add_argument("--window", type=int, default=None, help="samples outstanding; default 4 times max_num_seqs")
    parser.add_argument("--key-file", default=None, help="a file of `rollout keys` with the role node")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input ends")
    for name in _fields():
        parser.add_argument(f"--{name}", default=None)
    given = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        engine = parse_engine({name: given[name] for name in _fields()})
        keys = ClientKeys.load(given["key_file"]) if given["key_file"] else None
        config = NodeConfig(url=given["join"], name=given["name"], window=given["window"] or default_window(engine), keys=keys)
    except (ValueError, BatchGenError) as error:
        print(f"node: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return run(config, engine_factory(engine), given["watch_stdin"])


def default_window(engine: EngineConfig) -> int:
    """Enough samples that the engine always finds the next one waiting."""
    return 4 * engine.max_num_seqs


if __name__ == "__main__":
    sys.exit(main())
