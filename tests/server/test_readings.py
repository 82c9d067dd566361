"""Rates over the last second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.leases import Priority
from gpuserver.core.scheduler import Standing
from gpuserver.runtime.readings import Rates, RateWindow

MS = 1_000_000
NOTHING = Standing(
    vgpu=3, guarantee_ppm=1, limit_ppm=1, priority=Priority.NORMAL, wants=False, holds=False, throttled=False,
    barred=False, waiting_since_ns=None, lag_ns=0, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0,
)  # fmt: skip


def standing(held_ms: int, busy_ms: int, tokens: int) -> Standing:
    return replace(NOTHING, held_ns=held_ms * MS, busy_ns=busy_ms * MS, tokens=tokens)


def window(*samples: tuple[int, Standing]) -> RateWindow:
    made = RateWindow()
    for at_ms, found in samples:
        made.add(at_ms * MS, {3: found})
    return made


def test_rates_cover_the_last_second_alone() -> None:
    steady = window(*((t, standing(t // 2, t // 4, t // 10)) for t in range(0, 5001, 200)))
    rates = steady.rates(5200 * MS, standing(2600, 1300, 520))
    assert rates.held_ratio == pytest.approx(0.5)
    assert rates.busy_ratio == pytest.approx(0.25)
    assert rates.tokens_per_second == pytest.approx(100)
    # Whatever happened before the window has no say.
    burst = window(*((t, standing(min(t, 1000), 0, 0)) for t in range(0, 5001, 200)))
    assert burst.rates(5200 * MS, standing(1000, 0, 0)) == Rates(0, 0, 0)


def test_a_newcomer_has_no_rate_and_a_key_that_is_used_again_starts_anew() -> None:
    assert RateWindow().rates(MS, standing(1, 1, 1)) == Rates()
    reused = window((0, standing(900, 900, 90)), (200, standing(0, 0, 0)), (400, standing(100, 50, 2)))
    assert reused.rates(600 * MS, standing(200, 100, 4)).held_ratio == pytest.approx(0.5)
