"""Implicit memory, and when a dead process counts as gone: the driver's word against the ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.readings import SlotReading, SlotState, Where
from gpuserver.device.base import MemoryUse
from gpuserver.runtime.memory.outside import UNHOOKED_BYTES, drift_by_pid, outsiders, unhooked_by_pid
from gpuserver.runtime.memory.watch import AGAIN_S, CALM_S, FALL_S, URGENT_S, MemoryWatch, implicit_by_pid
from gpuserver.runtime.vgpus import Ledger
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.protocol.peer import start_time
from vgpu.units import GIB, MIB


def slot(index: int, pid: int, committed: int = 0, state: SlotState = SlotState.ACTIVE) -> SlotReading:
    with ActivityPage.create() as page:
        blank = page.read_slot(index)
    fields: dict[str, Any] = {name: getattr(blank, name) for name in blank.__slots__}
    return SlotReading(**(fields | {"pid": pid, "state": state, "committed_bytes": (committed, 0, 0, 0, 0, 0, 0, 0)}))


@pytest.mark.parametrize(
    ("slots", "driver", "implicit"),
    [
        ([slot(0, 1, 100)], {1: 150}, {1: 50}),
        ([slot(0, 1, 100)], {1: 90}, {1: 0}),
        ([slot(0, 1, 100)], {}, {1: 0}),
        ([slot(0, 1, 100), slot(1, 2, 5)], {1: 150, 2: 50, 3: 999}, {1: 50, 2: 45}),
        # After exec the same pid has a dead slot and a living one, and one context.
        ([slot(0, 1, 100, SlotState.DEAD), slot(1, 1, 20)], {1: 150}, {1: 30}),
    ],
)
def test_implicit_memory(slots: list[SlotReading], driver: dict[int, int], implicit: dict[int, int]) -> None:
    assert implicit_by_pid(slots, driver) == implicit


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), max_size=8),
    st.dictionaries(st.integers(1, 5), st.integers(0, 500)),
)
def test_what_is_charged_in_all_is_never_less_than_what_the_driver_shows(
    owned: list[tuple[int, int]], driver: dict[int, int]
) -> None:
    slots = [slot(i, pid, committed) for i, (pid, committed) in enumerate(owned)]
    implicit = implicit_by_pid(slots, driver)
    for pid in {pid for pid, _ in owned}:
        committed = sum(amount for owner, amount in owned if owner == pid)
        assert implicit[pid] + committed == max(committed, driver.get(pid, 0))


@pytest.mark.parametrize(
    ("before", "after", "driver", "drift"),
    [
        (900, 900, {1: 200}, {1: 700}),
        (900, 100, {1: 100}, {}),  # freed while the driver was asked
        (100, 900, {1: 100}, {}),  # allocated
        (900, 900, {1: 850}, {}),  # lags behind
        (900, 900, {1: 0}, {}),  # not told
        (900, 900, {}, {}),
    ],
)
def test_drift_is_what_the_books_say_beyond_the_driver_at_rest(
    before: int, after: int, driver: dict[int, int], drift: dict[int, int]
) -> None:
    shown = {pid: amount * MIB for pid, amount in driver.items()}
    found = drift_by_pid([slot(0, 1, before * MIB)], [slot(0, 1, after * MIB)], shown)
    assert found == {pid: amount * MIB for pid, amount in drift.items()}


def test_who_is_in_no_vgpu_is_named() -> None:
    (found,) = outsiders({os.getpid(): 5, 1: 7}, inside=[1], mps_pid=None)
    assert found.process == Process(os.getpid(), start_time(os.getpid()))
    assert (found.uid, found.memory_bytes) == (os.getuid(), 5)
    assert found.command
    (stranger,) = outsiders({2**22 + 1: 5}, inside=[], mps_pid=None)
    assert (stranger.uid, stranger.command, stranger.process.start_time) == (-1, "", 0)
    assert outsiders({os.getpid(): 5}, inside=[], mps_pid=os.getppid()) == (), "a child of the MPS daemon is its server"


def test_a_hooked_process_with_far_more_than_contexts_take_is_found_where_the_limit_does_not_hold() -> None:
    implicit = {1: UNHOOKED_BYTES, 2: UNHOOKED_BYTES + 1}
    assert unhooked_by_pid(implicit, 5, 4) == {2: UNHOOKED_BYTES + 1}
    assert unhooked_by_pid(implicit, 4, 4) == {}


class Page:
    """As much of a vGPU as the watch looks at."""

    class record:
        vgpu_id = "vgpu-1"
        memory_limit_bytes = 8 * GIB
        owner = SimpleNamespace(uid=1000)

    implicit_peak_bytes = 0
    quiesced = False
    driver_bytes: dict[int, int] | None = None
    programs: tuple[Process, ...] = ()

    def __init__(self, *slots: SlotReading) -> None:
        self.grants = SimpleNamespace(implicit_bytes=0, implicit_ns=0)
        self.slots = list(slots)
        self.epoch = 0

    @property
    def used_bytes(self) -> int:
        return int(self.grants.implicit_bytes) + sum(slot.charged_bytes for slot in self.slots)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.epoch, tuple(self.slots), self.epoch)


class Driver:
    """What NVML says, reading by reading; the last one is repeated."""

    def __init__(self, *readings: dict[int, int] | None) -> None:
        self._readings = list(readings)
        self.times: list[float] = []

    def memory_use(self) -> MemoryUse:
        self.times.append(trio.current_time())
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if reading is None:
            raise VgpuError(ErrorCode.UNAVAILABLE, "gone")
        return MemoryUse(sum(reading.values()), reading)


def watch(
    driver: Driver,
    vgpu: Page,
    act: Callable[[MemoryWatch], None],
    seconds: float,
    notice: Callable[[EventType, Any, str, int], None] = lambda *_: None,
) -> list[tuple[int, float]]:
    """The releases that were asked for within ``seconds``, as (slot, when)."""
    released: list[tuple[int, float]] = []

    async def release(_: Any, number: int, process: Process, keeps_shared: bool) -> bool:
        assert not keeps_shared
        released.append((number, trio.current_time()))
        memory.reaped(vgpu, number)  # type: ignore[arg-type]
        return True

    memory = MemoryWatch(driver, lambda: [vgpu], release, notice)  # type: ignore[arg-type, return-value, list-item]

    async def run() -> None:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(memory.run)
                await trio.sleep(0.5)
                act(memory)

    async def at_once(function: Callable[[], Any]) -> Any:
        await trio.lowlevel.checkpoint()
        return function()

    # The mock clock does not know that a thread is at work: on a busy machine it would jump meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", at_once)
        trio.run(run, clock=MockClock(autojump_threshold=0))
    return released


def test_the_dead_are_released_when_the_driver_has_let_go_and_looked_for_often() -> None:
    driver = Driver({7: 50}, {7: 50}, {7: 50}, {7: 50}, {})
    vgpu = Page(slot(0, 7, 10, SlotState.DEAD))
    released = watch(driver, vgpu, lambda m: m.died(vgpu, 0, Process(7, 70)) and None, 3)  # type: ignore[arg-type, func-returns-value]
    assert [number for number, _ in released] == [0], "once"
    gaps = [b - a for a, b in zip(driver.times[1:5], driver.times[2:5], strict=False)]
    assert all(gap <= URGENT_S + 0.005 for gap in gaps)
    assert driver.times[-1] - driver.times[-2] >= CALM_S - 1e-6, "and seldom when nobody waits"


@pytest.mark.parametrize("moving", ["allocates", "frees", "is about to"])
def test_what_moves_while_the_driver_is_asked_is_not_taken_for_implicit(moving: str) -> None:
    """The driver shows 100 MiB more than the ledger says, at each moment; two of its readings are of an earlier one."""
    vgpu = Page(slot(0, 7, 400 * MIB))
    charged: list[int] = []

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            charged.append(vgpu.grants.implicit_bytes)
            shown = 100 * MIB + sum(vgpu.slots[0].committed_bytes)
            count = len(self.times)
            if moving == "is about to" and count in {3, 4}:
                shown += 300 * MIB
                vgpu.slots = [replace(slot(0, 7, 400 * MIB), reserved_bytes=300 * MIB)]
            elif count in {3, 4, 5}:
                other = 700 if moving == "allocates" else 100
                vgpu.slots = [slot(0, 7, (other if count == 3 else 400) * MIB)]
                vgpu.epoch += 1
            self.times.append(trio.current_time())
            return MemoryUse(shown, {7: shown})

    driver = Asked({})
    watch(driver, vgpu, lambda _: None, 10)
    assert set(charged[1:]) == {100 * MIB}
    gaps = [b - a for a, b in pairwise(driver.times)]
    assert gaps[3:6] == pytest.approx([AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]), "and soon asked again"
    assert gaps[8] == pytest.approx(CALM_S)


def test_less_implicit_memory_is_believed_once_all_readings_of_half_a_second_said_so() -> None:
    """Between a free and its entry in the ledger, the ledger says too much: too much would be shown as free."""
    vgpu = Page(slot(0, 7, 10))
    charged: list[tuple[float, int]] = []

    class Noting(Driver):
        def memory_use(self) -> MemoryUse:
            charged.append((trio.current_time(), vgpu.grants.implicit_bytes))
            return super().memory_use()

    watch(Noting({7: 50}, {7: 48}, {7: 50}, {7: 30}, {7: 45}, {7: 25}, {7: 20}), vgpu, lambda _: None, 10)  # type: ignore[arg-type]
    amounts = [amount for _, amount in charged]
    assert list(dict.fromkeys(amounts)) == [0, 40, 35, 10], "the most of what the readings of each fall said"
    first_fall = charged[4][0] - CALM_S / 50
    assert charged[amounts.index(35)][0] - first_fall >= FALL_S


def test_what_the_driver_gives_back_while_the_ledger_still_has_it_frees_no_implicit_memory() -> None:
    """Seen on an H100: CuPy's pool of 20 GiB, freed and at once filled again, took 518 MiB beyond the vGPU's limit."""
    vgpu = Page(slot(0, 7, 20_000 * MIB))
    charged: list[int] = []

    class GivesBack(Driver):
        def memory_use(self) -> MemoryUse:
            charged.append(vgpu.grants.implicit_bytes)
            self.times.append(trio.current_time())
            left = max(20_518 - 3_000 * max(0, len(self.times) - 3), 4_000) if len(self.times) < 40 else 518
            if left == 518:
                vgpu.slots, vgpu.epoch = [slot(0, 7, 0)], 1
            return MemoryUse(0, {7: left * MIB})

    watch(GivesBack({}), vgpu, lambda memory: memory.look(), 40)
    assert len(charged) > 41
    assert set(charged[1:]) == {518 * MIB}


def test_a_peak_that_was_over_before_the_ledger_was_read_is_not_taken_for_implicit() -> None:
    """Allocated up to the limit, refused, freed: all of it between the two looks at the ledger."""
    vgpu = Page(slot(0, 7, 400 * MIB))
    charged: list[int] = []

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            charged.append(vgpu.grants.implicit_bytes)
            at_peak = len(self.times) == 3
            if at_peak:
                vgpu.slots, vgpu.epoch = [slot(0, 7, 300 * MIB)], 200
            self.times.append(trio.current_time())
            return MemoryUse(0, {7: (1100 if at_peak else 400 if len(self.times) > 3 else 500) * MIB})

    watch(Asked({}), vgpu, lambda _: None, 5)
    assert set(charged[1:]) == {100 * MIB}


def test_implicit_memory_grows_also_beside_a_ledger_that_never_rests() -> None:
    vgpu = Page(slot(0, 7, 400 * MIB))
    charged: list[int] = []

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            charged.append(vgpu.grants.implicit_bytes)
            vgpu.epoch += 1
            self.times.append(trio.current_time())
            return MemoryUse(0, {7: (500 if len(self.times) < 4 else 1500) * MIB})

    watch(Asked({}), vgpu, lambda _: None, 5)
    assert (charged[2], charged[-1]) == (100 * MIB, 1100 * MIB)


def test_the_most_that_was_implicit_is_known_until_its_process_ends() -> None:
    """Of one that is suspended the driver shows nothing."""
    vgpu = Page(slot(0, 7, 10), slot(1, 8, 10))
    seen: list[tuple[int, int]] = []

    class Noting(Driver):
        def memory_use(self) -> MemoryUse:
            seen.append((vgpu.grants.implicit_bytes, vgpu.implicit_peak_bytes))
            if len(seen) == 5:
                vgpu.slots.pop(0)
            return super().memory_use()

    watch(Noting({7: 50, 8: 30}, {7: 0, 8: 0}, {7: 0, 8: 0}, {7: 0, 8: 40}, {8: 40}), vgpu, lambda _: None, 10)
    assert seen[1:6] == [(60, 60), (60, 60), (0, 60), (30, 70), (30, 30)]


def test_a_reading_counts_as_one_from_when_it_was_begun_once_all_that_it_showed_is_charged() -> None:
    """A process with a second context, beside one that goes on to free while the driver is asked."""
    vgpu = Page(slot(0, 7, 400 * MIB), slot(1, 8, 300 * MIB))
    seen: list[tuple[int, int, int]] = []

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            count = len(self.times)
            seen.append((time.monotonic_ns(), vgpu.grants.implicit_ns, vgpu.grants.implicit_bytes))
            if count in {2, 3}:
                vgpu.slots[1] = slot(1, 8, (300 - 50 * count) * MIB)
                vgpu.epoch += 1
            self.times.append(trio.current_time())
            return MemoryUse(0, {7: (500 if count < 2 else 900) * MIB, 8: 300 * MIB})

    watch(Asked({}), vgpu, lambda memory: memory.look(), 5)
    begun = [at for at, _, _ in seen]
    said = [implicit_ns for _, implicit_ns, _ in seen]
    assert begun[0] < begun[1]
    assert said[1] <= begun[0] < said[2] <= begun[1]
    assert said[3] == said[4] == said[2], "what the one has beside its ledger is not known"
    assert begun[3] < said[5] <= begun[4]
    assert seen[5][2] >= 500 * MIB


@pytest.mark.parametrize("sibling", ["rests", "goes on"])
@pytest.mark.parametrize("held", ["stopped", "killed", "killed as it was moved"])
def test_a_reading_counts_beside_a_process_that_is_held_up_in_an_allocation(held: str, sibling: str) -> None:
    """What it has reserved is charged, whether or not the driver shows it yet; here it does."""
    stuck = replace(slot(0, 7, 400 * MIB), reserved_bytes=300 * MIB)
    if held != "stopped":
        where = Where.MOVING if held == "killed as it was moved" else Where.RESIDENT
        stuck = replace(stuck, state=SlotState.DEAD, where=where)
    vgpu = Page(slot(0, 7, 400 * MIB), slot(1, 8, 0))
    seen: list[tuple[int, int]] = []
    begun: list[int] = []

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            count = len(self.times)
            seen.append((vgpu.grants.implicit_ns, vgpu.grants.implicit_bytes))
            begun.append(time.monotonic_ns())
            shown = {7: 500 * MIB, 8: 100 * MIB}
            if count > 1:
                vgpu.slots[0] = stuck
                vgpu.epoch += count == 2 or sibling == "goes on"
                shown = {7: 800 * MIB, 8: 900 * MIB}
            self.times.append(trio.current_time())
            return MemoryUse(0, shown)

    watch(Asked({}), vgpu, lambda memory: memory.look(), 5)
    assert seen[3][0] < begun[2], "the ledger was another when it was asked for"
    assert begun[3] < seen[5][0]
    assert seen[5][1] == seen[-1][1] == 1000 * MIB


def test_of_a_process_that_goes_on_to_allocate_what_is_reserved_stays_in_doubt() -> None:
    vgpu = Page(slot(0, 7, 400 * MIB))
    driver = Driver({7: 2000 * MIB})
    show = driver.memory_use

    def memory_use() -> MemoryUse:
        vgpu.slots = [replace(slot(0, 7, (400 + 2 * len(driver.times)) * MIB), reserved_bytes=2 * MIB)]
        vgpu.epoch += 1
        return show()

    driver.memory_use = memory_use  # type: ignore[method-assign]
    watch(driver, vgpu, lambda memory: memory.look(), 5)
    assert vgpu.grants.implicit_ns == 0


def test_nobody_waits_for_a_driver_that_has_failed_twice_in_a_row() -> None:
    """Once it may fail in passing: it is asked again before anybody goes on without it."""
    vgpu = Page(slot(0, 7, 400 * MIB))
    said: list[int] = []

    class Failing(Driver):
        def memory_use(self) -> MemoryUse:
            said.append(vgpu.grants.implicit_ns)
            return super().memory_use()

    reading = {7: 500 * MIB}
    driver = Failing(reading, None, reading, None, None, None)
    watch(driver, vgpu, lambda memory: memory.look(), 2)
    counted = [before != after for before, after in pairwise(said)]
    assert counted[:6] == [True, False, True, False, True, True]
    assert driver.times[2] - driver.times[1] == pytest.approx(URGENT_S)
    assert vgpu.grants.implicit_bytes == 100 * MIB


def test_who_waits_for_a_reading_has_it_at_once_and_another_soon_if_it_does_not_count() -> None:
    vgpu = Page(slot(0, 7, 400 * MIB))

    class Asked(Driver):
        def memory_use(self) -> MemoryUse:
            vgpu.epoch += len(self.times) in {1, 2, 3}
            self.times.append(trio.current_time())
            return MemoryUse(0, {7: 500 * MIB})

    driver = Asked({})
    watch(driver, vgpu, lambda memory: memory.look(), 2)
    assert driver.times[1] == pytest.approx(driver.times[0] + 0.5), "when it was asked for"
    assert [b - a for a, b in pairwise(driver.times[1:5])] == pytest.approx([URGENT_S] * 3)


def test_the_driver_is_not_asked_more_often_whoever_asks_for_it() -> None:
    driver = Driver({7: 500 * MIB})

    def ask(memory: MemoryWatch) -> None:
        memory.look()
        driver.memory_use, asked = lambda: (memory.look(), asked())[1], driver.memory_use  # type: ignore[method-assign]

    watch(driver, Page(slot(0, 7, 400 * MIB)), ask, 1)
    assert min(b - a for a, b in pairwise(driver.times)) >= URGENT_S - 1e-6
    assert len(driver.times) > 10


def test_a_process_that_called_exec_has_lost_what_it_had() -> None:
    driver = Driver({7: 50})
    vgpu = Page(slot(0, 7, 10, SlotState.DEAD), slot(1, 7, 5))
    assert len(watch(driver, vgpu, lambda m: m.died(vgpu, 0, Process(7, 70)) and None, 2)) == 1  # type: ignore[arg-type, func-returns-value]


def test_without_nvml_the_process_table_decides() -> None:
    vgpu = Page(slot(0, 2**22 + 1, 10, SlotState.DEAD))
    released = watch(Driver(None), vgpu, lambda m: m.died(vgpu, 0, Process(2**22 + 1, 70)) and None, 2)  # type: ignore[arg-type, func-returns-value]
    assert len(released) == 1


def test_memory_past_the_hook_is_told_once_in_the_second_reading() -> None:
    events: list[tuple[EventType, int]] = []

    def notice(kind: EventType, vgpu: Any, text: str, pid: int) -> None:
        assert "holds 9 GiB that its hook did not allocate, and the vGPU uses 9 GiB of 8 GiB" in text
        events.append((kind, pid))

    few, much = {7: 500 * MIB}, {7: 9 * GIB}
    watch(Driver(few, much, few, much), Page(slot(0, 7)), lambda _: None, 8, notice)
    assert events == [(EventType.UNMANAGED, 7)]
