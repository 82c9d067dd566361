"""The suite on the simulated GPU, by its command line: nodes, vGPUs, sharers, records, tables. No figure counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.suite.__main__ import arguments, options_of
from benchmarks.suite.parts import PARTS
from benchmarks.suite.parts.part import Bench, Options
from benchmarks.suite.report.records import Run, Writer, read
from benchmarks.suite.stage import Ground
from benchmarks.suite.workloads.catalogue import WORKS

pytestmark = pytest.mark.timeout(600)  # twenty seconds, and more where much else runs


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.suite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def rehearse(out: Path, *arguments: str) -> str:
    done = suite("--simulate", "--seconds", "0.3", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_rows(out: Path, part: str, *options: str) -> None:
    """What the part says beforehand is what was measured."""
    found = {row.labels for row in PARTS[part].found(read([out]).measurements)}
    assert found == set(PARTS[part].rows(options_of(PARTS[part], arguments(options))))


@pytest.mark.slow
def test_shares_and_their_tables(tmp_path: Path) -> None:
    options = ("--works", "gemm4096", "--splits", "30", "30/70")
    shown = rehearse(tmp_path, "--part", "shares", *options)
    records = read([tmp_path])
    assert [(m.row, m.way) for m in records.measurements] == [
        ("exclusive", "exclusive"),
        ("2 of them", "hardware"),
        ("2 of them", "mps"),
        ("30", "temporal"),
        ("30/70", "temporal"),
        ("30/65 of the time", "spatial"),
    ]
    assert all(0 < r["busy_ratio"] <= r["taken_ratio"] <= 1 for m in records.measurements for r in m.results)
    assert "share error, points" in shown
    assert "| gemm4096 | 30/70 | temporal |" in (tmp_path / "tables.md").read_text()
    merged = suite("--merge", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "both"))
    assert merged.returncode == 0, merged.stderr
    (table,) = json.loads((tmp_path / "both" / "tables.json").read_text())["tables"]
    assert all(row["runs"] == row["figures"]["busy1_percent"]["repeats"] == 1 for row in table["rows"])
    assert_rows(tmp_path, "shares", *options)
    lacking = suite("--merge", str(tmp_path), "--missing", "1", "--part", "shares", *options)
    assert "3 of 3 rows that are judged have been measured less than 1 times" in lacking.stdout, lacking.stderr


@pytest.mark.slow
def test_pairs_with_all_their_baselines(tmp_path: Path) -> None:
    rehearse(tmp_path, "--part", "pairs", "--works", "gemm4096", "--splits", "30/70")
    measurements = read([tmp_path]).measurements
    assert {(m.row, m.way) for m in measurements} == {
        ("exclusive", "exclusive"),
        ("30/70", "temporal"),
        ("2 of them", "hardware"),
        ("2 of them", "mps"),
    }
    assert all(r["units_per_second"] > 0 for m in measurements for r in m.results)
    assert_rows(tmp_path, "pairs", "--works", "gemm4096", "--splits", "30/70")


@pytest.mark.slow
def test_handovers(tmp_path: Path) -> None:
    rehearse(tmp_path, "--part", "handover")
    temporal, hardware, spatial = read([tmp_path]).measurements
    for ours in (temporal, spatial):
        assert ours.figures["handovers"] >= 2
        assert ours.figures["gap_worst_us"] > 0
    assert "kernels_ns" not in hardware.results[0]
    assert 1 <= sum(len(result["longest_gaps"]) for result in temporal.results) <= 10
    for result in temporal.results:
        around = result["start"] - 5, result["start"] + result["seconds"] + 5
        assert all(around[0] < at_s < around[1] for at_s, _ in result["longest_gaps"]), "on the host's clock"
    assert {"stall_worst_us", "sleep_late_p99_us", "wake_late_p99_us"} <= temporal.figures.keys()
    assert_rows(tmp_path, "handover")


@pytest.mark.slow
def test_where_the_time_of_handovers_went(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.experiments.gaps", "--simulate", "--seconds", "0.5", "--over", "100"]
    done = subprocess.run([*command, "--keep", str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "which step took longest" in done.stdout
    gaps = json.loads((tmp_path / "gaps.json").read_text())["gaps"]
    handed = [gap for gap in gaps if gap["go"] is not None and gap["drained"] is not None]
    assert len(handed) >= 2
    assert any(gap["queues"] is not None and gap["released"] is not None for gap in handed)


@pytest.mark.slow
def test_a_training_with_the_gate_on_and_off(tmp_path: Path) -> None:
    rehearse(tmp_path, "--part", "gate")
    (result,) = read([tmp_path]).measurements[0].results
    turns = (1 + len(result["direct_s"])) * result["steps"]
    assert len(result["gated_s"]) == len(result["direct_s"]) >= 1
    assert result["direct_launches"] == turns * WORKS["resnet50-train"].kernels
    assert result["gated_launches"] >= result["direct_launches"]


@pytest.mark.slow
def test_a_stream_beside_a_trainer(tmp_path: Path) -> None:
    options = ("--works", "resnet50-graph1", "--ways", "spatial", "spatial-burst", "--splits", "50/50")
    rehearse(tmp_path, "--part", "colocation", *options)
    first, *ours, last = read([tmp_path]).measurements
    rows = ["trainer", "50/50", "50/50, no trainer", "50/50", "50/50, stream bursts", "trainer"]
    assert [m.row for m in (first, *ours, last)] == rows
    assert_rows(tmp_path, "colocation", *options)
    assert all(m.results[0]["host_p99_ms"] >= m.results[0]["gpu_p50_ms"] > 0 for m in ours)
    assert all(m.results[0]["host_p50_alone_ms"] > 0 for m in ours)
    assert all(m.results[1]["units_per_second"] > 0 for m in ours if m.way != "exclusive")


@pytest.mark.slow
def test_programs_that_use_a_small_part(tmp_path: Path) -> None:
    options = ("--works", "resnet50-infer1", "--ways", "temporal", "spatial")
    rehearse(tmp_path, "--part", "light", *options)
    assert_rows(tmp_path, "light", *options)
    replicas = [m for m in read([tmp_path]).measurements if m.block == "3 × resnet50-infer1" and m.row == "together"]
    assert [(m.way, m.asked) for m in replicas] == [
        ("hardware", ()),
        ("temporal", (33.0, 33.0, 33.0)),
        ("hardware", ()),
        ("spatial", (33.0, 33.0, 33.0)),
    ]
    assert all(len(r["turns"]) == 2 and r["samples"] for m in replicas for r in m.results)


@pytest.mark.slow
def test_dependent_launches(tmp_path: Path) -> None:
    rehearse(tmp_path, "--part", "pdl")
    assert [m.row for m in read([tmp_path]).measurements] == ["serial", "pdl", "100 %", "50 %"]
    assert_rows(tmp_path, "pdl")


@pytest.mark.slow
def test_sms_of_a_spatial_vgpu(tmp_path: Path) -> None:
    options = ("--works", "gemm4096", "--splits", "30")
    rehearse(tmp_path, "--part", "sms", *options)
    assert_rows(tmp_path, "sms", *options)
    (ours,) = [m for m in read([tmp_path]).measurements if m.way == "spatial"]
    assert ours.figures["granted_sms"] == 40
    assert ours.results[0]["units_per_second"] > 0


@pytest.mark.slow
def test_a_sharer_that_is_killed_costs_its_block_alone_and_leaves_no_vgpu(tmp_path: Path) -> None:
    run = Run("r", {}, "")
    told: list[str] = []
    with Ground(simulated=True) as ground:
        bench = Bench("pairs", "r", Options(0.3), ground, Writer(tmp_path, run), told.append, lambda _: None)
        with bench.block("doomed") as stage:
            sharer = stage.vgpu("temporal", "gemm4096", 30)
            stage.ready()
            for process in psutil.Process(sharer.pid).children():
                process.kill()
            stage.window([sharer], 0.3)
        assert json.loads(ground.node("temporal").run("ls", "-o", "json")) == []
    (failure,) = read([tmp_path]).failures
    assert failure["block"] == "doomed"
    assert "SharerFailed" in failure["reason"]
    assert "doomed FAILED" in told[-1]


def test_an_estimate_measures_nothing(tmp_path: Path) -> None:
    done = suite("--estimate", "--out", str(tmp_path / "none"))
    assert done.returncode == 0
    assert "in all" in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("words", [("--missing", "5"), ("--since", "2026-11-24"), ("--card", "H200")])
def test_what_is_about_runs_wants_runs(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(words)
    assert "name them with --merge" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["30/80", "0/50", "100", "a/b"])
def test_shares_that_no_gpu_has_are_refused(split: str, tmp_path: Path) -> None:
    done = suite("--splits", split, "--estimate", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--splits" in done.stderr


@pytest.mark.slow
def test_a_timeline_and_its_picture_drawn_again_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.experiments.timeline", str(tmp_path)]
    options = ["--simulate", "--seconds", "0.5", "--work", "gemm4096"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["lost"] == 0
    assert all(rate > 0 for when in ("without", "recorded") for rate in summary[when]["units_per_second"])
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["whole"]
    (tmp_path / "timeline.png").unlink()
    again = subprocess.run([*command, "--draw"], capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    nothing = [sys.executable, "-m", "benchmarks.experiments.timeline", str(tmp_path / "none"), "--draw"]
    refused = subprocess.run(nothing, capture_output=True, text=True, timeout=100, check=False)
    assert refused.returncode == 1
    assert "there is no recording.json" in refused.stderr


@pytest.mark.slow
def test_rounds_of_four_and_what_cannot_be_one_of_them() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.experiments.rounds",
        "--simulate",
        "--seconds",
        "0.8",
        "--windows",
        "2",
    ]
    done = subprocess.run([*command, "--stamps"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    windows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(window) for window in windows] == [4, 4]
    for told in [one for window in windows for one in window]:
        assert 0 < told["busy_percent"] < 100
        assert 0 < told["held_percent"] <= 100  # how much that is goes by the processors: windows are short
    for turn in ("40/76", "40/101/gemm4096"):
        refused = subprocess.run([*command, "--vgpu", turn], capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 2
        assert f"{turn}: write SM/REQUEST/WORK" in refused.stderr


@pytest.mark.slow
def test_a_stream_holds_its_trainer_up_at_each_request_and_lets_it_go() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.experiments.hold_trainer",
        "--simulate",
        "--seconds",
        "0.6",
        "--rates",
        "60",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    beside, paused = map(json.loads, done.stdout.splitlines())
    assert (beside["pauses"], beside["pauses_made"]) == (False, 0)
    assert paused["pauses"]
    assert paused["pauses_made"] >= paused["requests"] == beside["requests"] > 20, "and those of the lead-in"
    assert min(beside["trainer_percent"], paused["trainer_percent"]) > 0, "it was let go"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--split", "10"], "the stream's and the trainer's percent of the SMs"),
        (["--split", "nan/50"], "nan/50: write percents from 1 to 99"),
        (["--split", "20/90"], "20/90: write percents from 1 to 99"),
        (["--rates", "250", "0"], "0: write a number above 0"),
        (["--way", "word"], "leave out --simulate"),
    ],
)
def test_what_a_stream_cannot_be_asked(options: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "benchmarks.experiments.hold_trainer", "--simulate", *options]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert complaint in refused.stderr
