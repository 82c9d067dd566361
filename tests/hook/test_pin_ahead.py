"""--oversubscribe swap: host memory is pinned before the first move, which then takes as long as a later one."""

from __future__ import annotations

import pytest

from cython_ext.pages.storepage import STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.readings import Where
from tests.hook.stage import Stage, StagedVgpu, eventually
from tests.hook.test_swap import AWAY, MIB, Program, swappable

OWNED = 100 * MIB
NEEDED = OWNED + 192 * MIB
"""With what moves pass each other in."""


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage, blocks=4 * STORE_SEGMENT_BLOCKS)


def owner(stage: Stage, vgpu: StagedVgpu) -> Program:
    return Program(
        stage,
        vgpu,
        """
block = filled(100 << 20, 7)
say()
while True:
    say(bytes_of(block, 100 << 20))
""",
    )


def test_the_first_move_pins_nothing(stage: Stage, vgpu: StagedVgpu) -> None:
    program = owner(stage, vgpu)
    program.hear()
    eventually(lambda: vgpu.slot().pinned_bytes >= NEEDED, "host memory is pinned")
    assert vgpu.slot().pinned_bytes < NEEDED + 32 * MIB
    program.leave()
    assert (vgpu.slot().away_bytes, vgpu.slot().pinned_ns) == (OWNED, 0)
    program.go_on()
    program.come_back()
    assert program.hear() == [[7]]


def test_what_is_pinned_grows_with_the_store(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=1)
    vgpu.store = StorePage.create(4 * STORE_SEGMENT_BLOCKS)
    program = owner(stage, vgpu)
    program.hear()
    assert vgpu.slot().pinned_bytes == 0
    vgpu.store.grow(1)
    eventually(lambda: vgpu.slot().pinned_bytes == 128 * MIB, "all of the store is pinned")
    vgpu.store.grow(3 * STORE_SEGMENT_BLOCKS)
    eventually(lambda: vgpu.slot().pinned_bytes >= NEEDED, "more of it is pinned")


def test_blocks_of_others_do_not_count(stage: Stage, vgpu: StagedVgpu) -> None:
    """A second process owns as much: each pins what the other does not use."""
    first, second = owner(stage, vgpu), owner(stage, vgpu)
    first.hear()
    second.hear()
    eventually(lambda: all(slot.pinned_bytes >= NEEDED for slot in vgpu.slots()), "both have pinned enough")
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    eventually(lambda: all(slot.where == Where.AWAY for slot in vgpu.slots()), "both have left")
    assert sum(slot.away_bytes for slot in vgpu.slots()) == 2 * OWNED
    assert [slot.pinned_ns for slot in vgpu.slots()] == [0, 0]


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
