"""--oversubscribe managed: a program owns more than the card has left, and finds all of it again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cython_ext.readings import GrantsFlag
from cython_ext.simengine import Engine
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.talk import Talk

CARD = 4 * GIB
MANAGED = 1
MS = 1_000_000

WORK = """
MARK = 4096
def marked(size, mark):
    # An allocation with a mark at its beginning, middle and end.
    address = app.allocate(size)
    for at in (0, size // 2, size - MARK):
        app.call("cuMemsetD8_v2", c_uint64(address + at), mark, c_size_t(MARK))
    return address

def marks(address, size):
    return sorted({byte for at in (0, size // 2, size - MARK) for byte in app.read(address + at, MARK)})

def run():
    app.kernel(1.0).launch()
    app.synchronize()
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    small = Stage(memory_bytes=CARD)
    yield small
    small.close()


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return oversubscribed(stage)


def oversubscribed(stage: Stage, memory_bytes: int = 9 * GIB) -> StagedVgpu:
    vgpu = stage.vgpu(memory_bytes=memory_bytes)
    vgpu.grants.flags = vgpu.grants.flags | GrantsFlag.MANAGED | GrantsFlag.CONTENDED
    return vgpu


def test_one_program_owns_more_than_the_card(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = Talk(
        stage,
        vgpu,
        WORK
        + """
say(app.memory_info(), app.total_bytes)
SIZE = 3 * GIB
blocks = [marked(SIZE, mark) for mark in (1, 2, 3)]
run()
say([marks(block, SIZE) for block in blocks], app.memory_info(), app.allocate(1))
pitched, pitch = c_uint64(), c_size_t()
app.free(blocks.pop())
say(app.result("cuMemAllocPitch_v2", byref(pitched), byref(pitch), c_size_t(1000), c_size_t(1 << 20), c_uint(4)),
    pitch.value, marks(blocks[0], SIZE))
for address in (*blocks, pitched.value):
    app.free(address)
say()
""",
    )
    said, _ = talk.next()
    assert said == [[9 * GIB, 9 * GIB], 9 * GIB]
    said, slot = talk.next()
    assert said == [[[1], [2], [3]], [0, 9 * GIB], None]
    assert (slot.committed_bytes[MANAGED], slot.charged_bytes) == (9 * GIB, 9 * GIB)
    said, slot = talk.next()
    assert said == [0, 1024, [1]]
    assert slot.charged_bytes == 7 * GIB
    _, slot = talk.next()
    assert slot.charged_bytes == 0


def test_two_that_do_not_fit_take_turns_on_the_card_and_a_guaranteed_one_has_its_memory(
    stage: Stage, vgpu: StagedVgpu
) -> None:
    body = """
SIZE = 3 * GIB
address = marked(SIZE, {mark})
for _ in range(3):
    say()
    run()
    say(marks(address, SIZE))
"""
    talks = [Talk(stage, one, WORK + body.format(mark=i)) for i, one in enumerate((vgpu, oversubscribed(stage)), 5)]
    engine = Engine(stage.gpus)
    for _ in range(3):
        for mark, talk in enumerate(talks, 5):
            talk.next()
            said, _ = talk.next()  # its turn is over, the other's has not begun
            assert said == [[mark]]
            used = {pid: taken for pid, _, taken, *_ in engine.contexts().values()}
            assert used[talk.process.pid] > 3 * GIB, "what it works on is on the card"
            assert sum(used.values()) <= CARD
    guaranteed = Talk(stage, stage.vgpu(memory_bytes=2 * GIB), "say(app.allocate(2 * GIB) is not None)")
    (granted,), _ = guaranteed.next()
    assert granted, "what the card keeps for nobody gives way"


def test_what_is_not_managed_is_refused_by_the_card(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = Talk(stage, vgpu, "say(create_physical(app, 6 * GIB)[0], app.allocate(6 * GIB) is not None)")
    said, slot = talk.next()
    assert said == [2, True]
    assert slot.charged_bytes == 6 * GIB


def test_of_what_cannot_leave_the_card_it_may_own_what_is_nobody_elses(stage: Stage, vgpu: StagedVgpu) -> None:
    vgpu.grants.card_limit_bytes = GIB
    vgpu.grants.implicit_bytes = GIB // 4
    talk = Talk(
        stage,
        vgpu,
        """
pooled = c_uint64()
say(create_physical(app, GIB)[0], app.result("cuMemAllocAsync", byref(pooled), c_size_t(GIB), app.stream))
say(create_physical(app, GIB // 2)[0], create_physical(app, GIB // 2)[0], app.allocate(5 * GIB) is not None)
say(create_physical(app, GIB // 4)[0], create_physical(app, 2 << 20)[0])
""",
    )
    said, slot = talk.next()
    assert (said, slot.charged_bytes) == ([2, 2], 0)
    said, slot = talk.next()
    assert (said, slot.charged_bytes) == ([0, 2, True], 11 * GIB // 2)
    said, slot = talk.next()
    assert (said, slot.charged_bytes) == ([0, 2], 23 * GIB // 4)


def test_rows_that_nobody_has_are_refused(stage: Stage, vgpu: StagedVgpu) -> None:
    """Their bytes do not fit 64 bits: they must not become few."""
    talk = Talk(
        stage,
        vgpu,
        """
pitched, pitch = c_uint64(), c_size_t(77)
def rows(width, height, element=4, where=byref(pitched)):
    return app.result("cuMemAllocPitch_v2", where, byref(pitch), c_size_t(width), c_size_t(height), c_uint(element))
say(rows((1 << 40) + 512, 1 << 24), rows((1 << 64) - 1, 1), rows(100, 100, element=3), pitch.value)
""",
    )
    said, slot = talk.next()
    assert (said, slot.charged_bytes) == ([2, 2, 1, 77], 0)


def test_a_killed_one_leaves_nothing_on_the_card(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = Talk(stage, vgpu, WORK + "marked(3 * GIB, 1)\nrun()\nsay()\ninput()")
    talk.next()
    talk.process.kill()
    talk.process.wait()
    engine = Engine(stage.gpus)

    def empty() -> bool:
        engine.refresh()
        return not engine.contexts()

    eventually(empty, "its context is buried")
