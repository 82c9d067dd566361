"""Null pointers, sizes of nothing, wrong handles on a real GPU: each call ends with the hook as it does without.
The same simulated: tests/hook/test_odd_arguments.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.node import Node
from client_hook.environment import hook_library
from tests.hook.odd.cases import Program, all_cases, differences

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
LEFT_OUT = (
    *("cuMemcpy", "cuMemset", "cuLaunch", "cuStream", "cuMemAllocManaged", "cuMemAdvise", "cuMemPrefetch", "cuMemPool"),
    *("cuMemDiscard", "cuMulticast", "cuCheckpoint", "cuMemBatch", "nvmlDeviceGetAccountingPids"),
)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_the_hook_ends_odd_calls_as_nvidias_driver_does(node: Node, tmp_path: Path) -> None:
    """What lies at an address of the card is the driver's and may be a fault of the GPU: those calls are left out. So
    are calls of managed memory, which may hang a GPU where they ask for more than is free, and accounts of
    others' processes."""
    calls = [case for case in all_cases() if not case.name.startswith(LEFT_OUT)]
    program = Program(tmp_path, calls)
    vgpu_id = node.run("create", "--sm", "100", "--mem", "64G").split()[-1]
    inside = node.environment | {"VGPU_ID": vgpu_id, "LD_PRELOAD": str(hook_library())}
    found = program.results(inside, *LIBRARIES)
    expected = program.results(os.environ, *LIBRARIES)
    node.run("rm", "-f", vgpu_id)
    assert differences(program.cases, found, expected) == []
