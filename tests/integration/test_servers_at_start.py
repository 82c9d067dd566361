"""Two model servers that start at the same moment on one GPU: each sizes itself by its own vGPU, every time.

Without vGPUs each server counts the other's loading as its own. Then one has too small a cache, and the other refuses
to start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.node import PATIENCE_S, SimulatedNode
from vgpu.ctl.programs import attachment
from vgpu.protocol.messages import VgpuStatus

STARTS = 20
GIB = 1 << 30
SERVER = """
import json, sys
from tests.hook.app import App
sys.stdin.readline()
app = App()
before, total = app.memory_info()
weights = app.allocate(3 << 30)
peak = app.allocate(1 << 30)               # a forward pass of the largest batch
app.free(peak)
after, _ = app.memory_info()
cache = int(0.9 * total) - (before - after)
made = app.allocate(cache)
print(json.dumps([total, before - after, cache, made is not None, app.memory_info()[0]]), flush=True)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(1) as node:
        yield node


def started(node: SimulatedNode, vgpu: VgpuStatus) -> subprocess.Popen[str]:
    environment = attachment([vgpu]).environment(node.environment)
    return node.popen([sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_each_gets_the_same_cache_in_twenty_of_twenty_starts(node: SimulatedNode) -> None:
    vgpus = [node.create(sm_percent=40, memory_bytes="12G") for _ in range(2)]
    for number in range(STARTS):
        servers = [started(node, vgpu) for vgpu in vgpus]
        for server in servers:
            assert server.stdin is not None
            server.stdin.write("go\n")
            server.stdin.flush()
        for server in servers:
            total, used, cache, made, _ = json.loads(server.communicate(timeout=PATIENCE_S)[0])
            assert (total, used, made) == (12 * GIB, 3 * GIB, True), f"start {number}"
            assert cache == int(0.9 * 12 * GIB) - 3 * GIB
