"""Which learned lengths of changed graphs still hold, and what small transfers may pass without a lease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cython_ext.testing.bindings_logic import UNKNOWN_NS, Graphs, SmallTransferBudget, size_class

MS = 1_000_000
PAYS_NS = 400_000
STEADY = 16
LONG = 8
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
        self.steady: dict[int, int] = {}
        self.needed: dict[int, int] = {}
        self.given = 0
        self.under_way: list[tuple[int, int]] = []

    @rule(handle=handles)
    def update(self, handle: int) -> None:
        self.table.updated(handle)
        self.updates[handle] = self.updates.get(handle, 0) + 1

    @rule(handle=handles)
    def launch(self, handle: int) -> None:
        steady = self.steady.get(handle, 0) >= self.needed.get(handle, STEADY)
        doubted = self.updates.get(handle, 0) != self.proven.get(handle, 0) and not steady
        assert self.table.doubted(handle) == doubted
        assert self.table.version(handle) == self.version.get(handle, 0)
        assert self.table.updates(handle) == self.updates.get(handle, 0)
        self.under_way.append((handle, self.table.updates(handle)))

    @rule(learned_ns=st.one_of(lengths, st.just(UNKNOWN_NS)), lasted_ns=lengths, data=st.data())
    def complete(self, learned_ns: int, lasted_ns: int, data: st.DataObject) -> None:
        if self.under_way:
            self._complete(data.draw(st.integers(0, len(self.under_way) - 1)), learned_ns, lasted_ns)

    def _complete(self, index: int, learned_ns: int, lasted_ns: int) -> None:
        handle, updates = self.under_way.pop(index)
        self.table.timed(handle, updates, learned_ns, lasted_ns)
        if updates > self.updates.get(handle, 0):
            return  # it was destroyed since, and this is another one
        proven = self.proven.get(handle, 0)
        if updates > proven and learned_ns != UNKNOWN_NS:
            if not learned_ns / 2 <= lasted_ns <= 2 * learned_ns:
                self.given += 1
                self.version[handle] = self.given
                self.steady[handle] = 0
                self.needed[handle] = min(2 * self.needed.get(handle, STEADY), 1 << 20)
            elif abs(lasted_ns - learned_ns) <= learned_ns / 4:
                self.steady[handle] = self.steady.get(handle, 0) + 1
                needed = self.needed.get(handle, STEADY)
                if self.steady[handle] == LONG * needed:
                    self.needed[handle] = self.steady[handle] = max(needed // 2, STEADY)
        self.proven[handle] = max(proven, updates)

    @rule(handle=handles, times=st.integers(1, 300), learned_ns=st.integers(1, 10**9))
    def go_on(self, handle: int, times: int, learned_ns: int) -> None:
        """An update before each launch, and every length as before."""
        for _ in range(times):
            self.update(handle)
            updates = self.table.updates(handle)
            self.under_way.append((handle, updates))
            self._complete(len(self.under_way) - 1, learned_ns, learned_ns)

    @rule(handle=st.integers(0, 5))
    def forget(self, handle: int) -> None:
        self.table.forget(handle)
        for known in (self.updates, self.proven, self.version, self.steady, self.needed):
            for gone in [h for h in known if handle in (0, h)]:
                del known[gone]


TestGraphs = GraphsTwin.TestCase


def steps(table: Graphs, count: int, learned_ns: int, lasted_ns: int) -> int:
    """How many of so many launches, with an update before each, are doubted."""
    doubted = 0
    for _ in range(count):
        table.updated(1)
        doubted += table.doubted(1)
        table.timed(1, table.updates(1), learned_ns, lasted_ns)
    return doubted


def test_who_updates_all_the_time_and_stays_as_long_is_believed_in_the_end() -> None:
    table = Graphs()
    assert steps(table, 1000, MS, MS) == STEADY


def test_who_has_changed_is_believed_twice_as_late() -> None:
    table = Graphs()
    for wait in (STEADY, 2 * STEADY, 4 * STEADY):
        assert steps(table, 100, MS, MS) == wait
        assert steps(table, 1, MS, 10 * MS) == 0  # nobody could know
        assert steps(table, 1, UNKNOWN_NS, 10 * MS) == 1  # the new version is learned


def test_a_sample_that_is_off_by_less_than_double_says_nothing() -> None:
    """Caches are cold after a hand-over: one launch in ten takes half as long again."""
    table, doubted = Graphs(), 0
    for _ in range(100):
        doubted += steps(table, 9, MS, MS) + steps(table, 1, MS, 3 * MS // 2)
    assert doubted == STEADY + 1  # the one among the first sixteen does not count, and does not undo the others


def test_a_graph_that_changes_by_less_than_double_each_time_is_never_believed() -> None:
    assert steps(Graphs(), 1000, MS, 3 * MS // 2) == 1000


def test_who_had_a_sample_spoilt_now_and_then_is_believed_again_each_time() -> None:
    """The host stands still between a sample's events once in so many launches, which looks like a change."""
    table = Graphs()
    doubted = 0
    for _ in range(100):
        doubted += steps(table, 1000, MS, MS) + steps(table, 1, MS, 10 * MS) + steps(table, 1, UNKNOWN_NS, MS)
    assert doubted < 100 * 1002 / 20


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
    trifles, now_ns = SmallTransferBudget(), 10**12
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
    trifles = SmallTransferBudget()
    assert all(trifles.passes(10**12 + i * PAYS_NS) for i in range(1000))


@given(st.integers(0, 1 << 50))
def test_sizes_of_a_class_differ_by_less_than_a_quarter(size_bytes: int) -> None:
    assert size_class(size_bytes) <= size_class(size_bytes + 1) <= size_class(size_bytes) + 1
    assert size_class(size_bytes) < size_class(size_bytes + size_bytes // 4 + 1)
