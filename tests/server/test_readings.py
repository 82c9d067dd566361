"""Rates over the last second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.leases import Priority, Statement
from gpuserver.runtime.readings import Rates, RateWindow

MS = 1_000_000
NOTHING = Statement(
    vgpu=3, guarantee_ppm=1, limit_ppm=1, priority=Priority.NORMAL, wants=False, holds=False, throttled=False,
    barred=False, waiting_since_ns=None, lag_ns=0, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0,
)  # fmt: skip


def statement(held_ms: int, busy_ms: int, tokens: int) -> Statement:
    return replace(NOTHING, held_ns=held_ms * MS, busy_ns=busy_ms * MS, tokens=tokens)


def window(*samples: tuple[int, Statement]) -> RateWindow:
    made = RateWindow()
    for at_ms, found in samples:
        made.add(at_ms * MS, {3: found})
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
