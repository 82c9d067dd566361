"""Gangs beside higher and lower classes: a class goes first, and takes no gang's guarantee. And gangs whose kernels are
longer than a late lease."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserver.core.account import Account
from gpuserver.core.leases import Priority, Share
from gpuserver.core.policy import PPM
from gpuserver.core.temporal import TemporalScheduler
from tests.core.cluster import Cluster, Job
from tests.core.model import MS, US, S, Work

CLASSES = list(Priority)
PLACES = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def beside_high(
    priority: Priority, limit_ppm: int, gpus: tuple[int, ...], kind: type[TemporalScheduler] = TemporalScheduler
) -> Cluster:
    """A gang of ``priority`` with half of GPUs 0 and 1; a high vGPU on each of ``gpus`` has the other half, no limit,
    and always wants."""
    gang = Job(0, (0, 1), (Share(PPM // 2, limit_ppm, priority=priority),) * 2)
    high = Share(PPM // 2, PPM, priority=Priority.HIGH)
    others = [Job(1 + gpu, (gpu,), (high,), gang=False, ranks=False) for gpu in gpus]
    return Cluster([gang, *others], delay_ns=100 * US, kind=kind).run(4 * S)


def part(cluster: Cluster, key: int = 0) -> float:
    return cluster.progress[key].done * cluster.kernel_ns[key] / cluster.now_ns


@pytest.mark.parametrize("gpus", [(0,), (1,), (0, 1)], ids=["where it leads", "where it follows", "on both"])
@pytest.mark.parametrize("limit_ppm", [PPM, PPM // 2], ids=["no limit", "hard"])
@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.LOW])
def test_beside_a_high_one_that_never_rests_a_gang_has_most_of_its_guarantee(
    priority: Priority, limit_ppm: int, gpus: tuple[int, ...]
) -> None:
    cluster = beside_high(priority, limit_ppm, gpus)
    assert cluster.violations() == []
    assert part(cluster) > 0.38
    for gpu in gpus:
        assert cluster.gpus[gpu].held_ns(1 + gpu, 0, cluster.now_ns) > 0.48 * cluster.now_ns


class NobodyInsists(TemporalScheduler):
    def _insists(self, account: Account) -> bool:
        return False


def test_planted_fault_nobody_insists() -> None:
    assert part(beside_high(Priority.NORMAL, PPM // 2, (1,), NobodyInsists)) < 0.1


@pytest.mark.parametrize("kernel_ns", [300 * US, MS, 3 * MS])
@pytest.mark.parametrize("limit_ppm", [PPM, PPM // 2], ids=["no limit", "hard"])
def test_a_high_and_a_low_gang_cross(limit_ppm: int, kernel_ns: int) -> None:
    jobs = [
        Job(key, (0, 1), (Share(PPM // 2, limit_ppm, priority=priority),) * 2, Work(kernel_ns))
        for key, priority in enumerate((Priority.HIGH, Priority.LOW))
    ]
    cluster = Cluster(jobs, delay_ns=100 * US).run(4 * S)
    assert cluster.violations() == []
    assert part(cluster, 0) > 0.46
    assert part(cluster, 1) > 0.4


def two_gangs_and_two_aside(kernel_ns: int, kind: type[TemporalScheduler] = TemporalScheduler) -> Cluster:
    """All of a quarter, those that are in no gang on the GPU where both lead."""
    share = Share(PPM // 4)
    gangs = [Job(key, (0, 1), (share, share), Work(kernel_ns)) for key in (0, 1)]
    aside = [Job(key, (0,), (share,), gang=False, ranks=False) for key in (2, 3)]
    return Cluster([*gangs, *aside], delay_ns=100 * US, kind=kind).run(5 * S)


@pytest.mark.parametrize("kernel_ns", [3 * MS, 10 * MS, 30 * MS])
def test_urgent_turns_are_no_way_to_more_than_the_share(kernel_ns: int) -> None:
    """A kernel of 3 ms is late after 2. Were the other member called for it each time, and its next kernel late in
    turn, a gang would go on like that for seconds, deep in debt, and the other one starve."""
    cluster = two_gangs_and_two_aside(kernel_ns)
    assert cluster.violations() == []
    for gang in (0, 1):
        assert part(cluster, gang) > 0.235
    for key in range(4):
        assert cluster.gpus[0].held_ns(key, 0, cluster.now_ns) > 0.24 * cluster.now_ns


class AlwaysAsSoonLate(TemporalScheduler):
    def _late_ns(self, account: Account) -> int:
        return self.policy.muster_late_ns


def test_planted_fault_always_as_soon_late() -> None:
    cluster = two_gangs_and_two_aside(3 * MS, AlwaysAsSoonLate)
    assert min(part(cluster, gang) for gang in (0, 1)) < 0.21


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)]), st.sampled_from(CLASSES)),
        min_size=2,
        max_size=3,
    ),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(CLASSES)), max_size=2),
    st.sampled_from([300 * US, MS, 3 * MS]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_whatever_their_classes_all_make_progress(
    gangs: list[tuple[tuple[int, ...], Priority]],
    aside: list[tuple[int, Priority]],
    kernel_ns: int,
    hard: bool,
    seed: int,
) -> None:
    each = PPM // (len(gangs) + len(aside))
    limit = each if hard else PPM
    jobs = [
        Job(key, gpus, (Share(each, limit, priority=priority),) * len(gpus), Work(kernel_ns))
        for key, (gpus, priority) in enumerate(gangs)
    ]
    jobs += [
        Job(len(jobs) + i, (gpu,), (Share(each, priority=priority),), gang=False, ranks=False)
        for i, (gpu, priority) in enumerate(aside)
    ]
    cluster = Cluster(jobs, seed=seed, delay_ns=100 * US).run(2 * S)
    for at in (3, 4):
        before = {key: progress.done for key, progress in cluster.progress.items()}
        cluster.run(at * S)
        for key, progress in cluster.progress.items():
            assert progress.done > before[key], f"job {key} did nothing in a second, after {before[key]}"
    assert cluster.violations() == []
