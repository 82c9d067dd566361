"""Programs of one vGPU beside another vGPU's, under the real hook, on a simulated GPU."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.integration.node import SimulatedNode
from tests.integration.worker import Worker

GIB = 1 << 30
STOPS = 8


@pytest.mark.slow
def test_a_sibling_that_is_stopped_anywhere_in_its_turn_starves_nobody() -> None:
    """Work of which its thread never says that it has run keeps a lease from draining, but not for long."""
    dice = random.Random(1)
    with SimulatedNode() as node:
        ours, theirs = (node.create(sm_percent=50, memory_bytes="8G") for _ in range(2))
        workers = [Worker(node, vgpu, GIB // 4) for vgpu in (ours, ours, theirs)]
        stopped, *others = workers
        try:
            for _ in range(STOPS):
                time.sleep(0.1 + 0.05 * dice.random())
                os.kill(stopped.popen.pid, signal.SIGSTOP)
                time.sleep(0.3)
                for worker in others:
                    worker.goes_on()
                os.kill(stopped.popen.pid, signal.SIGCONT)
                stopped.goes_on()
        finally:
            for worker in workers:
                worker.end()
