"""A node process with a FakeEngine: `python tests/fake_node.py --join URL [--name N] [--step-s S] [--crash-after K] [--watch-stdin]`."""

import argparse
import os
import sys
from pathlib import Path

from rollout.node import NodeConfig
from rollout.node_main import run

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeEngine


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", required=True)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--crash-after", type=int, default=None, help="exit without a word in this step")
    parser.add_argument("--join-timeout-s", type=float, default=10.0)
    parser.add_argument("--watch-stdin", action="store_true")
    given = parser.parse_args()

    def on_step(engine: FakeEngine) -> None:
        if given.crash_after is not None and engine.stats().steps >= given.crash_after:
            os._exit(9)

    def factory() -> FakeEngine:
        return FakeEngine(step_s=given.step_s, tokens_per_step=given.tokens_per_step, on_step=on_step)

    return run(NodeConfig(url=given.join, name=given.name, join_timeout_s=given.join_timeout_s), factory, given.watch_stdin)


if __name__ == "__main__":
    sys.exit(main())
