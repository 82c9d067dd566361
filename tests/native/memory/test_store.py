"""Whose each block of a store is, against a model; under a race, and with owners killed in the middle of it; and the
page."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from mmap import mmap

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.pages.page import PageError
from cython_ext.pages.relaypage import RelayPage
from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.testing.bindings_memory import STORE_HEADER_BYTES, Blocks

NAMES = [(1, 1), (1, 2), (4_194_303, 1 << 39), (2, 0)]


def blocks_of(count: int) -> tuple[mmap, Blocks]:
    memory = mmap(-1, STORE_HEADER_BYTES + 8 * count)
    return memory, Blocks(memory)


class Owners(RuleBasedStateMachine):
    """Each block is at most one's; what is taken is the first that is free, or reserved, within what was asked for."""

    COUNT = 12

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.blocks = blocks_of(self.COUNT)
        self.owners: dict[int, tuple[int, int]] = {}
        self.reserved: set[int] = set()

    @rule(name=st.sampled_from(NAMES), block=st.integers(0, COUNT - 1))
    def reserve(self, name: tuple[int, int], block: int) -> None:
        assert self.blocks.reserve(*name, block) == (block not in self.owners)
        if block not in self.owners:
            self.owners[block] = name
            self.reserved.add(block)

    @rule(name=st.sampled_from(NAMES), own=st.booleans(), begin=st.integers(0, COUNT), end=st.integers(0, COUNT))
    def take_reserved(self, name: tuple[int, int], own: bool, begin: int, end: int) -> None:
        found = [i for i in range(begin, end) if i in self.reserved and (self.owners[i] == name) == own]
        block = self.blocks.take_reserved(*name, own, begin, end)
        assert block == (found[0] if found else -1)
        if found:
            self.owners[block] = name
            self.reserved.discard(block)

    @rule(name=st.sampled_from(NAMES), begin=st.integers(0, COUNT), end=st.integers(0, COUNT))
    def take(self, name: tuple[int, int], begin: int, end: int) -> None:
        free = [i for i in range(begin, end) if i not in self.owners]
        block = self.blocks.take(*name, begin, end)
        assert block == (free[0] if free else -1)
        if free:
            self.owners[block] = name

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99))
    def give(self, choice: int) -> None:
        block = list(self.owners)[choice % len(self.owners)]
        self.blocks.give(block)
        del self.owners[block]
        self.reserved.discard(block)

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: tuple[int, int]) -> None:
        mine = [block for block, owner in self.owners.items() if owner == name]
        assert self.blocks.give_all(*name) == len(mine)
        for block in mine:
            del self.owners[block]
            self.reserved.discard(block)

    @invariant()
    def words_are_names(self) -> None:
        words = memoryview(self.memory)[STORE_HEADER_BYTES:].cast("Q")
        assert {i for i, word in enumerate(words) if word} == set(self.owners)
        kinds = {(name, block in self.reserved) for block, name in self.owners.items()}
        assert len({words[i] for i in self.owners}) == len(kinds)
        assert {i for i in range(self.COUNT) if self.blocks.is_used(i)} == self.owners.keys() - self.reserved


TestOwners = Owners.TestCase


def take_and_give(memory: mmap, name: tuple[int, int], rounds: int) -> None:
    """Writes its number where it has a block, and finds it there."""
    blocks = Blocks(memory)
    held: list[int] = []
    for at in range(rounds):
        block = blocks.take(*name, 0, len(blocks))
        if block >= 0:
            held.append(block)
        if block < 0 or at % 3 == 0:
            for mine in held:
                blocks.give(mine)
            held.clear()
    for mine in held:
        blocks.give(mine)


def test_processes_that_race_for_blocks_and_are_killed_lose_none() -> None:
    count = 40
    memory, blocks = blocks_of(count)
    context = multiprocessing.get_context("fork")
    for victim in range(12):
        workers = {
            (pid, 7): context.Process(target=take_and_give, args=(memory, (pid, 7), 1 << 30)) for pid in range(1, 5)
        }
        for worker in workers.values():
            worker.start()
        time.sleep(0.01 + victim / 1000)
        for name, worker in workers.items():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
            blocks.give_all(*name)
        got = [blocks.take(9, 9, 0, count) for _ in range(count)]
        assert sorted(got) == list(range(count))
        assert blocks.give_all(9, 9) == count


def test_those_that_end_well_leave_nothing() -> None:
    memory, _ = blocks_of(64)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=take_and_give, args=(memory, (pid, 1), 20_000)) for pid in range(1, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not any(memory[STORE_HEADER_BYTES:])


# --- the page


def test_a_store_gets_its_memory_segment_by_segment() -> None:
    with StorePage.create(STORE_SEGMENT_BLOCKS + 1) as store:
        size = os.fstat(store.fileno())
        assert (store.blocks, store.ready) == (2 * STORE_SEGMENT_BLOCKS, 0)
        assert size.st_blocks * 512 < STORE_BLOCK_BYTES  # a header, and nothing behind it
        assert store.grow(1) == store.ready == STORE_SEGMENT_BLOCKS
        assert os.fstat(store.fileno()).st_blocks * 512 >= STORE_SEGMENT_BLOCKS * STORE_BLOCK_BYTES
        assert store.grow(1 << 20) == STORE_SEGMENT_BLOCKS
        assert store.grow(1) == 0


@pytest.mark.parametrize("threads", [1, 3, 200])
def test_several_threads_get_all_of_it(threads: int) -> None:
    with StorePage.create(3 * STORE_SEGMENT_BLOCKS) as store:
        assert store.grow(3 * STORE_SEGMENT_BLOCKS, threads) == store.blocks
        assert os.fstat(store.fileno()).st_blocks * 512 >= store.blocks * STORE_BLOCK_BYTES
        with pytest.raises(ValueError, match="blocks 0 to 193 of 192"):
            store.touch(0, store.blocks + 1)


def test_another_server_finds_who_has_what() -> None:
    with StorePage.create(STORE_SEGMENT_BLOCKS) as store:
        store.grow(1)
        blocks = Blocks(mmap(store.fileno(), STORE_HEADER_BYTES + 8 * store.blocks))
        for _ in range(3):
            blocks.take(5, 77, 0, 9)
        blocks.take(6, 77, 0, 9)
        with StorePage.map(store.fileno()) as found:
            assert (found.blocks, found.ready) == (store.blocks, store.ready)
            assert found.owners(0, 9) == ({(5, 77), (6, 77)}, 0)
            assert found.give_back([(5, 77), (7, 77)]) == 3
            assert (found.used, store.used) == (1, 1)
            assert found.owners(7, 9) == store.owners(7, 9) == ({(6, 77)}, 7)


def test_a_server_believes_what_memory_there_is_and_not_what_stands_in_the_page() -> None:
    """Else a program of the user could have it that others' memory is not given, or that there is no limit."""
    with StorePage.create(3 * STORE_SEGMENT_BLOCKS) as store:
        store.grow(1)
        page = mmap(store.fileno(), STORE_HEADER_BYTES)
        told = memoryview(page).cast("I")
        at = 1 + list(told).index(store.blocks)
        told[at] = 3 * STORE_SEGMENT_BLOCKS
        assert store.ready == STORE_SEGMENT_BLOCKS
        with StorePage.map(store.fileno()) as found:
            assert found.ready == told[at] == STORE_SEGMENT_BLOCKS
        told[at] = 0
        assert store.grow(1) == STORE_SEGMENT_BLOCKS
        assert store.ready == told[at] == 2 * STORE_SEGMENT_BLOCKS


def test_names_without_end_are_looked_at_a_few_at_a_time() -> None:
    with StorePage.create(STORE_SEGMENT_BLOCKS) as store:
        blocks = Blocks(mmap(store.fileno(), STORE_HEADER_BYTES + 8 * store.blocks))
        for pid in range(store.blocks):
            blocks.take(pid + 1, 7, 0, store.blocks)
        assert store.used == store.blocks
        seen, begin = set(), 5
        for _ in range(4):
            names, begin = store.owners(begin, 16)
            assert len(names) == 16
            assert not seen & names
            seen |= names
        assert seen == {(pid + 1, 7) for pid in range(store.blocks)}
        assert begin == 5


def test_those_that_are_no_more_give_back_what_is_theirs_and_nothing_else() -> None:
    with StorePage.create(STORE_SEGMENT_BLOCKS) as store:
        blocks = Blocks(mmap(store.fileno(), STORE_HEADER_BYTES + 8 * store.blocks))
        for k in range(40):
            blocks.take(1 + k % 8, 7, 0, store.blocks)
        assert store.give_back([(pid, 7) for pid in range(2, 9)]) == 35
        assert store.owners(0, 99)[0] == {(1, 7)}
        assert store.give_back([]) == 0
        assert store.used == 5


def test_a_store_in_which_nothing_is_gives_its_memory_back() -> None:
    with StorePage.create(2 * STORE_SEGMENT_BLOCKS) as store:
        store.grow(store.blocks)
        blocks = Blocks(mmap(store.fileno(), STORE_HEADER_BYTES + 8 * store.blocks))
        last = store.blocks - 1
        assert blocks.take(5, 77, last, store.blocks) == last
        assert not store.clear(9, 9)
        assert (store.ready, store.owners(0, 9)[0]) == (store.blocks, {(5, 77)})
        blocks.give(last)
        assert store.clear(9, 9)
        assert (store.ready, store.used) == (0, 0)
        assert os.fstat(store.fileno()).st_blocks * 512 < STORE_BLOCK_BYTES
        assert store.grow(1) == store.ready == STORE_SEGMENT_BLOCKS


@pytest.mark.parametrize("blocks", [0, -1, 1 << 40])
def test_a_size_that_makes_no_sense_is_refused(blocks: int) -> None:
    with pytest.raises(ValueError, match="a store has"):
        StorePage.create(blocks)


def test_what_is_no_store_is_refused() -> None:
    with RelayPage.create() as page, pytest.raises(PageError):
        StorePage.map(page.fileno())


def test_what_a_user_writes_into_the_header_does_not_lead_the_server_astray() -> None:
    with StorePage.create(STORE_SEGMENT_BLOCKS) as store:
        words = memoryview(mmap(store.fileno(), STORE_HEADER_BYTES)).cast("I")
        header = STORE_HEADER_BYTES // 4
        for at in range(6, header):  # behind magic, size, versions and features
            words[at] = 0xFFFFFFFF
        assert store.blocks == STORE_SEGMENT_BLOCKS
        assert store.ready <= store.blocks
        with StorePage.map(store.fileno()) as found:
            assert found.blocks == store.blocks
            assert found.owners(0, 9) == (set(), 0)
