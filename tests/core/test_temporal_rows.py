"""Deterministic runs of the temporal scheduler on the simulated GPU: figures of the policy, held to."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.model import MS, US, Run, S, Work
from vgpu.share import PPM, Share


def run_for(seconds: int, shares: list[Share], works: list[Work], **how: int) -> Run:
    return Run(TemporalScheduler(), shares, works, **how).run(seconds * S)


@pytest.mark.parametrize(
    ("percents", "works"),
    [
        ((30, 70), [Work(200 * US)] * 2),
        ((30, 70), [Work(MS, refill_ns=400 * US)] * 2),
        ((20, 30, 50), [Work(MS)] * 3),
        ((30, 70), [Work(30 * MS), Work(MS)]),
        ((40, *[6] * 10), [Work(MS)] * 11),
    ],
    ids=["pair", "pair-refill", "triple", "long-kernels", "eleven"],
)
def test_shares_hold(percents: tuple[int, ...], works: list[Work]) -> None:
    run = run_for(12, [Share(p * PPM // 100) for p in percents], works)
    for key, percent in enumerate(percents):
        held = 100 * run.held_ns(key, 2 * S, 12 * S) / (10 * S)
        assert held == pytest.approx(percent, abs=0.45)
    busy = sum(run.busy_ns(key, 2 * S, 12 * S) for key in run.keys)
    assert busy >= 0.983 * 10 * S
