"""Every Triton kernel compiles for the card it is written for, on a machine without one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_kernel_compiles_for_compute_capability_9_0():
    launched = {name for path in (ROOT / "batchgen").rglob("*.py") for name in re.findall(r"^\s+(_\w+)\[", path.read_text(), re.MULTILINE)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "compile_sm90.py"], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == launched
