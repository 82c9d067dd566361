"""Memory on a real GPU: every way to allocate and to free, at the limit of a vGPU. The same simulated:
tests/integration/test_matrix.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def matrix(node: Node) -> None:
    command = [*node.vgpuctl, "run", "--sm", "100", "--mem", "4G", "--", sys.executable, "-m", "tests.gpu.matrix"]
    ran = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False, timeout=200)
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    for case in said:
        print(case)
    assert said, ran.stderr
    assert [case for case in said if case.get("wrong")] == []
    assert ran.returncode == 0, ran.stderr


def test_every_way_to_allocate_and_to_free(node: Node) -> None:
    matrix(node)


def test_every_way_to_allocate_and_to_free_under_mps(spatial_node: Node) -> None:
    matrix(spatial_node)
