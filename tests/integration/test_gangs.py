"""Jobs whose ranks wait for each other on the GPU, crossing on GPUs that they share: real servers, brokers and hooks,
simulated GPUs. The job is ``tests/integration/ranks.py``."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from client_hook.environment import Attachment, Simulation, hook_library, simulation_libraries
from tests.integration.fixtures import nodes
from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from tests.integration.ranks import COLLECTIVES
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus

FOREVER = 1 << 20


class Job:
    """A vGPU of ``share`` percent, hard, on each of ``gpus``, and a rank on each. ``together``: all in one process."""

    def __init__(
        self, node: SimulatedNode, name: str, gpus: tuple[int, ...], *, together: bool, group: bool, share: float = 50
    ) -> None:
        fields: dict[str, Any] = {"group": name} if group else {}
        self._node = node
        self.vgpus = [node.create(gpu=str(gpu), sm_percent=share, memory_bytes="2G", **fields) for gpu in gpus]
        self._flags = node.directory / f"{name}.flags"
        self._flags.write_bytes(bytes(4096))
        ranks = [list(range(len(gpus)))] if together else [[rank] for rank in range(len(gpus))]
        self._ranks = ranks
        self.processes: list[subprocess.Popen[str]] = []

    def prepare(self, steps: int) -> None:
        """Start the processes, up to the point where their first step would begin."""
        for ranks in self._ranks:
            argv = [sys.executable, "-m", "tests.integration.ranks", str(self._flags), str(len(self.vgpus)), str(steps)]
            self.processes.append(
                self._node.popen(
                    [*argv, *map(str, ranks)],
                    env=self._environment([self.vgpus[rank] for rank in ranks]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def _environment(self, vgpus: list[VgpuStatus]) -> dict[str, str]:
        simulation = Simulation(Path(vgpus[0].environment["VGPU_SIM_DIR"]), simulation_libraries())
        ids = tuple(vgpu.vgpu_id for vgpu in vgpus)
        attachment = Attachment(ids, self._node.paths.runtime, hook_library(), simulation)
        return attachment.environment(self._node.environment)

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    @property
    def steps(self) -> int:
        """How many the slowest rank has done on its GPU."""
        raw = self._flags.read_bytes()
        return min(struct.unpack_from("<I", raw, 64 * rank)[0] for rank in range(len(self.vgpus))) // COLLECTIVES

    def goes_on(self, steps: int = 10) -> None:
        goal = self.steps + steps
        eventually(lambda: self.steps >= goal, f"{steps} more steps")

    def wait(self) -> None:
        for process in self.processes:
            assert process.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


Start = Callable[..., list[Job]]


shared, node = nodes(3)


@pytest.fixture
def start(node: SimulatedNode) -> Iterator[Start]:
    """Jobs on these GPUs, all beginning at once; at the end of the test they are killed."""
    with ExitStack() as stack:

        def begin(
            *places: tuple[int, ...], steps: int = FOREVER, together: bool = False, group: bool = True
        ) -> list[Job]:
            jobs = [Job(node, f"job{i}", gpus, together=together, group=group) for i, gpus in enumerate(places)]
            for job in jobs:
                stack.callback(job.kill)
                job.prepare(steps)
            for job in jobs:
                job.go()
            return jobs

        yield begin


@pytest.mark.slow
def test_without_a_gang_crossing_jobs_are_slow_and_never_lock_up(start: Start) -> None:
    """What bounds them is the wait for a holder that does not drain (``go_by``): both contexts then share the GPU."""
    for job in start((0, 1), (0, 1), group=False):
        job.goes_on(4)


@pytest.mark.parametrize("together", [False, True], ids=["a group of processes", "one process with two vGPUs"])
def test_crossing_jobs_of_gangs_come_to_their_end(start: Start, together: bool) -> None:
    jobs = start((0, 1), (0, 1), steps=60, together=together, group=not together)
    for job in jobs:
        job.wait()
        assert job.steps == 60


@pytest.mark.slow
def test_gangs_with_different_leaders_cross_on_one_gpu(start: Start) -> None:
    for job in start((0, 1), (1, 2)):
        job.goes_on(30)


def test_a_killed_rank_holds_up_its_own_job_alone(start: Start) -> None:
    first, second = start((0, 1), (0, 1))
    second.goes_on()
    first.processes[1].kill()
    second.goes_on(30)


@pytest.mark.slow
def test_the_leaders_server_is_killed(node: SimulatedNode, start: Start) -> None:
    jobs = start((0, 1), (0, 1))
    for job in jobs:
        job.goes_on()
    os.kill(node.server_pid(0), signal.SIGKILL)
    for job in jobs:
        job.goes_on(30)


@pytest.mark.slow
def test_the_leaders_server_is_stopped(node: SimulatedNode, start: Start) -> None:
    """Whoever needs its GPU waits for it; a job on the others goes on, also where it meets one that waits."""
    first, second = start((0, 1), (1, 2))
    second.goes_on()
    server = node.server_pid(0)
    os.kill(server, signal.SIGSTOP)
    try:
        second.goes_on(30)
    finally:
        os.kill(server, signal.SIGCONT)
    first.goes_on()


def test_a_group_has_one_vgpu_per_gpu(node: SimulatedNode) -> None:
    for number in range(3):
        assert node.create(sm_percent=10, memory_bytes="1G", group="train").spec.group == "train", number
    with node.link() as link:
        assert sorted(vgpu.gpu_index for vgpu in link.list()) == [0, 1, 2]
    with pytest.raises(VgpuError, match="of group 'train' is on this GPU already") as refused:
        node.create(sm_percent=10, memory_bytes="1G", group="train")
    assert refused.value.code is ErrorCode.NO_ROOM
    assert "another --group" in refused.value.hint
    with node.link() as link, pytest.raises(VgpuError, match="temporal mode only"):
        link.set_gpu("1", mode="spatial")


def test_a_group_is_refused_in_spatial_mode(node: SimulatedNode) -> None:
    with node.link() as link:
        for gpu in "012":
            link.set_gpu(gpu, mode="spatial")
    with pytest.raises(VgpuError, match="spatial mode") as refused:
        node.create(sm_percent=10, memory_bytes="1G", group="train")
    assert refused.value.code is ErrorCode.MODE
    with node.link() as link:
        link.set_gpu("2", mode="temporal")
    assert node.create(sm_percent=10, memory_bytes="1G", group="train").gpu_index == 2


def test_a_group_outlives_its_server(node: SimulatedNode) -> None:
    made = node.create(sm_percent=10, memory_bytes="1G", group="train", gpu="0")
    os.kill(node.server_pid(0), signal.SIGKILL)
    found = eventually(lambda: (now := node.reading(made.vgpu_id)) and now.state == "idle" and now, "its return")
    assert found.spec.group == "train"
