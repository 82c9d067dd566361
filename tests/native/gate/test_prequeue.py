"""Work queued ahead of its lease, against the same work submitted the moment the lease begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_logic import UNKNOWN_NS, Ahead, Backlog

MS = 1_000_000
MOST_LAUNCHES = 600
MOST_MARKERS = 24

lengths = st.integers(0, 4 * MS)
steps = st.lists(st.one_of(lengths, st.just("mark")), max_size=60)


def completions(backlog: Backlog, now_ns: int) -> list[tuple[int | None, bool, int, int]]:
    """What the books say while the markers complete, one a millisecond."""
    told = []
    while True:
        tag = backlog.oldest()
        now_ns += MS
        drained = backlog.completed(now_ns)
        told.append((tag, drained, backlog.end_ns, backlog.busy_ns))
        if tag is None:
            return told


@given(steps, st.integers(0, 3), st.integers(0, 5 * MS))
def test_queued_ahead_it_counts_as_if_submitted_when_the_lease_began(
    work: list[int | str], before: int, late_ns: int
) -> None:
    """``before``: launches of the lease before that are still in the queue, marked."""
    ahead, ours, plain = Ahead(), Backlog(), Backlog()
    for backlog in (ours, plain):
        backlog.begin(0)
        for i in range(before):
            backlog.submit(i, 3 * MS)
            backlog.mark(1000 + i)
        backlog.finish(5 * MS)
    begins_ns = 10 * MS
    assert Ahead.begins(ours)
    for backlog in (ours, plain):
        backlog.begin(begins_ns)
    begins_ns += late_ns
    for tag, item in enumerate(work):
        if isinstance(item, int):
            ahead.submit(ours, item)
            plain.submit(begins_ns, item)
        else:
            if ahead.mark(tag):
                assert plain.mark(tag)
    queued = ahead.launches
    assert queued == sum(isinstance(item, int) for item in work)
    ahead.release(ours, begins_ns)
    assert (ahead.launches, ahead.work_ns) == (0, 0)
    assert ours.backlog_ns(begins_ns) == plain.backlog_ns(begins_ns)
    assert (ours.busy, ours.busy_ns, ours.idle_ns, ours.refill_ns) == (
        plain.busy,
        plain.busy_ns,
        plain.idle_ns,
        plain.refill_ns,
    )
    for backlog in (ours, plain):
        backlog.mark(77)
    if len([item for item in work if item == "mark"]) < MOST_MARKERS:
        assert completions(ours, begins_ns) == completions(plain, begins_ns)


@given(st.lists(lengths, max_size=50), st.integers(0, 20 * MS))
def test_it_takes_no_more_work_than_may_be_queued(work: list[int], most_ns: int) -> None:
    ahead, backlog = Ahead(), Backlog()
    for length in work:
        if ahead.takes(backlog, length, most_ns):
            ahead.submit(backlog, length)
        assert ahead.work_ns <= most_ns
        assert ahead.takes(backlog, most_ns - ahead.work_ns, most_ns)
        assert not ahead.takes(backlog, most_ns - ahead.work_ns + 1, most_ns)


@given(st.lists(st.tuples(lengths, lengths), max_size=50), st.integers(0, 20 * MS))
def test_nor_may_it_be_longer_than_predicted_by_more_than_that(work: list[tuple[int, int]], most_ns: int) -> None:
    ahead, backlog, excess_ns = Ahead(), Backlog(), 0
    for length, excess in work:
        taken = ahead.takes(backlog, length, most_ns, excess)
        assert taken == (ahead.takes(backlog, length, most_ns) and excess_ns + excess <= most_ns)
        if taken:
            ahead.submit(backlog, length, excess)
            excess_ns += excess
    ahead.release(backlog, MS)
    assert backlog.excess_ns(MS) == excess_ns
    assert ahead.takes(backlog, 0, most_ns, most_ns)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_shorter_than_predicted_teaches_unless_nobody_knows_when_it_began(late: bool) -> None:
    ahead, backlog = Ahead(), Backlog()
    ahead.submit(backlog, 5 * MS)
    ahead.mark(1)
    ahead.release(backlog, MS, late)
    backlog.completed(3 * MS)
    assert (backlog.scale < 1.0) == (not late)


def test_it_takes_nothing_of_unknown_length() -> None:
    assert not Ahead().takes(Backlog(), UNKNOWN_NS, MS)


def test_it_takes_no_more_launches_than_the_drivers_queue_has_room_for() -> None:
    ahead, backlog = Ahead(), Backlog()
    while ahead.takes(backlog, 0, MS):
        ahead.submit(backlog, 0)
    assert ahead.launches == MOST_LAUNCHES
    ahead.release(backlog, 1)
    assert ahead.takes(backlog, 0, MS)


@given(st.lists(st.integers(0, 2 * MS), max_size=40))
def test_a_graph_takes_a_place_for_each_node_that_it_may_have(lengths_ns: list[int]) -> None:
    """Kernels last 2 us at least, one after the other; they and the launches beside them have 600 places."""
    ahead, backlog, places = Ahead(), Backlog(), 0
    for length_ns in lengths_ns:
        room = places + length_ns // 2000 < MOST_LAUNCHES
        assert ahead.takes_graph(length_ns) == room
        if room and ahead.takes(backlog, length_ns, 10**12):
            ahead.submit_graph(backlog, length_ns)
            places += 1 + length_ns // 2000
        assert ahead.takes(backlog, 0, 10**12) == (places < MOST_LAUNCHES)
    ahead.release(backlog, 1)
    assert ahead.takes_graph(MS)


def test_it_takes_no_more_than_can_be_marked() -> None:
    ahead, backlog = Ahead(), Backlog()
    assert not ahead.mark(0), "nothing to mark"
    for tag in range(MOST_MARKERS):
        assert ahead.takes(backlog, 1, MS)
        ahead.submit(backlog, 1)
        assert ahead.mark(tag)
    assert not ahead.takes(backlog, 1, MS)


def test_it_does_not_begin_behind_work_without_a_marker_or_where_markers_would_not_fit() -> None:
    backlog = Backlog()
    backlog.begin(0)
    backlog.submit(0, MS)
    assert not Ahead.begins(backlog)
    marked = 0
    while backlog.mark(marked):
        marked += 1
        assert Ahead.begins(backlog) == (marked + MOST_MARKERS < 128)
        backlog.submit(0, MS)


@given(steps, st.lists(st.one_of(lengths, st.just(UNKNOWN_NS)), max_size=5))
def test_launches_submitted_meanwhile_are_not_lost(work: list[int | str], meanwhile: list[int]) -> None:
    """They should not be; then everything that was submitted is still retired, and none of unknown length stays."""
    ahead, backlog = Ahead(), Backlog()
    backlog.begin(0)
    for tag, item in enumerate(work):
        if isinstance(item, int):
            ahead.submit(backlog, item)
        else:
            ahead.mark(tag)
    for learned_ns in meanwhile:
        backlog.submit(1, learned_ns, MS)
    known = sum(item for item in work if isinstance(item, int))
    ahead.release(backlog, MS)
    assert backlog.unknown == meanwhile.count(UNKNOWN_NS)
    assert backlog.backlog_ns(MS) >= known
    backlog.mark(99)
    completions(backlog, MS)
    assert (backlog.busy, backlog.unknown) == (False, 0)


@pytest.mark.parametrize(("queued", "refill_ns"), [(400, 1), (0, 1_296_000)])
def test_behind_a_long_queue_what_looks_idle_is_a_wrong_prediction(queued: int, refill_ns: int) -> None:
    """Kernels of 24 µs that are predicted to take 20, in one lease: the scale has no time to learn it."""
    ahead, backlog = Ahead(), Backlog()
    for _ in range(queued):
        ahead.submit(backlog, 20_000)
    backlog.begin(MS)
    ahead.release(backlog, MS)
    now_ns = MS
    for tag in range(45):
        now_ns += 192_000  # eight kernels later
        for _ in range(8):
            backlog.submit(now_ns, 20_000)
        backlog.mark(tag)
        if not queued:
            backlog.seen_busy(now_ns + 192_000 - 1)
            backlog.completed(now_ns + 192_000)
    for tag in range(45 if queued else 0):
        now_ns = MS + 24_000 * (queued + 8 * (tag + 1))
        backlog.seen_busy(now_ns - 1)
        backlog.completed(now_ns)
    assert backlog.refill_ns == pytest.approx(refill_ns, rel=0.2)
