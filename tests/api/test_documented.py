"""The code of docs/reference/python.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vgpu
from tests.api.test_testing import run
from tests.integration.node import ROOT, SimulatedNode, eventually

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "reference" / "python.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(node: SimulatedNode, tmp_path: Path, block: str) -> None:
    if "def test_" in block:
        done = run(tmp_path, block)
    else:
        script = tmp_path / "program.py"
        script.write_text(block)
        done = subprocess.run(
            [sys.executable, str(script)],
            env=node.environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: not vgpu.list(), "the vGPU's end")


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 6
