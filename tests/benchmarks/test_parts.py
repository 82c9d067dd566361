"""What the parts make of measurements: with the baselines of the same block, and without them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.parts import PARTS, pairs, shares
from benchmarks.gpu.parts.handover import with_gaps
from benchmarks.gpu.parts.part import Options
from benchmarks.gpu.records import Measurement
from benchmarks.gpu.stage import Outcome
from benchmarks.gpu.tables import Row


def measured(
    part: str, block: str, row: str, way: str, asked: tuple[float, ...], *results: dict[str, Any]
) -> Measurement:
    return Measurement("r", part, 0, block, row, way, asked, results)


def did(units: float, p99_ms: float | None = 5.0) -> dict[str, Any]:
    return {"units_per_second": units, "step_p50_ms": 4.0, "step_p99_ms": p99_ms}


def find(rows: list[Row], row: str, way: str) -> dict[str, float]:
    (found,) = [r.figures for r in rows if (r.row, r.way) == (row, way)]
    return found


def test_a_share_is_judged_by_the_one_who_is_furthest_off() -> None:
    rows = shares.derive(
        [
            measured("shares", "gemm4096", "exclusive", "exclusive", (), {"busy_ratio": 0.995}),
            measured("shares", "gemm4096", "30/70", "temporal", (30, 70), {"busy_ratio": 0.299}, {"busy_ratio": 0.694}),
        ]
    )
    assert find(rows, "30/70", "temporal")["error_points"] == pytest.approx(0.6)
    assert "error_points" not in find(rows, "exclusive", "exclusive")


def test_nobody_is_owed_more_than_it_uses_when_alone() -> None:
    rows = shares.derive(
        [
            measured("shares", "resnet50-train", "exclusive", "exclusive", (), {"busy_ratio": 0.88}),
            measured("shares", "resnet50-train", "90", "temporal", (90,), {"busy_ratio": 0.875}),
        ]
    )
    assert find(rows, "90", "temporal")["error_points"] == pytest.approx(0.5)


def test_without_an_exclusive_run_no_error_is_claimed() -> None:
    rows = shares.derive([measured("shares", "gemm4096", "30", "temporal", (30,), {"busy_ratio": 0.3})])
    assert find(rows, "30", "temporal") == {"busy1_percent": 30.0}


@pytest.mark.parametrize(
    ("token", "waited", "points"),
    [(0.30, 0.6, 0.0), (0.32, 0.0, 2.0), (0.20, 0.0, 0.0), (0.20, 0.04, 4.0), (0.20, 0.9, 10.0)],
)
def test_a_host_bound_work_is_short_of_its_share_only_while_work_waited(
    token: float, waited: float, points: float
) -> None:
    assert shares.token_error({"charged_ratio": token, "waiting_ratio": waited}, 30.0) == pytest.approx(points)


def test_totals_are_compared_with_the_exclusive_runs_before_and_after() -> None:
    block = "resnet50-train×2"
    rows = pairs.derive(
        [
            measured("pairs", block, "exclusive", "exclusive", (), did(2000)),
            measured("pairs", block, "30/70", "temporal", (30, 70), did(620, 110.0), did(1380)),
            measured("pairs", block, "2 of them", "hardware", (), did(900), did(900)),
            measured("pairs", block, "2 of them", "mps", (), did(950), did(950, None)),
            measured("pairs", block, "exclusive", "exclusive", (), did(2100)),
        ]
    )
    shared = find(rows, "30/70", "temporal")
    assert shared["total_percent"] == pytest.approx(100 * 2000 / 2050)
    assert shared["over_hardware_points"] == pytest.approx(100 * 200 / 2050)
    assert shared["split_error_points"] == pytest.approx(1.0)
    assert shared["p99_1_ms"] == 110.0
    assert "over_hardware_points" not in find(rows, "2 of them", "hardware")
    assert "p99_2_ms" not in find(rows, "2 of them", "mps")
    assert {row.work for row in rows} == {"resnet50-train"}


def test_a_block_that_was_cut_short_before_its_baseline_gives_no_row() -> None:
    assert pairs.derive([measured("pairs", "gemm4096×2", "30/70", "temporal", (30, 70), did(1), did(2))]) == []


def test_the_bars_of_pairs_are_for_the_works_that_they_name() -> None:
    columns = {column.figure: column for column in PARTS["pairs"].columns}

    def bar(figure: str, work: str, row: str = "30/70", way: str = "temporal") -> float | None:
        return columns[figure].bar(Row(work, row, way, {}))

    assert [bar("total_percent", work) for work in ("gemm16384", "elementwise", "resnet50-train", "bert-infer")] == [
        98.5,
        98.5,
        97.0,
        None,
    ]
    assert bar("total_percent", "gemm4096", way="hardware") is None
    assert [bar("p99_1_ms", "resnet50-train", row) for row in ("30/70", "50/50")] == [120.0, None]
    assert bar("split_error_points", "resnet50-infer1") is None


def test_gaps_replace_the_kernels_that_they_were_found_in() -> None:
    a, b = [(0, 1024), (2048, 3072)], [(1056, 2016), (3136, 4096)]
    outcome = with_gaps(Outcome(({"pid": 1, "kernels_ns": a}, {"pid": 2, "kernels_ns": b})))
    assert outcome.results == ({"pid": 1}, {"pid": 2})
    assert outcome.figures["handovers"] == 3
    assert outcome.figures["gap_p50_us"] == pytest.approx(0.032)
    assert outcome.figures["gap_worst_us"] == pytest.approx(0.064)
    assert (outcome.figures["tick_ns"], outcome.figures["overlaps"]) == (32, 0)


def test_gaps_of_kernels_that_all_overlap_are_no_gaps() -> None:
    outcome = with_gaps(Outcome(({"kernels_ns": [(0, 100)]}, {"kernels_ns": [(50, 150)]})))
    assert (outcome.figures["handovers"], outcome.figures["overlaps"]) == (1, 1)
    assert "gap_p99_us" not in outcome.figures


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_an_estimate_grows_with_what_is_asked(part: Any) -> None:
    assert part.name
    one, longer, more = (part.estimate(Options(s, n)) for s, n in ((4.0, 1), (8.0, 1), (4.0, 2)))
    assert 0 < one < longer
    assert one < more
