"""`rollout serve`: the service in this process, nodes as child processes. In: addresses and node commands. Out: exit code.

A node that exits is reported and the service goes on; its health says so. Stopping order: refuse new requests, let what runs finish
for drain_s, tell clients and nodes, close sockets, wait for the nodes, kill what is left, remove the run folder.
"""

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.config import EngineConfig
from rollout.errors import RolloutError, SecurityError
from rollout.security import is_local, run_folder
from rollout.service import Service, ServiceConfig
from rollout.sockets import AddressInUseError
from weights_sync.heap import keep_freed_buckets

EXIT_OK, EXIT_FAILED, EXIT_BAD_MODEL, EXIT_REFUSED, EXIT_ADDRESS_IN_USE = 0, 1, 2, 3, 4
NODE_EXIT_S = 15.0
log = logging.getLogger("rollout.serve")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """A service and the nodes it starts."""

    service: ServiceConfig
    node_commands: Sequence[Sequence[str]] = ()
    """Command lines without `--join`; each becomes a process that joins through a private ipc address."""
    drain_s: float = 5.0
    """How long running requests may go on after SIGTERM or SIGINT. A second signal ends at once."""

    def __post_init__(self) -> None:
        if self.drain_s < 0:
            raise ValueError(f"drain_s is 0 or more seconds, got {self.drain_s}")


def node_command(engine: EngineConfig, name: str, key_file: Path | None = None) -> list[str]:
    """The command line of a node process with a real engine."""
    from rollout.node_main import engine_arguments

    command = [sys.executable, "-m", "rollout.node_main", "--watch-stdin", "--name", name, *engine_arguments(engine)]
    return command if key_file is None else [*command, "--key-file", str(key_file)]


async def serve(config: ServeConfig, say: Callable[[str], None]) -> int:
    """Run until a signal, an admin's shutdown, or the end of every node before any could serve. Returns the exit code."""
    with run_folder() as folder:
        node_url = f"ipc://{folder / 'nodes.sock'}"
        async with Service(replace(config.service, node_url=node_url)) as service:
            _announce(service, config, say)
            stopping = _watch_signals(service, config.drain_s, say)
            nodes = [await _start_node([*command, "--join", node_url]) for command in config.node_commands]
            watchers = [asyncio.create_task(_watch(node, say)) for node in nodes]
            code = await _until_stopped(service, watchers, stopping, say)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(_end(node) for node in nodes))
        say("stopped")
        return code


def run(config: ServeConfig, say: Callable[[str], None] = print) -> int:
    """serve() in a new loop, errors turned into messages and exit codes."""
    keep_freed_buckets()
    try:
        return asyncio.run(serve(config, say))
    except AddressInUseError as error:
        print(f"serve: {error}", file=sys.stderr)
        return EXIT_ADDRESS_IN_USE
    except (RolloutError, SecurityError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _announce(service: Service, config: ServeConfig, say: Callable[[str], None]) -> None:
    keyed = config.service.keys is not None
    planes = (("clients and nodes", service.url, "submit, node"), ("administration and weights", service.admin_url, "admin, metrics"))
    for what, url, roles in planes:
        who = f"CURVE keys with role {roles}" if keyed else "anyone on this machine, no keys"
        reach = "this machine only" if is_local(url) else "OTHER MACHINES"
        say(f"listening on {url} for {what}: reachable from {reach}; admits {who}")


def _watch_signals(service: Service, drain_s: float, say: Callable[[str], None]) -> asyncio.Event:
    stopping = asyncio.Event()

    def stop(name: str) -> None:
        if stopping.is_set():
            service.shutdown(0.0)
            return
        stopping.set()
        say(f"{name}: no new requests; running ones have {drain_s:g} s")
        service.shutdown(drain_s)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    return stopping


async def _start_node(command: Sequence[str]) -> Process:
    # A session of its own: Ctrl-C reaches the service, which stops the nodes in order.
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, start_new_session=True)


async def _watch(node: Process, say: Callable[[str], None]) -> int:
    code = await node.wait()
    say(f"node process {node.pid} ended with code {code}; the service goes on without it")
    return code


async def _until_stopped(service: Service, watchers: list[asyncio.Task[int]], stopping: asyncio.Event, say: Callable[[str], None]) -> int:
    stopped = asyncio.create_task(service.stopped())
    pending: set[asyncio.Task[int]] = set(watchers)
    said = False
    try:
        while not stopped.done():
            done, _ = await asyncio.wait({stopped, *pending}, return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
            pending -= done
            health = service.health()
            if health.model is not None and not said and health.status == "ok":
                said = True
                say(f"ready: {health.model.name} ({health.model.architecture}, {health.model.dtype}) on {len(health.nodes)} node(s)")
            if watchers and not pending and health.model is None and not stopping.is_set():
                say("every node ended before one could serve")
                return next((task.result() for task in watchers if task.result()), EXIT_FAILED)
        return EXIT_OK
    finally:
        stopped.cancel()


async def _end(node: Process) -> None:
    """The node was told to stop; give it time, then insist."""
    if node.returncode is not None:
        return
    if node.stdin is not None:
        node.stdin.close()
    for last in (False, True):
        with suppress(TimeoutError):
            async with asyncio.timeout(NODE_EXIT_S):
                await node.wait()
            return
        log.warning("node process %d did not stop; it is %s", node.pid, "killed" if last else "terminated")
        with suppress(ProcessLookupError):
            node.kill() if last else node.terminate()
    await node.wait()
