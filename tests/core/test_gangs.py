"""Gangs: who is called when, by one server's decisions, and by several servers with messages between them."""

from __future__ import annotations

from collections.abc import Callable, Set
from copy import copy
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.gangs import GangName, Gangs
from gpuserver.core.scheduler.leases import (
    Added,
    Drained,
    GangCalled,
    GangMemberStatus,
    GangWindow,
    LeaseStarted,
    Publish,
    Runnable,
    Tick,
    VgpuIndex,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.eevdf import Eevdf
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.cluster import Cluster, Job
from tests.core.desk import GRANTED_ONLY
from tests.core.model import MS, US, S, Work
from tests.core.planted import in_temporal
from tests.tiers import slow
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)
HARD = Share(PPM // 2, PPM // 2)
NEARLY_ALL = Share(990_000, 990_000)
LAPSE = DEFAULT_POLICY.gang_lapse_ns
BOUND = GangMemberStatus(bound=True)
LEASE = GangMemberStatus(bound=True, start_ns=20 * MS, end_ns=40 * MS)

# --- what a server makes of the others' words


@pytest.mark.parametrize(
    ("here", "said", "gang_window"),
    [
        (1, {}, GangWindow()),
        (1, {0: GangMemberStatus()}, GangWindow()),
        (1, {0: BOUND}, GangWindow(binding=True, leader=0)),
        (1, {0: LEASE}, GangWindow(20 * MS, 40 * MS, binding=True, leader=0)),
        (1, {2: LEASE}, GangWindow()),
        (2, {1: LEASE, 0: BOUND}, GangWindow(binding=True, leader=0)),
        (2, {1: LEASE, 0: GangMemberStatus()}, GangWindow(20 * MS, 40 * MS, binding=True, leader=1)),
        (0, {1: GangMemberStatus(ready=False)}, GangWindow(binding=True)),
        (1, {0: GangMemberStatus(ready=False)}, GangWindow()),
        (0, {1: GangMemberStatus(bound=True, start_ns=1, end_ns=2, late=True)}, GangWindow(urgent=True)),
        (1, {0: GangMemberStatus(bound=True, start_ns=1, end_ns=2, late=True)}, GangWindow(1, 2, True, True, leader=0)),
    ],
    ids=[
        "alone",
        "the other wants nothing",
        "the leader waits",
        "the leader has a lease",
        "the leader does not follow",
        "the lowest that is bound leads",
        "the lowest is not bound",
        "a follower cannot go",
        "a leader that cannot go holds up nobody but by its wait",
        "a follower is late",
        "the leader is late",
    ],
)
def test_what_the_others_say_means(here: int, said: dict[int, GangMemberStatus], gang_window: GangWindow) -> None:
    gangs = Gangs(here)
    gangs.enroll({"g": 7}, 0)
    events = [event for gpu, outlook in said.items() for event in gangs.receive(gpu, {"g": outlook, "other": LEASE}, 0)]
    found = events[-1] if events else gangs.enroll({"g": 7}, 0)[-1]
    assert found.vgpu == 7
    assert found.gang_window is not None
    assert found.gang_window.lapses_ns == LAPSE
    assert gang_window == GangWindow(
        found.gang_window.start_ns,
        found.gang_window.end_ns,
        found.gang_window.binding,
        found.gang_window.urgent,
        leader=found.gang_window.leader,
    )


def test_a_server_that_is_silent_or_gone_binds_nobody() -> None:
    gangs = Gangs(2)
    gangs.enroll({"g": 7}, 0)
    gangs.receive(0, {"g": LEASE}, 0)
    [later] = gangs.receive(1, {"g": BOUND}, LAPSE)
    assert later.gang_window is not None
    assert later.gang_window.leader == 1
    [gone] = gangs.lose(1, LAPSE)
    assert gone.gang_window is not None
    assert not gone.gang_window.binding


def test_who_leaves_a_gang_is_free() -> None:
    gangs = Gangs(1)
    gangs.enroll({"g": 7}, 0)
    gangs.receive(0, {"g": BOUND}, 0)
    assert gangs.enroll({}, 0) == [GangCalled(7, None)]
    assert gangs.receive(0, {"g": BOUND}, 0) == []


# --- one scheduler


class Desk:
    """A scheduler with two vGPUs, both wanting: 0 is a gang's, 1 nobody's."""

    def __init__(self, gang: Share = HALF, aside: Share = HALF, *, other: bool = True) -> None:
        self.scheduler = TemporalScheduler(GRANTED_ONLY)
        self.published: list[Publish] = []
        for key, share in ((0, gang), (1, aside)):
            self.say(Added(key, share), 0)
        self.other = other

    def say(self, event: object, now_ns: int) -> None:
        commands = self.scheduler.handle(event, now_ns)  # type: ignore[arg-type]
        self.scheduler.check()
        self.published += [command for command in commands if isinstance(command, Publish)]

    def call(self, gang_window: GangWindow) -> None:
        self.say(GangCalled(0, gang_window), 0)
        if self.other:
            self.say(Runnable(1), 0)
        self.say(Runnable(0), 0)

    @property
    def goers(self) -> list[VgpuIndex]:
        return [command.lease.vgpu for command in self.published]


def binding(start_ns: int, end_ns: int) -> GangWindow:
    return GangWindow(start_ns, end_ns, binding=True, lapses_ns=LAPSE)


def test_outside_its_gang_window_it_stays_uncalled() -> None:
    desk = Desk()
    desk.call(binding(0, 0))
    assert set(desk.goers) == {1}


def test_leases_of_others_end_where_it_is_called() -> None:
    desk = Desk(aside=HARD)
    desk.call(binding(13 * MS, 33 * MS))
    assert desk.scheduler.outlook(1).end_ns == 12_200_000  # somebody waits: a window and a decision from now
    desk = Desk(aside=HARD)
    desk.call(binding(12 * MS, 33 * MS))


def test_inside_it_goes_first_for_as_long_as_its_leader() -> None:
    desk = Desk(other=False)
    desk.call(binding(0, 33 * MS))
    desk.say(Runnable(1), 0)
    [first] = [command.lease for command in desk.published if command.lease.epoch == 1][-1:]
    desk.say(LeaseStarted(0, 1, first.start_ns), first.start_ns)
    assert desk.scheduler.outlook(0) == GangMemberStatus(True, first.start_ns, 33 * MS)


def test_whoever_holds_gives_way_to_it() -> None:
    desk = Desk()
    desk.call(binding(0, 33 * MS))
    assert desk.scheduler.outlook(1).end_ns <= DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.window_ns


def test_where_nobody_else_wants_it_need_not_wait_unless_it_has_a_limit() -> None:
    free, capped = Desk(other=False), Desk(HARD, other=False)
    for desk in (free, capped):
        desk.call(binding(0, 0))
    assert (free.goers, capped.goers) == ([0], [])


def test_a_gang_window_lapses() -> None:
    desk = Desk(HARD, other=False)
    desk.call(binding(0, 0))
    due = desk.scheduler.next_deadline_ns()
    assert due == LAPSE
    desk.say(Tick(), due)
    assert desk.goers == [0]


def test_an_urgent_call_is_short_and_goes_before_a_turn_of_others() -> None:
    desk = Desk()
    desk.call(GangWindow(binding=True, urgent=True, lapses_ns=LAPSE))
    assert desk.scheduler.outlook(1).end_ns == DEFAULT_POLICY.decision_ns
    desk = Desk(other=False)
    desk.call(GangWindow(binding=True, urgent=True, lapses_ns=LAPSE))
    assert desk.scheduler.outlook(0).end_ns == DEFAULT_POLICY.gang_urgent_ns


def test_an_urgent_call_goes_before_a_higher_class() -> None:
    desk = Desk(aside=Share(PPM // 2, priority=Priority.HIGH))
    desk.call(GangWindow(binding=True, urgent=True, lapses_ns=LAPSE))
    assert desk.scheduler.outlook(1).end_ns == DEFAULT_POLICY.decision_ns


def test_an_urgent_call_goes_to_who_is_throttled_and_it_pays() -> None:
    desk = Desk(HARD, other=False)
    desk.say(Runnable(0), 0)
    desk.say(LeaseStarted(0, 1, 0), 0)
    desk.say(Drained(0, 1, 200 * MS, idle_ns=0, wants=True), 200 * MS)
    [bucket_ns] = [s.bucket_ns for s in desk.scheduler.snapshot(200 * MS) if s.vgpu == 0 and s.throttled]
    desk.say(GangCalled(0, GangWindow(binding=True, urgent=True, lapses_ns=LAPSE)), 200 * MS)
    outlook = desk.scheduler.outlook(0)
    assert outlook.end_ns == 200 * MS + DEFAULT_POLICY.gang_urgent_ns
    desk.say(LeaseStarted(0, 2, 200 * MS), 200 * MS)
    desk.say(GangCalled(0, binding(0, 0)), 201 * MS)
    desk.say(Drained(0, 2, 202 * MS, idle_ns=0, wants=True), 202 * MS)
    [after] = [s for s in desk.scheduler.snapshot(202 * MS) if s.vgpu == 0]
    assert after.throttled
    assert after.bucket_ns == bucket_ns - 2 * MS + MS


def test_whose_debt_keeps_it_out_goes_uncalled_once_no_word_arrives_any_more() -> None:
    """While words arrive they say whether another member is late; long kernels of its own give it no more than that."""
    desk = Desk(HARD, other=False)
    desk.say(Runnable(0), 0)
    desk.say(LeaseStarted(0, 1, 0), 0)
    desk.say(GangCalled(0, GangWindow(lapses_ns=3 * S)), S)
    desk.say(Drained(0, 1, 2 * S, idle_ns=0, wants=True), 2 * S)
    desk.published.clear()
    assert desk.scheduler.next_deadline_ns() == 3 * S, "it is in debt until after that"
    desk.say(GangCalled(0, GangWindow(lapses_ns=3 * S + MS)), 2 * S)
    desk.say(Tick(), 3 * S)
    assert desk.goers == []
    desk.say(Tick(), 3 * S + MS)
    assert desk.goers == [0]
    assert desk.scheduler.outlook(0).end_ns == 3 * S + MS + DEFAULT_POLICY.gang_urgent_ns


# --- several servers


def crossing(*shares: Share, gang: bool = True, kernel_ns: int = MS) -> list[Job]:
    return [Job(i, (0, 1), (share, share), Work(kernel_ns), gang=gang) for i, share in enumerate(shares)]


def part(cluster: Cluster, key: int) -> float:
    """Of the time so far, what the job has computed on each of its GPUs."""
    return cluster.progress[key].done * cluster.kernel_ns[key] / cluster.now_ns


@pytest.mark.simulation
@pytest.mark.parametrize("kernel_ns", [*slow(300 * US), MS])
@pytest.mark.parametrize(
    ("shares", "least"),
    [
        ((HALF, HALF), (0.42, 0.42)),
        ((HARD, HARD), (0.42, 0.42)),
        ((Share(300_000), Share(700_000)), (0.23, 0.6)),
        ((Share(300_000, 300_000), Share(700_000, 700_000)), (0.23, 0.6)),
    ],
    ids=["halves", "hard halves", "30 and 70", "hard 30 and 70"],
)
def test_crossing_gangs_get_their_shares(shares: tuple[Share, ...], least: tuple[float, ...], kernel_ns: int) -> None:
    cluster = Cluster(crossing(*shares, kernel_ns=kernel_ns)).run(4 * S)
    assert cluster.violations() == []
    for key, expected in enumerate(least):
        assert part(cluster, key) > expected


def test_without_gangs_one_of_them_starves() -> None:
    cluster = Cluster(crossing(HARD, HARD, gang=False)).run(4 * S)
    assert 0 < min(part(cluster, key) for key in (0, 1)) < 0.1


def test_alone_with_a_hard_limit_a_gang_gets_its_limit() -> None:
    """Without, its members run out of their allowances at different times, and each spins away what the other saves."""
    assert part(Cluster(crossing(HARD)).run(4 * S), 0) > 0.45
    assert part(Cluster(crossing(HARD, gang=False)).run(4 * S), 0) < 0.4


@pytest.mark.simulation
def test_a_ring_of_gangs_fills_its_gpus() -> None:
    """Each two meet on a GPU, so one runs at a time."""
    jobs = [Job(i, gpus, (HALF, HALF)) for i, gpus in enumerate([(0, 1), (1, 2), (0, 2)])]
    cluster = Cluster(jobs).run(4 * S)
    assert sum(part(cluster, key) for key in range(3)) > 0.9
    assert min(part(cluster, key) for key in range(3)) > 0.2


@pytest.mark.simulation
@pytest.mark.parametrize("limit_ppm", [*slow(PPM), 990_000], ids=["no limit", "limit"])
@pytest.mark.parametrize("beside", [0, 1], ids=["the other leads from below", "the other leads from above"])
def test_a_leader_that_is_alone_on_its_gpu_leaves_others_their_turns(beside: int, limit_ppm: int) -> None:
    """Two gangs meet where both follow. One leader has a GPU to itself and holds for ever, the other has not."""
    cluster = Cluster(meeting(limit_ppm, beside), delay_ns=100 * US).run(4 * S)
    assert cluster.violations() == []
    assert min(part(cluster, key) for key in (0, 1)) > 0.2


def meeting(limit_ppm: int, beside: int) -> list[Job]:
    third = Share(PPM // 3, limit_ppm)
    jobs = [Job(i, (i, 2), (third, third), Work(300 * US)) for i in (0, 1)]
    return [*jobs, Job(2, (beside,), (Share(PPM // 3),), gang=False, ranks=False)]


def test_without_a_word_from_anybody_no_wait_grows() -> None:
    """A rank spins while the other is throttled, is throttled for what it has spun, and the other spins for longer."""
    quarter = Share(PPM // 4, PPM // 4)
    jobs = [Job(i, gpus, (quarter, quarter), Work(3 * MS)) for i, gpus in enumerate([(0, 1), (0, 1), (0, 2)])]
    jobs.append(Job(3, (2,), (Share(PPM // 4),), gang=False, ranks=False))
    cluster = Cluster(jobs, seed=1, lost_ratio=1.0).run(S)
    for second in range(2, 12):
        before = {key: progress.done for key, progress in cluster.progress.items()}
        cluster.run(second * S)
        assert all(progress.done > before[key] for key, progress in cluster.progress.items()), f"in second {second}"


def test_different_shares_give_the_least() -> None:
    job = Job(0, (0, 1), (Share(700_000, 700_000), Share(200_000, 200_000)))
    beside = [Job(1, (0,), (Share(300_000),), gang=False, ranks=False), Job(2, (1,), (Share(800_000),), gang=False)]
    cluster = Cluster([job, *beside]).run(4 * S)
    assert 0.14 < part(cluster, 0) < 0.21


@pytest.mark.simulation
def test_members_hold_at_the_same_time() -> None:
    """Of the time that one of them holds, both do."""
    cluster = Cluster(crossing(HALF, HALF)).run(4 * S)
    one, other = (
        [(r.go_ns, r.drained_ns or cluster.now_ns) for r in gpu.records if r.key == 0] for gpu in cluster.gpus
    )
    both = sum(max(0, min(b, d) - max(a, c)) for a, b in one for c, d in other)
    assert both > 0.9 * max(sum(b - a for a, b in spans) for spans in (one, other))


@pytest.mark.simulation
def test_while_a_leaders_server_is_stopped_others_go_on() -> None:
    jobs = [Job(0, (0, 1), (HARD, HARD)), Job(1, (1, 2), (HARD, HARD)), Job(2, (1,), (HALF,), gang=False, ranks=False)]
    cluster = Cluster(jobs)
    cluster.run(S)
    cluster.stop(0)
    cluster.run(2 * S)
    before = cluster.progress[1].done
    cluster.run(3 * S)
    assert (cluster.progress[1].done - before) * MS > 0.4 * S
    cluster.resume(0)
    before = cluster.progress[0].done
    cluster.run(4 * S)
    assert cluster.progress[0].done > before, "it pays for two seconds of waiting on its other GPU, and goes on"


def bystanders(cluster: Cluster) -> list[str]:
    """Nobody in no gang that always wants is behind another by more than K (properties 2 and 3, with the longest lease
    that a gang window may ask for)."""
    found = []
    for gpu in cluster.gpus:
        k = DEFAULT_POLICY.quantum_max_ns + oracle.longest_overrun(gpu) + oracle.CREDIT
        for j in gpu.keys:
            if j in cluster.grouped:
                continue
            for i in set(gpu.keys) - {j}:
                r_i, r_j = (gpu.shares[key].guarantee_ppm for key in (i, j))
                bound = k * PPM / r_i + k * PPM / r_j
                rise, _ = oracle.normalised_difference(gpu, i, j, gpu.up_ns, gpu.now_ns)
                if rise > bound:
                    found.append(f"GPU {gpu.index}: {i} was {rise / bound:.2f} of what it may be ahead of {j}")
    return found


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two or three GPUs, gangs that cross on them in any way, perhaps somebody beside, messages late or lost."""
    count = draw(st.integers(2, 3))
    places = st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)] if count == 3 else [(0, 1)])
    gangs = draw(st.lists(places, min_size=1, max_size=3))
    aside = draw(st.lists(st.integers(0, count - 1), max_size=1))
    each = PPM // (len(gangs) + len(aside))
    # Short of all: a lease that has an end, and yet goes on and on where nobody else wants.
    limit = draw(st.sampled_from([each, max(each, PPM * 99 // 100), PPM]))
    kernel_ns = draw(st.sampled_from([300 * US, MS, 3 * MS]))
    jobs = [Job(i, gpus, (Share(each, limit),) * len(gpus), Work(kernel_ns)) for i, gpus in enumerate(gangs)]
    jobs += [Job(len(jobs), (gpu,), (Share(each),), gang=False, ranks=False) for gpu in aside]
    return Cluster(
        jobs,
        seed=draw(st.integers(0, 2**16)),
        delay_ns=draw(st.sampled_from([100 * US, MS, 5 * MS, 50 * MS])),
        lost_ratio=draw(st.sampled_from([0, 0.1, 0.5, 1.0])),
        overtaking=draw(st.booleans()),
        together=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=10)
@given(clusters(), st.integers(0, 2))
def test_gangs_never_lock_up_nor_take_what_is_others(cluster: Cluster, stopped: int) -> None:
    cluster.run(S)
    server = stopped % len(cluster.gpus)
    cluster.stop(server)
    cluster.run(S + LAPSE // 2)
    cluster.resume(server)
    before = {key: progress.done for key, progress in cluster.progress.items()}
    cluster.run(4 * S)
    for key, progress in cluster.progress.items():
        assert progress.done > before[key], f"job {key} stands still at {before[key]}"
    assert cluster.violations() == []
    assert cluster.messages < 40_000


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 2**16), st.sampled_from([200_000, 500_000, 800_000]), st.booleans())
def test_a_gang_takes_nothing_from_who_is_in_none(seed: int, gang_ppm: int, hard: bool) -> None:
    """Its leader gives it more, on a GPU of its own, than it may have on the GPU where it follows. Without a limit it
    would lead nobody."""
    gang = Job(0, (0, 1), (NEARLY_ALL, Share(gang_ppm, gang_ppm if hard else PPM)))
    other = Job(1, (1,), (Share(PPM - gang_ppm),), gang=False, ranks=False)
    cluster = Cluster([gang, other], seed=seed).run(4 * S)
    assert cluster.violations() == []
    assert bystanders(cluster) == []


# --- planted faults


class NobodyIsLate(Gangs):
    """Whoever waits for a member that has had its turn waits for its next one."""

    def receive(self, gpu_index: int, outlooks: dict[GangName, GangMemberStatus], now_ns: int) -> list[GangCalled]:  # type: ignore[override]
        blind = {gang: GangMemberStatus(o.bound, o.start_ns, o.end_ns, False, o.ready) for gang, o in outlooks.items()}
        return super().receive(gpu_index, blind, now_ns)


class NothingLapses(Gangs):
    def __init__(self, gpu_index: int) -> None:
        super().__init__(gpu_index)
        self._lapse_ns = 1 << 60


class ServesAlways(GangRules):
    def _overserved(self, account: object) -> bool:
        return False


class EntitledOnceCalled(Eevdf):
    def _entitled(self, account: Account, at_ns: int, clock: int, called: Set[VgpuIndex]) -> bool:
        return account.key in called or super()._entitled(account, at_ns, clock, called)


class CalledWhateverItHad(TemporalScheduler):
    def __init__(self) -> None:
        super().__init__()
        self._gangs.__class__ = ServesAlways
        self._eevdf.__class__ = EntitledOnceCalled


@in_temporal
class AtWorkForEver(GangRules):
    """A gang that is at work outdoes others for as long as its leader holds."""

    def _turn_ends(self, account: Account, now_ns: int) -> int | None:
        late = copy(account)
        late.time += 1 << 80
        return super()._turn_ends(late, now_ns)


def starved(cluster: Cluster) -> list[str]:
    cluster.run(4 * S)
    return [f"job {key} got {part(cluster, key):.2f}" for key in cluster.progress if part(cluster, key) < 0.4]


def stuck(cluster: Cluster) -> list[str]:
    """The leader's server is stopped; the follower's GPU is free."""
    cluster.run(S)
    cluster.stop(0)
    cluster.run(2 * S)
    leases = len(cluster.gpus[1].records)
    cluster.run(4 * S)
    return [] if len(cluster.gpus[1].records) > leases else ["the follower waits for ever"]


def robbed(cluster: Cluster) -> list[str]:
    return bystanders(cluster.run(4 * S))


def kept_away(cluster: Cluster) -> list[str]:
    cluster.run(4 * S)
    return [f"job {key} got {part(cluster, key):.2f}" for key in cluster.progress if part(cluster, key) < 0.1]


@dataclass(frozen=True)
class Case:
    jobs: list[Job]
    check: Callable[[Cluster], list[str]]
    gangs: type[Gangs] = Gangs
    kind: type[TemporalScheduler] = TemporalScheduler


CASES = {
    "NobodyIsLate": Case(crossing(HARD, HARD, kernel_ns=300 * US), starved, gangs=NobodyIsLate),
    "NothingLapses": Case([Job(0, (0, 1), (HARD, HARD), ranks=False)], stuck, gangs=NothingLapses),
    "CalledWhateverItHad": Case(
        [Job(0, (0, 1), (NEARLY_ALL, Share(200_000))), Job(1, (1,), (Share(800_000),), gang=False, ranks=False)],
        robbed,
        kind=CalledWhateverItHad,
    ),
    "AtWorkForEver": Case(meeting(990_000, 0), kept_away, kind=AtWorkForEver),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found(name: str) -> None:
    case = CASES[name]
    assert case.check(Cluster(case.jobs, gangs=case.gangs, kind=case.kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_without_the_fault_nothing_is_found(name: str) -> None:
    assert CASES[name].check(Cluster(CASES[name].jobs)) == []
