"""What allocations take from the card, against the set of pieces that they touch."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.nativememory import PIECE_BYTES, Pieces, pieces_for

BASE = 0x7F00_0000_0000


class Card(RuleBasedStateMachine):
    """Allocations anywhere, never on top of each other: the twin knows which piece has which of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = Pieces()
        self.blocks: dict[int, int] = {}
        self.charged = 0

    def touched(self) -> set[int]:
        return {
            piece
            for address, size in self.blocks.items()
            for piece in range(address // PIECE_BYTES, (address + size - 1) // PIECE_BYTES + 1)
        }

    @rule(
        address=st.integers(0, 16 * 512).map(lambda n: BASE + n * (PIECE_BYTES // 512)),
        size=st.one_of(
            st.integers(1, 4 * PIECE_BYTES), st.integers(1, 4).map(lambda n: n * PIECE_BYTES), st.integers(1, 5000)
        ),
    )
    def allocate(self, address: int, size: int) -> None:
        if any(address < at + other and at < address + size for at, other in self.blocks.items()):
            return
        self.charged += self.pieces.take(address, size)
        self.blocks[address] = size

    @precondition(lambda self: self.blocks)
    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: object) -> None:
        address = choice.choice(sorted(self.blocks))  # type: ignore[attr-defined]
        self.charged -= self.pieces.give(address, self.blocks.pop(address))

    @invariant()
    def charged_is_what_is_touched(self) -> None:
        assert self.charged == PIECE_BYTES * len(self.touched())

    @invariant()
    def room_is_what_is_left_of_the_pieces_touched(self) -> None:
        assert self.pieces.room_bytes == PIECE_BYTES * len(self.touched()) - sum(self.blocks.values())
        assert self.blocks or len(self.pieces) == 0


TestCard = Card.TestCase


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        (0, 0),
        (1, PIECE_BYTES),
        (PIECE_BYTES, PIECE_BYTES),
        (PIECE_BYTES + 1, 2 * PIECE_BYTES),
        (2**64 - 2 * PIECE_BYTES, 2**64 - 2 * PIECE_BYTES),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_what_an_allocation_takes_alone(size: int, bytes_: int) -> None:
    assert pieces_for(size) == bytes_


def test_nothing_takes_nothing() -> None:
    pieces = Pieces()
    assert (pieces.take(BASE, 0), pieces.give(BASE, 0), len(pieces)) == (0, 0, 0)
