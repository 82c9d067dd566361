"""Programs in vGPUs of a spatial GPU, and what that shows of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from vgpu.protocol.messages import GpuStatus, VgpuStatus

GRANTED_SMS = 40  # for 30 % of 132


class Worker:
    """A program of the vGPU that keeps the GPU busy, with the hook in it."""

    def __init__(self, node: SimulatedNode, vgpu_id: str, seconds: float = 600) -> None:
        argv = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu_id, "--"]
        argv += [sys.executable, "-m", "vgpu.workload", "--seconds", str(seconds), "-o", "json"]
        self.popen = node.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

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

    def error(self) -> int:
        """The CUresult with which it ends by itself."""
        said = self.popen.communicate(timeout=60)[0].splitlines()
        last: dict[str, Any] = json.loads(said[-1])
        assert last["event"] == "error", last
        return int(last["code"])

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@contextmanager
def two_at_work(node: SimulatedNode, vgpu: VgpuStatus) -> Iterator[list[Worker]]:
    running = [Worker(node, vgpu.vgpu_id) for _ in range(2)]
    try:
        for worker in running:
            worker.started()
        yield running
    finally:
        for worker in running:
            worker.end()


def spatial_gpu(node: SimulatedNode) -> GpuStatus:
    with node.link() as link:
        (gpu,) = link.gpus()
    return gpu


class Gpu:
    """The simulated GPU of a node: SM time by process since this look at it began."""

    def __init__(self, node: SimulatedNode) -> None:
        self.engine = Engine(node.paths.runtime / "sim")
        self.begin()

    def begin(self) -> None:
        self.begun_ns, self._before = self.engine.sm_time()

    def sms(self) -> dict[int, float]:
        """SMs used by each process, on average since ``begin``."""
        now_ns, used = self.engine.sm_time()
        passed = now_ns - self.begun_ns
        return {pid: (sm_ns - self._before.get(pid, 0)) / passed for pid, sm_ns in used.items()}

    def watch(self, seconds: float) -> dict[int, float]:
        self.begin()
        eventually(lambda: self._passed(seconds), "time on the simulated GPU")
        return self.sms()

    def _passed(self, seconds: float) -> bool:
        self.engine.refresh()
        return self.engine.time_ns - self.begun_ns > seconds * 1e9
