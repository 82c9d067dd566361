"""Small allocations within arenas, against the list of what is taken."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing.bindings_memory import ARENA_BYTES, UNIT_BYTES, Arenas

BASE = 0x7F00_0000_0000
sizes = st.one_of(
    st.integers(1, 4 * UNIT_BYTES),
    st.integers(1, ARENA_BYTES),
    st.integers(1, 64).map(lambda n: n * 64 * UNIT_BYTES),  # whole words of the bitmap
    st.just(ARENA_BYTES),
)


class Owner(RuleBasedStateMachine):
    """Who allocates: an arena more is made where none has room, and goes with the last block in it."""

    def __init__(self) -> None:
        super().__init__()
        self.arenas = Arenas()
        self.bases: set[int] = set()
        self.blocks: dict[int, int] = {}
        self.made = 0

    def taken_in(self, base: int) -> list[tuple[int, int]]:
        return sorted(
            (at, at + -(-size // UNIT_BYTES) * UNIT_BYTES)
            for at, size in self.blocks.items()
            if base <= at < base + ARENA_BYTES
        )

    def has_room(self, size: int) -> bool:
        for base in self.bases:
            end = base
            for start, after in [*self.taken_in(base), (base + ARENA_BYTES, 0)]:
                if start - end >= size:
                    return True
                end = after
        return False

    @rule(size=sizes)
    def allocate(self, size: int) -> None:
        address = self.arenas.take(size)
        assert bool(address) == self.has_room(size)
        if not address:
            base = BASE + 7 * self.made * ARENA_BYTES
            self.made += 1
            assert self.arenas.add(base)
            self.bases.add(base)
            address = self.arenas.take(size)
            assert address == base
        self.blocks[address] = size

    @precondition(lambda self: self.blocks)
    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: object) -> None:
        address = choice.choice(sorted(self.blocks))  # type: ignore[attr-defined]
        base = next(base for base in self.bases if base <= address < base + ARENA_BYTES)
        emptied = self.arenas.give(address, self.blocks.pop(address))
        assert emptied == (not self.taken_in(base))
        if emptied:
            self.bases.remove(base)

    @invariant()
    def blocks_are_aligned_within_arenas_and_apart(self) -> None:
        assert len(self.arenas) == len(self.bases)
        used = 0
        for base in self.bases:
            end = base
            for start, after in self.taken_in(base):
                assert start % UNIT_BYTES == 0
                assert end <= start
                used += after - start
                end = after
            assert end <= base + ARENA_BYTES
        assert self.arenas.free_bytes() == len(self.bases) * ARENA_BYTES - used


TestOwner = Owner.TestCase


def test_what_was_never_taken_is_no_arenas() -> None:
    assert not Arenas().give(BASE, 1)


def test_many_arenas_are_kept_apart() -> None:
    arenas = Arenas()
    bases = [BASE + n * ARENA_BYTES for n in range(300)]
    for base in bases:
        assert arenas.add(base)
        assert arenas.take(ARENA_BYTES) == base
    assert arenas.take(1) == 0
    assert all(arenas.give(base, ARENA_BYTES) for base in bases[::2])
    assert len(arenas) == 150
    assert not any(arenas.give(base, ARENA_BYTES) for base in bases[::2])
    assert all(arenas.give(base, ARENA_BYTES) for base in bases[1::2])
    assert len(arenas) == 0
