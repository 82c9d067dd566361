"""``vgpuctl`` against a node of the tests, as a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.node import ROOT, SimulatedNode


def vgpuctl(node: SimulatedNode, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs it to its end. It has to exit with ``code``."""
    done = subprocess.run(
        [sys.executable, "-m", "vgpu.ctl", *words],
        env=node.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done
