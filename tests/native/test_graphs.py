"""Which learned lengths of changed graphs still hold, and what small transfers may pass without a lease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cython_ext.nativelogic import UNKNOWN_NS, Graphs, Trifles, size_class

MS = 1_000_000
PAYS_NS = 400_000
handles = st.integers(1, 5)
lengths = st.integers(0, 10**9)


class GraphsTwin(RuleBasedStateMachine):
    """A few graphs, against a dict: nobody is forgotten for want of room."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Graphs()
        self.updates: dict[int, int] = {}
        self.proven: dict[int, int] = {}
        self.version: dict[int, int] = {}
        self.given = 0
        self.under_way: list[tuple[int, int]] = []

    @rule(handle=handles)
    def update(self, handle: int) -> None:
        self.table.updated(handle)
        self.updates[handle] = self.updates.get(handle, 0) + 1

    @rule(handle=handles)
    def launch(self, handle: int) -> None:
        doubted = self.updates.get(handle, 0) != self.proven.get(handle, 0)
        assert self.table.doubted(handle) == doubted
        assert self.table.version(handle) == self.version.get(handle, 0)
        assert self.table.updates(handle) == self.updates.get(handle, 0)
        self.under_way.append((handle, self.table.updates(handle)))

    @rule(learned_ns=st.one_of(lengths, st.just(UNKNOWN_NS)), lasted_ns=lengths, data=st.data())
    def complete(self, learned_ns: int, lasted_ns: int, data: st.DataObject) -> None:
        if not self.under_way:
            return
        handle, updates = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.table.timed(handle, updates, learned_ns, lasted_ns)
        if updates > self.updates.get(handle, 0):
            return  # it was destroyed since, and this is another one
        proven = self.proven.get(handle, 0)
        off = learned_ns != UNKNOWN_NS and not learned_ns / 2 <= lasted_ns <= 2 * learned_ns
        if updates > proven and off:
            self.given += 1
            self.version[handle] = self.given
        self.proven[handle] = max(proven, updates)

    @rule(handle=st.integers(0, 5))
    def forget(self, handle: int) -> None:
        self.table.forget(handle)
        for known in (self.updates, self.proven, self.version):
            for gone in [h for h in known if handle in (0, h)]:
                del known[gone]


TestGraphs = GraphsTwin.TestCase


def test_the_graph_that_was_updated_longest_ago_makes_room() -> None:
    """Where thousands are updated, the table stays full of the newest."""
    table = Graphs()
    for handle in range(1, 5000):
        table.updated(handle << 8)
        assert table.doubted(handle << 8)
    assert sum(table.doubted(handle << 8) for handle in range(1, 5000)) == 512


@given(st.lists(st.integers(0, 2 * MS), max_size=200))
def test_trifles_are_a_hundredth_of_the_time(gaps_ns: list[int]) -> None:
    """In any window that begins with a passing, at most 25 and one for each 0.4 ms."""
    trifles, now_ns = Trifles(), 10**12
    passed: list[int] = []
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        if trifles.passes(now_ns):
            passed.append(now_ns)
            for i, since_ns in enumerate(passed):
                assert len(passed) - i <= 25 + (now_ns - since_ns) // PAYS_NS + 1
        else:
            assert len(passed) >= 25


def test_a_trifle_now_and_then_always_passes() -> None:
    trifles = Trifles()
    assert all(trifles.passes(10**12 + i * PAYS_NS) for i in range(1000))


@given(st.integers(0, 1 << 50))
def test_sizes_of_a_class_differ_by_less_than_a_quarter(size_bytes: int) -> None:
    assert size_class(size_bytes) <= size_class(size_bytes + 1) <= size_class(size_bytes) + 1
    assert size_class(size_bytes) < size_class(size_bytes + size_bytes // 4 + 1)
