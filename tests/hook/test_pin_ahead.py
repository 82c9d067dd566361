"""--oversubscribe swap: host memory is pinned before the first move, which then takes as long as a later one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, STORE_TIME_MASK, StorePage
from cython_ext.readings import Where
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.test_swap import AWAY, MIB, Program, swappable

OWNED = 100 * MIB


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage, blocks=4 * STORE_SEGMENT_BLOCKS)


def owner(stage: Stage, vgpu: StagedVgpu, owned: int = OWNED, log: Path | None = None) -> Program:
    return Program(
        stage,
        vgpu,
        f"""
block = filled({owned}, 7)
say()
while True:
    say(bytes_of(block, {owned}))
""",
        **({"VGPU_HOOK_LOG": str(log)} if log else {}),
    )


def test_the_first_move_pins_nothing(stage: Stage, vgpu: StagedVgpu) -> None:
    program = owner(stage, vgpu)
    program.hear()
    eventually(lambda: vgpu.slot().pinned_bytes >= OWNED, "host memory is pinned")
    assert vgpu.store is not None
    assert vgpu.slot().pinned_bytes == vgpu.store.reserved * STORE_BLOCK_BYTES == OWNED
    assert vgpu.store.used == 0
    program.leave()
    assert (vgpu.store.used * STORE_BLOCK_BYTES, vgpu.store.reserved) == (OWNED, 0)
    assert (vgpu.slot().away_bytes, vgpu.slot().pinned_ns) == (OWNED, 0)
    program.go_on()
    program.come_back()
    assert program.hear() == [[7]]


def test_what_is_pinned_grows_with_the_store(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=1)
    vgpu.store = StorePage.create(4 * STORE_SEGMENT_BLOCKS)
    program = owner(stage, vgpu, 300 * MIB)
    program.hear()
    assert vgpu.slot().pinned_bytes == 0
    vgpu.store.grow(1)
    eventually(lambda: vgpu.slot().pinned_bytes == 128 * MIB, "all of the store is pinned")
    vgpu.store.grow(3 * STORE_SEGMENT_BLOCKS)
    eventually(lambda: vgpu.slot().pinned_bytes == 300 * MIB, "more of it is pinned")


def test_each_process_pins_blocks_of_its_own(stage: Stage) -> None:
    """The store has room for what they own, and little more."""
    vgpu = swappable(stage, blocks=5 * STORE_SEGMENT_BLOCKS)
    programs = [owner(stage, vgpu, 150 * MIB) for _ in range(4)]
    for program in programs:
        program.hear()
    eventually(lambda: all(slot.pinned_bytes >= 150 * MIB for slot in vgpu.slots()), "all have pinned enough")
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    eventually(lambda: all(slot.where == Where.AWAY for slot in vgpu.slots()), "all have left")
    assert sum(slot.away_bytes for slot in vgpu.slots()) == 600 * MIB
    assert [slot.pinned_ns for slot in vgpu.slots()] == [0] * 4


def test_a_process_takes_what_others_reserve_where_nothing_is_free(stage: Stage) -> None:
    """The store has room for one of two. Each reserves a part of it, and pins the rest in case."""
    vgpu = swappable(stage, blocks=2 * STORE_SEGMENT_BLOCKS)
    other = stage.vgpu(memory_bytes=GIB)
    other.grants.flags, other.store = vgpu.grants.flags, vgpu.store
    vgpus, size = [vgpu, other], 200 * MIB
    programs = [owner(stage, each, size) for each in vgpus]
    for program in programs:
        program.hear()
    assert vgpu.store is not None
    store = vgpu.store
    eventually(lambda: store.reserved == store.ready, "all of the store is reserved")
    for turn in range(4):
        program = programs[turn % 2]
        program.leave()
        assert store.used * STORE_BLOCK_BYTES == size
        program.go_on()
        program.come_back()
        assert program.hear() == [[7]]


def pinned_parts(log: Path) -> int:
    return log.read_text().count("pinned part")


def test_the_parts_that_are_pinned_in_case_are_those_that_are_taken(stage: Stage, tmp_path: Path) -> None:
    """The first has reserved nearly all of the store. The second pins what it could take from it."""
    vgpu = swappable(stage, blocks=4 * STORE_SEGMENT_BLOCKS)
    other = stage.vgpu(memory_bytes=GIB)
    other.grants.flags, other.store = vgpu.grants.flags, vgpu.store
    first = owner(stage, vgpu, 480 * MIB)
    first.hear()
    eventually(lambda: vgpu.slot().pinned_bytes == 480 * MIB, "the first has pinned")
    log = tmp_path / "hook.log"
    second = owner(stage, other, 200 * MIB, log)
    second.hear()
    eventually(lambda: pinned_parts(log) >= 7, "the second has pinned as much as it owns")
    second.leave()
    assert (other.slot().away_bytes, other.slot().pinned_ns) == (200 * MIB, 0)
    assert pinned_parts(log) <= 8


def test_a_move_that_has_pinned_nothing_ahead_pins_no_more_than_it_needs(stage: Stage, tmp_path: Path) -> None:
    """The store gets its memory once the process is leaving."""
    vgpu = swappable(stage, blocks=1)
    vgpu.store = StorePage.create(6 * STORE_SEGMENT_BLOCKS)
    log = tmp_path / "hook.log"
    program = owner(stage, vgpu, OWNED, log)
    program.hear()
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    program.until(Where.MOVING)
    vgpu.store.grow(6 * STORE_SEGMENT_BLOCKS)
    program.until(Where.AWAY)
    assert pinned_parts(log) == 4
    program.come_back()
    program.go_on()
    assert program.hear() == [[7]]


def test_a_process_pins_no_more_than_it_owns_while_the_store_grows(stage: Stage, tmp_path: Path) -> None:
    vgpu = swappable(stage, blocks=1)
    vgpu.store = StorePage.create(5 * STORE_SEGMENT_BLOCKS)
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    programs = [owner(stage, vgpu, 300 * MIB, log) for log in logs]
    for program in programs:
        program.hear()
    for _ in range(5):
        time.sleep(0.7)
        vgpu.store.grow(STORE_SEGMENT_BLOCKS)
    eventually(lambda: all(slot.pinned_bytes == 300 * MIB for slot in vgpu.slots()), "both have pinned enough")
    assert [pinned_parts(log) for log in logs] <= [12, 12]


def test_what_is_reserved_for_memory_that_was_freed_is_given_back(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage, vgpu, "block = filled(300 << 20, 7)\nkept = filled(40 << 20, 7)\nsay()\napp.free(block)\nsay()\nsay()"
    )
    program.hear()
    eventually(lambda: vgpu.slot().pinned_bytes == 340 * MIB, "host memory is pinned")
    program.go_on()
    program.hear()
    assert vgpu.store is not None
    store = vgpu.store
    eventually(lambda: store.reserved * STORE_BLOCK_BYTES == 40 * MIB, "what is too much is free")


def test_contexts_that_come_and_go_share_the_pinned_memory_for_hashes(stage: Stage, vgpu: StagedVgpu) -> None:
    """The context that has made it ends."""
    program = Program(
        stage,
        vgpu,
        """
first, context = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
app.call("cuCtxCreate_v2", byref(context), 0, app.device)
block = filled(20 << 20, 5)
say()
app.call("cuCtxSetCurrent", first)
mine = filled(30 << 20, 6)
app.call("cuCtxDestroy_v2", context)
while True:
    say(bytes_of(mine, 30 << 20))
""",
    )
    program.hear()
    eventually(lambda: vgpu.slot().pinned_bytes >= 20 * MIB, "host memory is pinned")
    program.leave()
    program.come_back()
    program.go_on()
    for clean in (0, 15, 15):
        assert program.hear() == [[6]]
        program.leave()
        assert vgpu.slot().clean_blocks == clean
        program.come_back()
        program.go_on()


def test_what_is_reserved_is_given_back_when_the_process_ends(stage: Stage, vgpu: StagedVgpu) -> None:
    program = owner(stage, vgpu)
    program.hear()
    eventually(lambda: vgpu.slot().pinned_bytes == OWNED, "host memory is pinned")
    slot = vgpu.slot()
    program.process.kill()
    program.process.wait()
    assert vgpu.store is not None
    assert vgpu.store.owners(0, 9)[0] == {(slot.pid, slot.start_time & STORE_TIME_MASK)}
    assert vgpu.store.give_back([(slot.pid, slot.start_time)]) == OWNED // STORE_BLOCK_BYTES
    assert vgpu.store.reserved == 0


def test_a_context_may_go_meanwhile(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
first, context = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
for _ in range(20):
    app.call("cuCtxCreate_v2", byref(context), 0, app.device)
    block = app.allocate(20 << 20)
    app.call("cuCtxDestroy_v2", context)
    app.call("cuCtxSetCurrent", first)
say(app.allocate(1) is not None)
""",
    )
    assert program.hear() == [True]
