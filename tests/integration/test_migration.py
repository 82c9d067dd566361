"""vGPUs that move between the GPUs of a simulated node, with programs that run on: real processes, the real hook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.node import SimulatedNode
from tests.integration.worker import GIB, Worker, on_gpu, state


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(2) as running:
        yield running


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.end()


def test_programs_go_on_on_the_other_gpu(node: SimulatedNode, workers: list[Worker]) -> None:
    vgpu = node.create("0", sm_percent=80, memory_bytes="100G", name="wanderer")
    workers += [Worker(node, vgpu, 30 * GIB), Worker(node, vgpu, 40 * GIB)]
    for worker in workers:
        worker.goes_on()
    with node.link() as link:
        for to in (1, 0, 1):
            moved = link.migrate("wanderer", str(to))
            assert (moved.vgpu_id, moved.gpu_index, moved.name) == (vgpu.vgpu_id, to, "wanderer")
            assert moved.owner_uid == vgpu.owner_uid
            assert moved.spec == vgpu.spec
            for worker in workers:
                worker.goes_on()
            assert sum(on_gpu(node, 1 - to).values()) == 0
            assert sum(on_gpu(node, to).values()) > 70 * GIB
    assert state(node, vgpu) in {"running", "waiting"}
