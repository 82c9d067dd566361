"""Programs of two containers in one vGPU are killed at random moments, and containers with them: the books add up.

CONTAINER_KILLS=1000 python -m pytest tests/cluster/test_kills.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.cluster import roots
from tests.cluster.conftest import Run
from tests.cluster.test_containers import made, said, volumes
from tests.integration.node import SimulatedNode, eventually
from vgpu.protocol.messages import VgpuStatus

KILLS = int(os.environ.get("CONTAINER_KILLS", "50"))
PROGRAMS = 3
"""Of each container."""
LONGEST_S = 0.03
"""Between the look at the processes and the kill: attaching, allocating and ending all lie in it."""


class Containers:
    """Two of them with one vGPU, each with ``PROGRAMS`` programs."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, start: Run, churn: Path) -> None:
        self._node, self._vgpu, self._start = node, vgpu, start
        self._volumes = [*volumes(node, vgpu), f"{churn}:/churn:ro"]
        self.running = [self._begin() for _ in range(2)]

    def _begin(self) -> subprocess.Popen[str]:
        return self._start(self._volumes, "/churn", str(PROGRAMS))

    def pids(self) -> list[int]:
        with self._node.link() as link:
            return [process.pid for process in link.processes().processes if process.vgpu_id == self._vgpu.vgpu_id]

    def replace(self, which: int) -> None:
        """A container dies with all its programs, and another one begins."""
        self.running[which].kill()
        self.running[which].wait()
        self.running[which] = self._begin()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_books_add_up_after_random_kills(
    node: SimulatedNode, start: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    churn = roots.build(Path(__file__).with_name("churn.c"), tmp_path_factory.mktemp("churn"))
    random = Random(KILLS)
    vgpu = made(node, memory_bytes="5G")  # six contexts of 480 MiB, and less than the programs want
    most = ("/probe", "4096", *("64",) * 20)  # more than there is
    before = said(start(volumes(node, vgpu), *most))
    containers = Containers(node, vgpu, start, churn)
    killed = 0
    while killed < KILLS:
        pids = eventually(containers.pids, "programs run")
        time.sleep(random.uniform(0, LONGEST_S))
        if random.random() < 0.05:
            containers.replace(random.randrange(2))
        with suppress(ProcessLookupError):
            os.kill(random.choice(pids), signal.SIGKILL)
            killed += 1
        now = node.reading(vgpu.vgpu_id)
        assert now is not None
        assert now.processes <= 2 * PROGRAMS + 1  # one that has just died
    for container in containers.running:
        container.kill()
        out, _ = container.communicate()
        assert out == ""  # no program ended by itself

    def is_empty() -> bool:
        now = node.reading(vgpu.vgpu_id)
        assert now is not None
        return (now.processes, now.memory_used_bytes) == (0, 0)

    eventually(is_empty, "nothing is used")
    assert said(start(volumes(node, vgpu), *most)) == before
    broker = node.reading(vgpu.vgpu_id).broker_pid  # type: ignore[union-attr]
    assert broker == vgpu.broker_pid
