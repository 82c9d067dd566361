"""The arithmetic of the lease table: epochs on their circle, idle and busy time, what is refused."""

from __future__ import annotations

import pytest

from cython_ext.readings import EventKind
from cython_ext.testing.bindings_lease_table import PyLeaseTable

EPOCHS = 2**32


def test_a_vgpus_next_lease_begins_where_its_own_last_one_ends() -> None:
    table = PyLeaseTable()
    table.add(0, 0)
    table.report(0, 0, want=True)
    table.publish(0, 1, 10, 100, (), 0, False, False, 0)
    table.step(10)
    table.publish(0, 2, 60, 90, (), 500, False, False, 20)
    table.step(60)
    assert table.outstanding(0) == [(1, True), (2, False)]
    assert table.deadline_ns() == 100
    table.step(130)  # the hooks did not wait for us: it began at 100
    went = [(event.epoch, event.at_ns, event.end_ns) for event in table.events()[0] if event.kind is EventKind.WENT]
    assert went == [(1, 10, 100), (2, 100, 130)]


def test_a_word_from_half_a_circle_ago_ends_nothing() -> None:
    table = PyLeaseTable()
    table.add(0, 0)
    table.report(0, 1, want=True, returned_epoch=5, drained_epoch=5)
    far = 5 + 2**31 + 3  # by the circle's arithmetic 5 "reaches" this epoch
    assert table.publish(0, far, 1, None, (), 0, True, False, 1)
    table.report(0, 2, want=True, returned_epoch=5, drained_epoch=5)
    assert table.outstanding(0) == [(far, True)]
    table.report(0, 3, want=True, returned_epoch=5, drained_epoch=far)
    assert table.outstanding(0) == []


def test_a_vgpu_that_slept_for_half_a_circle_gets_leases_again() -> None:
    table = PyLeaseTable()
    for key in (0, 1):
        table.add(key, 0)
        table.report(key, 0, want=True)
    assert table.publish(0, 9, 0, None, (), 0, True, False, 0)
    table.report(0, 1, want=True, drained_epoch=9)
    epoch = 9
    for _ in range(5):  # the other one works on
        epoch = (epoch + 2**29) % EPOCHS
        assert table.publish(1, epoch, 2, None, (), 0, True, False, 2)
        table.report(1, 3, want=True, drained_epoch=epoch)
    assert table.publish(0, epoch + 1, 4, None, (), 0, True, False, 4)
    assert table.outstanding(0) == [(epoch + 1, True)]


def test_events_that_do_not_fit_are_counted() -> None:
    table = PyLeaseTable()
    table.add(3, 0)
    for i in range(5000):
        table.report(3, i, want=i % 2 == 0)
    events, lost = table.events()
    assert len(events) + lost == 5000
    assert [event.at_ns for event in events] == list(range(len(events)))
    assert table.events() == ([], 0)


def test_whoever_changes_its_mind_while_the_scheduler_sleeps_pushes_no_lease_out_of_the_books() -> None:
    table = PyLeaseTable()
    for key in (0, 1, 2):
        table.add(key, 0)
    table.report(0, 0, want=True)
    table.publish(0, 1, 0, None, (), 0, True, False, 0)
    for i in range(1, 6000):  # 10 ms each: a reading of the holder, too
        table.report(2, 10_000_000 * i, want=i % 2 == 0)
        table.report(0, 10_000_000 * i, want=True)
    now_ns = 10_000_000 * 6000
    table.report(0, now_ns, want=False, drained_epoch=1, drained_ns=now_ns)
    table.report(1, now_ns, want=True)
    table.publish(1, 2, now_ns, now_ns + 10, (), 0, True, False, now_ns)
    events, lost = table.events()
    told = [(e.kind, e.epoch, e.at_ns) for e in events if e.kind in {EventKind.WENT, EventKind.DRAINED}]
    assert told == [(EventKind.WENT, 1, 0), (EventKind.DRAINED, 1, now_ns), (EventKind.WENT, 2, now_ns)]
    assert lost


def test_an_immense_busy_time_is_no_idle_time() -> None:
    table = PyLeaseTable()
    table.add(0, 0)
    table.report(0, 0, want=True)
    table.publish(0, 1, 10, 1000, (), 0, False, False, 0)
    table.step(10)
    table.report(0, 500, want=True, drained_epoch=1, drained_ns=400, busy_ns=2**64 - 1)
    (drained,) = [event for event in table.events()[0] if event.kind is EventKind.DRAINED]
    assert (drained.at_ns, drained.idle_ns) == (400, 0)


def test_idle_time_is_what_of_the_lease_was_not_busy() -> None:
    table = PyLeaseTable()
    table.add(0, 0)
    table.report(0, 0, want=True, busy_ns=10_000)
    table.publish(0, 1, 10, 1000, (), 0, False, False, 0)
    table.step(10)
    table.report(0, 1000, want=True, drained_epoch=1, drained_ns=1010, busy_ns=10_300)
    (drained,) = [event for event in table.events()[0] if event.kind is EventKind.DRAINED]
    assert (drained.at_ns, drained.idle_ns) == (1000, 990 - 300)


def test_what_the_books_do_not_know_yet_is_busy() -> None:
    """A figure from 300, read at 20 ms: from 300 on the GPU may have been busy all the time."""
    table = PyLeaseTable()
    table.add(0, 0)
    table.report(0, 0, want=True, busy_ns=10_000)
    table.publish(0, 1, 10, 10**9, (), 0, False, False, 0)
    table.step(10)
    table.report(0, 20_000_000, want=True, busy_ns=10_100, counted_ns=300)
    table.report(0, 50_000_000, want=True, drained_epoch=1, drained_ns=1000, busy_ns=10_100, counted_ns=0)
    idle = [event.idle_ns for event in table.events()[0] if event.kind in {EventKind.OBSERVED, EventKind.DRAINED}]
    assert idle == [290 - 100, 0]


@pytest.mark.parametrize(
    ("others", "taken_ns"),
    [
        ("nobody", 500_000),
        ("was over meanwhile", 400_000),
        ("holds", 0),
    ],
)
def test_who_took_its_lease_and_was_not_alone_is_charged_from_its_first_work_on(others: str, taken_ns: int) -> None:
    """Somebody else wants at the same moment, so the scheduler has to choose; but not for what a third one pays for."""
    table = PyLeaseTable()
    for key in (0, 1, 2):
        table.add(key, 0)
    assert table.publish(1, 1, 0, None, (), 2**62, True, True, 0, alone=True)
    table.report(0, 8_700_000, want=True)
    if others != "nobody":
        table.publish(2, 2, 8_750_000, None, (), 0, True, False, 8_750_000)
        table.report(2, 8_900_000, want=True, drained_epoch=2 * (others != "holds"), drained_ns=8_900_000)
    table.report(1, 9_000_000, want=True, submitted_epoch=1, submitted_ns=8_800_000)
    assert (1, False) in table.outstanding(1)
    assert table.publish(1, 1, 9_300_000, 19_300_000, (), 9_300_000, True, False, 9_300_000)
    (went,) = [e for e in table.events()[0] if e.kind is EventKind.WENT and e.vgpu == 1]
    assert (went.at_ns, went.end_ns, went.taken_ns) == (9_300_000, 19_300_000, taken_ns)


@pytest.mark.parametrize(
    "asked", [{"epoch": 0}, {"epoch": 2**32}, {"start_ns": -1}, {"end_ns": 10}, {"go_by_ns": 2**63}]
)
def test_what_no_lease_can_be_is_refused(asked: dict[str, int]) -> None:
    table = PyLeaseTable()
    table.add(0, 0)
    lease = {"epoch": 1, "start_ns": 10, "end_ns": 20, "go_by_ns": 0} | asked
    with pytest.raises(ValueError, match=r"epoch|start_ns|go_by_ns|ends before"):
        table.publish(0, after=(), early=True, on_want=False, now_ns=0, **lease)
    assert table.outstanding(0) == []
