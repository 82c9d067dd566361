"""What allocations take from the card, against the set of pieces that small ones touch and large ones have."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing.bindings_memory import PIECE_BYTES, SMALL_BYTES, Pieces, pieces_for, pieces_for_rows

BASE = 0x7F00_0000_0000


class Card(RuleBasedStateMachine):
    """Small allocations anywhere, large ones where a piece begins, never on top of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = Pieces()
        self.small: dict[int, int] = {}
        self.large: dict[int, int] = {}
        self.charged = 0

    def touched(self) -> set[int]:
        return {
            piece
            for address, size in self.small.items()
            for piece in range(address // PIECE_BYTES, (address + size - 1) // PIECE_BYTES + 1)
        }

    @rule(
        address=st.integers(0, 16 * 512).map(lambda n: BASE + n * (PIECE_BYTES // 512)),
        size=st.one_of(st.integers(1, SMALL_BYTES), st.just(SMALL_BYTES), st.integers(1, 5000)),
    )
    def allocate_small(self, address: int, size: int) -> None:
        if any(address < at + other and at < address + size for at, other in self.small.items()):
            return
        self.charged += self.pieces.take(address, size)
        self.small[address] = size

    @rule(piece=st.integers(20, 30), size=st.integers(SMALL_BYTES + 1, 4 * PIECE_BYTES))
    def allocate_large(self, piece: int, size: int) -> None:
        address = BASE + 16 * piece * PIECE_BYTES
        if address not in self.large:
            self.charged += self.pieces.take(address, size)
            self.large[address] = size

    @precondition(lambda self: self.small or self.large)
    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: object) -> None:
        address = choice.choice(sorted(self.small | self.large))  # type: ignore[attr-defined]
        blocks = self.small if address in self.small else self.large
        self.charged -= self.pieces.give(address, blocks.pop(address))

    @precondition(lambda self: self.small)
    @rule(choice=st.randoms(use_true_random=False))
    def take_again_before_it_was_given(self, choice: object) -> None:
        """Another thread is given an address that the driver has back and we have not heard of yet."""
        address = choice.choice(sorted(self.small))  # type: ignore[attr-defined]
        self.charged += self.pieces.take(address, self.small[address])
        self.charged -= self.pieces.give(address, self.small[address])

    @invariant()
    def charged_is_what_is_touched(self) -> None:
        large = sum(pieces_for(size) for size in self.large.values())
        assert self.charged == PIECE_BYTES * len(self.touched()) + large

    @invariant()
    def room_is_what_is_left_of_the_pieces_that_small_ones_have(self) -> None:
        assert self.pieces.room_bytes == PIECE_BYTES * len(self.touched()) - sum(self.small.values())
        assert self.small or len(self.pieces) == 0


TestCard = Card.TestCase


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        (0, 0),
        (1, PIECE_BYTES),
        (PIECE_BYTES, PIECE_BYTES),
        (PIECE_BYTES + 1, 2 * PIECE_BYTES),
        (2**64 - 2 * PIECE_BYTES, 2**64 - 2 * PIECE_BYTES),
        (2**64 - PIECE_BYTES, 2**64 - 1),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_what_an_allocation_takes_alone(size: int, bytes_: int) -> None:
    assert pieces_for(size) == bytes_


def test_nothing_takes_nothing() -> None:
    pieces = Pieces()
    assert (pieces.take(BASE, 0), pieces.give(BASE, 0), len(pieces)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("row", "rows", "bytes_"),
    [
        (100, 100_000, 50 << 20),
        (1, 100_000_000, pieces_for(512 * 100_000_000)),
        (512, 4096, PIECE_BYTES),
        (0, 5, 0),
        (5, 0, 0),
        (2**32, 2**32, 2**64 - 1),
        (2**64 - 1, 1, 2**64 - 1),
    ],
)
def test_rows_are_made_longer(row: int, rows: int, bytes_: int) -> None:
    assert pieces_for_rows(row, rows, 512) == bytes_
