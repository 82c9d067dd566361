"""Deterministic runs of the spatial scheduler on the simulated GPU: figures of the policy, held to."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.leases import Publish
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from tests.core.model import MS, US, Run, S, Work
from vgpu.share import PPM, Share


def share(guarantee: float, sm_percent: int, limit: float = 1.0) -> Share:
    return Share(round(guarantee * PPM), round(limit * PPM), sm_percent * 1000)


def busy_percents(run: Run, begin: int, end: int) -> list[float]:
    return [100 * run.busy_ns(key, begin, end) / (end - begin) for key in run.keys]


def test_where_all_fit_each_gets_one_open_ended_lease() -> None:
    run = Run(SpatialScheduler(), [share(1, 30), share(1, 30), share(1, 40)], [Work()] * 3).run(5 * S)
    leases = [command.lease for _, command in run.commands if isinstance(command, Publish)]
    assert [(lease.vgpu, lease.end_ns) for lease in leases] == [(0, None), (1, None), (2, None)]
    assert min(busy_percents(run, 1 * S, 5 * S)) > 99.9


def test_a_limit_holds_where_all_fit() -> None:
    run = Run(SpatialScheduler(), [share(1, 30), share(0.5, 70, 0.5)], [Work()] * 2).run(12 * S)
    assert busy_percents(run, 2 * S, 12 * S) == pytest.approx([100, 50], abs=0.1)


@pytest.mark.parametrize(
    ("shares", "works", "floor"),
    [
        ([(0.48, 80), (0.48, 30), (0.48, 30), (0.48, 30)], [Work()] * 4, 0.2),
        ([(0.30, 100), *[(0.065, 10)] * 10], [Work()] * 11, 0.2),
        pytest.param(
            [(0.4, 12)] * 4 + [(0.4, 24)] * 2 + [(0.6, 50)] * 2, [Work(200 * US)] * 8, -1.0, marks=pytest.mark.slow
        ),
        pytest.param(
            [(0.4, 12)] * 4 + [(0.4, 24)] * 2 + [(0.6, 50)] * 2,
            [Work(k * MS) for k in (1, 2, 3, 4) * 2],
            -3.5,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["large-partition", "whole-card-beside-ten", "three-models", "three-models-mixed-kernels"],
)
def test_guarantees_hold_in_rounds(shares: list[tuple[float, int]], works: list[Work], floor: float) -> None:
    """``floor``: points above (or, where the packing is full, below) the guarantee."""
    run = Run(SpatialScheduler(), [share(r, s) for r, s in shares], works).run(12 * S)
    for (guarantee, _), busy in zip(shares, busy_percents(run, 2 * S, 12 * S), strict=True):
        assert busy >= 100 * guarantee + floor
