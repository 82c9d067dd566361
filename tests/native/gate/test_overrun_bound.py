"""How much longer than predicted a queue may take: of kernels that were longer of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import UNKNOWN_NS

MS = 1_000_000


@given(st.lists(st.tuples(st.integers(0, 3 * MS), st.integers(0, 9 * MS), st.booleans()), max_size=40))
def test_what_the_queue_may_take_beyond_its_prediction_is_what_its_launches_may(
    work: list[tuple[int, int, bool]],
) -> None:
    """Until the marker behind them is complete."""
    backlog, parts, unmarked = native.Backlog(), [], 0
    for predicted, excess, mark in work:
        backlog.submit(0, predicted, 0, excess)
        unmarked += excess
        if mark:
            assert backlog.mark(len(parts))
            parts.append(unmarked)
            unmarked = 0
        assert backlog.excess_ns(0) == sum(parts) + unmarked
    while parts:
        parts.pop(0)
        backlog.completed(MS)
        assert backlog.excess_ns(MS) == sum(parts) + unmarked
    backlog.drained(2 * MS)
    assert backlog.excess_ns(2 * MS) == 0


def test_what_waits_for_another_launch_is_forgiven_what_it_may_take_too() -> None:
    backlog = native.Backlog()
    backlog.submit(0, MS, 0, 9 * MS)
    backlog.mark(1)
    for now in range(0, 102 * MS, MS):
        backlog.seen_busy(now)
        assert backlog.excess_ns(now) == (9 * MS if now <= 101 * MS else 0)
    backlog.seen_busy(102 * MS)
    assert [backlog.excess_ns(102 * MS + after) for after in (0, 5 * MS, 5 * MS + 1)] == [0, 0, 9 * MS]


@pytest.mark.parametrize(
    ("predicted", "longest", "excess"),
    [
        (MS, 0, 0),
        (MS, MS, 0),
        (MS, 3 * MS // 2, 0),
        (MS, 3 * MS // 2 + 1, MS // 2 + 1),
        (UNKNOWN_NS, 9 * MS, 0),
        (MS // 10, MS - 1, 0),
        (MS // 10, MS, 9 * MS // 10),
    ],
)
def test_a_launch_may_take_longer_where_that_would_disprove_its_prediction(
    predicted: int, longest: int, excess: int
) -> None:
    assert native.Backlog().launch_excess_ns(predicted, longest) == excess
