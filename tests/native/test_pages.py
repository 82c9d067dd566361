"""Pages: sealed, validated, and honest about what tenants wrote into them."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cython_ext.pages.activitypage import ActivityPage, SlotsFull
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.page import PageError
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import GrantsFlag, PageMode, SlotState
from cython_ext.testing import bindings_memory as native
from cython_ext.testing.bindings_logic import GRANTS_BYTES

GIB = 2**30
PROCESSES = slice(44, 48)  # of an activity page: cython_ext/pages/layout.pxd


def grants(**changes: object) -> GrantsPage:
    arguments: dict[str, object] = {
        "vgpu_id": "vgpu-00c0ffee",
        "gpu_uuid": "GPU-1",
        "mode": PageMode.TEMPORAL,
        "generation": 7,
        "memory_limit_bytes": 8 * GIB,
        "total_memory_bytes": 80 * GIB,
    }
    return GrantsPage.create(**(arguments | changes))  # type: ignore[arg-type]


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def page() -> Iterator[GrantsPage]:
    with grants() as made:
        yield made


def test_what_the_maker_writes_the_reader_sees(page: GrantsPage) -> None:
    with GrantsPage.map_readonly(page.fileno()) as reader:
        page.memory_limit_bytes = 3 * GIB
        page.implicit_bytes = 500
        page.implicit_ns = 77
        page.window_ns = 250_000
        page.flags = GrantsFlag.CONTENDED | GrantsFlag.LOSS_RUN
        assert (reader.vgpu_id, reader.gpu_uuid, reader.generation, reader.mode) == ("vgpu-00c0ffee", "GPU-1", 7, 1)
        assert (reader.memory_limit_bytes, reader.window_ns) == (3 * GIB, 250_000)
        assert (reader.implicit_bytes, reader.implicit_ns) == (500, 77)
        assert reader.flags == GrantsFlag.CONTENDED | GrantsFlag.LOSS_RUN
        assert reader.plan().current is None
        assert reader.alive_ns > 0


def test_a_change_of_flags_advances_the_word_that_sleepers_wait_on(page: GrantsPage) -> None:
    before = page.plan().change
    page.flags = GrantsFlag.REMOVED
    assert page.plan().change == before + 1


def test_nobody_but_the_maker_can_write_a_grants_page(page: GrantsPage) -> None:
    with GrantsPage.map_readonly(page.fileno()) as reader, pytest.raises(PageError, match="read-only"):
        reader.memory_limit_bytes = 0
    # The descriptor is read-only; reopened for writing through /proc, the seal still holds.
    again = os.open(f"/proc/self/fd/{page.fileno()}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
    finally:
        os.close(again)


def test_mapping_outlives_the_descriptor(page: GrantsPage) -> None:
    reader = GrantsPage.map_readonly(page.fileno())
    page.close_descriptor()
    page.close_descriptor()
    page.memory_limit_bytes = 5
    assert reader.memory_limit_bytes == 5
    with pytest.raises(PageError, match="no descriptor"):
        page.fileno()
    reader.close()
    reader.close()
    with pytest.raises(PageError, match="closed"):
        _ = reader.memory_limit_bytes


def test_pages_are_close_on_exec_and_leak_no_descriptor() -> None:
    before = open_descriptors()
    with grants() as made, ActivityPage.create() as activity, RelayPage.create() as relay:
        assert not any(os.get_inheritable(page.fileno()) for page in (made, activity, relay))
    assert open_descriptors() == before


@pytest.mark.parametrize("field", ["memory_limit_bytes", "implicit_bytes", "implicit_ns", "window_ns", "grace_ns"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_amounts_out_of_range_are_refused(page: GrantsPage, field: str, value: int) -> None:
    before = getattr(page, field)
    with pytest.raises(ValueError, match=field):
        setattr(page, field, value)
    assert getattr(page, field) == before


def test_an_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 63 fit"):
        grants(vgpu_id="x" * 64)


def test_descriptors_of_anything_else_are_refused() -> None:
    read_end, write_end = os.pipe()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    try:
        with pytest.raises(PageError, match="not a memfd"):
            GrantsPage.map_readonly(read_end)
        with pytest.raises(PageError, match="not sealed"):
            GrantsPage.map_readonly(unsealed)
        with ActivityPage.create() as activity, RelayPage.create() as relay:
            with pytest.raises(PageError, match="some other page"):
                GrantsPage.map_readonly(activity.fileno())
            with pytest.raises(PageError, match="some other page"):
                RelayPage.map(activity.fileno())
            with pytest.raises(PageError, match="some other page"):
                ActivityPage.map(relay.fileno())
            with grants() as small, pytest.raises(PageError, match="4096 bytes"):
                ActivityPage.map(small.fileno())
    finally:
        for descriptor in (read_end, write_end, unsealed):
            os.close(descriptor)


def test_a_page_that_needs_a_newer_program_is_refused(page: GrantsPage) -> None:
    newer = os.memfd_create("newer", os.MFD_ALLOW_SEALING)
    try:
        content = bytearray(os.pread(page.fileno(), 4096, 0))
        content[14:16] = (999).to_bytes(2, "little")  # PageHeader.min_version
        os.pwrite(newer, content, 0)
        with RelayPage.create() as sealed:
            fcntl.fcntl(newer, fcntl.F_ADD_SEALS, fcntl.fcntl(sealed.fileno(), fcntl.F_GET_SEALS))
        with pytest.raises(PageError, match="layout version 999"):
            GrantsPage.map_readonly(newer)
    finally:
        os.close(newer)


def test_hooks_of_the_first_release_take_the_page(page: GrantsPage) -> None:
    """They know 400 bytes of it, and refuse a page whose header says more."""
    assert int.from_bytes(os.pread(page.fileno(), 4, 8), "little") == 400
    assert os.fstat(page.fileno()).st_size >= GRANTS_BYTES > 400


def test_slots_are_reserved_until_none_is_left() -> None:
    with ActivityPage.create() as activity:
        taken = [activity.reserve_slot(pid, 10 * pid, f"job {pid}") for pid in range(1, 65)]
        assert taken == list(range(64))
        assert activity.processes == 64
        with pytest.raises(SlotsFull):
            activity.reserve_slot(99, 1)
        reading = activity.slots()[3]
        assert (reading.index, reading.state, reading.pid, reading.start_time) == (3, SlotState.RESERVED, 4, 40)
        assert (reading.command, reading.charged_bytes, len(reading.committed_bytes)) == ("job 4", 0, 8)
    with pytest.raises(IndexError), ActivityPage.create() as activity:
        activity.read_slot(64)


def test_the_broker_may_name_the_slot_that_its_own_books_call_free() -> None:
    with ActivityPage.create() as activity:
        assert activity.reserve_slot(1, 10, "first", 5) == 5
        assert activity.reserve_slot(2, 20, "second", 5) == 5  # the page may say what it likes
        assert activity.read_slot(5).pid == 2
        assert activity.reserve_slot(3, 30) == 0


def test_only_a_dead_slot_is_reaped() -> None:
    with ActivityPage.create() as activity:
        slot = activity.reserve_slot(1, 10)
        assert activity.reap_slot(slot) == 0
        assert activity.read_slot(slot).state is SlotState.RESERVED
        with pytest.raises(IndexError):
            activity.reap_slot(64)


def test_whatever_a_tenant_writes_slots_stay_within_their_ranges() -> None:
    with ActivityPage.create() as activity:
        for pid in range(1, 65):
            activity.reserve_slot(pid, pid, "x")
        with mmap.mmap(activity.fileno(), 0) as raw:
            raw[192:] = b"\xff" * (len(raw) - 192)  # everything behind the ledger
        for reading in activity.slots():
            assert reading.state is SlotState.ACTIVE
            assert reading.command == "�" * 64
            for name in reading.__slots__:
                value = getattr(reading, name)
                for number in value if isinstance(value, tuple) else (value,):
                    assert isinstance(number, str) or 0 <= number < 2**64
            for name in ("busy_ns", "launches", "peak_bytes", "refused_bytes", "drained_ns", "longest_kernel_ns"):
                assert 0 <= getattr(reading, name) < 2**63
            assert all(0 <= amount < 2**63 for amount in reading.committed_bytes)


def test_refusals_are_those_of_every_process_that_is_not_known_to_be_dead() -> None:
    with ActivityPage.create() as activity, mmap.mmap(activity.fileno(), 0) as raw:
        words = native.Activity(raw)
        for slot in range(4):
            activity.reserve_slot(slot + 1, 1)
            for _ in range(slot + 1):
                words.reserve(slot, 0, 1, 0, 2**64 - 1)
        assert activity.refusals == 1 + 2 + 3 + 4
        words.set_state(1, SlotState.DEAD)
        words.set_state(2, SlotState.ACTIVE)
        words.set_state(3, SlotState.FREE)
        assert activity.refusals == 1 + 3
        assert activity.refusals == sum(slot.refusals for slot in activity.slots() if slot.state is not SlotState.DEAD)
        words.set_state(2, 77)  # a word that means nothing does not make a process disappear
        assert activity.refusals == 1 + 3
        del words


def test_commands_cannot_write_to_an_operators_terminal() -> None:
    with ActivityPage.create() as activity:
        slot = activity.reserve_slot(1, 1, "evil\x1b[2J\r\nname")
        assert activity.read_slot(slot).command == "evil?[2J??name"
        long = activity.reserve_slot(2, 2, "é" * 100)
        assert len(activity.read_slot(long).command.encode()) <= 66


def test_generation_and_broker_epoch() -> None:
    with ActivityPage.create(generation=3) as activity, ActivityPage.map(activity.fileno()) as other:
        assert other.generation == 3
        other.generation = 4
        assert activity.generation == 4
        assert [activity.bump_broker_epoch(), other.bump_broker_epoch()] == [1, 2]


@pytest.mark.parametrize("left", [0, 2, 0xFFFFFFFF])
def test_a_new_broker_counts_the_processes_that_there_are(left: int) -> None:
    """Killed between a slot and its count, a broker leaves one too few or too many; a hook that is not alone by that
    word queues nothing ahead of its leases."""
    with ActivityPage.create() as activity, mmap.mmap(activity.fileno(), 0) as raw:
        activity.reserve_slot(1, 1)
        assert int.from_bytes(raw[PROCESSES], "little") == 1
        raw[PROCESSES] = left.to_bytes(4, "little")
        activity.bump_broker_epoch()
        assert int.from_bytes(raw[PROCESSES], "little") == 1


def test_relay_entries_start_empty_and_have_bounds() -> None:
    with RelayPage.create() as relay, RelayPage.map(relay.fileno()) as other:
        assert other.entry(255) == relay.entry(0)
        assert not relay.entry(0).want
        with pytest.raises(IndexError):
            relay.entry(256)
