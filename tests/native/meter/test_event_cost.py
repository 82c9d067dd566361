"""What two events add to the launch between them: measured in pairs, and taken off a launch's sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_logic import PAIR_MOST_NS, PAIRS, EventCost

times = st.integers(0, 1_000_000_000)
either = pytest.mark.parametrize("empty", [False, True])


def measured(busy_ns: int, empty_ns: int) -> EventCost:
    cost = EventCost()
    for _ in range(PAIRS):
        cost.notes(busy_ns, empty=False)
        cost.notes(empty_ns + 5_000, empty=True, host_ns=5_000)
    return cost


@either
def test_nothing_is_taken_off_before_a_pair_was_timed(empty: bool) -> None:
    assert EventCost().length_ns(10_000, empty) == 10_000


@either
def test_so_many_pairs_are_timed_in_either_queue(empty: bool) -> None:
    cost = EventCost()
    for _ in range(PAIRS):
        assert cost.wants(empty)
        cost.notes(1_250, empty)
    assert not cost.wants(empty)
    assert cost.wants(not empty)


def test_a_launch_has_its_own_length_in_either_queue() -> None:
    """The pairs and samples of an H100 (docs/reference/performance/light.md)."""
    cost = measured(1_250, 1_200)
    for own_ns, busy_ns, empty_ns in [(2_660, 4_770, 3_070), (5_700, 7_810, 6_050), (21_840, 23_970, 22_250)]:
        assert cost.length_ns(busy_ns, empty=False) == pytest.approx(own_ns, abs=150)
        assert cost.length_ns(empty_ns + 4_000, empty=True, host_ns=4_000) == pytest.approx(own_ns, abs=150)


@either
def test_the_shortest_pair_counts(empty: bool) -> None:
    """A host may be late, and another vGPU's time slice may come between the two."""
    late, usual = EventCost(), EventCost()
    for elapsed_ns in (2_000_000, 1_250, 30_000):
        late.notes(elapsed_ns, empty)
    usual.notes(1_250, empty)
    assert late.length_ns(20_000, empty) == usual.length_ns(20_000, empty) < 20_000


@given(
    pairs=st.lists(st.tuples(times, st.booleans(), times), max_size=2 * PAIRS),
    elapsed_ns=times,
    host_ns=times,
    empty=st.booleans(),
)
def test_no_launch_is_free_and_none_is_longer_than_it_was_seen(
    pairs: list[tuple[int, bool, int]], elapsed_ns: int, host_ns: int, empty: bool
) -> None:
    cost = EventCost()
    for pair in pairs:
        cost.notes(*pair)
    found = cost.length_ns(elapsed_ns, empty, host_ns)
    assert elapsed_ns // 8 <= found <= elapsed_ns
    assert found >= max(elapsed_ns - host_ns, elapsed_ns // 4) - 2 * PAIR_MOST_NS
