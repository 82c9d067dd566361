"""Books of memory pools: what allocations that overlap in time leave in the ledger."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cython_ext.testing import bindings_memory as native

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
    """A pool, its book, and the ledger's two words for it. Each allocation is begun, made by the driver, and answered;
    in between, others are."""

    def __init__(self) -> None:
        super().__init__()
        self.book = native.PoolBook()
        self.taken = self.used = 0
        self.reserved = self.committed = 0
        self.told = 0
        """What it had taken when it was settled last."""
        self.claims: list[int] = []
        self.uncounted = 0
        """Freed, and still said to be used."""
        self.beyond = self.unasked = 0

    asked = Bundle("asked")
    """Sizes of allocations that are begun, and not made yet."""
    made = Bundle("made")
    """Of those that are made, and not answered yet."""
    owned = Bundle("owned")

    @rule(target=asked, mib=st.integers(1, 70))
    def begin(self, mib: int) -> int:
        size = mib * MIB
        self.settle()
        growth = self.book.growth(self.taken, self.book.used(self.taken, self.used + self.uncounted), size)
        self.reserved += growth
        self.book.begin(growth, size)
        self.claims.append(size)
        return size

    @rule(target=made, size=consumes(asked), pieces=st.sampled_from([0, 0, 0, 1]))
    def make(self, size: int, pieces: int) -> int:
        """``pieces``: the driver finds no room, though there is some."""
        before = self.taken
        needed = self.used + size
        if needed > self.taken:
            self.taken += -(-(needed - self.taken) // STEP) * STEP
        self.taken += pieces * STEP
        self.unasked += pieces * STEP
        assert self.taken >= before
        self.used += size
        return size

    @rule(target=owned, size=consumes(made))
    def answer(self, size: int) -> int:
        self.claims.remove(size)
        self.book.end(size)
        self.settle()
        return size

    @rule(size=consumes(asked))
    def fail(self, size: int) -> None:
        self.claims.remove(size)
        self.book.end(size)
        self.settle()

    @rule(size=consumes(owned))
    def free(self, size: int) -> None:
        self.used -= size

    @rule(size=consumes(owned), quirk=st.booleans())
    def free_plainly(self, size: int, quirk: bool) -> None:
        """``quirk``: the driver goes on saying that it is used."""
        before = self.used + self.uncounted
        self.used -= size
        self.uncounted += size if quirk else 0
        self.book.freed(before, self.used + self.uncounted, size)

    @rule()
    def trim(self) -> None:
        """What nobody uses or is about to goes back to the card."""
        self.taken = min(self.taken, self.used + sum(self.claims))
        self.settle()

    @rule()
    def settle(self) -> None:
        used = self.book.used(self.taken, self.used + self.uncounted)
        assert used == self.used
        commit, beyond, cancel, release = self.book.settle(self.taken, used)
        assert commit + cancel <= self.reserved
        assert release <= self.committed
        assert release == 0 or commit + beyond == 0
        self.reserved -= commit + cancel
        self.committed += commit + beyond - release
        self.beyond += beyond
        self.told = self.taken

    @invariant()
    def charged_is_what_it_had_when_it_was_asked(self) -> None:
        assert self.book.words == (self.committed, self.reserved, sum(self.claims))
        assert self.committed == self.told

    @invariant()
    def nothing_is_reserved_for_nobody(self) -> None:
        assert self.reserved == 0 or self.claims

    @invariant()
    def nobody_pays_beyond_what_was_reserved_unless_the_room_was_in_pieces(self) -> None:
        assert self.beyond <= self.unasked


TestPool = Pool.TestCase
