"""What the temporal scheduler does in named situations, and what must not matter to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.leases import (
    AccountState,
    Added,
    Allow,
    Command,
    Drained,
    Idle,
    LeaseStarted,
    Publish,
    Runnable,
    Withdraw,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.desk import GRANTED_ONLY, Desk, spans
from tests.core.model import MS, US, App, Run, S, Work
from tests.core.populations import Population, temporal_populations
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)


def simulate(shares: list[Share], works: list[Work], seconds: float = 3, **how: object) -> Run:
    return Run(TemporalScheduler(), shares, works, **how).run(round(seconds * S))  # type: ignore[arg-type]


def log_of(population: Population, shares: list[Share], keys: list[int]) -> list[tuple[int, Command]]:
    return simulate(shares, list(population.works), 1, seed=population.seed, keys=keys).commands


def renamed(commands: list[tuple[int, Command]], name: dict[int, int]) -> list[tuple[int, Command]]:
    def command(c: Command) -> Command:
        if isinstance(c, Withdraw | Allow):
            return replace(c, vgpu=name[c.vgpu])
        after = tuple((name[k], e) for k, e in c.lease.after)
        return Publish(replace(c.lease, vgpu=name[c.lease.vgpu], after=after))

    return [(at, command(c)) for at, c in commands]


@pytest.mark.simulation
@given(temporal_populations(priorities=True))
def test_names_and_repetition_change_nothing(population: Population) -> None:
    """12: the same events give the same commands; other names give the same commands under other names."""
    shares = list(population.shares)
    keys = list(range(len(shares)))
    first = log_of(population, shares, keys)
    assert log_of(population, shares, keys) == first
    others = [200 - 7 * k for k in keys]
    assert log_of(population, shares, others) == renamed(first, dict(zip(keys, others, strict=True)))


@pytest.mark.simulation
@given(temporal_populations(), st.sampled_from([2, 4]))
def test_only_the_ratio_of_guarantees_matters(population: Population, factor: int) -> None:
    """12: all guarantees times k, nobody capped, changes nothing but the rounding of a nanosecond."""
    shares = [Share(s.guarantee_ppm // 8 * 8) for s in population.shares]
    scaled = [Share(s.guarantee_ppm // factor) for s in shares]
    runs = [simulate(kind, list(population.works), 1, seed=population.seed) for kind in (shares, scaled)]
    for key in runs[0].keys:
        one, other = (run.held_ns(key, 0, 1 * S) for run in runs)
        assert one == pytest.approx(other, abs=2 * MS)


@given(st.integers(1, PPM), st.lists(st.integers(0, 10**10), min_size=1, max_size=20))
def test_a_lease_in_pieces_costs_what_it_costs_in_one(guarantee: int, pieces: list[int]) -> None:
    split, whole = (Account(0, 0, Share(guarantee)) for _ in range(2))
    for piece in pieces:
        split.charge(piece)
    whole.charge(sum(pieces))
    assert split.time == whole.time


@pytest.mark.simulation
@given(temporal_populations())
def test_lags_stay_bounded_and_add_up_to_nothing(population: Population) -> None:
    """1: −(1.25 q̂ + ô + C) ≤ lag ≤ q̂ + ô + C, for whoever competes."""
    scheduler = TemporalScheduler(GRANTED_ONLY)
    seen: list[tuple[int, int]] = []

    def watch(event: object, now: int, _: list[Command]) -> None:
        competing = [s for s in scheduler.snapshot(now) if s.wants and not s.throttled and not s.penalised]
        seen.extend((s.vgpu, s.lag_ns) for s in competing)
        if not any(s.holds and not s.wants for s in scheduler.snapshot(now)):
            assert abs(sum(s.lag_ns for s in competing)) <= len(competing) + 1

    run = population.run(scheduler, watch).run(2 * S)
    weight = min(s.guarantee_ppm for s in run.shares.values())
    quantum = min(max(oracle.quantum(run, key, weight, 40 * MS) for key in run.keys), 100 * MS)
    bound = quantum * 5 // 4 + oracle.longest_overrun(run) + oracle.CREDIT
    for key, lag in seen:
        assert -bound <= lag <= bound - quantum // 4, key


@pytest.mark.simulation
@pytest.mark.parametrize("kernel_ns", [MS, 30 * MS, 100 * MS])
@pytest.mark.parametrize("limit", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("counted", [True, False])
def test_a_limit_is_neither_exceeded_nor_withheld(limit: float, kernel_ns: int, counted: bool) -> None:
    """5 and 6: alone, always wanting. Where hooks count nothing, leases with an end hold it."""
    run = simulate([Share(round(limit * PPM), round(limit * PPM), counted=counted)], [Work(kernel_ns)], 12)
    leases = {command.lease.epoch for _, command in run.commands if isinstance(command, Publish)}
    assert len(leases) > 10 or counted
    assert not oracle.limits(run)
    assert not oracle.limit_used(run, 0)
    assert run.busy_ns(0, 2 * S, 12 * S) / (10 * S) == pytest.approx(limit, abs=0.012)


def test_alone_and_unlimited_one_lease_lasts_for_ever() -> None:
    run = simulate([HALF], [Work()])
    assert {c.lease.epoch for _, c in run.commands if isinstance(c, Publish)} == {1}
    assert run.busy_ns(0, 1 * S, 3 * S) >= 2 * S - 2 * MS  # the last kernel is still running


def test_a_debt_is_paid_while_throttled_and_becomes_no_credit() -> None:
    desk = Desk(TemporalScheduler(), Share(PPM // 10, PPM // 10), Share(PPM // 10))
    desk.runs(0, 0)
    desk.wants(1, 1)
    desk.drained(0, 1, 60, wants=True)
    assert desk.statement(0, 60).lag_ns < -50 * MS
    desk.went(1, 2, 60)
    assert desk.statement(0, 100).lag_ns == pytest.approx(desk.statement(0, 60).lag_ns + 40 * MS, abs=4)
    desk.tick(300)
    assert desk.statement(0, 300).throttled
    assert desk.statement(0, 300).lag_ns == 0


@pytest.mark.parametrize(("kernel_ms", "decided_ms"), [(1, 46.0), (3, 46.0), (20, 37.5)])
def test_whether_a_holder_goes_on_is_decided_while_half_a_kernel_fits(kernel_ms: int, decided_ms: float) -> None:
    """After that its hook lets nothing more into the lease: it drains, and is granted another one for each kernel."""
    two = Desk(TemporalScheduler(), Share(PPM * 9 // 10), Share(PPM // 10))
    first = two.runs(1, 0)
    two.wants(0, 1)
    two.drained(1, first.epoch, 12, wants=True)
    second = two.scheduler.next_epoch - 1
    two.went(0, second, 12)
    assert spans(two.observed(0, second, 13, longest_kernel_ns=kernel_ms * MS)) == []
    assert two.statement(1, 13).wants
    assert two.due_ms == decided_ms
    assert spans(two.tick(decided_ms - 0.1)) == []
    (went_on,) = spans(two.tick(decided_ms))
    assert went_on[:2] == (0, second)
    assert went_on[3] is not None
    assert went_on[3] > 48


@pytest.mark.simulation
def test_nobody_owes_a_throttled_vgpu_what_its_limit_withholds() -> None:
    """Beside a small guarantee that takes the rest its lag must not grow, or it drags V away from who comes next."""
    shares = [Share(295_180, 295_180), Share(36_144), Share(186_746), Share(349_397)]
    works = [
        Work(2 * MS, refill_ns=400 * US),
        Work(2 * MS, jitter=0.3, refill_ns=400 * US, start_ns=14 * MS),
        Work(2 * MS, start_ns=251 * MS),
        Work(2 * MS, start_ns=493 * MS),
    ]
    scheduler = TemporalScheduler(GRANTED_ONLY)
    lags: list[int] = []

    def watch(event: object, now: int, _: list[Command]) -> None:
        lags.extend(s.lag_ns for s in scheduler.snapshot(now) if s.wants)

    run = Run(scheduler, shares, works, seed=1, watch=watch).run(3 * S)
    assert max(lags) < 50 * MS
    assert not oracle.fairness(run)


@pytest.mark.simulation
def test_a_stopped_holder_gives_way_and_pays() -> None:
    run = simulate([HALF, HALF], [Work(stop_ns=1 * S, resume_ns=2 * S), Work()], 4)
    assert run.busy_ns(1, 1200 * MS, 2 * S) > 0.99 * 800 * MS
    goes = [r.go_ns for r in run.records if r.key == 1 and r.go_ns > 1 * S]
    assert min(goes) < 1 * S + 2 * 20 * MS + DEFAULT_POLICY.grace_ns
    books = run.scheduler.books()
    assert books[0].overuse_ns > 900 * MS
    assert not oracle.one_holder(run) or books[0].held_ns > books[0].busy_ns


@pytest.mark.simulation
def test_a_process_stopped_for_ever_does_not_starve_newcomers() -> None:
    run = simulate([Share(PPM // 4)] * 3, [Work(stop_ns=1 * S), Work(), Work(start_ns=4 * S)], 6)
    for key in (1, 2):
        assert run.busy_ns(key, 4500 * MS, 6 * S) == pytest.approx(750 * MS, rel=0.03)


def test_a_drain_reported_late_is_charged_to_when_it_happened() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    scheduler.handle(Added(7, HALF), 0)
    (published,) = scheduler.handle(Runnable(7), 1 * MS)
    assert isinstance(published, Publish)
    epoch = published.lease.epoch
    scheduler.handle(LeaseStarted(7, epoch, 2 * MS), 2 * MS)
    scheduler.handle(Drained(7, epoch, at_ns=12 * MS, idle_ns=4 * MS, wants=False), 500 * MS)
    book = scheduler.books()[7]
    assert (book.held_ns, book.busy_ns, book.tokens) == (10 * MS, 6 * MS, 1)


def test_a_drain_cannot_be_dated_before_the_lease() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    scheduler.handle(Added(0, HALF), 0)
    scheduler.handle(Runnable(0), 0)
    scheduler.handle(LeaseStarted(0, 1, 5 * MS), 5 * MS)
    scheduler.handle(Drained(0, 1, at_ns=-100 * MS, idle_ns=0, wants=True), 6 * MS)
    assert scheduler.books()[0].held_ns == 0
    (statement,) = scheduler.snapshot(6 * MS)
    assert statement.waiting_since_ns == 5 * MS, "it would be the longest unserved, and forced into a round"


def test_a_high_vgpu_gets_the_gpu_within_the_window() -> None:
    low, high = Share(PPM // 2, priority=Priority.LOW), Share(PPM // 4, priority=Priority.HIGH)
    run = simulate([low, high], [Work(500 * US), Work(MS, burst=2, pause_ns=18 * MS)], 3)
    bound = run.up_ns + run.down_ns + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.window_low_ns + 500 * US
    assert max(wait for _, wait in oracle.waits_of(run, 1)) <= bound
    granted = [c.lease for _, c in run.commands if isinstance(c, Publish) and not c.lease.standby]
    assert all(lease.window_ns == DEFAULT_POLICY.window_low_ns for lease in granted if lease.vgpu == 0)


def key_of(command: Command) -> int:
    assert isinstance(command, Publish)
    return command.lease.vgpu


def test_one_that_gives_up_before_its_lease_begins_is_withdrawn() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    for key in (0, 1):
        scheduler.handle(Added(key, HALF), 0)
    scheduler.handle(Runnable(0), 0)
    scheduler.handle(LeaseStarted(0, 1, 0), 0)
    scheduler.handle(Runnable(1), 10 * MS)
    commands = scheduler.handle(Idle(1), 10 * MS + 100 * US)
    assert Withdraw(1, 2) in commands
    assert [c.lease.end_ns for c in commands if isinstance(c, Publish)] == [None]
    # The withdrawal crossed the GO: what was held all the same is charged.
    scheduler.handle(LeaseStarted(1, 2, 11 * MS), 12 * MS)
    scheduler.handle(Drained(0, 1, 11 * MS, 0, wants=False), 12 * MS)
    scheduler.handle(Drained(1, 2, 13 * MS, 0, wants=False), 13 * MS)
    assert scheduler.books()[1].held_ns == 2 * MS
    scheduler.check()


def test_debts_survive_a_restart() -> None:
    """A journalled book is an account that goes on: the indebted one stays behind by its debt."""
    book = AccountState(lag_ns=-60 * MS, bucket_ns=0, held_ns=5 * S, busy_ns=4 * S, overuse_ns=1 * S, tokens=9)
    fresh = AccountState(lag_ns=60 * MS, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)
    scheduler = TemporalScheduler(GRANTED_ONLY, first_epoch=100)
    run = Run(scheduler, [], [])
    for key, kept in enumerate((book, fresh)):
        scheduler.handle(Added(key, HALF, kept), 0)
    assert scheduler.books()[0] == book
    assert scheduler.books()[1].lag_ns == 20 * MS  # asleep, and no more than the idle credit
    for key in (0, 1):
        run.keys.append(key)
        run.shares[key], run.published[key], run.wanting[key] = HALF, {}, []
        run.apps[key] = App(key, Work())
        run.at(0, lambda key=key: run._arrive(run.apps[key]))  # type: ignore[misc]
    run.run(1 * S)
    assert run.records[0].epoch == 100
    ahead = run.held_ns(1, 0, 1 * S) - run.held_ns(0, 0, 1 * S)
    # V is the indebted one's own time when it wakes first; what the other was owed then counts in full.
    assert ahead == pytest.approx(60 * MS, abs=22 * MS)  # a quantum is 20 ms, and the second ends within one


@pytest.mark.simulation
def test_a_new_share_counts_from_the_next_token() -> None:
    run = Run(TemporalScheduler(), [HALF, HALF], [Work(), Work()])
    run.run(2 * S)
    run.change(0, Share(PPM // 10))
    run.change(1, Share(9 * PPM // 10))
    run.run(6 * S)
    assert run.held_ns(0, 0, 2 * S) == pytest.approx(1 * S, rel=0.02)
    assert run.held_ns(0, 2 * S, 6 * S) == pytest.approx(400 * MS, abs=40 * MS)


def test_an_unknown_vgpu_is_an_error_that_changes_nothing() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    with pytest.raises(KeyError, match="vGPU 3"):
        scheduler.handle(Runnable(3), 0)
    scheduler.handle(Added(3, HALF), 0)
    with pytest.raises(ValueError, match="twice"):
        scheduler.handle(Added(3, HALF), 0)


@pytest.mark.simulation
@pytest.mark.parametrize(("refill_us", "period_ms"), [(0, 40), (100, 57.1), (400, 114.3), (1000, 142.8)])
def test_the_period_grows_with_the_cost_of_a_hand_over(refill_us: int, period_ms: float) -> None:
    run = simulate([Share(3 * PPM // 10), Share(7 * PPM // 10)], [Work(refill_ns=refill_us * US)] * 2, 6)
    goes = [r.go_ns for r in run.records if r.key == 0 and r.go_ns > 3 * S]
    assert (goes[-1] - goes[0]) / (len(goes) - 1) / MS == pytest.approx(period_ms, rel=0.03)
