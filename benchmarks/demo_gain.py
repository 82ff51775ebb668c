"""What `rollout demo` gains and costs. In: how many seeds. Out: a table, one JSON line; exit code 1 when a seed gains less than promised.

python benchmarks/demo_gain.py                # three seeds, as the README says
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rollout.demo.cli import run_demo
from rollout.demo.config import DemoConfig

PROMISED_POINTS = 15.0
"""Least gain in held-out accuracy for every seed, sampled and greedy."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=DemoConfig().rounds)
    parser.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))), help="of the engine, and of the trainer")
    parser.add_argument("--out", type=Path, help="keep reports and the plot here")
    args = parser.parse_args()
    config = replace(DemoConfig(), rounds=args.rounds, num_threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        report = run_demo(config, args.seeds, args.out or Path(folder))
    kept = all(points >= PROMISED_POINTS for gains in report.gains for points in gains)
    print(f"\n{report.table()}\n{report.wall_s:.0f} s, {report.cpu_s:.0f} processor seconds")
    print(json.dumps({"benchmark": "demo_gain", **report.summary(), "promised_points": PROMISED_POINTS, "kept": kept}))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
