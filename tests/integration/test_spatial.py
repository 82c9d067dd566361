"""Spatial mode with real processes: what several processes of one vGPU take together, and what one's end does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cython_ext.pages import ActivityPage, GrantsPage
from cython_ext.rehearsal import Process
from cython_ext.simengine import Engine
from gpuserver.device.mps import MOST_PROCESSES
from tests.integration.node import ROOT, SimulatedNode, eventually
from tests.integration.process import attach_request, knock
from vgpu.protocol.messages import GpuReading, VgpuReading
from vgpu.spec import VgpuChanges

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

    def error(self) -> int:
        """The CUresult with which it ends by itself."""
        said = self.popen.communicate(timeout=60)[0].splitlines()
        last: dict[str, Any] = json.loads(said[-1])
        assert last["event"] == "error", last
        return int(last["code"])

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


def spatial_gpu(node: SimulatedNode) -> GpuReading:
    with node.link() as link:
        (gpu,) = link.gpus()
    return gpu


def stray(node: SimulatedNode, vgpu_id: str) -> int:
    """What a program with a stray store gets for it."""
    argv = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu_id, "--", sys.executable, "-m", "tests.stray"]
    ran = subprocess.run(argv, env=node.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def works(node: SimulatedNode, vgpu_id: str) -> None:
    worker = Worker(node, vgpu_id, seconds=0.1)
    try:
        worker.started()
        assert worker.popen.wait(60) == 0
    finally:
        worker.end()


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


# --- what cannot be changed, and what cannot be promised


def test_a_new_share_of_the_sms_is_for_new_processes_and_a_limit_for_all(
    node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]
) -> None:
    with node.link() as link:
        assert not link.inspect(vgpu.vgpu_id).vgpu.warnings
        changed = link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=10, quota_limit_percent=50))
    assert round(changed.sm_percent_granted * 132 / 100) == 12
    (warning,) = changed.warnings
    assert warning.startswith(f"2 processes started with {GRANTED_SMS} SMs and will keep them for life (MPS); new ones")
    used = Gpu(node).watch(4)
    assert sum(used.values()) < 0.6 * GRANTED_SMS  # the new limit holds for those who were there
    newcomer = Worker(node, vgpu.vgpu_id)
    try:
        assert newcomer.started()["sm_count"] == 12
    finally:
        newcomer.end()


def test_more_memory_is_for_new_processes(node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]) -> None:
    with node.link() as link:
        (warning,) = link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="16G")).warnings
        assert warning == "2 processes started with 8 GiB and can never have more (MPS); new ones can have 16 GiB."
        assert not link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="4G")).warnings  # the ledger holds all to that


def test_the_sms_of_those_who_were_there_still_count(
    node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]
) -> None:
    other = node.create(sm_percent=60, memory_bytes="1G")
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=10))
    wide = node.create(sm_percent=30, memory_bytes="1G")  # fits beside what they have now, not beside what they had
    competitors = [Worker(node, other.vgpu_id), Worker(node, wide.vgpu_id)]
    try:
        for competitor in competitors:
            competitor.started()
        assert sum(Gpu(node).watch(3).values()) <= 132
        with node.link() as link:
            tokens = {reading.vgpu_id: reading.tokens for reading in link.list()}
        assert all(count > 5 for count in tokens.values())  # rounds: no lease is open-ended
    finally:
        for competitor in competitors:
            competitor.end()


def test_burst_beside_a_hard_share_is_never_silent(node: SimulatedNode, vgpu: VgpuReading) -> None:
    bursting = node.create(sm_percent=30, memory_bytes="1G", burst=True)
    (told,) = bursting.warnings
    assert vgpu.vgpu_id in told
    assert "may get fewer SMs than promised" in told
    shown = node.reading(vgpu.vgpu_id)
    assert shown is not None
    (told,) = shown.warnings
    assert bursting.vgpu_id in told
    assert f"fewer than its {GRANTED_SMS}" in told


def test_who_started_bursting_keeps_all_sms_and_counts_for_them(node: SimulatedNode, vgpu: VgpuReading) -> None:
    other = node.create(sm_percent=60, memory_bytes="1G", burst=True)
    bursting = Worker(node, other.vgpu_id)
    hard = Worker(node, vgpu.vgpu_id)
    try:
        assert bursting.started()["sm_count"] == 132
        hard.started()
        with node.link() as link:
            changed = link.set(other.vgpu_id, VgpuChanges.parse(burst=False, priority="low"))
            kept, level = changed.warnings
            before = {reading.vgpu_id: reading.tokens for reading in link.list()}
        assert kept.startswith("1 process started with 132 SMs and will keep them for life (MPS); new ones get 80.")
        assert level.startswith("1 process started as MPS clients of normal priority, for life; new ones are of low")
        used = Gpu(node).watch(3)
        assert used[hard.pid] > 5  # alone on its SMs, in turns with the one that fills the card
        with node.link() as link:
            after = {reading.vgpu_id: reading.tokens for reading in link.list()}
        assert all(after[key] > before[key] + 5 for key in after)  # rounds: nobody's lease is open-ended
    finally:
        bursting.end()
        hard.end()


def test_programs_of_low_priority_are_clients_of_the_lower_one(node: SimulatedNode) -> None:
    low = node.create(sm_percent=30, memory_bytes="1G", priority="low")
    child = node.attach(low.vgpu_id)
    try:
        assert child.replies[0]["mps_client_priority"] == "1"
        eventually(lambda: node.reading(low.vgpu_id).processes == 1, "the server knows of it")
        with node.link() as link:
            (told,) = link.set(low.vgpu_id, VgpuChanges.parse(priority="high")).warnings
        assert "of low priority, for life; new ones are of normal" in told
    finally:
        child.kill()


def test_the_window_of_a_gpu_is_changed_live_and_remembered(node: SimulatedNode) -> None:
    assert spatial_gpu(node).window_ns == 12_000_000
    with node.link() as link:
        assert link.set_gpu("0", window_ns=6_000_000).window_ns == 6_000_000
    os.kill(node.server_pid(), signal.SIGKILL)
    eventually(lambda: spatial_gpu(node).state == "serving", "the next server")
    assert spatial_gpu(node).window_ns == 6_000_000


# --- MPS: what was granted, how many it takes, and its end

ILLEGAL_ADDRESS = 700
MPS_RPC_FAILURE = 806


def test_what_a_process_was_granted_is_read_back(node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]) -> None:
    with node.link() as link:
        shown = link.processes(vgpu.vgpu_id).processes
    assert [(process.sm_planned, process.sm_count) for process in shown] == [(GRANTED_SMS, GRANTED_SMS)] * 2
    assert '"kind": "granted"' not in node.logs()


def test_a_grant_that_is_far_from_the_plan_is_reported_once(node: SimulatedNode, vgpu: VgpuReading) -> None:
    def joins(vgpu_id: str, sm_count: int) -> Process:
        reply, descriptors = knock(node.paths.broker_socket(vgpu_id), attach_request())
        grants, activity = GrantsPage.map_readonly(descriptors[0]), ActivityPage.map(descriptors[1])
        for descriptor in descriptors:
            os.close(descriptor)
        process = Process(activity, grants, reply["slot"])
        process.pretend_active()
        process.tell_sm_count(sm_count)
        return process

    other = node.create(sm_percent=30, memory_bytes="1G")
    processes = [joins(vgpu.vgpu_id, GRANTED_SMS - 2)]  # a step less is what rounding may do
    processes += [joins(other.vgpu_id, GRANTED_SMS - 4)]  # looked at after the first
    eventually(lambda: "was to have" in node.logs(), "the report")
    assert node.logs().count(f"has {GRANTED_SMS - 4} SMs, and was to have {GRANTED_SMS}") == 1
    assert f"has {GRANTED_SMS - 2} SMs" not in node.logs()
    assert len(processes) == 2


def test_one_process_more_than_the_mps_server_takes(node: SimulatedNode, vgpu: VgpuReading) -> None:
    door = node.paths.broker_socket(vgpu.vgpu_id)
    other = node.create(sm_percent=30, memory_bytes="1G")
    for taken in range(MOST_PROCESSES):
        reply, descriptors = knock(door if taken else node.paths.broker_socket(other.vgpu_id), attach_request())
        for descriptor in descriptors:
            os.close(descriptor)
        assert reply["ok"], reply
    for closed in (door, node.paths.broker_socket(other.vgpu_id)):  # in either vGPU: the daemon is the GPU's
        reply, _ = knock(closed, attach_request())
        assert (reply["ok"], reply["code"]) == (False, "full")
        assert f"{MOST_PROCESSES} processes" in reply["error"]
    assert spatial_gpu(node).processes == MOST_PROCESSES  # who was turned away left nothing behind


def test_a_program_that_is_one_too_many_is_told_so_at_start(node: SimulatedNode, vgpu: VgpuReading) -> None:
    for _ in range(MOST_PROCESSES):
        _, descriptors = knock(node.paths.broker_socket(vgpu.vgpu_id), attach_request())
        for descriptor in descriptors:
            os.close(descriptor)
    worker = Worker(node, vgpu.vgpu_id)
    _, said = worker.popen.communicate(timeout=60)
    assert worker.popen.returncode != 0
    assert f"GPU 0 has {MOST_PROCESSES} processes already, the most of its MPS server" in said


def test_a_dead_daemon_is_replaced_for_those_who_come_after_it(
    node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]
) -> None:
    daemon = eventually(lambda: spatial_gpu(node).mps_pid, "the daemon's first look")
    os.kill(daemon, signal.SIGKILL)
    assert [worker.error() for worker in workers] == [MPS_RPC_FAILURE] * 2
    eventually(lambda: spatial_gpu(node).mps_restarts, "another daemon")
    assert spatial_gpu(node).mps_pid not in {None, daemon}
    works(node, vgpu.vgpu_id)
    assert f"the MPS daemon (pid {daemon}) is gone" in node.logs()
    assert "another MPS daemon runs" in node.logs()


def test_a_daemon_outlives_its_server(node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]) -> None:
    daemon = eventually(lambda: spatial_gpu(node).mps_pid, "the daemon's first look")
    server = node.server_pid()
    os.kill(server, signal.SIGKILL)
    eventually(lambda: node.server_pid() not in {0, server} and spatial_gpu(node).mps_pid == daemon, "the next server")
    assert Gpu(node).watch(0.5)[workers[0].pid] > 0


@pytest.mark.parametrize("used", [False, True])
def test_an_orderly_stop_takes_the_daemon_along_unless_somebody_needs_it(
    node: SimulatedNode, vgpu: VgpuReading, used: bool
) -> None:
    daemon = eventually(lambda: spatial_gpu(node).mps_pid, "the daemon's first look")
    worker = Worker(node, vgpu.vgpu_id)
    try:
        worker.started()
        if not used:
            worker.end()
            eventually(lambda: not spatial_gpu(node).processes, "the end of the process")
        node.supervisor.send_signal(signal.SIGTERM)
        node.supervisor.wait(60)
        if used:
            assert runs(daemon)
        else:
            eventually(lambda: not runs(daemon), "the daemon's end")
    finally:
        worker.end()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_a_fatal_fault_takes_the_neighbours_and_not_those_who_come_after(
    node: SimulatedNode, vgpu: VgpuReading, workers: list[Worker]
) -> None:
    other = node.create(sm_percent=30, memory_bytes="1G")
    assert stray(node, other.vgpu_id) == ILLEGAL_ADDRESS
    assert [worker.error() for worker in workers] == [ILLEGAL_ADDRESS] * 2
    works(node, vgpu.vgpu_id)
    works(node, other.vgpu_id)
    assert spatial_gpu(node).mps_restarts == 0


def test_in_temporal_mode_a_fatal_fault_stays_with_its_process() -> None:
    with SimulatedNode() as node:
        vgpu = node.create(sm_percent=30, memory_bytes="1G")
        worker = Worker(node, vgpu.vgpu_id, seconds=2)
        try:
            worker.started()
            assert stray(node, node.create(sm_percent=30, memory_bytes="1G").vgpu_id) == ILLEGAL_ADDRESS
            assert worker.popen.wait(60) == 0
        finally:
            worker.end()
