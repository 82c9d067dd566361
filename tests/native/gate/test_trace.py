"""The ring in which a hook notes what it sees of the GPU: readers that are late, torn records, older pages; and that
the intervals noted are those of the books."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.readings import TraceKind, TraceReading
from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_memory import ACTIVITY_BYTES, SLOT_BYTES
from cython_ext.testing.fake_peer import Process
from tests.native.gate.test_window import Gpu, Step, play, steps
from tests.native.stage import grants

RING = 512
F_ADD_SEALS = 1033
SEAL_SHRINK = 2


@pytest.fixture
def page() -> Iterator[ActivityPage]:
    with ActivityPage.create() as made:
        yield made


def process(page: ActivityPage, slot: int = 0) -> Process:
    return Process(page, grants(), slot)


def test_a_reader_that_keeps_up_misses_nothing(page: ActivityPage) -> None:
    writer = process(page, 63)
    assert page.traced(63) == ([], 0, 0)
    for begin in range(3):
        writer.note(TraceKind.BUSY, begin, begin + 1)
    found, newest, lost = page.traced(63, 0)
    assert (found, newest, lost) == ([TraceReading(TraceKind.BUSY, b, b + 1, 0) for b in range(3)], 3, 0)
    writer.note(TraceKind.LAUNCH, 7, 9, 5)
    assert page.traced(63, newest) == ([TraceReading(TraceKind.LAUNCH, 7, 9, 5)], 4, 0)
    assert page.traced(62, 0) == ([], 0, 0)


@given(st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=6))
def test_every_record_is_read_once_or_counted_as_lost(bursts: list[tuple[int, bool]]) -> None:
    page = ActivityPage.create()
    writer = process(page)
    written, seen, lost, after = 0, [], 0, 0
    for count, torn in bursts:
        for i in range(count):
            writer.note(TraceKind.BUSY, written, written + 1, torn=torn and i == 0)
            written += 1
        found, after, missed = page.traced(0, after)
        seen += [record.begin_ns for record in found]
        lost += missed
        assert len(found) <= RING
    assert seen == sorted(set(seen))
    assert len(seen) + lost == written


def test_a_process_that_is_new_in_a_slot_is_read_from_its_first_record(page: ActivityPage) -> None:
    writer = process(page)
    for _ in range(5):
        writer.note(TraceKind.BUSY, 1, 2)
    _, after, _ = page.traced(0)
    page.reserve_slot(1234, 1, "next", index=0)
    writer.note(TraceKind.BUSY, 8, 9)
    assert page.traced(0, after) == ([TraceReading(TraceKind.BUSY, 8, 9, 0)], 1, 0)


def test_a_page_of_an_older_version_has_no_rings_and_works_otherwise() -> None:
    """What is appended behind the activity page is found by the file's size; nobody touches what is not there."""
    with ActivityPage.create() as made:
        whole = os.pread(made.fileno(), ACTIVITY_BYTES, 0)
    descriptor = os.memfd_create("older", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, whole, 0)
        os.ftruncate(descriptor, -(-ACTIVITY_BYTES // 4096) * 4096)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEAL_SHRINK)
        with ActivityPage.map(descriptor) as page:
            slot = page.reserve_slot(4711, 1)
            assert [reading.pid for reading in page.slots()] == [4711]
            assert page.traced(slot, 0) == ([], 0, 0)
    finally:
        os.close(descriptor)


def test_older_programs_take_the_page() -> None:
    """They refuse one whose header says more than they know."""
    with ActivityPage.create() as made:
        size = int.from_bytes(os.pread(made.fileno(), 4, 8), "little")
        assert size == ACTIVITY_BYTES < os.fstat(made.fileno()).st_size
    assert SLOT_BYTES == 512


def test_what_a_value_says() -> None:
    launch = TraceReading(TraceKind.LAUNCH, 0, 0, (1 << 63) | (123_456 << 24) | 0xABCDEF)
    assert (launch.is_graph, launch.lasted_ns, launch.key) == (True, 123_456, 0xABCDEF)
    drain = TraceReading(TraceKind.DRAIN, 0, 0, (77 << 32) | 12_000)
    assert (drain.epoch, drain.window_ns) == (77, 12_000_000)


def noted(gpu: Gpu, script: list[Step]) -> tuple[list[tuple[int, int]], int]:
    """The intervals that a hook would note while ``script`` plays, and the busy time in the books at its end."""
    told: list[tuple[int, int]] = []

    class Watched(native.Backlog):  # type: ignore[misc] # the simulated GPU of the window's tests drives it
        def completed(self, now_ns: int) -> bool:
            since = self.since_ns
            empty = super().completed(now_ns)
            if empty and (interval := self.closed_interval(since)):
                told.append(interval)
            return bool(empty)

    gpu.backlog = Watched()
    for step in script:
        play(gpu, step, step.length_ns)
        if part := gpu.backlog.open_interval():
            told.append(part)
    gpu.now_ns = max(gpu.now_ns, gpu.end_ns)
    busy, since = gpu.backlog.busy, gpu.backlog.since_ns
    gpu.synchronise()
    if busy and (interval := gpu.backlog.closed_interval(since)):
        told.append(interval)
    return told, gpu.backlog.busy_ns


@given(st.lists(steps, max_size=40))
def test_the_intervals_are_those_of_the_books(script: list[Step]) -> None:
    told, busy_ns = noted(Gpu(), script)
    assert all(begin < end for begin, end in told)
    assert all(a[1] <= b[0] for a, b in pairwise(told))
    assert sum(end - begin for begin, end in told) == busy_ns
