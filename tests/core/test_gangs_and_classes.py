"""Gangs beside higher and lower classes: a class goes first, and takes no gang's guarantee. And gangs whose kernels are
longer than a late lease."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.leases import GangCalled, GangWindow
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.eevdf import Decision, Eevdf
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from gpuserver.core.scheduler.temporal.turns import Turns
from tests.core.cluster import Cluster, Job
from tests.core.desk import GRANTED_ONLY, Desk
from tests.core.model import MS, US, S, Work
from tests.core.planted import in_temporal
from tests.tiers import slow
from vgpu.share import PPM, Priority, Share

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


@pytest.mark.parametrize(
    "gpus",
    [*slow((0,), (1,)), (0, 1)],
    ids=["where it leads", "where it follows", "on both"],
)
@pytest.mark.parametrize("limit_ppm", [*slow(PPM), PPM // 2], ids=["no limit", "hard"])
@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.LOW])
def test_beside_a_high_one_that_never_rests_a_gang_has_most_of_its_guarantee(
    priority: Priority, limit_ppm: int, gpus: tuple[int, ...]
) -> None:
    cluster = beside_high(priority, limit_ppm, gpus)
    assert cluster.violations() == []
    assert part(cluster) > 0.43
    for gpu in gpus:
        assert cluster.gpus[gpu].held_ns(1 + gpu, 0, cluster.now_ns) > 0.48 * cluster.now_ns


@in_temporal
class NobodyInsists(GangRules):
    def overrides_class(self, account: Account) -> bool:
        return False


def test_planted_fault_nobody_insists() -> None:
    assert part(beside_high(Priority.NORMAL, PPM // 2, (1,), NobodyInsists)) < 0.25


def small_beside(
    priority: Priority,
    gpus: tuple[int, ...],
    kind: type[TemporalScheduler] = TemporalScheduler,
    ppm: int = PPM // 10,
    hard: bool = False,
) -> Cluster:
    """A low gang with a hard ``ppm`` of GPUs 0 and 1; on each of ``gpus`` somebody of ``priority`` has the rest, and is
    ``hard``, or has no limit."""
    gang = Job(0, (0, 1), (Share(ppm, ppm, priority=Priority.LOW),) * 2)
    rest = Share(PPM - ppm, PPM - ppm if hard else PPM, priority=priority)
    others = [Job(1 + gpu, (gpu,), (rest,), gang=False, ranks=False) for gpu in gpus]
    return Cluster([gang, *others], delay_ns=100 * US, kind=kind).run(8 * S)


@pytest.mark.parametrize(
    ("priority", "gpus", "least"),
    [
        pytest.param(Priority.NORMAL, (0,), 0.085, marks=pytest.mark.slow, id="normal"),
        pytest.param(Priority.NORMAL, (0, 1), 0.065, id="normal on both"),
        pytest.param(Priority.HIGH, (0, 1), 0.04, marks=pytest.mark.slow, id="high on both"),
    ],
)
def test_a_small_low_gang_whose_member_is_late_is_not_left_waiting(
    priority: Priority, gpus: tuple[int, ...], least: float
) -> None:
    """Its limit pays for the spinning of the one, while the other waits for a class that never rests."""
    cluster = small_beside(priority, gpus)
    assert cluster.violations() == []
    assert part(cluster) > least
    for gpu in gpus:
        assert cluster.gpus[gpu].held_ns(1 + gpu, 0, cluster.now_ns) > 0.89 * cluster.now_ns


@pytest.mark.parametrize("hard", [*slow(False), True], ids=["beside bursting ones", "beside hard ones"])
@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.HIGH])
@pytest.mark.parametrize("percent", [*slow(2), 3, *slow(5)])
def test_a_very_small_low_gang_gets_most_of_its_share(percent: int, priority: Priority, hard: bool) -> None:
    """Its leases are shorter than the time in which who holds on the other GPU gives way."""
    ppm = PPM * percent // 100
    cluster = small_beside(priority, (0, 1), ppm=ppm, hard=hard)
    assert cluster.violations() == []
    assert part(cluster) > 0.6 * ppm / PPM
    for gpu in (0, 1):
        assert cluster.gpus[gpu].held_ns(1 + gpu, 0, cluster.now_ns) > 0.99 * (PPM - ppm) / PPM * cluster.now_ns


@in_temporal
class ToldWithoutNotice(Turns):
    """Who follows on is looked for when the holder could no more go on, whoever that is."""

    def _lookaheads(self, holder: Account) -> list[int]:
        return [self._lookahead(holder)]


@in_temporal
class LeadersAreCutShort(Eevdf):
    """A lease that begins at the moment when a higher class is no longer entitled ends in the next one."""

    def pick(self, at_ns: int, staying: ActiveLease | None, following: ActiveLease | None = None) -> Decision | None:
        choice = super().pick(at_ns, staying, following)
        return choice and replace(choice, leads=False)


@pytest.mark.parametrize(
    ("kind", "percent", "most"), [(ToldWithoutNotice, 3, 0.5), (LeadersAreCutShort, 2, 0.6)], ids=["told late", "cut"]
)
def test_planted_faults_of_very_small_gangs(kind: type[TemporalScheduler], percent: int, most: float) -> None:
    ppm = PPM * percent // 100
    assert part(small_beside(Priority.NORMAL, (0, 1), kind, ppm)) < most * ppm / PPM


@in_temporal
class UrgentWaitsForClasses(GangRules):
    def urgent(self, account: Account) -> bool:
        waits = any(a.wants and a.share.priority > account.share.priority for a in self._accounts.competing.values())
        return not waits and super().urgent(account)


def test_planted_fault_urgent_waits_for_classes() -> None:
    assert part(small_beside(Priority.NORMAL, (0, 1), UrgentWaitsForClasses)) < 0.035


@pytest.mark.parametrize("kernel_ns", [*slow(300 * US), MS, *slow(3 * MS)])
@pytest.mark.parametrize("limit_ppm", [*slow(PPM), PPM // 2], ids=["no limit", "hard"])
def test_a_high_and_a_low_gang_cross(limit_ppm: int, kernel_ns: int) -> None:
    jobs = [
        Job(key, (0, 1), (Share(PPM // 2, limit_ppm, priority=priority),) * 2, Work(kernel_ns))
        for key, priority in enumerate((Priority.HIGH, Priority.LOW))
    ]
    cluster = Cluster(jobs, delay_ns=100 * US).run(4 * S)
    assert cluster.violations() == []
    assert part(cluster, 0) > 0.42
    assert part(cluster, 1) > 0.4


def two_gangs_and_two_aside(kernel_ns: int, kind: type[TemporalScheduler] = TemporalScheduler) -> Cluster:
    """All of a quarter, those that are in no gang on the GPU where both lead."""
    share = Share(PPM // 4)
    gangs = [Job(key, (0, 1), (share, share), Work(kernel_ns)) for key in (0, 1)]
    aside = [Job(key, (0,), (share,), gang=False, ranks=False) for key in (2, 3)]
    return Cluster([*gangs, *aside], delay_ns=100 * US, kind=kind).run(5 * S)


@pytest.mark.parametrize("kernel_ns", [*slow(3 * MS), 10 * MS, *slow(30 * MS)])
def test_urgent_turns_are_no_way_to_more_than_the_share(kernel_ns: int) -> None:
    """A kernel of 3 ms is late after 2. Were the other member called for it each time, and its next kernel late in
    turn, a gang would go on like that for seconds, deep in debt, and the other one starve."""
    cluster = two_gangs_and_two_aside(kernel_ns)
    assert cluster.violations() == []
    for gang in (0, 1):
        assert part(cluster, gang) > 0.235
    for key in range(4):
        assert cluster.gpus[0].held_ns(key, 0, cluster.now_ns) > 0.24 * cluster.now_ns


@in_temporal
class AlwaysAsSoonLate(GangRules):
    def _late_ns(self, account: Account) -> int:
        return self.policy.gang_late_ns


@pytest.mark.slow
def test_planted_fault_always_as_soon_late() -> None:
    cluster = two_gangs_and_two_aside(3 * MS, AlwaysAsSoonLate)
    assert min(part(cluster, gang) for gang in (0, 1)) < 0.21


@pytest.mark.slow
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


def follower_at_work() -> Desk:
    """vGPU 0 follows a leader elsewhere, and holds beside vGPU 1, to whom it was owed; vGPU 2, high, is idle."""
    desk = Desk(TemporalScheduler(), Share(PPM // 4), Share(PPM // 2), Share(PPM // 4, priority=Priority.HIGH))
    desk.tell(GangCalled(0, GangWindow(0, 0, binding=True, urgent=False, lapses_ns=10 * S, leader=0)), 0)
    held = desk.runs(1, 0)
    desk.wants(0, 1)
    desk.tell(GangCalled(0, GangWindow(30 * MS, 330 * MS, binding=True, urgent=False, lapses_ns=10 * S, leader=0)), 30)
    end_ns = desk.scheduler.published(1)[0][0].end_ns
    assert end_ns is not None
    desk.drained(1, held.epoch, end_ns / MS)
    ((lease, _),) = desk.scheduler.published(0)
    desk.went(0, lease.epoch, end_ns / MS + 0.1)
    return desk


def ends_ms(desk: Desk) -> float:
    ((lease, _),) = desk.scheduler.published(0)
    assert lease.end_ns is not None
    return lease.end_ns / MS


def beside_low(gang_window: GangWindow | None) -> Desk:
    """vGPU 0, low, waits beside vGPU 1, which holds until it is no more entitled; vGPU 2, high, is idle."""
    low, high = (Share(PPM // 10, priority=priority) for priority in (Priority.LOW, Priority.HIGH))
    desk = Desk(TemporalScheduler(GRANTED_ONLY), low, Share(PPM * 9 // 10), high)
    desk.tell(GangCalled(0, gang_window), 0)
    desk.runs(1, 0)
    desk.wants(0, 1)
    while not desk.scheduler.published(0):
        assert desk.due_ms is not None
        desk.tick(desk.due_ms)
    return desk


@pytest.mark.parametrize(("gang_window", "before_ms"), [(None, 2.0), (GangWindow(lapses_ns=10**12), 14.2)])
def test_a_leader_is_published_so_early_that_those_on_other_gpus_can_give_way(
    gang_window: GangWindow | None, before_ms: float
) -> None:
    desk = beside_low(gang_window)
    ((lease, _),) = desk.scheduler.published(0)
    assert lease.start_ns - desk.scheduler._accounts.now_ns == before_ms * MS  # type: ignore[attr-defined]


def leader_at_work(gang_window: GangWindow | None) -> tuple[Desk, float]:
    """vGPU 0 of ``beside_low`` has taken over, and since when."""
    desk = beside_low(gang_window)
    ((held, _),) = desk.scheduler.published(1)
    ((lease, _),) = desk.scheduler.published(0)
    begin_ms = lease.start_ns / MS
    desk.drained(1, held.epoch, begin_ms)
    desk.went(0, lease.epoch, begin_ms)
    return desk, begin_ms


@pytest.mark.parametrize(("gang_window", "length_ms"), [(None, 3.45), (GangWindow(lapses_ns=10**12), 5.0)])
def test_a_leader_that_was_owed_its_lease_keeps_it(gang_window: GangWindow | None, length_ms: float) -> None:
    """The higher class is entitled again a moment after it was not."""
    desk, begin_ms = leader_at_work(gang_window)
    desk.tick(begin_ms + 3)
    assert ends_ms(desk) == pytest.approx(begin_ms + length_ms)


def test_but_not_beside_a_higher_one_that_comes_meanwhile() -> None:
    desk, begin_ms = leader_at_work(GangWindow(lapses_ns=10**12))
    desk.wants(2, begin_ms + 1)
    assert ends_ms(desk) == pytest.approx(begin_ms + 1.45)


def test_a_high_one_waits_for_a_member_that_is_owed_only_while_that_is_called() -> None:
    desk = follower_at_work()
    desk.wants(2, 50)
    assert ends_ms(desk) > 100
    desk = follower_at_work()
    desk.tell(GangCalled(0, GangWindow(lapses_ns=10 * S)), 49)  # its leader has nothing to do any more
    desk.wants(2, 50)
    assert ends_ms(desk) < 51


def test_a_turn_that_becomes_urgent_before_it_begins_counts_as_one() -> None:
    desk = Desk(TemporalScheduler(), Share(PPM // 2), Share(PPM // 2))
    held = desk.runs(1, 0)
    called = GangWindow(0, 10**12, binding=True, urgent=False, lapses_ns=10**13, leader=0)
    desk.tell(GangCalled(0, called), 1)
    desk.wants(0, 2)
    before_ns = desk.scheduler.published(1)[0][0].end_ns
    assert before_ns is not None
    desk.tell(GangCalled(0, replace(called, urgent=True)), before_ns / MS - 3)
    ((lease, went),) = desk.scheduler.published(0)
    assert (lease.end_ns - lease.start_ns, went) == (DEFAULT_POLICY.gang_urgent_ns, False)  # type: ignore[operator]
    assert lease.go_by_ns == lease.start_ns + DEFAULT_POLICY.gang_late_ns, "the holder may wait for it in turn"
    desk.drained(1, held.epoch, lease.start_ns / MS)
    desk.went(0, lease.epoch, lease.start_ns / MS)
    assert desk.scheduler._accounts.all[0].urgent_turns == 1  # type: ignore[attr-defined]


def test_an_urgent_turn_waits_two_milliseconds_for_a_drain() -> None:
    desk = Desk(TemporalScheduler(), Share(PPM // 2), Share(PPM // 2))
    desk.runs(1, 0)
    desk.tell(GangCalled(0, GangWindow(0, 10**12, binding=True, urgent=True, lapses_ns=10**13, leader=0)), 1)
    desk.wants(0, 2)
    ((lease, _),) = desk.scheduler.published(0)
    assert lease.go_by_ns - lease.start_ns == DEFAULT_POLICY.gang_late_ns
