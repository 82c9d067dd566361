"""Spatial mode with real processes: what several processes of one vGPU take together, and what one's end does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.protocol.messages import VgpuReading

GRANTED_SMS = 40  # for 30 % of 132


class Worker:
    """A program of the vGPU that keeps the GPU busy, with the hook in it."""

    def __init__(self, node: SimulatedNode, vgpu_id: str, seconds: float = 600) -> None:
        argv = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu_id, "--"]
        argv += [sys.executable, "-m", "vgpu.workload", "--seconds", str(seconds), "-o", "json"]
        self.popen = subprocess.Popen(
            argv, env=node.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def started(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            pytest.fail(f"it never started: {self.popen.communicate()[1]}")
        said: dict[str, Any] = json.loads(line)
        assert said["event"] == "started", said
        return said

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(mode="spatial") as running:
        yield running


@pytest.fixture
def vgpu(node: SimulatedNode) -> VgpuReading:
    return node.create(sm_percent=30, memory_bytes="8G")


@pytest.fixture
def workers(node: SimulatedNode, vgpu: VgpuReading) -> Iterator[list[Worker]]:
    running = [Worker(node, vgpu.vgpu_id) for _ in range(2)]
    try:
        for worker in running:
            worker.started()
        yield running
    finally:
        for worker in running:
            worker.end()


class Gpu:
    """The simulated GPU of a node: SM time by process since this look at it began."""

    def __init__(self, node: SimulatedNode) -> None:
        self.engine = Engine(node.paths.runtime / "sim")
        self.begin()

    def begin(self) -> None:
        self.engine.refresh()
        self.begun_ns, self._before = self.engine.time_ns, self._by_pid()

    def _by_pid(self) -> dict[int, float]:
        return {pid: sm_ns for pid, _, _, sm_ns, _, _ in self.engine.contexts().values()}

    def sms(self) -> dict[int, float]:
        """SMs used by each process, on average since ``begin``."""
        self.engine.refresh()
        passed = self.engine.time_ns - self.begun_ns
        return {pid: (sm_ns - self._before.get(pid, 0)) / passed for pid, sm_ns in self._by_pid().items()}

    def watch(self, seconds: float) -> dict[int, float]:
        self.begin()
        eventually(lambda: self._passed(seconds), "time on the simulated GPU")
        return self.sms()

    def _passed(self, seconds: float) -> bool:
        self.engine.refresh()
        return self.engine.time_ns - self.begun_ns > seconds * 1e9


def test_two_processes_never_use_more_sms_than_their_vgpu_has(node: SimulatedNode, workers: list[Worker]) -> None:
    used = Gpu(node).watch(3)
    first, second = (used[worker.pid] for worker in workers)
    assert first + second <= GRANTED_SMS * 1.01  # side by side they would use twice as many
    assert first / (first + second) == pytest.approx(0.5, abs=0.1)


def test_a_killed_one_leaves_its_turns_to_the_other(node: SimulatedNode, workers: list[Worker]) -> None:
    gpu = Gpu(node)
    workers[0].end()
    alone = gpu.watch(2)[workers[1].pid]
    assert alone > 0.6 * GRANTED_SMS  # half of it would be 0.5


def test_a_stopped_one_is_passed_over_and_comes_back(node: SimulatedNode, workers: list[Worker]) -> None:
    gpu = Gpu(node)
    os.kill(workers[0].pid, signal.SIGSTOP)
    gpu.watch(0.5)
    used = gpu.watch(2)
    assert used[workers[1].pid] > 0.6 * GRANTED_SMS
    os.kill(workers[0].pid, signal.SIGCONT)
    eventually(lambda: gpu.sms()[workers[0].pid] > used[workers[0].pid] + 1, "the woken one's turns")


def test_without_a_broker_for_a_while_they_go_on(node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]) -> None:
    shown = node.reading(vgpu.vgpu_id)
    assert shown is not None
    assert shown.broker_pid is not None
    os.kill(shown.broker_pid, signal.SIGKILL)
    eventually(
        lambda: (now := node.reading(vgpu.vgpu_id)) is not None and now.broker_pid not in {None, shown.broker_pid},
        "another broker",
    )
    used = Gpu(node).watch(2)
    assert sum(used[worker.pid] for worker in workers) <= GRANTED_SMS * 1.01
    assert min(used[worker.pid] for worker in workers) > 0.2 * GRANTED_SMS
