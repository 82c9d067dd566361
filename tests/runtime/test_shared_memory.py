"""Memory that one process shares and others import: the driver may show it for any of them, and it is charged once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from cython_ext.readings import SHARED, SlotReading, SlotState
from gpuserver.runtime.memory.sharing import importers, only_shared, shared_bytes, without_imports
from gpuserver.runtime.memory.watch import FALL_S, MemoryWatch
from tests.runtime.test_memory import Driver, Page, slot
from vgpu.identity import Process
from vgpu.units import GIB, MIB

CONTEXT = 500 * MIB
MODEL = 16 * GIB


def kinds(device: int = 0, shared: int = 0) -> tuple[int, ...]:
    sizes = [device, *[0] * 7]
    sizes[SHARED] = shared
    return tuple(sizes)


def owner(pid: int = 1, shared: int = MODEL, device: int = 0, state: SlotState = SlotState.ACTIVE) -> SlotReading:
    return replace(slot(0, pid, state=state), committed_bytes=kinds(device, shared))


def importer(index: int, pid: int, imported: int = MODEL, device: int = 0) -> SlotReading:
    return replace(slot(index, pid), committed_bytes=kinds(device), imported_bytes=imported)


@pytest.mark.parametrize(
    ("driver", "shown"),
    [
        # It shows the importers' contexts and caches alone, ...
        ({1: MODEL + CONTEXT, 2: CONTEXT + GIB}, {1: MODEL + CONTEXT, 2: CONTEXT + GIB}),
        # ... or what they have imported, too.
        ({1: MODEL + CONTEXT, 2: MODEL + CONTEXT + GIB}, {1: MODEL + CONTEXT, 2: CONTEXT + GIB}),
        ({2: 0}, {2: 0}),
        ({}, {}),
    ],
)
def test_imported_memory_is_no_memory_of_the_importer(driver: dict[int, int], shown: dict[int, int]) -> None:
    slots = [owner(), importer(1, 2, device=GIB)]
    assert without_imports(driver, slots, shared_bytes(slots), CONTEXT) == shown


def test_a_claim_of_more_than_is_shared_counts_no_further() -> None:
    slots = [owner(shared=GIB), importer(1, 2, imported=100 * GIB)]
    assert without_imports({2: MODEL}, slots, shared_bytes(slots), CONTEXT) == {2: MODEL - GIB}
    assert without_imports({2: MODEL}, slots[1:], 0, CONTEXT) == {2: MODEL}


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 100)), max_size=5),
    st.integers(0, 5),
)
def test_no_figure_falls_below_what_is_charged_and_a_context(
    shared: int, processes: list[tuple[int, int, int]], context: int
) -> None:
    slots = [owner(shared=shared)]
    slots += [importer(i, i + 2, imported, device) for i, (imported, device, _) in enumerate(processes)]
    driver = {i + 2: shown for i, (_, _, shown) in enumerate(processes)}
    found = without_imports(driver, slots, shared_bytes(slots), context)
    assert found.keys() == driver.keys()
    for i, (imported, device, shown) in enumerate(processes):
        assert shown - min(imported, shared) <= found[i + 2] <= shown
        assert found[i + 2] == shown or found[i + 2] >= device + context


def test_who_imports() -> None:
    dead = replace(importer(2, 3), state=SlotState.DEAD)
    assert importers([owner(), importer(1, 2), dead]) == {Process(2, 0)}
    assert only_shared(owner())
    assert not only_shared(owner(device=1))


def watched(driver: Driver, pages: list[Page], script: Any) -> list[tuple[int, bool]]:
    """What the watch asked for while ``script`` ran: the slot, and whether its shared memory stays charged."""
    asked: list[tuple[int, bool]] = []

    async def release(vgpu: Any, number: int, process: Process, keeps_shared: bool) -> bool:
        asked.append((number, keeps_shared))
        if keeps_shared:
            (at,) = [at for at, one in enumerate(vgpu.slots) if one.index == number]
            vgpu.slots[at] = replace(vgpu.slots[at], committed_bytes=kinds(0, vgpu.slots[at].committed_bytes[SHARED]))
        else:
            vgpu.slots = [one for one in vgpu.slots if one.index != number]
            memory.reaped(vgpu, number)
        return True

    memory = MemoryWatch(driver, lambda: pages, release, lambda *_: None)  # type: ignore[arg-type, return-value]

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(memory.run)
            await trio.sleep(0.5)
            await script(memory, asked)
            nursery.cancel_scope.cancel()

    async def at_once(function: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", at_once)
        trio.run(run, clock=MockClock(autojump_threshold=0))
    return asked


def test_a_dead_owners_shared_memory_stays_charged_until_the_last_importer_has_let_it_go() -> None:
    mine, theirs = Page(owner(device=GIB)), Page(importer(0, 2), importer(1, 3))
    theirs.record = type("record", (Page.record,), {"vgpu_id": "vgpu-2"})  # type: ignore[assignment, misc]

    async def script(memory: MemoryWatch, asked: list[tuple[int, bool]]) -> None:
        mine.slots[0] = replace(mine.slots[0], state=SlotState.DEAD)
        memory.died(mine, 0, Process(1, 0))  # type: ignore[arg-type]
        await trio.sleep(30)
        assert asked == [(0, True)], "it asks once"
        assert mine.slots[0].charged_bytes == MODEL
        theirs.slots[0] = replace(theirs.slots[0], state=SlotState.DEAD)
        await trio.sleep(30)
        assert mine.slots[0].charged_bytes == MODEL
        theirs.slots[1] = replace(theirs.slots[1], imported_bytes=0)
        theirs.slots.append(importer(2, 9))  # of another owner, since
        await trio.sleep(30)
        assert mine.slots == []

    driver = Driver({1: MODEL + GIB + CONTEXT, 2: CONTEXT, 3: CONTEXT}, {2: MODEL + CONTEXT, 3: CONTEXT})
    assert watched(driver, [mine, theirs], script) == [(0, True), (0, False)]


def test_importers_are_charged_with_their_contexts_alone() -> None:
    mine, theirs = Page(owner()), Page(importer(0, 2, device=GIB))
    theirs.record = type("record", (Page.record,), {"vgpu_id": "vgpu-2"})  # type: ignore[assignment, misc]

    async def script(memory: MemoryWatch, asked: list[tuple[int, bool]]) -> None:
        await trio.sleep(2 * FALL_S)
        assert mine.grants.implicit_bytes == CONTEXT
        assert theirs.grants.implicit_bytes == CONTEXT

    for shown in (0, MODEL):
        theirs.grants.implicit_bytes = 0
        watched(Driver({1: MODEL + CONTEXT, 2: shown + CONTEXT + GIB}), [mine, theirs], script)
