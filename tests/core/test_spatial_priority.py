"""What a high vGPU takes back from others in spatial mode, and what it does not."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.leases import AccountState, Added
from tests.core.desk import MS, leases, share, spans
from tests.core.test_spatial_behaviour import crowd, desk, two_of_sixty
from vgpu.share import Priority


def test_who_is_of_a_lower_class_than_a_newcomer_gets_the_short_window_with_its_next_end() -> None:
    two = desk(share(0.3, 60), share(0.3, 60))
    assert two.runs(0, 0).window_ns == 12 * MS
    two.tell(Added(2, share(0.1, 10, priority=Priority.HIGH)), 1)
    assert [x.window_ns for x in leases(two.wants(1, 2))] == [250_000]


def test_a_high_one_that_fits_takes_nothing_back() -> None:
    three = desk(share(0.3, 60), share(0.3, 60), share(0.2, 40, priority=Priority.HIGH))
    three.runs(0, 0)
    three.wants(1, 1)
    assert spans(three.wants(2, 2)) == [(2, 2, 2, 20)]


def test_sms_that_are_promised_for_the_next_round_are_free_until_then() -> None:
    pair = two_of_sixty()
    assert spans(pair.tick(15)) == [(1, 2, 20, 30)]
    pair.tell(Added(2, share(0.1, 40, priority=Priority.HIGH)), 16)
    assert spans(pair.wants(2, 16)) == [(2, 3, 16, 30)]  # nothing is taken back


def test_a_high_one_lengthens_nobodys_lease() -> None:
    two = desk(share(0.3, 100, 0.1), share(0.3, 40, priority=Priority.HIGH))
    assert two.runs(0, 0).end_ns == 10 * MS
    assert spans(two.wants(1, 9.8)) == [(1, 2, 10.25, 20)]  # its limit ends vGPU 0's before that


def test_a_high_one_takes_back_only_what_is_not_free_already() -> None:
    four = desk(share(0.3, 30), share(0.2, 30, priority=Priority.LOW), share(0.2, 70, priority=Priority.HIGH))
    four.runs(0, 0)
    four.runs(1, 0)
    assert spans(four.wants(2, 2)) == [(0, 1, 0, 20), (1, 2, 0, 2.45), (2, 3, 2.45, 20)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_one_class_it_is_taken_from_who_is_most_ahead(ahead: int) -> None:
    three = desk()
    for key in (0, 1):
        lag_ns = -8 * MS if key == ahead else 8 * MS
        book = AccountState(lag_ns, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)
        three.tell(Added(key, share(0.3, 50), book), 0)
    three.tell(Added(2, share(0.2, 40, priority=Priority.HIGH)), 0)
    for key in (0, 1):
        three.runs(key, 0)
    ends = {vgpu: end for vgpu, _, _, end in spans(three.wants(2, 2))}
    assert (ends[ahead], ends[1 - ahead]) == (2.45, 20)


def test_a_high_one_takes_nothing_from_its_own_class() -> None:
    three = desk(
        share(0.3, 60, priority=Priority.HIGH), share(0.1, 40, priority=Priority.LOW),
        share(0.2, 50, priority=Priority.HIGH),
    )  # fmt: skip
    three.runs(0, 0)
    three.runs(1, 0)
    assert spans(three.wants(2, 2)) == [(0, 1, 0, 20), (1, 2, 0, 20)]


def test_a_high_one_takes_nothing_from_who_could_not_give_it_back_in_time() -> None:
    three = crowd(Priority.HIGH, 40)
    three.observed(1, 2, 1.5, drains_by_ns=60 * MS)
    assert spans(three.wants(2, 2)) == [(0, 1, 0, 2.45), (1, 2, 1, 20), (2, 3, 2.45, 20)]


def test_what_was_taken_back_is_not_planned_with() -> None:
    three = crowd(Priority.HIGH, 40)
    three.wants(2, 16)  # within the look-ahead: the round after is planned at once
    assert three.statement(1, 16).holds
    assert not [x for x in leases(three.tick(17)) if x.vgpu == 1 and x.epoch == 2]
