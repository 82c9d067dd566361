"""``vgpuctl gpu set --period``: whatever a round takes, shares hold, and it takes that."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy, with_period
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.model import MS, US, Run, S, Work
from vgpu.share import PPM, Share
from vgpu.spec import LONGEST_PERIOD_NS, SHORTEST_PERIOD_NS

PERIODS = [SHORTEST_PERIOD_NS, 6 * MS, 40 * MS, 200 * MS, LONGEST_PERIOD_NS]
SLOW = {6 * MS, 200 * MS}


@pytest.mark.simulation
@pytest.mark.parametrize("period_ns", [pytest.param(ns, marks=[pytest.mark.slow] * (ns in SLOW)) for ns in PERIODS])
@pytest.mark.parametrize(
    "shares",
    [
        [Share(450_000, PPM, 60_000)] * 2,
        [Share(470_000, PPM, 80_000)] + [Share(470_000, PPM, 30_000)] * 3,
        [Share(300_000, PPM, 60_000)] * 3,
    ],
    ids=["two of 60 %", "80 % and three of 30 %", "three of 60 %"],
)
def test_spatial_guarantees_hold_in_rounds_of_any_length(shares: list[Share], period_ns: int) -> None:
    policy = with_period(DEFAULT_POLICY, period_ns)
    seconds = 4 if period_ns < 100 * MS else 16
    run = Run(SpatialScheduler(policy), shares, [Work(500 * US)] * len(shares)).run(seconds * S)
    assert not oracle.guarantees(run, 4 * period_ns + oracle.longest_overrun(run), begin=S)


def round_seen_ns(period_ns: int) -> float:
    """Of two equal vGPUs that always want, as of the time between turns of the first."""
    policy = with_period(DEFAULT_POLICY, period_ns)
    run = Run(TemporalScheduler(policy), [Share(PPM // 2)] * 2, [Work(400 * US)] * 2).run(12 * S)
    turns = [record.go_ns for record in run.records if record.key == 0 and record.go_ns > 4 * S]
    return (turns[-1] - turns[0]) / (len(turns) - 1)


@pytest.mark.simulation
@pytest.mark.parametrize("period_ns", [70 * MS, 200 * MS, 400 * MS, LONGEST_PERIOD_NS])
def test_two_take_turns_as_often_as_was_asked_for(period_ns: int) -> None:
    assert round_seen_ns(period_ns) == pytest.approx(period_ns, rel=0.02)


@pytest.mark.simulation
@pytest.mark.parametrize("period_ns", [400 * MS, LONGEST_PERIOD_NS])
def test_a_long_turn_is_no_debt(period_ns: int) -> None:
    """Half of a second at once is more than the grace of others for a drain; nobody is kept out for it."""
    policy = with_period(DEFAULT_POLICY, period_ns)
    shares = [Share(PPM * part // 1000) for part in (500, 250, 125, 125)]
    run = Run(TemporalScheduler(policy), shares, [Work(MS)] * len(shares)).run(20 * S)
    turns = [record.go_ns for record in run.records if record.key == 0 and record.go_ns > 4 * S]
    assert max(after - before for before, after in pairwise(turns)) < 1.2 * period_ns


def test_a_period_may_be_changed_and_changed_back() -> None:
    assert with_period(with_period(with_period(DEFAULT_POLICY, 5 * MS), S), 40 * MS) == with_period(Policy(), 40 * MS)
