"""Tests do not depend on how they were started (tests/conftest.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THIS = "tests/vocabulary/test_dispositions.py::test_what_a_test_starts_ignores_and_blocks_nothing"


def test_what_a_test_starts_ignores_and_blocks_nothing() -> None:
    told = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    masks = {int(line.split()[1], 16) for line in told.splitlines() if line.startswith(("SigIgn", "SigBlk"))}
    assert not any(mask >> (number - 1) & 1 for mask in masks for number in signal.valid_signals())  # not libc's own


def test_nor_does_it_in_the_background_of_a_shell() -> None:
    """Which ignores what a terminal sends to all of its processes; ``nohup`` ignores that there is no terminal left."""
    script = f"trap '' INT QUIT HUP; exec {sys.executable} -m pytest -q -p no:cacheprovider {THIS}"
    done = subprocess.run(["/bin/sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
