"""An oversubscribed vGPU beside one that was promised memory, on a simulated node."""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.node import SimulatedNode
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus

PHYSICAL = """
import sys
from tests.hook.app import App, create_physical
app = App()
print(create_physical(app, int(sys.argv[1]) << 30)[0], app.allocate(int(sys.argv[2]) << 30) is not None, flush=True)
sys.stdin.readline()
"""


def program(node: SimulatedNode, vgpu: VgpuStatus, physical_gib: int, managed_gib: int) -> subprocess.Popen[str]:
    return node.program(vgpu, PHYSICAL, str(physical_gib), str(managed_gib))


def test_what_others_were_promised_it_cannot_take_and_what_it_took_is_promised_to_nobody() -> None:
    with SimulatedNode(1) as node:
        promised = node.create(sm_percent=30, memory_bytes="120G")
        greedy = node.create(sm_percent=30, memory_bytes="300G", oversubscribe="managed")
        held = program(node, greedy, 30, 250)
        try:
            assert held.stdout is not None
            assert held.stdout.readline() == "2 True\n", "30 of the 20 GiB that nobody was promised, and 250 managed"
            with node.link() as link:
                link.remove(promised.vgpu_id)
            other = program(node, greedy, 40, 1)
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == "0 True\n"
                with pytest.raises(VgpuError) as refused:
                    node.create(sm_percent=30, memory_bytes="120G")
                assert refused.value.code is ErrorCode.NO_ROOM
                node.create(sm_percent=30, memory_bytes="90G")
            finally:
                other.communicate("\n")
        finally:
            held.communicate("\n")
