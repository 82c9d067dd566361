"""The hook's end of the store: what of the memory leaves, and comes back, as there is room for it on either side."""

from __future__ import annotations

import signal
import time

from cython_ext.pages.storepage import STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.readings import GrantsFlag, Where
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually, stop
from tests.hook.test_swap import AWAY, MIB, Program, swappable

OWNER = """
blocks = [(filled(size << 20, byte), size << 20, byte) for byte, size in enumerate((70, 34, 2, 60), 1)]
small = filled(3000, 5)
say()
app.kernel(0.5).launch()
app.synchronize()
say([bytes_of(address, size) == [byte] for address, size, byte in blocks] + [bytes_of(small, 3000) == [5]])
"""
OWNED = 168 * MIB
ROOMY = 2 * STORE_SEGMENT_BLOCKS
"""A store that takes all of it: 256 MiB, which a machine may take a second to find."""


def used(vgpu: StagedVgpu) -> int:
    assert vgpu.store is not None
    return int(vgpu.store.used) * 2 * MIB


def owner(stage: Stage, vgpu: StagedVgpu) -> Program:
    program = Program(stage, vgpu, OWNER)
    program.hear()
    vgpu.withdraw()
    assert program.on_card() == OWNED
    return program


def asked_to_leave(vgpu: StagedVgpu) -> None:
    vgpu.grants.flags = vgpu.grants.flags & ~GrantsFlag.PRESENT | AWAY


def asked_back(vgpu: StagedVgpu, present_bytes: int) -> None:
    vgpu.grants.present_bytes = present_bytes
    vgpu.grants.flags = vgpu.grants.flags & ~AWAY | GrantsFlag.PRESENT


def is_whole(program: Program, vgpu: StagedVgpu) -> None:
    vgpu.open()
    program.go_on()
    assert program.hear() == [[True] * 5]
    assert (program.on_card(), used(vgpu)) == (OWNED, 0)


def test_what_the_store_has_no_room_for_stays_and_all_of_it_comes_back(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=STORE_SEGMENT_BLOCKS)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.STUCK)
    slot = vgpu.slot()
    assert 0 < slot.away_bytes <= 128 * MIB
    assert slot.away_bytes == used(vgpu) == OWNED - program.on_card()
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_it_goes_on_leaving_as_the_store_grows(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=1)
    vgpu.store = StorePage.create(2 * STORE_SEGMENT_BLOCKS)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.MOVING)
    assert vgpu.slot().away_bytes == 0
    vgpu.store.grow(1)
    eventually(lambda: vgpu.slot().away_bytes > 64 * MIB, "some of it has left")
    vgpu.store.grow(1)
    program.until(Where.AWAY)
    assert (vgpu.slot().away_bytes, used(vgpu), program.on_card()) == (OWNED, OWNED, 0)
    assert vgpu.slot().moved_ns >= vgpu.slot().pinned_ns > 0
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_it_comes_as_far_as_it_may(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=ROOMY)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    asked_back(vgpu, 70 * MIB)
    eventually(lambda: program.on_card() >= 38 * MIB, "some of it has come")
    assert OWNED - used(vgpu) <= program.on_card() <= 70 * MIB
    vgpu.grants.present_bytes = 130 * MIB
    eventually(lambda: program.on_card() > 90 * MIB, "more of it has come")
    assert program.on_card() <= 130 * MIB
    assert vgpu.slot().where == Where.MOVING
    asked_to_leave(vgpu)  # half-way
    program.until(Where.AWAY)
    assert (program.on_card(), used(vgpu)) == (0, OWNED)
    asked_back(vgpu, OWNED)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_a_card_that_has_no_room_after_all_is_told(stage: Stage) -> None:
    """What it may have there, others have."""
    vgpu, other = swappable(stage, blocks=ROOMY), stage.vgpu(memory_bytes=200 * GIB)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    filler = Program(stage, other, "say(app.allocate(app.memory_info()[0] - (100 << 20)))\nsay()")
    assert filler.hear()
    asked_back(vgpu, 0)
    program.until(Where.KEPT_AWAY)
    assert program.on_card() - OWNED > 0
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    filler.go_on()
    filler.hear()
    filler.process.kill()
    filler.process.wait()
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_who_is_killed_half_way_leaves_its_name_on_its_blocks(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=STORE_SEGMENT_BLOCKS)
    program = owner(stage, vgpu)
    slot = vgpu.slot()
    asked_to_leave(vgpu)
    eventually(lambda: used(vgpu) > 0, "it is leaving")
    stop(program.process.pid)
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    assert vgpu.store is not None
    assert vgpu.store.owners(0, 9)[0] == {(slot.pid, slot.start_time)}
    assert vgpu.store.give_back([(slot.pid, slot.start_time)]) > 0
    assert used(vgpu) == 0
    assert program.on_card() == 0


def test_it_is_still_away_where_server_and_broker_have_died(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=ROOMY)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    vgpu.lose_everything()
    vgpu.grants.flags = vgpu.grants.flags | GrantsFlag.SWAPPABLE | AWAY
    eventually(lambda: len(vgpu.slots()) == 1 and vgpu.slot().away_bytes == OWNED, "it says so in the new page")
    assert (vgpu.slot().where, vgpu.slot().charged_bytes) == (Where.AWAY, OWNED)
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_what_is_asked_for_in_vain_is_refused(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=ROOMY)
    vgpu.grants.card_limit_bytes, vgpu.grants.spare_bytes = 100 * MIB, 60 * MIB
    program = Program(stage, vgpu, "say(app.allocate(90 << 20) is not None, app.allocate(70 << 20))")
    assert program.hear() == [True, None]
    assert vgpu.slot().room_bytes == 0


def test_an_allocation_is_refused_only_after_it_was_in_vain_all_the_while(stage: Stage) -> None:
    vgpu, other = swappable(stage, blocks=ROOMY), stage.vgpu(memory_bytes=200 * GIB)
    filler = Program(
        stage, other, "block = app.allocate(app.memory_info()[0] - (700 << 20))\nsay()\napp.free(block)\nsay()"
    )
    filler.hear()
    program = Program(stage, vgpu, "say(app.allocate(900 << 20) is not None)")
    eventually(lambda: any(slot.room_bytes for slot in vgpu.slots()), "it waits")
    until = time.monotonic() + 2
    while time.monotonic() < until:
        vgpu.grants.spare_bytes = 60 * MIB
        time.sleep(0.1)
        vgpu.grants.spare_bytes = 2 * GIB
        time.sleep(0.02)
    filler.go_on()
    assert program.hear() == [True]


def test_the_store_of_a_later_server_is_used_once_nothing_is_left_in_the_other(stage: Stage) -> None:
    """Server and broker died together: nobody has the store any more, and it does not grow."""
    vgpu = swappable(stage, blocks=ROOMY)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    first = vgpu.store
    vgpu.lose_everything()
    vgpu.store = StorePage.create(2 * STORE_SEGMENT_BLOCKS)
    vgpu.store.grow(2 * STORE_SEGMENT_BLOCKS)
    vgpu.grants.flags = vgpu.grants.flags | GrantsFlag.SWAPPABLE | AWAY
    eventually(lambda: len(vgpu.slots()) == 1 and vgpu.slot().away_bytes == OWNED, "it says so in the new page")
    assert first is not None
    assert used(vgpu) == 0
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    assert first.used == 0
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    assert (first.used, used(vgpu)) == (0, OWNED)
    assert (first.reserved, first.kept()) == (0, {})
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)


def test_where_a_later_server_has_the_first_store_again_that_one_is_used(stage: Stage) -> None:
    """The server between them died before it knew of the broker that had kept it."""
    vgpu = swappable(stage, blocks=ROOMY)
    program = owner(stage, vgpu)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    first = vgpu.store
    for store in (StorePage.create(ROOMY), first):
        vgpu.lose_everything()
        vgpu.store = store
        vgpu.grants.flags = vgpu.grants.flags | GrantsFlag.SWAPPABLE | AWAY
        eventually(lambda: len(vgpu.slots()) == 1 and vgpu.slot().away_bytes == OWNED, "it says so in the new page")
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    asked_to_leave(vgpu)
    program.until(Where.AWAY)
    assert used(vgpu) == OWNED
    asked_back(vgpu, 0)
    program.until(Where.RESIDENT)
    is_whole(program, vgpu)
