"""A lease's tail on the table: who goes at it, and when the scheduler is told."""

from __future__ import annotations

import pytest

from cython_ext.readings import EventKind
from cython_ext.testing.bindings_lease_table import PyLeaseTable

HUSH_NS = 5_000_000


def test_who_waits_for_a_lease_goes_at_its_tail_and_it_drains_all_the_same() -> None:
    table = PyLeaseTable()
    for key in (0, 1):
        table.add(key, 0)
        table.report(key, 0, want=True)
    table.publish(0, 1, 10, 10_000_000, (), 0, True, False, 10)
    table.publish(1, 2, 10_000_000, 20_000_000, [(0, 1)], 15_000_000, True, False, 10)
    table.report(0, 8_999_999, want=True, tail_epoch=1)
    assert table.outstanding(1) == [(2, False)], "too far from its end to be believed"
    table.report(0, 9_000_000, want=True)
    table.report(0, 9_800_000, want=True, tail_epoch=1)
    assert (table.outstanding(0), table.outstanding(1)) == ([(1, True)], [(2, True)])
    table.report(0, 9_900_000, want=True, tail_epoch=1, drained_epoch=1, drained_ns=9_890_000)
    seen = [(e.kind, e.vgpu, e.at_ns) for e in table.events()[0] if e.kind in (EventKind.WENT, EventKind.DRAINED)]
    assert seen == [(EventKind.WENT, 0, 10), (EventKind.WENT, 1, 9_800_000), (EventKind.DRAINED, 0, 9_890_000)]


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize(("length_ns", "told_ns"), [(4_000_000, 2_000_000), (20_000_000, HUSH_NS), (None, HUSH_NS)])
def test_go_at_a_tail_is_told_with_the_drain_or_in_time(length_ns: int | None, told_ns: int, drains: bool) -> None:
    table = PyLeaseTable()
    for key in (0, 1):
        table.add(key, 0)
        table.report(key, 0, want=True)
    table.publish(0, 1, 10, 10_000_000, (), 0, True, False, 10)
    end_ns = None if length_ns is None else 10_000_000 + length_ns
    table.publish(1, 2, 10_000_000, end_ns, [(0, 1)], 15_000_000, True, False, 10)
    table.report(0, 9_000_000, want=True)
    table.events()
    table.report(0, 9_800_000, want=True, tail_epoch=1)
    assert (table.outstanding(1), table.pressing) == ([(2, True)], False)
    assert table.deadline_ns() == 9_800_000 + told_ns
    if drains:
        table.report(0, 9_900_000, want=True, tail_epoch=1, drained_epoch=1, drained_ns=9_890_000)
    else:
        table.step(9_800_000 + told_ns - 1)
        assert not table.pressing
        table.step(9_800_000 + told_ns)
    assert (table.pressing, table.deadline_ns()) == (True, None)
    assert [event.kind for event in table.events()[0]] == [EventKind.WENT, *[EventKind.DRAINED] * drains]
    assert (table.pressing, table.deadline_ns()) == (False, None)
