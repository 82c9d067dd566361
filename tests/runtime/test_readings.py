"""Rates over the last second; what is told of a vGPU that cannot be suspended."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cython_ext.readings import SlotState
from gpuserver.core.admission.registry import GpuCapacity, Owner, Registry
from gpuserver.core.scheduler.leases import AccountSnapshot, AccountState, ServiceTotals
from gpuserver.runtime.api import readings
from gpuserver.runtime.api.readings import (
    owed_ns,
    peak_bytes,
    warnings_on,
    warnings_on_size,
    warnings_when_idle,
)
from gpuserver.runtime.rates import Rates, RateWindow
from gpuserver.runtime.vgpus import Past, Vgpu
from vgpu.identity import Member, Process
from vgpu.share import Mode, Priority
from vgpu.spec import VgpuSpec

MS = 1_000_000
NOTHING = AccountSnapshot(
    vgpu=3, guarantee_ppm=1, limit_ppm=1, priority=Priority.NORMAL, wants=False, holds=False, open_ended=False,
    throttled=False, penalised=False, waiting_since_ns=None, lag_ns=0, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0,
    tokens=0,
)  # fmt: skip


def statement(held_ms: int, busy_ms: int, tokens: int) -> AccountSnapshot:
    return replace(NOTHING, held_ns=held_ms * MS, busy_ns=busy_ms * MS, tokens=tokens)


def window(*samples: tuple[int, AccountSnapshot]) -> RateWindow:
    made = RateWindow()
    for at_ms, found in samples:
        made.add(at_ms * MS, {3: ServiceTotals(found.held_ns, found.busy_ns, found.tokens)})
    return made


def test_rates_cover_the_last_second_alone() -> None:
    steady = window(*((t, statement(t // 2, t // 4, t // 10)) for t in range(0, 5001, 200)))
    rates = steady.rates(5200 * MS, statement(2600, 1300, 520))
    assert rates.held_ratio == pytest.approx(0.5)
    assert rates.busy_ratio == pytest.approx(0.25)
    assert rates.tokens_per_second == pytest.approx(100)
    # Whatever happened before the window has no say.
    burst = window(*((t, statement(min(t, 1000), 0, 0)) for t in range(0, 5001, 200)))
    assert burst.rates(5200 * MS, statement(1000, 0, 0)) == Rates(0, 0, 0)


def test_a_newcomer_has_no_rate_and_a_key_that_is_used_again_starts_anew() -> None:
    assert RateWindow().rates(MS, statement(1, 1, 1)) == Rates()
    reused = window((0, statement(900, 900, 90)), (200, statement(0, 0, 0)), (400, statement(100, 50, 2)))
    assert reused.rates(600 * MS, statement(200, 100, 4)).held_ratio == pytest.approx(0.5)


def test_the_throttled_part_is_that_of_the_samples_that_know_the_vgpu() -> None:
    made, totals = RateWindow(), ServiceTotals(0, 0, 0)
    for at_ms, served, at_limit in ((0, {}, {3}), (200, {3: totals}, {3}), (400, {3: totals}, set()), (600, {}, set())):
        made.add(at_ms * MS, served, frozenset(at_limit))
    assert made.rates(800 * MS, statement(0, 0, 0)).throttled_ratio == pytest.approx(0.5)


def test_who_wants_nothing_is_owed_nothing_and_keeps_its_debt() -> None:
    assert [owed_ns(replace(NOTHING, wants=wants, lag_ns=2 * MS)) for wants in (False, True)] == [0, 2 * MS]
    assert [owed_ns(replace(NOTHING, wants=wants, lag_ns=-MS)) for wants in (False, True)] == [-MS, -MS]


def test_a_peak_has_all_that_the_limit_counts() -> None:
    """Contexts, too: else a vGPU could use more than it ever had."""
    slots = tuple(SimpleNamespace(peak_bytes=size << 20) for size in (2, 5))
    vgpu = cast(Vgpu, SimpleNamespace(implicit_peak_bytes=480 << 20, slots=slots))
    assert peak_bytes(vgpu) == 487 << 20


def test_what_cannot_be_suspended_is_told_before_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(idle: str, uid: int, unmoved: str = "", **fields: object) -> str:
        spec = VgpuSpec.parse(sm_percent=30, memory_bytes="1G", idle_suspend_ns=idle, **fields)
        record = SimpleNamespace(spec=spec, owner=Owner(uid))
        return " ".join(
            warnings_when_idle(
                cast(Vgpu, SimpleNamespace(record=record, suspend_error=unmoved, quiesced=False, unheard_ports=()))
            )
        )

    monkeypatch.setattr(readings.os, "geteuid", lambda: 1000)
    assert told("10m", 1000) == told("off", 1001) == told("10m", 1001, oversubscribe="swap") == ""
    assert told("10m", 1001) == (
        "The node runs as uid 1000, and may not suspend programs of uid 1001 when they are idle."
    )
    assert told("10m", 1000, "no") == "It cannot be suspended when it is idle: no. It is tried again."
    monkeypatch.setattr(readings.os, "geteuid", lambda: 0)
    assert told("10m", 1001) == ""


def test_who_has_more_than_its_limit_is_told_so_until_it_has_not() -> None:
    def told(used_mib: int, limit: str) -> tuple[str, ...]:
        spec = VgpuSpec.parse(sm_percent=30, memory_bytes=limit)
        record = Registry(GpuCapacity(16 << 30, 132), Mode.TEMPORAL).create("a", spec, Owner(os.geteuid()), 0)
        vgpu = SimpleNamespace(
            record=record, used_bytes=used_mib << 20, suspend_error="", quiesced=False, unheard_ports=(), swaps=False
        )
        return warnings_on(cast(Vgpu, vgpu), [record], "", "")

    assert told(256, "256M") == ()
    assert told(482, "256M") == ("Its programs have 482 MiB of 256 MiB: they keep it, and are refused more.",)
    assert told(482, "1G") == ()


def test_what_is_counted_of_a_vgpu_never_goes_back() -> None:
    """A process is dead in its page before its broker has said so: in neither sum are its counts then."""
    live = SimpleNamespace(index=0, state=SlotState.ACTIVE, refusals=2, launches=1000, refused_bytes=7)
    dead = SimpleNamespace(index=0, state=SlotState.DEAD, refusals=2, launches=1000, refused_bytes=7)
    other = SimpleNamespace(index=1, state=SlotState.ACTIVE, refusals=1, launches=10)

    def page(*slots: SimpleNamespace) -> Any:
        return SimpleNamespace(read_member=lambda index, *_: slots[index], read_slot=slots.__getitem__)

    members = {index: Member(index, Process(index, 1)) for index in (0, 1)}
    vgpu = Vgpu(cast(Any, None), 1, cast(Any, None), activity=page(live, other), members=members)
    assert vgpu.show_counts() == Past(3, 1010)
    vgpu.activity = page(dead, other)
    assert vgpu.show_counts() == Past(3, 1010)
    vgpu.count_past(0)
    assert vgpu.retired.refused_bytes == 7
    assert vgpu.show_counts() == Past(3, 1010)
    vgpu.activity = None
    assert vgpu.show_counts() == Past(3, 1010)
    assert [vgpu.show_served(ServiceTotals(9, busy, 1)).busy_ns for busy in (4, 7, 5, 8)] == [4, 7, 7, 8]
    book = AccountState(lag_ns=1, bucket_ns=1, held_ns=10, busy_ns=7, overuse_ns=1, tokens=2)
    assert vgpu.booked(book) == replace(book, busy_ns=8)
    other.launches += 5
    vgpu.activity = page(dead, other)
    assert vgpu.show_counts() == Past(3, 1015)


def test_a_limit_that_one_context_fills_is_a_warning() -> None:
    assert warnings_on_size(481 << 20, 0) == ()
    (told,) = warnings_on_size(64 << 20, 0)
    assert "takes about 480 MiB (none was seen on this card yet), and the limit is 64 MiB" in told
    (told,) = warnings_on_size(500 << 20, 512 << 20)
    assert "took 512 MiB on this card, and the limit is 500 MiB" in told
    assert warnings_on_size(513 << 20, 512 << 20) == ()
