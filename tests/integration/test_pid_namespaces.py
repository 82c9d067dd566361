"""Programs with PID namespaces of their own, as in containers: process 1 there, and another pid for the node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.node import ROOT, SimulatedNode, eventually
from tests.integration.worker import GIB, PROGRAM, Worker, on_gpu
from vgpu.ctl.programs import attachment
from vgpu.protocol.messages import VgpuStatus

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespaces for this user",
)


class Nested(Worker):
    """A worker that is process 1 of its PID namespace. ``pid``: the one that the node knows."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, memory_bytes: int) -> None:
        self.popen = subprocess.Popen(
            [*UNSHARE, sys.executable, "-c", PROGRAM, str(memory_bytes)],
            env=attachment([vgpu]).environment(node.environment),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.heard() == "started", self.popen.wait()
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        self.pid = int(children[0])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.popen.wait()


@contextmanager
def nested(node: SimulatedNode, vgpus: list[VgpuStatus], memory_bytes: int = GIB) -> Iterator[list[Nested]]:
    running: list[Nested] = []
    try:
        running.extend(Nested(node, vgpu, memory_bytes) for vgpu in vgpus)
        yield running
    finally:
        for worker in running:
            worker.end()


def shown(node: SimulatedNode) -> dict[int, str]:
    """The vGPU of each process that ``vgpuctl ps`` lists, by pid."""
    with node.link() as link:
        return {process.pid: process.vgpu_id for process in link.processes().processes if process.alive}


@pytest.mark.parametrize("count", [1, 2], ids=["in one vGPU", "in two vGPUs"])
def test_two_programs_that_are_both_process_1(node: SimulatedNode, count: int) -> None:
    vgpus = [node.create(sm_percent=30, memory_bytes="4G") for _ in range(count)]
    server = node.server_pid()
    with nested(node, [vgpus[0], vgpus[-1]]) as workers:
        assert [worker.asked("__import__('os').getpid()") for worker in workers] == [1, 1]
        assert shown(node) == {workers[0].pid: vgpus[0].vgpu_id, workers[1].pid: vgpus[-1].vgpu_id}
        assert set(on_gpu(node)) == {worker.pid for worker in workers}
        for worker in workers:
            worker.goes_on()
            refused = worker.asked("allocation(4 << 30)")
            assert refused == 2, "memory beyond the vGPU's is refused"
        workers[0].kill()
        eventually(lambda: set(on_gpu(node)) == {workers[1].pid}, "the dead program leaves the GPU")
        eventually(lambda: set(shown(node)) == {workers[1].pid}, "its slot is free")
        workers[1].goes_on()
        workers[1].kill()
        eventually(lambda: not on_gpu(node), "nothing is left on the GPU")
    eventually(lambda: not shown(node), "no slot is left")
    assert node.server_pid() == server


def test_a_program_that_becomes_another_has_nothing_of_what_it_had(node: SimulatedNode) -> None:
    """Same pid and start time, another program: on the GPU and in the books of its vGPU."""
    vgpu = node.create(sm_percent=30, memory_bytes="4G")
    body = """
import os, sys
from tests.hook.app import App
app = App()
app.allocate(3 << 30)
print("started", flush=True)
if len(sys.argv) == 1:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
sys.stdin.readline()
"""
    program = node.program(vgpu, body)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        assert program.stdout.readline() == "started\n", "the second program has no 3 GiB"
        assert set(on_gpu(node)) == {program.pid}
        assert set(shown(node)) == {program.pid}
    finally:
        program.kill()
        program.communicate()
    eventually(lambda: not on_gpu(node), "nothing is left on the GPU")
