"""Books of memory pools: what allocations that overlap in time leave in the ledger."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cython_ext import nativememory as native

MIB = 1 << 20
STEP = native.POOL_STEP


@pytest.mark.parametrize(
    ("taken", "used", "claimed", "size", "growth"),
    [
        (0, 0, 0, 1, STEP),
        (0, 0, 0, STEP + 1, 2 * STEP),
        (STEP, STEP - 5, 0, 5, 0),
        (STEP, STEP - 5, 0, 6, STEP),
        (STEP, STEP - 5, 1, 5, STEP),
        (5 * STEP, STEP, 0, 4 * STEP, 0),
        (0, 7, 0, 7, STEP),  # read between two changes of the pool
    ],
)
def test_growth_is_whole_steps_beyond_the_room(taken: int, used: int, claimed: int, size: int, growth: int) -> None:
    book = native.PoolBook()
    book.begin(0, claimed)
    assert book.growth(taken, used, size) == growth


class Pool(RuleBasedStateMachine):
    """A pool, its book, and the ledger's two words for it. The driver grows the pool at any time in an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.book = native.PoolBook()
        self.taken = self.reserved = self.committed = 0
        self.under_way: list[int] = []
        self.told = 0
        """What it had taken when it was settled last."""
        self.beyond = self.unasked = 0

    asked = Bundle("asked")
    """Allocations that the driver has not answered: (reserved, what the pool still grows by in it)."""

    @rule(target=asked, reserved=st.integers(0, 3), grows=st.integers(0, 4))
    def begin(self, reserved: int, grows: int) -> list[int]:
        reserved *= STEP
        self.reserved += reserved
        self.book.begin(reserved, reserved + 1)
        self.under_way.append(reserved)
        self.unasked += max(0, grows * STEP - reserved)
        return [reserved, grows * STEP]

    @rule(allocation=asked)
    def grow(self, allocation: list[int]) -> None:
        """In the driver; others may settle before this one does."""
        self.taken += allocation[1]
        allocation[1] = 0

    @rule(allocation=consumes(asked))
    def answer(self, allocation: list[int]) -> None:
        self.taken += allocation[1]
        self.under_way.remove(allocation[0])
        self.book.end(allocation[0], allocation[0] + 1)
        self.settle()

    @rule(part=st.integers(0, 4))
    def shrink(self, part: int) -> None:
        self.taken -= self.taken * part // 4 // STEP * STEP
        self.settle()

    def settle(self) -> None:
        commit, beyond, cancel, release = self.book.settle(self.taken)
        assert commit + cancel <= self.reserved
        assert release <= self.committed
        assert release == 0 or commit + beyond == 0
        self.reserved -= commit + cancel
        self.committed += commit + beyond - release
        self.beyond += beyond
        self.told = self.taken

    @invariant()
    def charged_is_what_it_had_when_it_was_asked(self) -> None:
        asked = sum(self.under_way)
        assert self.book.words == (self.committed, self.reserved, asked, asked + len(self.under_way))
        assert self.committed == self.told

    @invariant()
    def nothing_is_reserved_for_nobody(self) -> None:
        assert self.reserved <= sum(self.under_way)

    @invariant()
    def who_reserves_enough_pays_for_nothing_beyond(self) -> None:
        assert self.beyond <= self.unasked


TestPool = Pool.TestCase
