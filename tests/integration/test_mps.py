"""The MPS daemon of a spatial GPU with real processes: what it granted, how many it takes, its end, and what a fault in
one of its clients does. Each test has a daemon of its own."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_hook.environment import simulation_libraries
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing import bindings_memory as native
from cython_ext.testing.fake_peer import Process
from gpuserver.device.nvidia.mps import MOST_PROCESSES
from tests.integration.node import ROOT, SimulatedNode, eventually
from tests.integration.process import attach_request, knock
from tests.integration.spatial import GRANTED_SMS, Gpu, Worker, spatial_gpu, two_at_work
from tests.integration.strangers import crowd
from vgpu.protocol.messages import VgpuStatus

ILLEGAL_ADDRESS = 700
MPS_RPC_FAILURE = 806


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(mode="spatial") as running:
        yield running


@pytest.fixture
def vgpu(node: SimulatedNode) -> VgpuStatus:
    return node.create(sm_percent=30, memory_bytes="8G")


@pytest.fixture
def workers(node: SimulatedNode, vgpu: VgpuStatus) -> Iterator[list[Worker]]:
    with two_at_work(node, vgpu) as running:
        yield running


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


@pytest.mark.slow
def test_what_a_process_was_granted_is_read_back(node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]) -> None:
    with node.link() as link:
        shown = link.processes(vgpu.vgpu_id).processes
    assert [(process.sm_planned, process.sm_count) for process in shown] == [(GRANTED_SMS, GRANTED_SMS)] * 2
    assert '"kind": "granted"' not in node.logs()


@pytest.mark.slow
def test_a_grant_that_is_far_from_the_plan_is_reported_once(node: SimulatedNode, vgpu: VgpuStatus) -> None:
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


def test_no_more_processes_than_the_mps_server_takes_and_a_part_of_them_for_each_vgpu(
    node: SimulatedNode, vgpu: VgpuStatus
) -> None:
    """One vGPU takes all but the places that are kept for the other, and one process takes one."""
    door = node.paths.broker_socket(vgpu.vgpu_id)
    other = node.create(sm_percent=30, memory_bytes="1G")
    with crowd() as processes:

        def fill(vgpu_id: str) -> str:
            while (reply := processes.knock(node.paths.broker_socket(vgpu_id)))["ok"]:
                pass
            assert reply["code"] == "full"
            return str(reply["error"])

        assert "are kept for other vGPUs" in fill(vgpu.vgpu_id)
        kept = MOST_PROCESSES - spatial_gpu(node).processes
        assert kept == 7, "of the 24 that are kept, three tenths"
        assert f"{MOST_PROCESSES} processes already" in fill(other.vgpu_id)
        assert spatial_gpu(node).processes == MOST_PROCESSES  # who was turned away left nothing behind
        assert processes.knock(door)["code"] == "full"


def test_who_is_turned_away_need_not_wait_for_a_stopped_process(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    """That one has the lock of the vGPU's ledger, without which no slot is freed: later, then."""
    door = node.paths.broker_socket(vgpu.vgpu_id)
    _, descriptors = knock(door, attach_request())
    with crowd() as processes:
        for _ in range(MOST_PROCESSES - 1):
            assert processes.knock(door)["ok"]
        page = ActivityPage.map(descriptors[1])
        ledger = native.Activity(mmap.mmap(descriptors[1], 0))
        assert ledger.live(0) == native.ROBUST_LOCKED
        assert ledger.lock(0, 0) == native.ROBUST_LOCKED
        for _ in range(2):
            assert processes.knock(door)["code"] == "full"
        assert len(page.slots()) == MOST_PROCESSES + 2
        ledger.unlock()
        eventually(lambda: len(page.slots()) == MOST_PROCESSES, "their slots are free")
        assert spatial_gpu(node).processes == MOST_PROCESSES
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.slow
def test_a_program_that_is_one_too_many_is_told_so_at_start(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    with crowd() as processes:
        for _ in range(MOST_PROCESSES):
            assert processes.knock(node.paths.broker_socket(vgpu.vgpu_id))["ok"]
        worker = Worker(node, vgpu.vgpu_id)
        _, said = worker.popen.communicate(timeout=60)
    assert worker.popen.returncode != 0
    assert f"GPU 0 has {MOST_PROCESSES} processes already, the most of its MPS server" in said


def test_a_dead_daemon_is_replaced_for_those_who_come_after_it(
    node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]
) -> None:
    daemon = eventually(lambda: spatial_gpu(node).mps_pid, "the daemon's first look")
    os.kill(daemon, signal.SIGKILL)
    assert [worker.error() for worker in workers] == [MPS_RPC_FAILURE] * 2
    eventually(lambda: spatial_gpu(node).mps_restarts, "another daemon")
    assert spatial_gpu(node).mps_pid not in {None, daemon}
    works(node, vgpu.vgpu_id)
    assert f"the MPS daemon (pid {daemon}) is gone" in node.logs()
    assert "another MPS daemon runs" in node.logs()


@pytest.mark.slow
def test_a_daemon_outlives_its_server(node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]) -> None:
    daemon = eventually(lambda: spatial_gpu(node).mps_pid, "the daemon's first look")
    server = node.server_pid()
    os.kill(server, signal.SIGKILL)
    eventually(lambda: node.server_pid() not in {0, server} and spatial_gpu(node).mps_pid == daemon, "the next server")
    assert Gpu(node).watch(0.5)[workers[0].pid] > 0


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True])
def test_an_orderly_stop_takes_the_daemon_along_unless_somebody_needs_it(
    node: SimulatedNode, vgpu: VgpuStatus, used: bool
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
    node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]
) -> None:
    other = node.create(sm_percent=30, memory_bytes="1G")
    assert stray(node, other.vgpu_id) == ILLEGAL_ADDRESS
    assert [worker.error() for worker in workers] == [ILLEGAL_ADDRESS] * 2
    works(node, vgpu.vgpu_id)
    works(node, other.vgpu_id)
    assert spatial_gpu(node).mps_restarts == 0


@pytest.mark.slow
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


ANOTHER_USER = """
import ctypes, os
driver = ctypes.CDLL("libcuda.so.1")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
context, sms = ctypes.c_void_p(), ctypes.c_int()
codes = driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuDeviceGetAttribute(ctypes.byref(sms), 16, 0)
print(*codes, sms.value)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_every_user_reaches_the_daemon_whatever_the_nodes_umask_is() -> None:
    before = os.umask(0o077)
    try:
        with SimulatedNode(mode="spatial") as node:
            node.directory.chmod(0o755)
            told = node.attach(node.create(sm_percent=25, memory_bytes="1G").vgpu_id).replies[0]
            places = {
                "VGPU_SIM_DIR": str(node.paths.runtime / "sim"),
                "LD_LIBRARY_PATH": str(simulation_libraries()),
                "CUDA_MPS_PIPE_DIRECTORY": told["mps_pipe_directory"],
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            }
            ran = subprocess.run(
                [sys.executable, "-c", ANOTHER_USER],
                env=node.environment | places,
                capture_output=True,
                text=True,
                check=True,
            )
    finally:
        os.umask(before)
    assert ran.stdout == "0 0 32\n", "it runs under MPS, with a quarter of the SMs"
