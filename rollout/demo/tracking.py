"""Optional experiment logging. In: numbers per round. Out: a wandb run, or nothing. A failure ends the logging, never the run."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


class Tracker:
    """Logs to wandb when it is asked to and can; `off` does nothing and imports nothing."""

    def __init__(self, mode: str, config: Mapping[str, Any], folder: Path):
        self._run: Any = None
        if mode != "off":
            self._guard(lambda: self._open(mode, config, folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is not None:
            self._guard(lambda: self._run.log(dict(values), step=step))

    def close(self) -> None:
        if self._run is not None:
            self._guard(self._run.finish)

    def _open(self, mode: str, config: Mapping[str, Any], folder: Path) -> None:
        wandb: Any = import_module("wandb")
        settings = {"silent": True}  # the terminal belongs to the progress lines
        name = f"seed-{config['seed']}"
        self._run = wandb.init(project="batchgen-demo", name=name, mode=mode, dir=str(folder), config=dict(config), settings=settings)

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # logging is an extra: whatever it raises, the run goes on
            self._run = None
            hint = "; pip install 'batchgen[wandb]'" if isinstance(error, ImportError) else ""
            print(f"demo: goes on without wandb: {error}{hint}", file=sys.stderr, flush=True)
