"""benchmarks/micro/varying.py, rehearsed: lengths that go by arguments."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.micro.varying import PATTERNS


def test_patterns_are_as_often_long_as_they_say() -> None:
    often = {name: sum(is_long(n) for n in range(1000)) for name, is_long in PATTERNS.items()}
    assert (often["fifty"], often["turns"], often["tenth"], often["long"]) == (500, 500, 100, 1000)
    assert 400 < often["random"] < 600
    assert [PATTERNS["fifty"](n) for n in (0, 49, 50, 99, 100)] == [False, False, True, True, False]


@pytest.mark.slow
def test_both_are_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.micro.varying", "--patterns", "fifty", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"fifty +([\d.]+) % +([\d.]+) %", done.stdout)
    assert all(0 < float(percent) < 101 for percent in found)
