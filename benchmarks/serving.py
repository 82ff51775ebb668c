"""`rollout serve` for a benchmark. In: a model folder and options. Out: a running service's addresses; it is ended afterwards."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUNDLED_MODEL = Path(__file__).parents[1] / "batchgen" / "assets" / "tiny-moe"
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """A service in processes of its own."""

    url: str
    admin_url: str
    pid: int
    """Of the service; its nodes are children."""


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Served]:
    """Start the service and one node on free ports, wait until it can generate, and stop it at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service ends with a benchmark that is told to
    command = [sys.executable, "-m", "rollout.cli", "serve", "--model", str(model), "--port", "0", "--admin-port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            urls: list[str] = []
            for line in process.stdout:
                urls += re.findall(r"listening on (\S+)", line)
                if line.startswith("ready"):
                    break
            watchdog.cancel()
            if len(urls) != 2:
                raise SystemExit(f"the service did not start within {START_S:g} s; try: {' '.join(command)}")
            yield Served(urls[0], urls[1], process.pid)
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGINT)
            process.communicate()
