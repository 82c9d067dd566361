"""Latency targets (``--slo``): which vGPU of a class goes first, and what holds nevertheless."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_logic import PAUSE_NS
from gpuserver.core.scheduler.leases import Command, Event, Publish, Runnable
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.desk import MS, Desk, leases
from tests.core.model import Run, S, Work
from tests.core.populations import Population, temporal_populations
from vgpu.share import PPM, Priority, Share

PLAIN = Share(200_000)
TPOT = Share(200_000, tpot_ns=30 * MS)
TTFT = Share(200_000, ttft_ns=500 * MS)
CREDIT = 50 * MS
QUICK = replace(DEFAULT_POLICY, slo_credit_ns=CREDIT)
"""A run of 3 s shows no starvation where a vGPU may be owed 1 s."""


def desk(*shares: Share) -> Desk:
    return Desk(TemporalScheduler(), *shares)


def following(commands: list[Command]) -> int:
    """The vGPU of the last lease that ``commands`` publish."""
    return leases(commands)[-1].vgpu


def test_the_earliest_deadline_of_a_class_goes_first() -> None:
    found = desk(PLAIN, PLAIN, TTFT, TPOT, TPOT)
    found.runs(0, 100)
    for key, at_ms in ((1, 100.1), (2, 100.2), (3, 100.3)):
        commands = found.wants(key, at_ms)
    assert following(commands) == 3
    assert not leases(found.wants(4, 105))  # it is due later


def test_a_new_request_is_due_by_its_ttft_and_the_next_step_by_its_tpot() -> None:
    both = replace(TPOT, ttft_ns=500 * MS)
    found = desk(PLAIN, both, TPOT)
    lease = found.runs(1, 100)
    found.wants(2, 100)
    (end_ns,) = {one.end_ns for one in leases(found.tick(100)) if one.vgpu == 1} or {None}
    assert end_ns is None or end_ns / MS < 110  # the step of 2 is due before the request of 1
    commands = found.drained(1, lease.epoch, 104)
    assert not commands or following(commands) == 2


def test_one_with_an_slo_ends_the_turn_of_one_without() -> None:
    for second, at_most_ms in ((TPOT, 103.5), (PLAIN, 120)):
        found = desk(PLAIN, PLAIN, second)
        found.runs(0, 100)
        found.wants(1, 100.1)
        found.tick(101)
        found.wants(2, 101)
        (lease,) = (lease for lease, _ in found.scheduler.published(0))  # type: ignore[attr-defined]
        assert lease.end_ns <= at_most_ms * MS
        assert (lease.end_ns <= 110 * MS) == (second is TPOT)


def test_classes_come_before_targets() -> None:
    found = desk(PLAIN, replace(PLAIN, priority=Priority.HIGH), TPOT)
    found.runs(0, 100)
    assert following(found.tell_all([Runnable(2), Runnable(1)], 100.1)) == 1


def test_a_target_lengthens_no_window_below_a_higher_class() -> None:
    """One without a tpot may come at any moment, as without targets."""
    low = replace(PLAIN, priority=Priority.LOW)
    paced = replace(TPOT, priority=Priority.LOW)
    for highest, window_ns in ((PLAIN, DEFAULT_POLICY.window_low_ns), (TPOT, DEFAULT_POLICY.slo_window_ns)):
        found = desk(low, paced, highest)
        assert found.runs(0, 100).window_ns == window_ns


class Windows(oracle.Watch):
    """Also: a vGPU that runs beside one with a tpot, which wants the GPU, has a short window."""

    def __init__(self, scheduler: TemporalScheduler, shares: tuple[Share, ...]) -> None:
        super().__init__(scheduler)
        self.shares = shares
        self.judged = 0

    def __call__(self, events: list[Event], now: int, commands: list[Command]) -> None:  # type: ignore[override]
        super().__call__(events, now, commands)
        wanting = {s.vgpu for s in self.scheduler.snapshot(now) if s.wants and self.shares[s.vgpu].tpot_ns}  # type: ignore[attr-defined]
        for command in commands:
            if isinstance(command, Publish) and command.lease.end_ns is not None:
                mine = self.shares[command.lease.vgpu].priority
                beside = [k for k in wanting - {command.lease.vgpu} if self.shares[k].priority >= mine]
                self.judged += bool(beside)
                if beside and command.lease.window_ns > DEFAULT_POLICY.slo_window_ns:
                    self.found.append(f"a window of {command.lease.window_ns} ns beside {beside} at {now}")


@st.composite
def with_targets(draw: st.DrawFn) -> Population:
    population = draw(temporal_populations(priorities=draw(st.booleans())))
    slos = [draw(st.sampled_from([(0, 0), (0, 0), (8, 0), (30, 500), (0, 100)])) for _ in population.shares]
    shares = [
        replace(share, tpot_ns=tpot * MS, ttft_ns=ttft * MS)
        for share, (tpot, ttft) in zip(population.shares, slos, strict=True)
    ]
    return replace(population, shares=tuple(shares))


@given(with_targets())
def test_targets_take_no_guarantee_and_pass_no_limit(population: Population) -> None:
    scheduler = TemporalScheduler(QUICK)
    watch = Windows(scheduler, population.shares)
    run = population.run(scheduler, watch).run(3 * S)
    assert not watch.found
    assert not oracle.limits(run)
    assert not oracle.one_holder(run)
    assert not oracle.fairness(run, credit_ns=CREDIT)


def test_a_short_answer_is_not_cut_by_turns_of_others() -> None:
    """A vGPU that was idle runs on for as long as it is owed time; one without an slo has its share at once."""
    held = {}
    for target in (0, 30 * MS):
        found = desk(Share(800_000, tpot_ns=target, priority=Priority.HIGH), Share(200_000, priority=Priority.LOW))
        low = found.runs(1, 100)
        found.tick(2000)
        found.wants(0, 2000)
        commands = found.drained(1, low.epoch, 2000.5)
        (mine,) = {lease.epoch for lease, _ in found.scheduler.published(0)}  # type: ignore[attr-defined]
        found.went(0, mine, 2000.5)
        at_ms = 2000.5
        while at_ms < 3000 and not any(lease.vgpu == 1 for lease in leases(commands)):
            at_ms = max(at_ms + 0.5, min(found.due_ms or at_ms + 5, at_ms + 5))
            commands = found.tick(at_ms)
        held[target] = at_ms - 2000.5
    assert held[0] < 200 < 700 < held[30 * MS]


def test_turns_are_short_beside_one_with_a_tpot_that_uses_all_of_its_share() -> None:
    """But none is shorter than half of a shortest token."""
    usual = {}
    for target in (0, 5, 8):
        shares = (Share(800_000, tpot_ns=target * MS), Share(200_000))
        scheduler = TemporalScheduler(QUICK)
        watch = Windows(scheduler, shares)
        run = Population(shares, (Work(jitter=0.0), Work(jitter=0.0)), seed=0).run(scheduler, watch).run(2 * S)
        lengths = sorted(x.end_ns - x.start_ns for x in watch.leases.values() if x.vgpu == 1 and x.end_ns)
        usual[target] = lengths[len(lengths) // 2] / MS
        assert not oracle.fairness(run, credit_ns=CREDIT)
    assert 2.5 <= usual[5] <= usual[8] <= 4 < 7 <= usual[0]


def test_a_server_of_high_priority_decodes_as_if_alone_and_a_batch_keeps_what_is_left() -> None:
    """Answers of 64 steps of 8 ms, half of the time. The first one has no credit: both begin at the same time."""
    slowest = {}
    for target in (0, 9.2):
        server = Share(800_000, tpot_ns=round(target * MS), priority=Priority.HIGH)
        shares = (server, Share(200_000, priority=Priority.LOW))
        works = (Work(8 * MS, jitter=0.01, burst=64, pause_ns=512 * MS), Work())
        scheduler = TemporalScheduler()
        run = Population(shares, works, seed=1).run(scheduler, Windows(scheduler, shares)).run(12 * S)
        steps = [one for one in run.apps[0].finished if one[0] > 2 * S]
        lasted = [after[1] - before[1] for before, after in pairwise(steps) if after[0] - before[1] < 100 * MS]
        slowest[target] = sorted(lasted)[len(lasted) * 99 // 100] / (8 * MS)
        used = sum(end - begin for begin, end in run.apps[0].finished) / (12 * S)
        kept = sum(end - begin for begin, end in run.apps[1].finished) / (12 * S) / (1 - used)
        assert kept >= 0.97
    assert slowest[9.2] <= 1.05 < 1.5 < slowest[0]


def shortfall_ns(run: Run, key: int, since_ns: int) -> float:
    """The most that ``key`` fell behind its guarantee, over all windows from ``since_ns`` on."""
    guarantee = run.shares[key].guarantee_ppm / PPM
    held = oracle.curve(oracle.held_spans(run, key), since_ns, run.now_ns)
    return oracle.rises([guarantee * (at - since_ns) - total for at, total in held])[0]


def test_a_lower_class_is_owed_no_more_for_its_target() -> None:
    """It would draw V back, and the higher class would not be eligible for as long."""
    shares = (Share(500_000, priority=Priority.HIGH), replace(TPOT, priority=Priority.LOW))
    works = (Work(5 * MS), Work(5 * MS, burst=100, pause_ns=2 * S))
    run = Population(shares, works, seed=0).run(TemporalScheduler()).run(8 * S)
    assert len(run.apps[1].finished) > 200
    assert shortfall_ns(run, 0, S // 10) <= DEFAULT_POLICY.idle_credit_ns + 2 * DEFAULT_POLICY.period_ns
    assert not oracle.fairness(run)


@st.composite
def beside_one_that_is_busy(draw: st.DrawFn) -> Population:
    """vGPU 0 always wants. The others have an slo; they sleep for long, and want the GPU for long."""
    count = draw(st.integers(2, 6))
    parts = draw(st.lists(st.integers(1, 9), min_size=count + 1, max_size=count + 1))
    shares, works = [Share(PPM * parts[0] // sum(parts))], [Work(10 * MS)]
    for part in parts[1:]:
        tpot, ttft = draw(st.sampled_from([(8, 0), (30, 500), (0, 100)]))
        shares.append(Share(PPM * part // sum(parts), tpot_ns=tpot * MS, ttft_ns=ttft * MS))
        burst, start_ns = draw(st.sampled_from([10, 100, None])), draw(st.sampled_from([0, S, 2 * S]))
        pause_ns = 0 if burst is None else draw(st.sampled_from([30 * MS, 300 * MS, 2 * S]))
        works.append(Work(10 * MS, burst=burst, pause_ns=pause_ns, start_ns=start_ns))
    return Population(tuple(shares), tuple(works), draw(st.integers(0, 2**16)), draw(st.booleans()))


def kept_its_share(population: Population) -> bool:
    """Whether vGPU 0, which always wants, falls behind its guarantee by one credit at most, and a few turns."""
    run = population.run(TemporalScheduler()).run(12 * S)
    most_ns = DEFAULT_POLICY.slo_credit_ns + 2 * DEFAULT_POLICY.period_ns + oracle.longest_overrun(run)
    return shortfall_ns(run, 0, S // 10) <= most_ns


def test_five_with_an_slo_that_wake_at_once_delay_a_busy_one_by_one_credit() -> None:
    shares = (Share(PPM // 6), *(replace(TPOT, guarantee_ppm=PPM // 6) for _ in range(5)))
    works = (Work(10 * MS), *(Work(10 * MS, start_ns=2 * S) for _ in range(5)))
    assert kept_its_share(Population(shares, works, seed=0))


@pytest.mark.slow
@given(beside_one_that_is_busy())
def test_all_with_an_slo_together_delay_a_busy_one_by_one_credit(population: Population) -> None:
    assert kept_its_share(population)


def test_what_runs_alone_has_little_in_flight_until_the_one_with_a_tpot_was_idle_for_long() -> None:
    found = desk(replace(TPOT, priority=Priority.HIGH), replace(PLAIN, priority=Priority.LOW))
    mine = found.runs(0, 100)
    found.drained(0, mine.epoch, 110, wants=False)
    other = found.runs(1, 112)
    assert other.end_ns is not None
    assert other.window_ns == DEFAULT_POLICY.slo_window_ns
    at_ms = 112.0
    while other.end_ns is not None:
        assert at_ms < 1200
        at_ms = max(at_ms + 0.1, found.due_ms or at_ms)
        found.tick(at_ms)
        ((other, _),) = found.scheduler.published(1)  # type: ignore[attr-defined]
    assert at_ms > 1100


def test_scheduler_and_hook_have_the_same_pause() -> None:
    """``cython_ext/logic/meter/steps.pxd`` separates requests by it, too."""
    assert DEFAULT_POLICY.slo_pause_ns == PAUSE_NS


def test_an_slo_adds_nothing_to_a_share() -> None:
    assert TPOT.guarantee_ppm == PLAIN.guarantee_ppm
    assert TPOT.limit_ppm == PPM
