"""Light vGPUs hold shared leases side by side, and beside the turns of others, whose guarantees hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.leases import Allow, Command, GangCalled, GangWindow, Lease, Measured, Priority, Share
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, PPM
from gpuserver.core.scheduler.run_queue import InvariantError
from gpuserver.core.scheduler.sharing import LENIENCE_PPM, MOST_TOGETHER, Guard, Relief, sharers
from gpuserver.core.scheduler.temporal import TemporalScheduler
from tests.core import oracle
from tests.core.desk import MS, Desk, leases, share, spans, withdrawn
from tests.core.model import S, Work
from tests.core.populations import Population, works
from tests.core.slices import Slices

LIGHT, HEAVY = 0.2, 0.9
NANOSECOND = 1 / (200 * MS)
"""As a part of a window of 200 ms."""


def sharer(guarantee: float = 0.3, limit: float = 1.0, priority: Priority = Priority.NORMAL) -> Share:
    return replace(share(guarantee, 100, limit, priority), shareable=True)


def sharing(*shares: Share) -> Desk:
    """All of them are light, want the GPU, and hold shared leases by 100 ms."""
    desk = Desk(TemporalScheduler(), *shares)
    desk.measured(0, *(LIGHT for _ in shares))
    desk.runs(0, 0)
    for key in range(1, len(shares)):
        desk.wants(key, 1)
        desk.went(key, held(desk, key)[0], 1)
    assert sorted(desk.scheduler.shared()) == list(range(len(shares)))
    return desk


def held(desk: Desk, key: int) -> tuple[int, int | None]:
    """Epoch and end of the newest lease of ``key``, in ns."""
    lease, _ = desk.scheduler.published(key)[-1]
    return lease.epoch, lease.end_ns


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


def exclusive(guarantee: float = 0.1) -> Share:
    return replace(sharer(guarantee), shareable=False)


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


# --- who is curbed


def accounts(*guarantees: float) -> list[Account]:
    return [Account(key, key, sharer(guarantee)) for key, guarantee in enumerate(guarantees)]


def window(relief: Relief, shared: list[Account], number: int, used: list[float], waits: list[float]) -> int | None:
    """One more window, in which each used and waited so much of the time. Who is curbed after it."""
    for account, part, waited in zip(shared, used, waits, strict=True):
        account.busy_ns += round(part * 200 * MS)
        account.kind.waits_ppm = round(waited * PPM)
    relief.look(shared, number * 200 * MS)
    return relief.curbed


def test_the_one_most_ahead_is_curbed_while_another_is_short() -> None:
    shared, relief = accounts(0.7, 0.2, 0.1), Relief()
    relief.reset(shared, 0)
    assert window(relief, shared, 1, [0.3, 0.3, 0.3], [0.9, 0.9, 0.9]) == 2, "0.3 of 0.1"
    assert window(relief, shared, 2, [0.45, 0.4, 0.1], [0.9, 0.9, 0.9]) == 2, "the first is short still, and gains"
    assert window(relief, shared, 3, [0.72, 0.15, 0.1], [0.4, 0.9, 0.9]) is None


def test_nobody_is_curbed_for_one_that_does_not_wait() -> None:
    shared, relief = accounts(0.7, 0.3), Relief()
    relief.reset(shared, 0)
    assert window(relief, shared, 1, [0.1, 0.6], [0.2, 0.9]) is None


def test_what_does_not_help_ends_and_comes_again_ever_later() -> None:
    shared, relief = accounts(0.7, 0.3), Relief()
    relief.reset(shared, 0)
    curbed = [window(relief, shared, n, [0.3, 0.6 if relief.curbed is None else 0.3], [0.9, 0.9]) for n in range(1, 80)]
    begins = [n for n, (was, now) in enumerate(pairwise(curbed)) if was is None and now == 1]
    assert curbed.count(1) < 10
    pauses = [after - before for before, after in pairwise(begins)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 2 * pauses[0] - 2


def relieved(*guarantees: float) -> tuple[Relief, list[Account]]:
    """Sharing has begun at 0."""
    relief, shared = Relief(), accounts(*guarantees)
    assert relief.curbed is None
    relief.reset(shared, 0)
    return relief, shared


def test_the_margin_counts_until_one_is_curbed() -> None:
    """A sharer of 60 % is short from 50 % down; while another one is curbed for it, below 60 %."""
    relief, shared = relieved(0.6, 0.2)
    assert window(relief, shared, 1, [0.5, 0.4], [0.9, 0.9]) is None
    assert window(relief, shared, 2, [0.5 - NANOSECOND, 0.4], [0.9, 0.9]) == 1
    assert window(relief, shared, 3, [0.6 - NANOSECOND, 0.3], [0.9, 0.9]) == 1
    assert window(relief, shared, 4, [0.6, 0.3], [0.9, 0.9]) is None


def test_a_sharer_that_got_its_guarantee_is_not_short_however_long_it_waits() -> None:
    relief, shared = relieved(0.6, 0.2)
    assert window(relief, shared, 1, [0.61, 0.3], [1.0, 1.0]) is None


def test_a_sharer_is_short_that_waits_half_of_the_time() -> None:
    for waits, curbed in ((0.499999, None), (0.5, 1)):
        relief, shared = relieved(0.6, 0.2)
        assert window(relief, shared, 1, [0.3, 0.4], [waits, 0.9]) == curbed


def test_a_sharer_that_used_no_more_than_its_guarantee_is_never_curbed() -> None:
    relief, shared = relieved(0.6, 0.2, 0.2)
    assert window(relief, shared, 1, [0.3, 0.2, 0.1], [0.9, 0.0, 0.0]) is None
    assert window(relief, shared, 2, [0.3, 0.2 + NANOSECOND, 0.1], [0.9, 0.0, 0.0]) == 1


def test_of_two_as_far_ahead_the_older_one_is_curbed() -> None:
    relief, shared = relieved(0.6, 0.2, 0.2)
    assert window(relief, shared, 1, [0.3, 0.3, 0.3], [0.9, 0.0, 0.0]) == 1


def test_curbing_fails_where_the_short_one_gains_less_than_half_of_what_the_curbed_one_gives_up() -> None:
    """What the curbed sharer gives up is 40 ms and a nanosecond."""
    for gained, curbed in ((0.1, 1), (0.1 - NANOSECOND, None)):
        relief, shared = relieved(0.7, 0.2)
        assert window(relief, shared, 1, [0.3, 0.5], [0.9, 0.9]) == 1
        assert window(relief, shared, 2, [0.3 + gained, 0.3 - NANOSECOND], [0.9, 0.9]) == curbed


def test_a_curbed_sharer_that_gives_up_nothing_yet_stays_curbed() -> None:
    relief, shared = relieved(0.7, 0.2)
    assert window(relief, shared, 1, [0.3, 0.5], [0.9, 0.9]) == 1
    assert window(relief, shared, 2, [0.2, 0.5], [0.9, 0.9]) == 1


def test_once_no_sharer_is_short_the_next_shortage_is_relieved_without_a_pause() -> None:
    relief, shared = relieved(0.7, 0.2)
    assert window(relief, shared, 1, [0.3, 0.5], [0.9, 0.9]) == 1
    assert window(relief, shared, 2, [0.3, 0.3], [0.1, 0.9]) is None
    assert window(relief, shared, 3, [0.3, 0.5], [0.9, 0.9]) == 1


def test_a_curbed_sharer_that_leaves_is_curbed_no_more_and_no_pause_follows() -> None:
    relief, shared = relieved(0.5, 0.2, 0.2)
    assert window(relief, shared, 1, [0.3, 0.5, 0.1], [0.9, 0.9, 0.1]) == 1
    stay = [shared[0], shared[2]]
    assert window(relief, stay, 2, [0.3, 0.1], [0.9, 0.1]) is None
    assert window(relief, stay, 3, [0.3, 0.5], [0.9, 0.9]) == 2


def test_a_sharer_that_came_later_and_is_short_has_gained_nothing() -> None:
    relief, shared = relieved(0.4, 0.2)
    assert window(relief, shared, 1, [0.2, 0.6], [0.9, 0.9]) == 1
    shared.append(Account(2, 2, sharer(0.4)))
    assert window(relief, shared, 2, [0.39, 0.4, 0.1], [0.9, 0.9, 0.9]) == 1
    assert window(relief, shared, 3, [0.4, 0.4, 0.1], [0.1, 0.9, 0.9]) is None
    assert window(relief, shared, 4, [0.2, 0.5, 0.3], [0.9, 0.9, 0.9]) is None, "curbing pauses"


def test_pauses_are_1_2_4_seconds_and_a_minute_at_most_until_curbing_helps() -> None:
    """Windows in which the short sharer gains nothing, whatever the other one gives up."""
    relief, shared = relieved(0.7, 0.2)
    number = 1
    pauses: list[int] = []
    assert window(relief, shared, 1, [0.3, 0.5], [0.9, 0.9]) == 1
    while len(pauses) < 8:
        number += 1
        assert window(relief, shared, number, [0.3, 0.2], [0.9, 0.9]) is None
        begins = number
        while relief.curbed is None:
            number += 1
            window(relief, shared, number, [0.3, 0.5], [0.9, 0.9])
        pauses.append((number - begins) // 5)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert window(relief, shared, number + 1, [0.5, 0.2], [0.9, 0.9]) == 1
    assert window(relief, shared, number + 2, [0.3, 0.2], [0.9, 0.9]) is None
    assert [window(relief, shared, number + n, [0.3, 0.5], [0.9, 0.9]) for n in range(3, 8)] == [None] * 4 + [1]


def test_a_curbed_one_is_allowed_its_guarantee() -> None:
    desk = sharing(sharer(0.7), sharer(0.2))
    used_ns = [0, 0]
    waits = {0: 0.9, 1: 0.9}
    for at_ms in range(110, 560, 10):
        for key, rate in enumerate((0.3, 0.5)):
            used_ns[key] += round(rate * 10 * MS)
            desk.observed(key, held(desk, key)[0], at_ms, used_ns=used_ns[key])
        desk.measured(at_ms, LIGHT, LIGHT, waits=waits)
    epoch, allowed_ns = desk.allowed[1]
    assert epoch == held(desk, 1)[0]
    assert allowed_ns is not None
    assert desk.allowed.get(0, (0, None))[1] is None
    assert allowed_ns - used_ns[1] <= 0.2 * DEFAULT_POLICY.allowance_ahead_ns + 10 * MS
    commands = []
    for at_ms in range(560, 1200, 10):
        used_ns[0] += round(0.7 * 10 * MS)
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=used_ns[0])
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=used_ns[1])
        commands += desk.measured(at_ms, LIGHT, LIGHT, waits={0: 0.1, 1: 0.9})
    assert [c.allowance_ns for c in commands if isinstance(c, Allow) and c.vgpu == 1][-1] is None


# --- the guarantees of those that take turns


def guarded(*guarantees: float) -> tuple[Guard, list[Account], list[Account]]:
    """The first takes turns, and needs the GPU all the time; the others share."""
    first, *others = accounts(*guarantees)
    first.kind.demand_ppm = first.kind.alone_ppm = PPM
    first.wants = True
    guard = Guard()
    guard.look(others, [first], 0)
    return guard, [first], others


def look(
    guard: Guard, turns: list[Account], sharing: list[Account], number: int, work: float, used: list[float]
) -> None:
    """One more window, in which ``turns[0]`` had so much of the time, and the others used so much."""
    for account, part in zip(sharing, used, strict=True):
        account.busy_ns += round(part * 200 * MS)
    turns[0].kind.work_ns += round(work * 200 * MS)
    guard.look(sharing, turns, number * 200 * MS)


def test_a_sharer_pays_for_its_switches() -> None:
    """Three that use 6 % and cost 13 % of the time, of which each may have 10."""
    guard, turns, sharing_ = guarded(0.7, 0.1, 0.1, 0.1)
    for number in range(1, 20):
        look(guard, turns, sharing_, number, 0.61, [0.06, 0.06, 0.06])
    assert guard.curbed.keys() == {1, 2, 3}
    assert all(0.04 * PPM < allowed < 0.06 * PPM for allowed in guard.curbed.values())


def test_what_switches_cost_is_forgiven_up_to_a_fourteenth() -> None:
    """Requests that are put off until later need as many switches then."""
    guard, turns, sharing_ = guarded(0.7, 0.1, 0.1, 0.1)
    for number in range(1, 50):
        look(guard, turns, sharing_, number, 0.66, [0.05, 0.05, 0.05])
    assert guard.curbed == {}


def test_a_trainer_whose_host_is_late_is_due_what_it_does_alone() -> None:
    guard, turns, sharing_ = guarded(0.7, 0.1)
    turns[0].kind.alone_ppm, turns[0].kind.demand_ppm = PPM * 9 // 10, PPM * 6 // 10
    for number in range(1, 20):
        look(guard, turns, sharing_, number, 0.6, [0.1])
    assert guard.curbed == {}, "93 % of 63 % are due"
    for number in range(20, 40):
        look(guard, turns, sharing_, number, 0.5, [0.1])
    assert guard.curbed.keys() == {1}


def test_sharers_run_free_until_one_is_short() -> None:
    guard, turns, sharing_ = guarded(0.5, 0.1, 0.1)
    for number in range(1, 50):
        look(guard, turns, sharing_, number, 0.51, [0.2, 0.1])
    assert guard.curbed == {}


def test_only_those_are_curbed_that_cost_more_than_their_guarantee_until_nothing_is_owed() -> None:
    guard, turns, sharing_ = guarded(0.5, 0.4, 0.1)
    for number in range(1, 5):
        look(guard, turns, sharing_, number, 0.3, [0.1, 0.3])
    assert guard.curbed.keys() == {2}
    for number in range(5, 7):
        look(guard, turns, sharing_, number, 0.55, [0.1, 0.06])
    assert guard.curbed.keys() == {2}, "something is owed still"
    for number in range(7, 60):
        look(guard, turns, sharing_, number, 0.7, [0.1, 0.06])
    assert guard.curbed == {}


def test_one_that_idles_or_needs_less_is_owed_nothing() -> None:
    guard, turns, sharing_ = guarded(0.7, 0.3)
    turns[0].kind.alone_ppm = PPM * 3 // 10
    for number in range(1, 10):
        look(guard, turns, sharing_, number, 0.2, [0.5])
    assert guard.curbed == {}
    turns[0].kind.alone_ppm, turns[0].wants = PPM, False
    for number in range(10, 20):
        look(guard, turns, sharing_, number, 0.1, [0.5])
    assert guard.curbed == {}


def test_nothing_is_curbed_before_20_ms_are_owed_and_until_the_last_nanosecond_is_worked_off() -> None:
    """93 % of a guarantee of 80 % are 148.8 ms of each window."""
    guard, turns, sharing_ = guarded(0.8, 0.1)
    look(guard, turns, sharing_, 1, 0.0, [0.0])
    look(guard, turns, sharing_, 2, 0.644 + NANOSECOND, [0.3])
    assert guard.curbed == {}, "20 ms less a nanosecond are owed"
    look(guard, turns, sharing_, 3, 0.744 - NANOSECOND, [0.3])
    assert guard.curbed.keys() == {1}
    look(guard, turns, sharing_, 4, 0.844 - NANOSECOND, [0.0])
    assert guard.curbed.keys() == {1}, "a nanosecond is owed"
    look(guard, turns, sharing_, 5, 0.744 + NANOSECOND, [0.0])
    assert guard.curbed == {}
    look(guard, turns, sharing_, 6, 0.644, [0.3])
    assert guard.curbed.keys() == {1}, "20 ms are owed"


def test_what_a_curbed_sharer_may_use_is_its_guarantee_over_the_cost_of_its_use() -> None:
    """Sharers use 30 ms of each window and cost 90: three times that. A quarter of each window's ratio counts."""
    guard, turns, sharing_ = guarded(0.7, 0.1, 0.1)
    look(guard, turns, sharing_, 1, 0.0, [0.0, 0.0])
    allowed = []
    for number in range(2, 5):
        look(guard, turns, sharing_, number, 0.55, [0.09, 0.06])
        allowed.append(dict(guard.curbed))
    assert allowed == [{1: 66_666}, {1: 53_333, 2: 53_333}, {1: 46_376, 2: 46_376}]


def test_a_sharers_use_costs_four_times_as_much_at_most_and_never_less_than_itself() -> None:
    for work, used, allowed in ((0.0, 0.01, 0.2 / 1.75), (0.0, 1.0, 0.2)):
        guard, turns, sharing_ = guarded(0.7, 0.2, 0.1)
        look(guard, turns, sharing_, 1, 0.0, [0.0, 0.0])
        look(guard, turns, sharing_, 2, work, [used, 0.0])
        guard.curbed = {1: 0}
        look(guard, turns, sharing_, 3, work, [0.0, 0.0])
        assert guard.curbed == {1: int(allowed * PPM)}


def test_a_sharer_that_costs_its_guarantee_is_not_curbed() -> None:
    for used, curbed in ((0.25, {}), (0.25 + NANOSECOND, {1: 250_000})):
        guard, turns, sharing_ = guarded(0.9, 0.25)
        look(guard, turns, sharing_, 1, 0.0, [0.0])
        look(guard, turns, sharing_, 2, 1 - used, [used])
        assert guard.curbed == {}, "17.4 ms are owed"
        look(guard, turns, sharing_, 3, 1 - used, [used])
        assert guard.curbed == curbed


def test_what_sharers_use_while_none_wants_turns_says_nothing_of_their_cost() -> None:
    guard, turns, sharing_ = guarded(0.7, 0.1)
    turns[0].wants = False
    for number in range(1, 10):
        look(guard, turns, sharing_, number, 0.0, [0.02])
    turns[0].wants = True
    look(guard, turns, sharing_, 10, 0.8, [0.2])
    look(guard, turns, sharing_, 11, 0.8, [0.2])
    look(guard, turns, sharing_, 12, 0.5, [0.5])
    assert guard.curbed == {1: 100_000}


def test_a_vgpu_is_owed_nothing_for_a_window_in_which_it_did_not_want_the_gpu_for_a_moment() -> None:
    guard, turns, sharing_ = guarded(0.7, 0.1)
    look(guard, turns, sharing_, 1, 0.7, [0.3])
    turns[0].wants = False
    guard.look(sharing_, turns, 300 * MS)
    turns[0].wants = True
    look(guard, turns, sharing_, 2, 0.1, [0.3])
    assert guard.curbed == {}
    look(guard, turns, sharing_, 3, 0.1, [0.3])
    assert guard.curbed.keys() == {1}


def test_what_is_owed_is_forgotten_once_a_vgpu_does_not_want_the_gpu() -> None:
    guard, turns, sharing_ = guarded(0.8, 0.1)
    look(guard, turns, sharing_, 1, 0.0, [0.0])
    look(guard, turns, sharing_, 2, 0.67, [0.3])
    turns[0].wants = False
    look(guard, turns, sharing_, 3, 0.0, [0.3])
    turns[0].wants = True
    look(guard, turns, sharing_, 4, 0.67, [0.3])
    assert guard.curbed == {}, "14.8 ms are owed, and not twice as much"


@pytest.mark.parametrize(("passed_ms", "judged"), [(399, True), (400, False), (500, False)])
def test_a_window_twice_as_long_is_not_judged(passed_ms: int, judged: bool) -> None:
    guard, turns, sharing_ = guarded(0.7, 0.1)
    look(guard, turns, sharing_, 1, 0.0, [0.0])
    sharing_[0].busy_ns += 100 * MS
    guard.look(sharing_, turns, (200 + passed_ms) * MS)
    assert bool(guard.curbed) is judged


@given(st.lists(st.floats(0.01, 0.3), min_size=1, max_size=5), st.floats(1.0, 3.0), st.floats(0.05, 1.0))
def test_where_one_is_short_there_is_one_to_curb_and_the_shortage_ends(
    parts: list[float], fee: float, greed: float
) -> None:
    """A GPU on which each sharer uses what it may, and costs ``fee`` times that. Guarantees add up to 100 %."""
    scale = max(1.0, sum(parts) / 0.9)
    shares = [part / scale for part in parts]
    guard, turns, sharing_ = guarded(1 - sum(shares), *shares)
    got: list[float] = []
    for number in range(1, 80):
        used = [min(greed / len(shares) / fee, guard.curbed.get(a.key, PPM) / PPM) for a in sharing_]
        got.append(max(0.0, 1 - fee * sum(used)))
        look(guard, turns, sharing_, number, got[-1], used)
    assert sum(got[10:]) / len(got[10:]) >= (1 - sum(shares)) * (1 - LENIENCE_PPM / PPM) - 0.02


# --- the leases and allowances of sharers, to the nanosecond


def allows(commands: list[Command]) -> list[Allow]:
    return [c for c in commands if isinstance(c, Allow)]


def test_the_demand_is_measured_every_50_ms_while_two_compete() -> None:
    desk = sharing(sharer(), sharer())
    assert desk.due_ms == 50
    desk.tick(49.9)
    assert desk.due_ms == 50
    desk.tick(50)
    assert desk.due_ms == 100
    assert desk.scheduler.comparable() == [0, 1]
    assert desk.scheduler.metered() == [0, 1]


def test_one_alone_is_not_measured_and_is_metered_if_it_has_a_limit() -> None:
    for limit, metered, due_ms in ((1.0, [], None), (0.3, [0], 10)):
        desk = Desk(TemporalScheduler(), sharer(limit=limit))
        desk.runs(0, 0)
        assert desk.scheduler.comparable() == []
        assert desk.scheduler.metered() == metered
        assert desk.due_ms == due_ms


def test_a_shared_lease_begins_at_once_without_an_end_and_waits_for_none() -> None:
    desk = sharing(sharer(), sharer(), sharer())
    desk.drained(2, held(desk, 2)[0], 110, wants=False)
    (lease,) = leases(desk.wants(2, 150))
    assert lease == Lease(2, lease.epoch, 150 * MS, None, go_by_ns=150 * MS, window_ns=DEFAULT_POLICY.shared_window_ns)


def taking_turns() -> tuple[Desk, Lease]:
    """Of two that are heavy so far vGPU 0 holds, and the lease of vGPU 1 follows."""
    desk = Desk(TemporalScheduler(), sharer(), sharer())
    desk.runs(0, 0)
    desk.wants(1, 5)
    end = held(desk, 0)[1]
    assert end is not None
    desk.tick(end / MS - 1.5)
    following, _ = desk.scheduler.published(1)[-1]
    assert following.after == ((0, held(desk, 0)[0]),)
    return desk, following


def light(key: int) -> Measured:
    return Measured(key, round(LIGHT * PPM))


def test_a_turn_that_has_not_begun_becomes_a_shared_lease_that_waits_for_none() -> None:
    desk, following = taking_turns()
    at_ns = following.start_ns - MS
    commands = desk.tell_all([light(1)], at_ns / MS)
    (lease,) = [lease for lease in leases(commands) if lease.vgpu == 1]
    assert lease == Lease(
        *(1, following.epoch, at_ns, None),
        go_by_ns=at_ns,
        window_ns=DEFAULT_POLICY.shared_window_ns,
        early=True,
    )
    assert desk.scheduler.shared() == [1]
    (said,) = leases(desk.went(1, following.epoch, at_ns / MS))
    assert (said.epoch, said.end_ns) == (following.epoch, None), "its GO may have crossed the change"


def test_the_turn_after_a_lease_that_becomes_a_shared_one_waits_for_it_no_more() -> None:
    """It would wait as long as its patience allows, and the light vGPU would be barred as one that does not drain."""
    desk, following = taking_turns()
    at_ms = following.start_ns / MS - 1
    (lease,) = [lease for lease in leases(desk.tell_all([light(0)], at_ms)) if lease.vgpu == 1]
    assert (lease.epoch, lease.after) == (following.epoch, ())
    desk.went(1, following.epoch, at_ms + 0.1)
    statement = desk.statement(0, at_ms + 0.1)
    assert (statement.shared, statement.barred) == (True, False)


def test_the_turn_after_a_lease_that_is_about_to_end_waits_for_it() -> None:
    desk, following = taking_turns()
    desk.tell_all([light(0)], (following.start_ns - DEFAULT_POLICY.decision_ns) / MS)
    lease, _ = desk.scheduler.published(1)[-1]
    assert lease.after == following.after


def test_a_turn_that_is_about_to_end_becomes_no_shared_lease() -> None:
    for before_ns, shared in ((DEFAULT_POLICY.decision_ns + 1, [0]), (DEFAULT_POLICY.decision_ns, [])):
        desk, following = taking_turns()
        epoch, end = held(desk, 0)
        assert end == following.start_ns
        desk.tell_all([light(0)], (end - before_ns) / MS)
        assert desk.scheduler.shared() == shared
        assert held(desk, 0) == (epoch, None if shared else end)


def test_a_turn_that_has_begun_becomes_a_shared_lease_and_begins_when_it_did() -> None:
    desk, following = taking_turns()
    before, _ = desk.scheduler.published(0)[-1]
    desk.tell_all([light(0)], (following.start_ns - MS) / MS)
    after, _ = desk.scheduler.published(0)[-1]
    assert after == replace(before, end_ns=None, window_ns=DEFAULT_POLICY.shared_window_ns)


def test_the_last_one_takes_turns_again_once_another_one_comes() -> None:
    desk = sharing(sharer(), sharer())
    desk.drained(1, held(desk, 1)[0], 110, wants=False)
    desk.added(2, exclusive(), 110)
    desk.wants(2, 120)
    assert held(desk, 0)[1] == 120 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.window_ns


def test_a_shared_lease_that_has_not_begun_is_taken_back_once_its_vgpu_is_heavy() -> None:
    desk = sharing(sharer(), sharer(), sharer())
    desk.drained(2, held(desk, 2)[0], 110, wants=False)
    desk.wants(2, 120)
    epoch = held(desk, 2)[0]
    commands = desk.measured(121, LIGHT, LIGHT, HEAVY)
    assert withdrawn(commands) == [(2, epoch)]
    assert [(key, end) for key, _, _, end in spans(commands)] == [(2, None)], "it takes turns, and is the only one"


def test_the_only_one_that_turns_heavy_holds_the_turn_without_a_gap() -> None:
    desk = sharing(sharer(), sharer())
    epoch = held(desk, 1)[0]
    desk.measured(150, LIGHT, HEAVY)
    end = 150 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.shared_window_ns
    desk.tick(151)
    assert held(desk, 1) == (epoch, None)
    assert end > 151 * MS


def test_one_that_turns_heavy_while_another_one_holds_the_turn_waits_for_that_one() -> None:
    desk = sharing(sharer(), sharer())
    desk.added(2, sharer(), 110)
    desk.runs(2, 120)
    epoch = held(desk, 1)[0]
    desk.measured(150, LIGHT, HEAVY, HEAVY)
    assert held(desk, 1) == (epoch, 150 * MS + DEFAULT_POLICY.decision_ns + DEFAULT_POLICY.shared_window_ns)
    assert held(desk, 2)[1] is None
    desk.drained(1, epoch, 151)
    turn, _ = desk.scheduler.published(2)[-1]
    assert turn.end_ns is not None
    desk.tick(turn.end_ns / MS - 1.5)
    following, _ = desk.scheduler.published(1)[-1]
    assert following.after == ((2, turn.epoch),)


def test_a_drain_beside_sharers_may_take_a_time_slice_of_each_longer() -> None:
    """A token of 40 % is 16 ms long."""
    desk = sharing(sharer(0.1), sharer(0.1))
    desk.added(2, sharer(0.4), 110)
    desk.added(3, sharer(0.4), 110)
    desk.runs(2, 120)
    desk.wants(3, 121)
    desk.tick((held(desk, 2)[1] or 0) / MS - 1.5)
    following, _ = desk.scheduler.published(3)[-1]
    assert following.go_by_ns - following.start_ns == 16 * MS + 2 * DEFAULT_POLICY.slice_ns


@pytest.mark.parametrize("heavy", [False, True])
def test_a_sharer_saves_up_its_idle_credit_and_nothing_beside_turns(heavy: bool) -> None:
    """vGPU 1 uses nothing."""
    desk = sharing(sharer(0.4), sharer(0.2))
    if heavy:
        desk.added(2, sharer(0.4), 5)
        desk.runs(2, 10)
    for at_ms in range(10, 1001, 10):
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 2)
        desk.tick(at_ms)
    saved_ns = 0 if heavy else DEFAULT_POLICY.idle_credit_ns
    assert desk.statement(1, 1000).lag_ns == pytest.approx(saved_ns, abs=3 * MS)


def test_under_a_limit_a_sharer_may_use_its_bucket_and_what_comes_in_12_ms() -> None:
    desk = sharing(sharer(limit=0.3), sharer())
    epoch = held(desk, 0)[0]
    commands = desk.observed(0, epoch, 50, used_ns=7 * MS)
    bucket_ns = desk.scheduler.books(50 * MS)[0].bucket_ns
    assert allows(commands) == [Allow(0, epoch, 7 * MS + bucket_ns + 3_600_000)]
    assert allows(desk.tick(59.9)) == []
    assert desk.due_ms == 60
    assert len(allows(desk.tick(60))) == 1


def curbed_for(desk: Desk, used: float, until_ms: int) -> int:
    """vGPU 0 waits, and gets 10 %; vGPU 1 uses so much. Until one window is over. What vGPU 1 has used, in ns."""
    used_ns = 0
    for at_ms in range(10, until_ms + 1, 10):
        used_ns = round(used * at_ms * MS)
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 10)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=used_ns)
        desk.measured(at_ms, LIGHT, LIGHT, waits={0: 0.9})
    return used_ns


def test_a_curbed_sharer_may_use_its_guarantee_and_no_more_than_its_limit_leaves() -> None:
    """12 ms at 20.0001 % are 2,400,012 ns. Where its bucket has less, it is that."""
    for limit, left_ns in ((1.0, 2_400_012), (0.9, 2_400_012)):
        desk = sharing(sharer(0.7), sharer(0.200001, limit=limit))
        used_ns = curbed_for(desk, 0.4, 210)
        assert desk.allowed[1] == (held(desk, 1)[0], used_ns + left_ns)
        assert isinstance(desk.allowed[1][1], int)
    desk = sharing(sharer(0.6), sharer(0.2, limit=0.25))
    used_ns = curbed_for(desk, 0.55, 210)
    bucket_ns = desk.scheduler.books(210 * MS)[1].bucket_ns
    assert bucket_ns < 0
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + bucket_ns + 3 * MS)


def test_what_a_curbed_sharers_kernel_used_beyond_its_allowance_counts_against_the_next_one() -> None:
    """Each kernel takes 5 ms; a curbed sharer of 20 % may begin one every 25 ms, not one every 10."""
    desk = sharing(sharer(0.7), sharer(0.2))
    first_ns = curbed_for(desk, 0.4, 210)
    epoch = held(desk, 1)[0]
    used_ns = first_ns
    for at_ms in range(220, 410, 10):
        allowed_ns = desk.allowed[1][1]
        assert allowed_ns is not None
        if used_ns < allowed_ns:
            used_ns += 5 * MS
        desk.observed(1, epoch, at_ms, used_ns=used_ns)
        desk.tick(at_ms)
    assert used_ns - first_ns == 40 * MS, "20 % of 190 ms, and what the last kernel went beyond that"


def test_what_a_sharers_bucket_allowed_before_it_was_curbed_does_not_count_after_that() -> None:
    """It begins to compute 80 ms before it is curbed, out of its bucket."""
    desk = sharing(sharer(0.7), sharer(0.2, limit=0.5))
    used_ns = 0
    for at_ms in range(10, 211, 10):
        used_ns = max(0, at_ms - 130) * MS
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=at_ms * MS // 10)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=used_ns)
        desk.measured(at_ms, LIGHT, LIGHT, waits={0: 0.9})
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + 2_400_000)


def test_a_curbed_sharer_saves_up_no_allowance() -> None:
    desk = sharing(sharer(0.7), sharer(0.2))
    used_ns = curbed_for(desk, 0.4, 210)
    desk.tick(400)
    assert desk.allowed[1][1] == used_ns + 2_400_000


def test_a_sharer_that_is_curbed_no_more_is_allowed_all_at_once_and_once() -> None:
    """Its allowance was renewed 6 ms before."""
    desk = sharing(sharer(0.7), sharer(0.2))
    used_ns = curbed_for(desk, 0.4, 210)
    desk.tick(404)
    assert desk.allowed[1] == (held(desk, 1)[0], used_ns + 2_400_000)
    desk.observed(0, held(desk, 0)[0], 410, used_ns=180 * MS)
    assert allows(desk.measured(410, LIGHT, LIGHT, waits={0: 0.0})) == [Allow(1, held(desk, 1)[0], None)]
    assert allows(desk.measured(420, LIGHT, LIGHT, waits={0: 0.0})) == []
    assert allows(desk.measured(440, LIGHT, LIGHT, waits={0: 0.0})) == []


def test_a_sharer_that_costs_turns_too_much_is_allowed_its_guarantee_over_that_cost() -> None:
    """The sharer uses 30 % and costs 60: in the first window that counts for a quarter, a factor of 1.25."""
    desk = sharing(sharer(0.2), sharer(0.1))
    desk.added(2, sharer(0.7), 1)
    desk.runs(2, 1)
    used_ns = 0
    for at_ms in range(10, 420, 10):
        used_ns = at_ms * MS * 3 // 10
        desk.observed(0, held(desk, 0)[0], at_ms, used_ns=used_ns)
        desk.observed(1, held(desk, 1)[0], at_ms, used_ns=0)
        desk.tell_all([Measured(2, round(HEAVY * PPM), work_ns=at_ms * MS * 4 // 10)], at_ms)
        desk.tick(at_ms)
        if 0 in desk.allowed:
            break
    assert at_ms == 400
    assert desk.allowed == {0: (held(desk, 0)[0], used_ns + 160_000 * 12)}


def test_the_books_of_sharers_are_checked() -> None:
    def spoilt(spoil: Callable[[TemporalScheduler], None]) -> str:
        desk = sharing(sharer(), sharer(limit=0.5))
        assert isinstance(desk.scheduler, TemporalScheduler)
        spoil(desk.scheduler)
        with pytest.raises(InvariantError) as raised:
            desk.scheduler.check()
        return str(raised.value)

    def unshare(scheduler: TemporalScheduler) -> None:
        scheduler._shared[0].shared = False

    def end(scheduler: TemporalScheduler) -> None:
        scheduler._shared[0].lease = replace(scheduler._shared[0].lease, end_ns=10**9)

    def unknown(scheduler: TemporalScheduler) -> None:
        scheduler._shared[0] = replace(scheduler._shared[0])

    def unlimited(scheduler: TemporalScheduler) -> None:
        scheduler._accounts[1].allowance_at_ns = None

    def turn(scheduler: TemporalScheduler) -> None:
        scheduler._current = scheduler._shared.pop(0)

    def heavy(scheduler: TemporalScheduler) -> None:
        scheduler._accounts[0].kind.light = False

    def without(scheduler: TemporalScheduler) -> None:
        account, hold = scheduler._accounts[0], scheduler._shared.pop(0)
        del account.holds[hold.lease.epoch]
        scheduler._note_holds(account)

    def forget(scheduler: TemporalScheduler) -> None:
        del scheduler._shared[0]

    for spoil in (unshare, end, unknown):
        assert spoilt(spoil).startswith("no shared lease, or one that no account knows: ActiveLease(lease=Lease(vgpu=0")
    assert spoilt(unlimited).startswith("a shared lease without an allowance for a vGPU with a limit: Lease(vgpu=1")
    assert spoilt(turn).startswith("a vGPU takes turns that may share: ActiveLease(lease=Lease(vgpu=0")
    assert spoilt(heavy) == "vGPUs hold shared leases that may not: {0}"
    assert spoilt(without) == "a vGPU waits that may share"
    assert spoilt(forget) == "vGPU 0 holds a shared lease, and takes turns"


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
