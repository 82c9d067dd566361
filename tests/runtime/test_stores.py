"""Whose host memory is taken back, and when; and that no store's memory is forgotten while programs have it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from mmap import mmap
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.testing.bindings_memory import STORE_HEADER_BYTES, Blocks
from gpuserver.core.states.residency import HostMemory
from gpuserver.runtime.lifecycle.reports import BrokerReports
from gpuserver.runtime.memory.stores import SWEEP_MOST, USED_UP, Stores
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.identity import Process
from vgpu.protocol.broker import Reaped
from vgpu.protocol.peer import start_time

UID = 4711
SEGMENT_BYTES = STORE_SEGMENT_BLOCKS * STORE_BLOCK_BYTES


class Program:
    def __init__(self) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.process = Process(self.popen.pid, start_time(self.popen.pid))

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def program() -> Iterator[Program]:
    started = Program()
    yield started
    started.end()


def blocks_of(stores: Stores) -> Blocks:
    store = stores.of(UID)
    return Blocks(mmap(store.fileno(), STORE_HEADER_BYTES + 8 * store.blocks))


def takes(stores: Stores, process: Process, count: int = 3) -> None:
    blocks = blocks_of(stores)
    for _ in range(count):
        assert blocks.take(process.pid, process.start_time, 0, stores.of(UID).blocks) >= 0


def test_blocks_of_one_that_was_killed_are_its_own_until_the_driver_has_let_it_go(program: Program) -> None:
    stores = Stores(SEGMENT_BYTES)
    takes(stores, program.process)
    pid = program.process.pid
    stores.sweep(1, {pid})
    stores.sweep(9, {pid})
    assert stores.used_bytes == 3 * STORE_BLOCK_BYTES
    program.end()
    # the last reading may have begun before it ended, whether it shows the program or not
    for readings, shown in ((9, set()), (10, set()), (11, {pid}), (12, {pid})):
        stores.sweep(readings, shown)
        assert stores.used_bytes == 3 * STORE_BLOCK_BYTES
    stores.sweep(13, set())
    assert stores.used_bytes == 0


def test_what_is_told_of_is_free_at_once(program: Program) -> None:
    stores = Stores(SEGMENT_BYTES)
    takes(stores, program.process)
    program.end()
    stores.release(program.process)
    assert stores.used_bytes == 0


@pytest.mark.parametrize("attached", [True, False])
def test_who_was_replaced_under_the_same_name_loses_nothing_of_what_it_has_now(
    program: Program, *, attached: bool
) -> None:
    stores, process = Stores(SEGMENT_BYTES), program.process
    takes(stores, process)
    others = {"other": SimpleNamespace(programs=(process,) if attached else ())}
    memory = SimpleNamespace(reaped=lambda vgpu, slot: process)
    state = SimpleNamespace(
        vgpus=others,
        facts=SimpleNamespace(total_memory_bytes=80 << 30),
        record_event=lambda *_, **__: None,
    )
    vgpu = SimpleNamespace(members={})
    message = Reaped(slot=0, pid=process.pid, released_bytes=0)
    reports = BrokerReports(cast(GpuState, state), cast(MemoryWatch, memory), stores)
    reports.reaped(cast(Vgpu, vgpu), message)
    assert stores.used_bytes == (3 * STORE_BLOCK_BYTES if attached else 0)
    program.end()
    for readings in range(3):
        stores.sweep(readings, set())
    assert stores.used_bytes == 0


def test_names_that_nobody_has_go_a_few_at_a_time_and_hide_nobody(program: Program) -> None:
    """A tenant may write whatever it likes."""
    stores = Stores(4 * SEGMENT_BYTES)
    for number in range(3 * SWEEP_MOST):
        takes(stores, Process(1 << 21, number + 1), 1)
    takes(stores, program.process)
    for round_ in range(4):
        before = stores.used_bytes
        stores.sweep(2 * round_, set())
        assert before - stores.used_bytes <= SWEEP_MOST * STORE_BLOCK_BYTES
    for round_ in range(4, 12):
        stores.sweep(2 * round_, set())
    assert stores.used_bytes == 3 * STORE_BLOCK_BYTES
    program.end()
    for round_ in range(12, 15):
        stores.sweep(2 * round_, set())
    assert stores.used_bytes == 0


def test_what_a_user_without_programs_had_another_can_have(program: Program) -> None:
    stores = Stores(2 * SEGMENT_BYTES)
    assert not trio.run(stores.have, UID, 2 * SEGMENT_BYTES)
    takes(stores, program.process)
    assert trio.run(stores.have, UID + 1, 1) == stores.lacks(UID + 1, 1) == USED_UP
    trio.run(stores.give_back, set())  # something is in it
    trio.run(stores.give_back, {UID})
    assert stores.ready_bytes == 2 * SEGMENT_BYTES
    assert stores.host == HostMemory(2 * SEGMENT_BYTES, {UID: 2 * SEGMENT_BYTES, UID + 1: 0})
    program.end()
    stores.release(program.process)
    trio.run(stores.give_back, {UID})  # nothing is in it, but somebody may have it pinned
    assert trio.run(stores.have, UID + 1, 1) == USED_UP
    trio.run(stores.give_back, set())
    assert (stores.ready_bytes, stores.used_bytes) == (0, 0)
    assert not trio.run(stores.have, UID + 1, 1)
    assert stores.ready_bytes == SEGMENT_BYTES  # as much as is needed, in segments


def test_programs_whose_vgpu_was_removed_have_the_store_pinned(program: Program) -> None:
    stores = Stores(SEGMENT_BYTES)
    stores.of(UID).grow(1)
    stores.leave(UID, [program.process])
    trio.run(stores.give_back, set())
    assert stores.ready_bytes == SEGMENT_BYTES
    program.end()
    trio.run(stores.give_back, set())
    assert stores.ready_bytes == 0


def test_a_store_of_before_that_came_late_is_emptied_once_nothing_is_in_it(program: Program) -> None:
    """Server and one broker had died: the other broker brings it, when there is another one already."""
    with StorePage.create(2 * STORE_SEGMENT_BLOCKS) as before:
        before.grow(2 * STORE_SEGMENT_BLOCKS)
        blocks = Blocks(mmap(before.fileno(), STORE_HEADER_BYTES + 8 * before.blocks))
        block = blocks.take(program.process.pid, program.process.start_time, 0, before.blocks)
        stores = Stores(2 * SEGMENT_BYTES)
        handed_out = stores.of(UID)
        stores.take(UID, before.fileno())
        assert stores.of(UID) is handed_out
        trio.run(stores.give_back, {UID})
        assert trio.run(stores.have, UID, 1) == USED_UP
        blocks.give(block)  # it has come back to the card
        trio.run(stores.give_back, {UID})
        assert not trio.run(stores.have, UID, 1)
        assert stores.ready_bytes == SEGMENT_BYTES
        trio.run(stores.give_back, {UID})  # not what is handed out
        assert stores.ready_bytes == SEGMENT_BYTES


def test_a_store_that_nobody_is_given_any_more_counts_until_its_programs_have_ended(program: Program) -> None:
    stores = Stores(2 * SEGMENT_BYTES)
    stores.of(UID).grow(1)
    stores.leave(UID, [program.process])
    stores.leave(UID, [])  # the last of his vGPUs; the programs of an earlier one live on
    stores.drop(UID)
    stores.sweep(1, set())
    assert stores.ready_bytes == SEGMENT_BYTES
    assert stores.lacks(UID + 1, 2 * SEGMENT_BYTES)
    program.end()
    stores.sweep(2, set())
    assert stores.ready_bytes == 0
    assert not stores.lacks(UID + 1, 2 * SEGMENT_BYTES)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with memory to spare, whatever this one has."""
    monkeypatch.setattr("gpuserver.runtime.memory.stores.ahead_reserve_bytes", lambda: 0)


@pytest.mark.usefixtures("roomy")
def test_a_store_grows_ahead_by_whole_segments_to_what_is_wanted() -> None:
    stores = Stores(4 * SEGMENT_BYTES)

    async def scene() -> None:
        assert await stores.have_ahead(UID, SEGMENT_BYTES + 1)
        assert stores.ready_bytes == SEGMENT_BYTES
        assert await stores.have_ahead(UID, SEGMENT_BYTES + 1)
        assert not await stores.have_ahead(UID, SEGMENT_BYTES + 1)
        assert stores.ready_bytes == 2 * SEGMENT_BYTES
        async with trio.open_nursery() as nursery:  # what is needed now goes first, and both end
            nursery.start_soon(stores.have_ahead, UID, 4 * SEGMENT_BYTES)
            nursery.start_soon(stores.have, UID, 3 * SEGMENT_BYTES)
        assert stores.ready_bytes >= 3 * SEGMENT_BYTES

    trio.run(scene)


@pytest.mark.usefixtures("roomy")
def test_stores_grow_ahead_only_where_all_that_is_owned_has_room() -> None:
    """A part for each would leave no vGPU room to leave as a whole."""
    stores = Stores(4 * SEGMENT_BYTES)

    async def scene() -> None:
        assert await stores.have_ahead(1, SEGMENT_BYTES)

    trio.run(scene)
    assert stores.have_room_for({1: 2 * SEGMENT_BYTES, 2: 2 * SEGMENT_BYTES})
    assert not stores.have_room_for({1: 2 * SEGMENT_BYTES, 2: 2 * SEGMENT_BYTES + 1})
    assert stores.have_room_for({2: 3 * SEGMENT_BYTES})
    assert not stores.have_room_for({2: 3 * SEGMENT_BYTES + 1})


@pytest.mark.usefixtures("roomy")
def test_a_store_gives_copies_of_programs_that_have_ended_first_and_then_in_the_order_given() -> None:
    stores, owners = Stores(SEGMENT_BYTES), [Process(pid, 7) for pid in (11, 12, 13, 14)]
    store = stores.of(UID)
    named: list[list[tuple[int, int]]] = []

    class Kept:
        def kept(self) -> dict[tuple[int, int], int]:
            return {(pid, 7): 1 for pid in (12, 13, 14)}

        def take_first(self, processes: list[tuple[int, int]]) -> None:
            named.append(processes)

    stores._stores[UID] = [cast(StorePage, Kept())]
    stores.take_first(UID, [owners[2], owners[0], owners[1]])
    assert named == [[(14, 7), (13, 7), (12, 7)]]
    store.close()


@pytest.mark.usefixtures("roomy")
def test_a_host_without_memory_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, attempts = Stores(4 * SEGMENT_BYTES), 0

    def fails(work: object) -> None:
        nonlocal attempts
        attempts += 1
        raise MemoryError("the host has none")

    monkeypatch.setattr("gpuserver.runtime.memory.stores.in_nice_thread", fails)

    async def scene() -> None:
        for _ in range(3):
            assert not await stores.have_ahead(UID, SEGMENT_BYTES)
        assert attempts == 1
        await trio.sleep(31)
        assert not await stores.have_ahead(UID, SEGMENT_BYTES)
        assert attempts == 2

    trio.run(scene, clock=MockClock(autojump_threshold=0.1))
