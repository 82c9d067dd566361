"""Spatial mode with real processes: what several processes of one vGPU take together, and what one's end does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.spatial import GRANTED_SMS, Gpu, Worker, spatial_gpu, two_at_work
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode(mode="spatial") as running:
        yield running


@pytest.fixture
def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared
    shared.clear()


@pytest.fixture
def vgpu(node: SimulatedNode) -> VgpuStatus:
    return node.create(sm_percent=30, memory_bytes="8G")


@pytest.fixture
def workers(node: SimulatedNode, vgpu: VgpuStatus) -> Iterator[list[Worker]]:
    with two_at_work(node, vgpu) as running:
        yield running


def test_two_processes_never_use_more_sms_than_their_vgpu_has(node: SimulatedNode, workers: list[Worker]) -> None:
    gpu = Gpu(node)

    def equal() -> bool:
        used = gpu.watch(2)
        first, second = (used.get(worker.pid, 0) for worker in workers)
        assert first + second <= GRANTED_SMS * 1.01  # side by side they would use twice as many
        return abs(first - second) < 0.2 * (first + second)

    eventually(equal, "both have as much")


def test_a_killed_one_leaves_its_turns_to_the_other(node: SimulatedNode, workers: list[Worker]) -> None:
    gpu = Gpu(node)
    workers[0].end()
    eventually(lambda: gpu.watch(1).get(workers[1].pid, 0) > 0.6 * GRANTED_SMS, "more than the half")


def test_a_stopped_one_is_passed_over_and_comes_back(node: SimulatedNode, workers: list[Worker]) -> None:
    gpu = Gpu(node)
    os.kill(workers[0].pid, signal.SIGSTOP)
    eventually(lambda: gpu.watch(1).get(workers[1].pid, 0) > 0.6 * GRANTED_SMS, "more than the half")
    before = gpu.sms()[workers[0].pid]
    os.kill(workers[0].pid, signal.SIGCONT)
    eventually(lambda: gpu.sms()[workers[0].pid] > before + 1, "the woken one's turns")


def test_without_a_broker_for_a_while_they_go_on(node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]) -> None:
    shown = node.reading(vgpu.vgpu_id)
    assert shown is not None
    assert shown.broker_pid is not None
    os.kill(shown.broker_pid, signal.SIGKILL)
    eventually(
        lambda: (now := node.reading(vgpu.vgpu_id)) is not None and now.broker_pid not in {None, shown.broker_pid},
        "another broker",
    )
    gpu = Gpu(node)

    def in_turns() -> bool:
        sms = gpu.watch(1)
        used = [sms.get(worker.pid, 0) for worker in workers]
        return sum(used) <= GRANTED_SMS * 1.01 and min(used) > 0.2 * GRANTED_SMS

    eventually(in_turns, "turns as before: who waits for a second beside a silent broker goes without one")


# --- what cannot be changed, and what cannot be promised


def test_a_new_share_of_the_sms_is_for_new_processes_and_a_limit_for_all(
    node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]
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


def test_more_memory_is_for_new_processes(node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]) -> None:
    with node.link() as link:
        (warning,) = link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="16G")).warnings
        assert warning == "2 processes started with 8 GiB and can never have more (MPS); new ones can have 16 GiB."
        assert not link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="4G")).warnings  # the ledger holds all to that


@pytest.mark.slow
def test_the_sms_of_those_who_were_there_still_count(
    node: SimulatedNode, vgpu: VgpuStatus, workers: list[Worker]
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


def test_burst_beside_a_hard_share_is_never_silent(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    bursting = node.create(sm_percent=30, memory_bytes="1G", burst=True)
    (told,) = bursting.warnings
    assert vgpu.vgpu_id in told
    assert "may get fewer SMs than promised" in told
    shown = node.reading(vgpu.vgpu_id)
    assert shown is not None
    (told,) = shown.warnings
    assert bursting.vgpu_id in told
    assert f"fewer than its {GRANTED_SMS}" in told


@pytest.mark.slow
def test_who_started_bursting_keeps_all_sms_and_counts_for_them(node: SimulatedNode, vgpu: VgpuStatus) -> None:
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


@pytest.mark.slow
def test_the_window_of_a_gpu_is_changed_live_and_remembered() -> None:
    with SimulatedNode(mode="spatial") as node:
        assert spatial_gpu(node).window_ns == 12_000_000
        with node.link() as link:
            assert link.set_gpu("0", window_ns=6_000_000).window_ns == 6_000_000
        os.kill(node.server_pid(), signal.SIGKILL)
        eventually(lambda: spatial_gpu(node).state == "serving", "the next server")
        assert spatial_gpu(node).window_ns == 6_000_000
