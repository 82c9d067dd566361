"""Memory on a real GPU: every way to allocate and to free, at the limit of a vGPU. The same simulated:
tests/integration/test_matrix.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def test_managed_memory_of_an_oversubscribed_vgpu_works(node: Node) -> None:
    """Far below what the card has: beyond that it may hang a GPU. Beyond it: tests/hook/test_oversubscribe.py."""
    program = """
import ctypes
from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX
gpu = Gpu(PTX)
size = 3 << 30
address = gpu.allocate(size)
managed = ctypes.c_uint()
gpu.call("cuPointerGetAttribute", ctypes.byref(managed), 8, ctypes.c_uint64(address))
gpu.clear(address, size)
end = set(gpu.read(address + size - 4096, 4096))
print(managed.value & 1, end, gpu.memory_info(), gpu.allocate(6 << 30), flush=True)
"""
    options = ["--sm", "50", "--mem", "8G", "--oversubscribe", "managed"]
    command = [*node.vgpuctl, "run", *options, "--", sys.executable, "-c", program]
    ran = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.startswith("1 {0} ("), ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("None"), ran.stdout


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
