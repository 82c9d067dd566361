"""The allocation table against a dict."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from cython_ext.testing import bindings_memory as native


class TableTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = native.Allocations()
        self.blocks: dict[int, tuple[int, int, int]] = {}

    addresses = Bundle("addresses")

    @rule(
        target=addresses,
        address=st.one_of(st.integers(1, 2**64 - 1), st.integers(1, 2**20).map(lambda page: page << 21)),
    )
    def address(self, address: int) -> int:
        return address

    @rule(
        target=addresses,
        base=st.integers(1, 2**40),
        count=st.integers(1, 700),
        step=st.sampled_from([1, 256, 512, 2**21]),
    )
    def insert_run(self, base: int, count: int, step: int) -> object:
        """Neighbours, as an allocator hands them out; enough to make the table grow."""
        for i in range(count):
            assert self.table.insert(base + i * step, i)
            self.blocks[base + i * step] = (i, 0, 0)
        return multiple(base, base + (count - 1) * step)

    @rule(address=addresses, size=st.integers(0, 2**64 - 1), kind=st.integers(0, 7), aux=st.integers(0, 2**64 - 1))
    def insert(self, address: int, size: int, kind: int, aux: int) -> None:
        assert self.table.insert(address, size, kind, aux)
        self.blocks[address] = (size, kind, aux)

    @rule(address=addresses)
    def remove(self, address: int) -> None:
        assert self.table.remove(address) == self.blocks.pop(address, None)

    @rule(stride=st.integers(2, 5))
    def remove_many(self, stride: int) -> None:
        for address in list(self.blocks)[::stride]:
            assert self.table.remove(address) == self.blocks.pop(address)

    @rule(address=addresses, offset=st.sampled_from([0, 0, 1, -1, 256]))
    def find(self, address: int, offset: int) -> None:
        wanted = (address + offset) % 2**64
        assert self.table.find(wanted) == self.blocks.get(wanted)

    @invariant()
    def same_size_and_room_left(self) -> None:
        assert len(self.table) == len(self.blocks)
        assert 4 * len(self.table) <= 3 * self.table.capacity

    def teardown(self) -> None:
        assert all(self.table.find(address) == block for address, block in self.blocks.items())


TestTableTwin = TableTwin.TestCase
TestTableTwin.settings = settings(max_examples=min(40, settings().max_examples))


def test_address_zero_is_no_block() -> None:
    table = native.Allocations()
    assert table.find(0) is None
    assert not table.insert(0, 1)
    assert table.remove(0) is None
    assert len(table) == 0


def test_probes_stay_short_at_a_hundred_thousand_blocks() -> None:
    """In every order of coming and going: deletion leaves no tombstones behind that would make them longer."""
    table = native.Allocations()
    step = 512
    for n in range(100_000):
        table.insert((n + 1) * step, n)
    for turn in range(3):
        for n in range(turn, 100_000, 3):
            assert table.remove((n + 1) * step) == (n, 0, 0)
            assert table.insert((n + 1) * step, n)
    assert len(table) == 100_000
    assert table.capacity == 2**18
    assert table.longest_probe() <= 24
