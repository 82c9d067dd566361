"""Light vGPUs hold shared leases side by side, and beside the turns of others, whose guarantees hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.leases import GangCalled, GangWindow
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from gpuserver.core.scheduler.temporal.sharing import MOST_TOGETHER, sharers
from tests.core import oracle
from tests.core.desk import MS, Desk, leases, spans, withdrawn
from tests.core.model import S, Work
from tests.core.populations import Population, works
from tests.core.sharers import HEAVY, LIGHT, accounts, exclusive, held, sharer, sharing
from tests.core.slices import Slices
from vgpu.share import PPM, Priority, Share


def test_light_ones_hold_side_by_side_and_nobody_waits() -> None:
    desk = sharing(sharer(), sharer(), sharer())
    assert all(held(desk, key)[1] is None for key in range(3))
    assert desk.scheduler.turns(range(3)) == set()
    assert all(desk.statement(key, 110).shared for key in range(3))


def test_one_that_comes_later_holds_at_once() -> None:
    desk = sharing(sharer(), sharer(), sharer(0.1))
    desk.drained(2, held(desk, 2)[0], 110, wants=False)
    assert desk.scheduler.shared() == [0, 1]
    assert [(key, end) for key, _, _, end in spans(desk.wants(2, 150))] == [(2, None)]


def test_beside_one_that_never_shares_all_take_turns() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, exclusive(), 110)
    ends = {key: end for key, _, _, end in spans(desk.wants(2, 120)) if end is not None}
    latest = 120 + (DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.shared_window_ns) / MS
    assert ends[0] == ends[1] == pytest.approx(latest)
    assert desk.scheduler.shared() == []
    assert desk.scheduler.turns(range(3)) == {0, 1, 2}


def test_the_turn_after_shared_leases_waits_for_all_of_them() -> None:
    desk = sharing(sharer(), sharer(), sharer(0.1))
    epochs = {(key, held(desk, key)[0]) for key in range(3)}
    desk.added(3, exclusive(), 110)
    commands = desk.wants(3, 120)
    commands += desk.tick(121)
    (first,) = [lease for lease in leases(commands) if lease.vgpu == 3]
    assert set(first.after) == epochs
    assert first.go_by_ns - first.start_ns <= DEFAULT_POLICY.grace_ns


def test_they_share_again_once_that_one_is_gone() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, exclusive(), 110)
    desk.wants(2, 120)
    for key in (0, 1):
        desk.drained(key, held(desk, key)[0], 123)
    desk.tick(123)
    epoch = held(desk, 2)[0]
    desk.went(2, epoch, 124)
    desk.drained(2, epoch, 126, wants=False)
    for key in (0, 1):
        if desk.scheduler.published(key) and not desk.scheduler.published(key)[-1][1]:
            desk.went(key, held(desk, key)[0], 127)
    assert sorted(desk.scheduler.shared()) == [0, 1]


# --- beside others that take turns


def test_a_heavy_one_holds_beside_sharers_without_an_end_and_waits_for_none_of_them() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, sharer(), 110)
    (lease,) = leases(desk.wants(2, 120))
    assert (lease.vgpu, lease.end_ns, lease.after) == (2, None, ())
    assert sorted(desk.scheduler.shared()) == [0, 1]
    assert desk.scheduler.turns(range(3)) == {2}, "it gains nothing by giving its lease back"


def test_two_heavy_ones_take_turns_beside_sharers() -> None:
    desk = sharing(sharer(0.1), sharer(0.1))
    desk.added(2, sharer(0.4), 110)
    desk.added(3, sharer(0.4), 110)
    desk.wants(2, 120)
    desk.went(2, held(desk, 2)[0], 120)
    desk.wants(3, 121)
    assert held(desk, 2)[1] is not None
    desk.tick((held(desk, 2)[1] or 0) / MS - 1.5)
    following, _ = desk.scheduler.published(3)[-1]
    assert following.after == ((2, held(desk, 2)[0]),)
    assert sorted(desk.scheduler.shared()) == [0, 1]
    patience_ns = following.go_by_ns - following.start_ns
    assert patience_ns >= 2 * DEFAULT_POLICY.slice_ns, "a drain takes longer beside others' slices"


def test_a_light_one_that_comes_while_a_heavy_one_holds_shares_at_once() -> None:
    desk = Desk(TemporalScheduler(), sharer(), sharer())
    desk.measured(0, HEAVY, LIGHT)
    desk.runs(0, 0)
    assert [(key, end) for key, _, _, end in spans(desk.wants(1, 10))] == [(1, None)]
    assert desk.scheduler.shared() == [1]
    assert held(desk, 0)[1] is None


def test_a_light_one_that_turns_heavy_takes_turns() -> None:
    desk = sharing(sharer(), sharer())
    desk.measured(150, LIGHT, HEAVY)
    assert desk.scheduler.shared() == [0]
    assert not desk.statement(1, 150).shared
    desk.added(2, sharer(), 150)
    desk.wants(2, 151)
    assert held(desk, 1)[1] is not None, "another one waits for its turn"
    assert held(desk, 0)[1] is None


def test_a_heavy_one_that_turns_light_shares() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, sharer(), 110)
    desk.wants(2, 120)
    desk.went(2, held(desk, 2)[0], 120)
    epoch = held(desk, 2)[0]
    desk.measured(150, LIGHT, LIGHT, LIGHT)
    assert sorted(desk.scheduler.shared()) == [0, 1, 2]
    assert held(desk, 2) == (epoch, None)


def test_a_lower_class_does_not_share_beside_a_higher_one_and_a_higher_one_does() -> None:
    for light, heavy, shared in ((Priority.NORMAL, Priority.HIGH, []), (Priority.HIGH, Priority.NORMAL, [1])):
        desk = Desk(TemporalScheduler(), sharer(priority=heavy), sharer(priority=light))
        desk.measured(0, HEAVY, LIGHT)
        desk.runs(0, 0)
        desk.wants(1, 10)
        assert desk.scheduler.shared() == shared


def test_the_last_one_goes_on_without_a_gap() -> None:
    desk = sharing(sharer(), sharer())
    epoch, end = held(desk, 0)
    commands = desk.drained(1, held(desk, 1)[0], 110, wants=False)
    assert held(desk, 0) == (epoch, end) == (epoch, None)
    assert not leases(commands)
    assert not withdrawn(commands)
    assert desk.scheduler.shared() == []


@pytest.mark.parametrize(
    "others",
    [
        (sharer(), sharer(priority=Priority.HIGH)),
        (sharer(), replace(sharer(), shareable=False)),
    ],
)
def test_which_light_ones_take_turns_all_the_same(others: tuple[Share, ...]) -> None:
    desk = Desk(TemporalScheduler(), *others)
    desk.runs(0, 0)
    desk.wants(1, 0)
    desk.measured(50, LIGHT, LIGHT)
    assert desk.scheduler.shared() == []


def test_members_of_a_gang_take_turns() -> None:
    desk = Desk(TemporalScheduler(), sharer(), sharer())
    desk.tell(GangCalled(1, GangWindow()), 0)
    desk.runs(0, 0)
    desk.wants(1, 0)
    desk.measured(50, LIGHT, LIGHT)
    assert desk.scheduler.shared() == []


def test_a_limit_holds_under_a_shared_lease() -> None:
    desk = sharing(sharer(limit=0.3), sharer())
    epoch = held(desk, 0)[0]
    assert desk.allowed[0][0] == epoch
    assert desk.allowed.get(1, (0, None))[1] is None
    for at_ms in range(110, 1110, 10):
        allowed_ns = desk.allowed[0][1]
        assert allowed_ns is not None
        desk.observed(0, epoch, at_ms, used_ns=allowed_ns)
        desk.tick(at_ms)
    assert 0.28 * S < (desk.allowed[0][1] or 0) < 0.45 * S, "a second at 30 %, and what the bucket had"


def test_used_time_is_charged_and_nobody_is_owed_what_it_did_not_use() -> None:
    desk = sharing(sharer(), sharer(), sharer(0.1))
    used_ns = [0, 0, 0]
    for at_ms in range(110, 2110, 50):
        for key, rate in enumerate((0.4, 0.05, 0.1)):
            used_ns[key] += round(rate * 50 * MS)
            desk.observed(key, held(desk, key)[0], at_ms, used_ns=used_ns[key])
        desk.measured(at_ms, LIGHT, LIGHT, LIGHT)
    for key in range(3):
        statement = desk.statement(key, 2110)
        assert statement.busy_ns == pytest.approx(used_ns[key], abs=60 * MS)
        assert abs(statement.lag_ns) <= 2 * DEFAULT_POLICY.idle_credit_ns


# --- any population


@st.composite
def light_and_heavy(draw: st.DrawFn, *, heavy: bool) -> Population:
    """Two to five vGPUs that may share, some with a limit, whose demand is another one in each second."""
    parts = draw(st.lists(st.integers(3, 60), min_size=2, max_size=5))
    scale = max(100, sum(parts))
    demands = st.sampled_from([0, 100_000, 400_000, 600_000, 900_000]) if heavy else st.just(200_000)
    shares, drawn = [], []
    for part in parts:
        guarantee = part * PPM // scale
        limit = guarantee if heavy and draw(st.integers(0, 2)) == 0 else PPM
        shares.append(Share(guarantee, limit, shareable=draw(st.booleans()) or not heavy))
        seen = tuple(draw(st.lists(demands, min_size=1, max_size=3)))
        drawn.append(replace(draw(works(longest_ms=5)), demands_ppm=seen))
    return Population(tuple(shares), tuple(drawn), draw(st.integers(0, 2**16)), draw(st.booleans()))


@pytest.mark.simulation
@given(light_and_heavy(heavy=True))
@settings(max_examples=60)
def test_the_contract_and_limits_hold_for_any_kinds(population: Population) -> None:
    scheduler = TemporalScheduler()
    watch = oracle.Watch(scheduler)
    run = population.run(scheduler, watch).run(4 * S)
    assert not watch.found
    assert not oracle.limits(run)
    assert not oracle.idle_gpu(run)


@pytest.mark.simulation
@given(light_and_heavy(heavy=False))
@settings(max_examples=40)
def test_no_light_one_ever_waits(population: Population) -> None:
    run = population.run(TemporalScheduler())
    run.run(S)
    for at_ms in range(1000, 2000, 7):
        run.run(at_ms * MS)
        for key, app in run.apps.items():
            since, until = run.wanting[key][-1] if run.wanting[key] else (0, 0)
            if app.wants and until is None and run.now_ns - since > MS:
                assert app.held is not None, f"{key} wants since {since} and holds nothing at {run.now_ns}"


@pytest.mark.simulation
@given(light_and_heavy(heavy=False))
@settings(max_examples=20)
def test_beside_one_that_never_shares_turns_are_as_ever(population: Population) -> None:
    """A vGPU that takes turns and always wants: who shares otherwise has what it would have without sharing."""
    works_ = (*population.works, Work(kernel_ns=MS, jitter=0.0))
    rest = (*(s.guarantee_ppm * 8 // 10 for s in population.shares), 150_000)
    spent = []
    for shareable in (True, False):
        shares = tuple(Share(r, PPM, shareable=shareable and i < len(rest) - 1) for i, r in enumerate(rest))
        run = Population(shares, works_, population.seed).run(TemporalScheduler()).run(4 * S)
        assert run.scheduler.shared() == []
        spent.append({key: book.held_ns for key, book in run.scheduler.books(run.now_ns).items()})
    for key, without_ns in spent[1].items():
        assert spent[0][key] == pytest.approx(without_ns, abs=120 * MS)


@pytest.mark.parametrize(("light", "heavy"), [(MOST_TOGETHER, 0), (MOST_TOGETHER, 1)])
def test_so_many_share_at_most(light: int, heavy: int) -> None:
    company = accounts(*[0.01] * (light + 1 + heavy))
    for account in company[: light + 1]:
        account.kind.light = True
    assert sharers(company) == []
    assert sharers(company[1:]) == company[1 : light + 1]


@st.composite
def trainers_and_services(draw: st.DrawFn) -> tuple[list[Share], list[Work]]:
    """One or two that need the GPU all the time, and up to three light ones whose bursts are 4 ms at most."""
    trainers, services = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    parts = draw(st.lists(st.integers(5, 60), min_size=trainers + services, max_size=trainers + services))
    scale = max(100, sum(parts))
    drawn = [
        Work(draw(st.sampled_from([MS // 2, MS, 3 * MS])), demands_ppm=(950_000,), jitter=0.05) for _ in range(trainers)
    ]
    for _ in range(services):
        kernel_ns, burst = draw(st.sampled_from([(MS // 2, 1), (MS // 2, 4), (MS, 3), (2 * MS, 2), (4 * MS, 1)]))
        demand_ppm = draw(st.sampled_from([100_000, 200_000, 400_000, 500_000]))
        pause_ns = kernel_ns * burst * (PPM - demand_ppm) // demand_ppm
        drawn.append(Work(kernel_ns, burst=burst, pause_ns=pause_ns, demands_ppm=(demand_ppm,)))
    return [Share(part * PPM // scale, shareable=True) for part in parts], drawn


@pytest.mark.simulation
@given(trainers_and_services(), st.sampled_from([0.0, 0.1, 0.2, 0.3]), st.integers(0, 2**16))
@settings(max_examples=15)
def test_time_slices_take_no_guarantee(drawn: tuple[list[Share], list[Work]], fee: float, seed: int) -> None:
    scheduler = TemporalScheduler()
    watch = oracle.Watch(scheduler)
    run = Slices(scheduler, *drawn, watch=watch, seed=seed, fee=fee)
    run.run(6 * S)
    assert not watch.found
    assert not oracle.shared_guarantees(run)
    assert not oracle.debts_of_sharers(run)
    assert not oracle.curbed_for_another(run)


def test_one_alone_does_not_share() -> None:
    one = Account(0, 0, sharer())
    one.kind.light = True
    assert sharers([one]) == []
