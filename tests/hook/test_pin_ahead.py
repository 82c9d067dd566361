"""--oversubscribe swap: host memory is pinned before the first move, which then takes as long as a later one."""

from __future__ import annotations

import pytest

from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, STORE_TIME_MASK, StorePage
from cython_ext.readings import Where
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.test_swap import AWAY, MIB, Program, swappable

OWNED = 100 * MIB


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage, blocks=4 * STORE_SEGMENT_BLOCKS)


def owner(stage: Stage, vgpu: StagedVgpu, owned: int = OWNED) -> Program:
    return Program(
        stage,
        vgpu,
        f"""
block = filled({owned}, 7)
say()
while True:
    say(bytes_of(block, {owned}))
""",
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
