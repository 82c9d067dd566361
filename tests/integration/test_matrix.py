"""The matrix of allocations and frees (tests/gpu/matrix.py) in a vGPU of a simulated node."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.node import ROOT, SimulatedNode


@pytest.mark.slow
def test_every_way_to_allocate_and_to_free_within_at_and_over_the_limit() -> None:
    run = [sys.executable, "-m", "vgpu.ctl", "run", "--sm", "100", "--mem", "4G", "--"]
    with SimulatedNode(1) as node:
        ran = subprocess.run(
            [*run, sys.executable, "-m", "tests.gpu.matrix"],
            env=node.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [case for case in said if case.get("wrong")] == [], ran.stderr
    assert (said[-1], ran.returncode) == ({"cases": 54, "bad": 0}, 0), ran.stderr
