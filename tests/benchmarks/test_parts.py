"""What the parts make of measurements: with the baselines of the same block, and without them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, cast

import pytest

from benchmarks.suite.parts import PARTS, colocation, gate, light, mix, packing, pairs, pdl, percents, shares, sms
from benchmarks.suite.parts.handover import with_gaps
from benchmarks.suite.parts.part import Options, rotated
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import percentile
from benchmarks.suite.report.tables import Row
from benchmarks.suite.stage import Outcome, Sharer, Stage
from benchmarks.suite.workloads.chain import overlaps
from benchmarks.suite.workloads.sharer import Window, check_whole, requests


def measured(
    part: str, block: str, row: str, way: str, asked: tuple[float, ...], *results: dict[str, Any]
) -> Measurement:
    return Measurement("r", part, 0, block, row, way, asked, results)


def did(units: float, p99_ms: float | None = 5.0) -> dict[str, Any]:
    return {"units_per_second": units, "step_p50_ms": 4.0, "step_p99_ms": p99_ms, "steps": 99}


def gpu_time(taken: float) -> dict[str, Any]:
    return {"taken_ratio": taken, "busy_ratio": taken - 0.02, "units_per_second": 1000 * taken}


def bars(part: str, row: Row) -> dict[str, float]:
    return {c.figure: limit for c in PARTS[part].columns if (limit := c.bar(row)) is not None}


def find(rows: list[Row], row: str, way: str) -> dict[str, float]:
    (found,) = [r.figures for r in rows if (r.row, r.way) == (row, way)]
    return found


def test_a_share_is_judged_by_the_one_who_is_furthest_off() -> None:
    rows = shares.derive(
        [
            measured("shares", "gemm4096", "exclusive", "exclusive", (), gpu_time(0.995)),
            measured("shares", "gemm4096", "30/70", "temporal", (30, 70), gpu_time(0.299), gpu_time(0.694)),
        ]
    )
    assert find(rows, "30/70", "temporal")["error_points"] == pytest.approx(0.6)
    assert "error_points" not in find(rows, "exclusive", "exclusive")


def test_shares_tell_the_throughput_too() -> None:
    rows = shares.derive(
        [
            measured("shares", "gemm4096", "exclusive", "exclusive", (), gpu_time(1.0)),
            measured("shares", "gemm4096", "2 of them", "hardware", (), gpu_time(0.45), gpu_time(0.45)),
            measured("shares", "gemm4096", "30", "temporal", (30,), gpu_time(0.3)),
            measured("shares", "gemm4096", "30/70", "temporal", (30, 70), gpu_time(0.32), gpu_time(0.67)),
        ]
    )
    pair = find(rows, "30/70", "temporal")
    assert pair["total_percent"] == pytest.approx(99.0)
    assert pair["split_error_points"] == pytest.approx(100 * 0.32 / 0.99 - 30)
    assert pair["over_hardware_points"] == pytest.approx(9.0)
    assert find(rows, "2 of them", "hardware")["total_percent"] == pytest.approx(90.0)
    assert "split_error_points" not in find(rows, "2 of them", "hardware")
    assert "total_percent" not in find(rows, "30", "temporal")


def test_nobody_is_owed_more_than_it_uses_when_alone() -> None:
    rows = shares.derive(
        [
            measured("shares", "resnet50-train", "exclusive", "exclusive", (), gpu_time(0.88)),
            measured("shares", "resnet50-train", "90", "temporal", (90,), gpu_time(0.875)),
        ]
    )
    assert find(rows, "90", "temporal")["error_points"] == pytest.approx(0.5)


def test_without_an_exclusive_run_no_error_is_claimed() -> None:
    rows = shares.derive([measured("shares", "gemm4096", "30", "temporal", (30,), gpu_time(0.3))])
    assert find(rows, "30", "temporal") == pytest.approx({"taken1_percent": 30.0, "busy1_percent": 28.0})


@pytest.mark.parametrize(
    ("token", "waited", "points"),
    [(0.30, 0.6, 0.0), (0.32, 0.0, 2.0), (0.20, 0.0, 0.0), (0.20, 0.04, 4.0), (0.20, 0.9, 10.0)],
)
def test_a_host_bound_work_is_short_of_its_share_only_while_work_waited(
    token: float, waited: float, points: float
) -> None:
    alone = {"charged_ratio": token, "held_ratio": 0.9, "waiting_ratio": waited}
    company = {"charged_ratio": min(token, 0.1), "held_ratio": token, "waiting_ratio": waited}
    assert shares.token_error(alone, 30.0, in_company=False) == pytest.approx(points)
    assert shares.token_error(company, 30.0, in_company=True) == pytest.approx(points)


def test_it_is_not_short_in_seconds_in_which_it_has_its_share_or_wants_no_more() -> None:
    held_up = {"seconds": 1.0, "charged_ratio": 0.3, "waiting_ratio": 0.2}
    slow = {"seconds": 1.0, "charged_ratio": 0.2, "waiting_ratio": 0.0}
    result = {"charged_ratio": 0.25, "waiting_ratio": 0.1}
    assert shares.token_error(result, 30.0, in_company=False) == pytest.approx(5.0)
    assert shares.token_error(result | {"parts": [held_up, slow]}, 30.0, in_company=False) == pytest.approx(0.0)
    starved = slow | {"waiting_ratio": 0.5}
    assert shares.token_error(result | {"parts": [held_up, starved]}, 30.0, in_company=False) == pytest.approx(5.0)


def test_no_company_lets_a_host_bound_work_hold_for_longer_than_its_share() -> None:
    result = {"charged_ratio": 0.2, "held_ratio": 0.33, "waiting_ratio": 0.0}
    assert shares.token_error(result, 30.0, in_company=True) == pytest.approx(3.0)
    assert shares.token_error(result, 30.0, in_company=False) == pytest.approx(0.0)  # the gaps of one alone are free


def test_nvml_has_to_agree_with_busy_or_taken_or_what_is_between() -> None:
    assert shares.apart(29.6, 28.2, 30.1) == 0
    assert shares.apart(26.0, 28.2, 30.1) == pytest.approx(2.2)
    assert shares.apart(34.0, 28.2, 30.1) == pytest.approx(3.9)
    both = [gpu_time(part) | {"busy_ratio": part} for part in (0.45, 0.9)]  # in turns, by the kernel
    measurement = replace(
        measured("shares", "long-kernel", "30/70", "temporal", (30, 70), *both), figures={"nvml_percent": 99.0}
    )
    (row,) = shares.derive([measurement])
    assert row.figures["nvml_off_points"] == pytest.approx(36.0)
    assert bars("shares", row) == {"error_points": 1.0, "split_error_points": 1.0, "nvml_off_points": 3.0}


def test_nothing_is_judged_by_less_than_was_asked_for() -> None:
    assert bars("native", Row("64 vGPUs", "cold, free GPU", "programs", {})) == {"cold_p99_us": 100.0}
    assert bars("native", Row("64 vGPUs", "cold, standby lease", "played hooks", {})) == {"cold_p99_us": 100.0}
    assert bars("native", Row("64 vGPUs", "contending", "programs", {})) == {"cpu_percent": 25.0}
    assert bars("shares", Row("bert-infer", "30", "temporal", {})) == {
        "token_error_points": 1.0,
        "nvml_off_points": 3.0,
    }
    assert bars("shares", Row("gemm4096", "30/65 of the time", "spatial", {})) == {"error_points": 1.0}
    assert bars("shares", Row("gemm4096", "exclusive", "exclusive", {})) == {}
    assert bars("colocation", Row("resnet50-graph1", "30/70", "spatial", {}))["requests"] == 20_000
    assert bars("colocation", Row("resnet50-graph1", "20/80", "spatial", {})) == {}


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
    assert (shared["p99_1_ms"], shared["steps_1"]) == (110.0, 99)
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
    assert [bar("steps_1", "resnet50-train", row) for row in ("30/70", "50/50")] == [100.0, None]
    assert bar("split_error_points", "resnet50-infer1") is None
    assert bars("shares", Row("elementwise", "20/30/50", "temporal", {}))["total_percent"] == 98.5
    assert "total_percent" not in bars("shares", Row("elementwise", "30", "temporal", {}))
    assert bars("shares", Row("graph", "30/70", "temporal", {}))["split_error_points"] == 1.0


def noted(kernels: list[tuple[int, int]]) -> dict[str, Any]:
    """By a clock that is ours."""
    return {"kernels_ns": kernels, "looks": [(0, 0), (10**6, 10**6)]}


def test_gaps_replace_the_kernels_that_they_were_found_in() -> None:
    a, b = [(0, 1024), (2048, 3072)], [(1056, 2016), (3136, 4096)]
    looks = [(0, 10**9), (10**6, 10**9 + 10**6)]  # ours is a second ahead
    told = ({"pid": 1, "kernels_ns": a, "looks": looks}, {"pid": 2, "kernels_ns": b, "looks": looks})
    outcome = with_gaps(Outcome(told), {})
    assert outcome.results == (
        {"pid": 1, "longest_gaps": [(pytest.approx(1 + 2016e-9), pytest.approx(0.032))]},
        {
            "pid": 2,
            "longest_gaps": [
                (pytest.approx(1 + 1024e-9), pytest.approx(0.032)),
                (pytest.approx(1 + 3072e-9), pytest.approx(0.064)),
            ],
        },
    )
    assert outcome.figures["handovers"] == 3
    assert outcome.figures["gap_p50_us"] == pytest.approx(0.032)
    assert outcome.figures["gap_worst_us"] == pytest.approx(0.064)
    assert (outcome.figures["tick_ns"], outcome.figures["overlaps"]) == (32, 0)


def test_the_longest_of_a_few_gaps_is_no_percentile() -> None:
    def taking_turns(count: int) -> Outcome:
        kernels = [(at * 1000, at * 1000 + 900) for at in range(count + 1)]
        return with_gaps(Outcome(tuple(noted(of) for of in (kernels[::2], kernels[1::2]))), {})

    few, enough = taking_turns(99).figures, taking_turns(100).figures
    assert sum(len(result["longest_gaps"]) for result in taking_turns(99).results) == 10
    assert (few["handovers"], few["gap_worst_us"]) == (99, pytest.approx(0.1))
    assert not {"gap_p99_us", "gap_p99_low_us", "gap_p99_high_us"} & few.keys()
    assert enough["gap_p99_us"] == pytest.approx(0.1)


def test_gaps_of_kernels_that_all_overlap_are_no_gaps() -> None:
    outcome = with_gaps(Outcome((noted([(0, 100)]), noted([(50, 150)]))), {})
    assert [result["longest_gaps"] for result in outcome.results] == [[], []]
    assert (outcome.figures["handovers"], outcome.figures["overlaps"]) == (1, 1)
    assert "gap_p99_us" not in outcome.figures


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_an_estimate_grows_with_what_is_asked(part: Any) -> None:
    assert part.name
    one, longer, more = (part.estimate(Options(s, n)) for s, n in ((4.0, 1), (8.0, 1), (4.0, 2)))
    assert 0 < one <= longer
    assert one < more


def test_a_stream_and_its_trainer_are_compared_with_each_alone() -> None:
    def served(factor: float) -> dict[str, Any]:
        rising = [factor * took for took in range(1, 101)]
        return {"work": "stream", "unserved": 1, "late_s": 0.0, "host_ms": rising, "gpu_ms": rising[:50]}

    stream = colocation.latencies([served(1.0), served(1.0)], [served(1.05), served(1.05)])
    rows = colocation.derive(
        [
            measured("colocation", "b", "trainer", "exclusive", (), did(1900)),
            measured("colocation", "b", "30/70", "spatial", (), stream, did(1700)),
            measured("colocation", "b", "trainer", "exclusive", (), did(2100)),
        ]
    )
    ours = find(rows, "30/70", "spatial")
    assert (ours["requests"], ours["unserved"]) == (200, 2)
    assert (ours["host_p50_alone_ms"], ours["gpu_p99_alone_ms"]) == (50, 50)
    assert ours["host_p50_ratio"] == ours["gpu_p99_ratio"] == pytest.approx(1.05)
    assert ours["host_p99_ratio_low"] <= ours["host_p99_ratio"] <= ours["host_p99_ratio_high"]
    assert ours["trainer_percent"] == pytest.approx(85)
    assert "host_p50_ratio" not in rows[0].figures
    asked = {"host_p50_ratio": 1.10, "host_p99_ratio": 1.10, "trainer_percent": 80.0, "requests": 20_000}
    assert bars("colocation", rows[1]) == asked


def in_turns(*totals: float, samples: Sequence[float] = ()) -> list[Outcome]:
    """Windows of one sharer in a closed loop; of streams, if ``samples`` say what their requests took."""
    if samples:
        return [Outcome(({"work": "s", "unserved": 1, "samples_ms": list(samples)},), {"nvml_percent": 50.0})] * 2
    return [Outcome(({"work": "w", "units_per_second": n, "samples_ms": [1.0, 3.0]},), {}) for n in totals]


def light_of(block: str, row: str, way: str, outcomes: Sequence[Outcome]) -> Measurement:
    of_all = light.condensed(outcomes)
    return replace(measured("light", block, row, way, (), *of_all.results), figures=of_all.figures)


def test_replicas_are_compared_turn_by_turn_with_the_time_slicing_beside_them() -> None:
    block = light.SCENES[0].name
    rows = light.derive(
        [
            light_of(block, "alone", "exclusive", in_turns(40, 50)),
            light_of(block, "together", "hardware", in_turns(100, 200)),
            light_of(block, "alone", "temporal", in_turns(20, 40)),
            light_of(block, "together", "temporal", in_turns(50, 180)),
            light_of(block, "together", "hardware", in_turns(50, 50)),
            light_of(block, "together", "spatial", in_turns(60, 60)),
        ]
    )
    ours = find(rows, "together", "temporal")
    assert (ours["percent"], ours["percent_low"], ours["percent_high"]) == (70, 50, 90)
    assert find(rows, "together", "spatial")["percent"] == 120
    assert find(rows, "alone", "temporal")["percent"] == 65
    assert (ours["p50_ms"], ours["p99_ms"], ours["samples"], ours["p99_ratio"]) == (1.0, 3.0, 4, 1.0)
    assert "percent" not in rows[1].figures
    assert bars("light", rows[3]) == {"percent_low": 97.0}
    assert bars("light", rows[2]) == {"percent_low": 97.0}
    assert bars("light", rows[5]) == bars("light", rows[0]) == {}
    bound = Row("2 × decode-graph", "alone", "temporal", {})
    assert bars("light", bound) == {}


def test_stdio_are_judged_by_their_latencies_and_a_trainer_by_what_it_keeps() -> None:
    block = "1 stream beside vit-train"

    def beside(took: float, trains: float) -> list[Outcome]:
        stream, trainer = in_turns(samples=[took] * 100), in_turns(trains, trains)
        return [Outcome((*a.results, *b.results), a.figures) for a, b in zip(stream, trainer, strict=True)]

    rows = light.derive(
        [
            light_of(block, "alone", "exclusive", in_turns(samples=[4.0] * 100)),
            light_of(block, "together", "hardware", beside(6.0, 900)),
            light_of(block, "trainer alone", "exclusive", in_turns(1000, 1000)),
            light_of(block, "together", "temporal", beside(9.0, 950)),
        ]
    )
    ours = find(rows, "together", "temporal")
    assert (ours["p50_ms"], ours["samples"], ours["unserved"]) == (9.0, 200, 2)
    assert (ours["p50_ratio"], ours["p99_ratio"]) == (1.5, 1.5)
    assert (ours["trainer_percent"], ours["trainer_over_points"]) == (95, 5)
    assert find(rows, "together", "hardware")["trainer_percent"] == 90
    assert bars("light", rows[3]) == {"p50_ratio": 1.15, "p99_ratio": 1.15, "trainer_over_points": -1.0}


def test_the_stream_alone_and_in_company_take_turns_in_going_first() -> None:
    asked: list[tuple[int, int]] = []

    class Played:
        def window(self, sharers: Sequence[object], seconds: float, *, seed: int, **_: object) -> Outcome:
            assert seconds == 20.0
            asked.append((len(sharers), seed))
            served = {"work": "stream", "unserved": 0, "host_ms": [len(sharers)] * 9, "gpu_ms": [1.0] * 9}
            return Outcome((served, did(1700.0))[: len(sharers)])

    stage, pair = cast(Stage, Played()), cast(Sequence[Sharer], ["beside", "trainer"])
    stream, _ = colocation.in_turns(stage, cast(Sharer, "alone"), pair, 250.0, 80.0).results
    assert asked == [(1, 0), (2, 0), (2, 1), (1, 1), (1, 2), (2, 2), (2, 3), (1, 3)]
    assert stream["host_p50_ratio"] == 2.0


def test_replicas_are_compared_with_mps_of_the_same_kind() -> None:
    each = {"exclusive": 1, "mps": 4, "mps-capped": 4, "spatial": 4, "spatial-burst": 4}
    rates = {"exclusive": 100.0, "mps": 30.0, "mps-capped": 25.0, "spatial": 24.0, "spatial-burst": 29.7}
    rows = packing.derive(
        [
            measured("packing", "4 replicas", "24 % each", way, (), *[did(rates[way]) for _ in range(n)])
            for way, n in each.items()
        ]
    )
    assert find(rows, "24 % each", "spatial")["against_percent"] == pytest.approx(96)
    assert find(rows, "24 % each", "spatial-burst")["against_percent"] == pytest.approx(99)
    assert find(rows, "24 % each", "mps")["distance_percent"] == 0
    assert "against_percent" not in find(rows, "24 % each", "mps")


def test_the_total_of_a_mix_is_normalised_by_kind() -> None:
    works = ["resnet50-infer8", "resnet50-infer8", "rnnt-infer", "bert-infer"]

    def together(*rates: float) -> list[dict[str, Any]]:
        return [{"work": work, "units_per_second": rate} for work, rate in zip(works, rates, strict=True)]

    alone = zip(("resnet50-infer8", "rnnt-infer", "bert-infer"), (1000.0, 400.0, 200.0), strict=True)
    measurements = [
        *(measured("mix", "b", work, "exclusive", (), did(rate)) for work, rate in alone),
        measured("mix", "b", "8 of them", "mps", (), *together(190, 190, 100, 50)),
        measured("mix", "b", "8 of them", "spatial", (), *together(260, 260, 100, 50)),
        measured("mix", "b", "8 of them", "mps", (), *together(210, 210, 100, 50)),
        measured("mix", "b", "8 of them", "spatial", (), *together(240, 240, 100, 50)),
    ]
    rows = mix.derive(measurements)
    ours, again = (row.figures for row in rows if row.way == "spatial")
    assert (ours["total_percent"], again["total_percent"]) == (pytest.approx(102), pytest.approx(98))
    assert ours["over_mps_percent"] == again["over_mps_percent"] == pytest.approx(100 * 100 / 90)
    assert ours["mps_apart_percent"] == pytest.approx(100 * (92 / 88 - 1))
    assert ours["resnet50-infer8_percent"] == pytest.approx(52)
    assert mix.derive(measurements[1:]) == []


def test_percents_are_of_the_native_runs_around_them() -> None:
    rows = percents.derive(
        [
            measured("percents", "gemm4096", "exclusive", "exclusive", (), did(600)),
            measured("percents", "gemm4096", "50", "temporal", (50,), did(352)),
            measured("percents", "gemm4096", "exclusive", "exclusive", (), did(680)),
        ]
    )
    assert find(rows, "50", "temporal")["native_percent"] == pytest.approx(55)
    assert find(rows, "50", "temporal")["apart_percent"] == pytest.approx(100 * 8 / 60)


@pytest.mark.parametrize(("percent", "count"), [(10, 14), (30, 40), (50, 66), (70, 92), (90, 118), (1, 8), (100, 132)])
def test_the_nearest_number_of_sms(percent: float, count: int) -> None:
    assert sms.nearest(percent, 132) == count


def test_sms_are_judged_by_the_nearest_and_throughput_stands_beside() -> None:
    rows = sms.derive(
        [
            measured("sms", "gemm4096", "exclusive", "exclusive", (), did(640)),
            replace(
                measured("sms", "gemm4096", "30", "spatial", (30,), did(264)),
                figures={"granted_sms": 36.0, "sm_count": 132.0},
            ),
            measured("sms", "gemm4096", "30", "mps-capped", (30,), did(240)),
            measured("sms", "gemm4096", "exclusive", "exclusive", (), did(680)),
        ]
    )
    ours = find(rows, "30", "spatial")
    assert (ours["nearest_sms"], ours["off_sms"]) == (40, 4)
    assert ours["native_percent"] == pytest.approx(40)
    assert ours["against_percent"] == pytest.approx(110)
    assert bars("sms", rows[1]) == {"off_sms": 2.0}
    assert bars("sms", rows[2]) == {}


def test_what_the_gate_adds_is_the_median_of_pairs() -> None:
    turns = {"gated_s": [1.01, 1.00, 1.04], "direct_s": [1.0, 1.0, 1.0], "steps": 50}
    found = gate.figures({**turns, "gated_launches": 7, "direct_launches": 8})
    assert found["added_percent"] == pytest.approx(1.0)
    assert found["added_low_percent"] <= 1.0 <= found["added_high_percent"]
    assert found["step_ms"] == pytest.approx(20.0)


def test_the_overlap_that_is_kept_is_in_percent_of_that_without_a_vgpu() -> None:
    def chain(percent: float) -> dict[str, float]:
        return {"overlapped_percent": percent, "kernel_us": 10.0, "chains": 3}

    rows = pdl.derive(
        [
            measured("pdl", "pdl", "pdl", "exclusive", (), chain(80)),
            measured("pdl", "pdl", "100 %", "temporal", (100,), chain(76)),
        ]
    )
    assert find(rows, "100 %", "temporal")["kept_percent"] == pytest.approx(95)
    assert "kept_percent" not in find(rows, "pdl", "exclusive")


def test_neighbours_in_a_chain_overlap_where_the_next_starts_before_the_end() -> None:
    found = overlaps([(0, 20_000), (10_000, 30_000), (30_000, 50_000)])
    assert found == {"overlapped_percent": 50.0, "kernel_us": pytest.approx(50 / 3)}


def test_timestamps_have_to_cover_the_window() -> None:
    second = 1_000_000_000
    check_whole([(9 * second, 10 * second), (11 * second, 12 * second)], 10.0, 12.0)
    for missing in ([], [(9 * second, 11 * second)], [(11 * second, 13 * second)]):
        with pytest.raises(RuntimeError, match="timestamps"):
            check_whole(missing, 10.0, 12.0)


class Slow:
    """A program whose every step takes 40 ms of the GPU."""

    def step(self) -> None: ...

    def mark(self, timed: bool = False) -> float:
        return time.monotonic()

    def wait(self, mark: float) -> None:
        time.sleep(0.04)

    def elapsed_ms(self, first: float, last: float) -> float:
        return 40.0

    def synchronize(self) -> None: ...

    def stamped(self) -> Any: ...


def test_nothing_always_follows_the_same_other() -> None:
    orders = ["".join(rotated("abc", repeat)) for repeat in range(6)]
    assert len(set(orders)) == 6
    for pair in permutations("abc", 2):
        assert 1 <= sum("".join(pair) in order for order in orders) <= 3
    assert {order[-1] for order in orders} == set("abc")


def test_requests_that_nobody_could_serve_count_with_the_time_they_waited() -> None:
    found = requests(Slow(), Window(time.monotonic(), 0.4, requests_per_second=1000.0, lead_s=0.0))
    arrived = len(found["host_ms"])
    assert arrived > found["unserved"] > arrived / 2
    assert set(found["gpu_ms"]) == {40.0}
    assert 200.0 <= percentile(found["host_ms"], 50) <= 600.0


class Quick(Slow):
    """Its first steps find everything cold."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self, timed: bool = False) -> float:
        self.marks += 1
        return time.monotonic()

    def wait(self, mark: float) -> None: ...

    def elapsed_ms(self, first: float, last: float) -> float:
        return 9.0 if self.marks <= 20 else 1.0


def test_requests_of_the_lead_in_do_not_count() -> None:
    program = Quick()
    found = requests(program, Window(time.monotonic() + 0.3, 0.3, requests_per_second=200.0, lead_s=0.25))
    assert 0 < len(found["gpu_ms"]) < program.marks / 2 - 10
    assert set(found["gpu_ms"]) == {1.0}


@pytest.mark.parametrize(("stream", "seconds"), [("resnet50-graph1", 82), ("resnet50-infer1", 205)])
def test_so_many_seconds_give_twenty_thousand_requests(stream: str, seconds: float) -> None:
    """As the part's page says, for arrivals that are the same every time."""
    turns = round(seconds / colocation.TURN_S)
    lead_s, rate = 0.7, colocation.STREAMS[stream]
    arrived = 0
    for seed in range(turns):
        dice, at = random.Random(seed), -lead_s
        while at < seconds / turns:
            arrived += at >= 0
            at += dice.expovariate(rate)
    assert arrived >= 20_000
    assert f"{seconds}" in (colocation.__doc__ or "")
