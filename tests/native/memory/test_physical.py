"""The book of a program's physical memory, against lists of its handles and mappings."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing.bindings_memory import PhysicalBook

PIECE = 2 << 20
CHUNK = 8 * PIECE
PLACES = 40


@dataclass
class Memory:
    size: int
    chunk: int
    references: int = 1
    mapped: set[int] = field(default_factory=set)


class Book(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = PhysicalBook()
        self.memory: dict[int, Memory] = {}
        self.made = 0

    def free(self, pieces: int) -> list[int]:
        """Where so many pieces have room."""
        taken = {
            at // PIECE + i
            for memory in self.memory.values()
            for at in memory.mapped
            for i in range(memory.size // PIECE)
        }
        return [at * PIECE for at in range(1, PLACES) if not taken & {*range(at, at + pieces)}]

    @rule(pieces=st.integers(1, 20), whole=st.booleans())
    def is_made(self, pieces: int, whole: bool) -> None:
        self.made += 1
        handle, size = (self.made << 40), pieces * PIECE
        assert self.book.add(handle, size, size if whole else CHUNK)
        self.memory[handle] = Memory(size, size if whole else CHUNK)

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def is_released(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.memory)))
        memory = self.memory[handle]
        if memory.references == 0:
            assert self.book.release(handle) is None
            return
        memory.references -= 1
        goes = memory.references == 0 and not memory.mapped
        assert self.book.release(handle) is goes
        if goes:
            del self.memory[handle]

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def is_mapped(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.memory)))
        memory = self.memory[handle]
        places = self.free(memory.size // PIECE)
        if places:
            at = data.draw(st.sampled_from(places))
            assert self.book.map(handle, at)
            memory.mapped.add(at)

    @rule(data=st.data())
    def is_unmapped(self, data: st.DataObject) -> None:
        mapped = {at: handle for handle, memory in self.memory.items() for at in memory.mapped}
        at = data.draw(st.sampled_from([*sorted(mapped), PLACES * PIECE]))
        if at not in mapped:
            assert self.book.unmap(at) is None
            return
        handle = mapped[at]
        memory = self.memory[handle]
        memory.mapped.remove(at)
        goes = memory.references == 0 and not memory.mapped
        assert self.book.unmap(at) == (handle, goes)
        if goes:
            del self.memory[handle]

    @rule(at=st.integers(0, PLACES), inside=st.integers(0, PIECE - 1), pieces=st.integers(0, 8))
    def is_asked(self, at: int, inside: int, pieces: int) -> None:
        mappings = [(begin, memory.size, handle) for handle, memory in self.memory.items() for begin in memory.mapped]
        address = at * PIECE + inside
        assert self.book.around(address) == next((m for m in mappings if m[0] <= address < m[0] + m[1]), None)
        end = at * PIECE
        while end < (at + pieces) * PIECE and (size := next((m[1] for m in mappings if m[0] == end), 0)):
            end += size
        assert self.book.is_whole(at * PIECE, pieces * PIECE) is (pieces > 0 and end == (at + pieces) * PIECE)

    @invariant()
    def all_of_it_is_known(self) -> None:
        assert len(self.book) == len(self.memory)
        for handle, memory in self.memory.items():
            assert {*self.book.mapped(handle)} == memory.mapped
            chunks = self.book.chunks(handle)
            assert chunks is not None
            assert sum(chunks) == memory.size
            assert {*chunks[:-1]} <= {memory.chunk}


TestBook = Book.TestCase
