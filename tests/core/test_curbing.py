"""Which sharers are curbed: ``Relief`` beside sharers that are short, ``Guard`` beside turns that are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.leases import Allow
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.sharing import LENIENCE_PPM, Guard, Relief
from tests.core.desk import MS
from tests.core.sharers import LIGHT, NANOSECOND, accounts, held, sharer, sharing
from vgpu.share import PPM

# --- who is curbed


def window(relief: Relief, shared: list[Account], number: int, used: list[float], waits: list[float]) -> int | None:
    """One more window, in which each used and waited so much of the time. Who is curbed after it."""
    for account, part, waited in zip(shared, used, waits, strict=True):
        account.busy_ns += round(part * 200 * MS)
        account.kind.waits_ppm = round(waited * PPM)
    relief.update(shared, number * 200 * MS)
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
    guard.update(others, [first], 0)
    return guard, [first], others


def look(
    guard: Guard, turns: list[Account], sharing: list[Account], number: int, work: float, used: list[float]
) -> None:
    """One more window, in which ``turns[0]`` had so much of the time, and the others used so much."""
    for account, part in zip(sharing, used, strict=True):
        account.busy_ns += round(part * 200 * MS)
    turns[0].kind.work_ns += round(work * 200 * MS)
    guard.update(sharing, turns, number * 200 * MS)


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
    guard.update(sharing_, turns, 300 * MS)
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
    guard.update(sharing_, turns, (200 + passed_ms) * MS)
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
