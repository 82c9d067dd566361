"""Records and tables: nothing measured is lost, repeats are merged, and bars judge the worst."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suite.report import tables
from benchmarks.suite.report.records import FILE, REHEARSAL, Measurement, Records, Run, Writer, counting, parse, read
from benchmarks.suite.report.tables import Bar, Column, Row, merged

COLUMNS = (
    Column("error", "error", "low", 2, (Bar(1.0, lambda row: row.way == "vgpu"),)),
    Column("total", "total", "high", 1, (Bar(98.5),)),
    Column("unused", "unused"),
    Column("note", "note"),
)
RUN = Run("r1", {"gpu": "H200"}, "python -m benchmarks.suite")


def measurement(**changes: object) -> Measurement:
    fields = {"run": "r1", "part": "pairs", "repeat": 0, "block": "b", "row": "30/70", "way": "temporal"}
    return Measurement(**{**fields, "asked": (30.0, 70.0), "results": ({"busy_ratio": 0.3},), **changes})  # type: ignore[arg-type]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN)
    kept = measurement(figures={"nvml_percent": 99.0})
    writer.measured(kept)
    writer.failed("pairs", "b", "Traceback")
    records = read([tmp_path])
    assert (records.runs, records.measurements) == ([RUN], [kept])
    assert records.failures == [{"part": "pairs", "block": "b", "reason": "Traceback"}]


def test_a_line_that_a_kill_cut_short_costs_that_line_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN)
    writer.measured(measurement())
    with (tmp_path / FILE).open("a") as file:
        file.write('{"measurement": {"run"')
    assert len(read([tmp_path]).measurements) == 1
    Writer(tmp_path, RUN).measured(measurement(repeat=1))
    assert [m.repeat for m in read([tmp_path]).measurements] == [0, 1]


def test_nonsense_in_the_middle_is_told() -> None:
    with pytest.raises(ValueError, match="line 1 is no record"):
        parse(["nonsense", json.dumps({"failure": {}})])


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Writer(tmp_path / name, RUN).measured(measurement(run=name))
    assert [m.run for m in read([tmp_path / "a", tmp_path / "b" / FILE]).measurements] == ["a", "b"]


def test_only_one_run_repeat_and_block_are_compared_with_each_other() -> None:
    ours = [measurement(), measurement(way="exclusive")]
    others = [measurement(run="r2"), measurement(repeat=1), measurement(block="c"), measurement(part="shares")]
    assert tables.compared([*ours, *others]) == [ours, *([other] for other in others)]


def test_repeats_become_median_and_worst_and_the_worst_is_judged() -> None:
    rows = [Row("gemm", "30/70", "vgpu", {"error": error, "total": total, "note": 1.0}) for error, total in (
        (0.2, 99.0), (1.4, 98.6), (0.3, 99.5),
    )]  # fmt: skip
    (line,) = merged("pairs", "Pairs", COLUMNS, rows).lines
    error, total = line.cells["error"], line.cells["total"]
    assert (error.median, error.worst, error.repeats, error.met) == (0.3, 1.4, 3, False)
    assert (total.median, total.worst, total.met) == (99.0, 98.6, True)
    assert line.cells["note"].met is None
    assert "unused" not in line.cells


def test_a_bar_is_for_the_rows_that_it_names_and_its_limit_still_meets_it() -> None:
    rows = [Row("gemm", "30/70", way, {"error": 1.0, "total": 98.5}) for way in ("vgpu", "hardware")]
    table = merged("pairs", "Pairs", COLUMNS, rows)
    assert [line.cells["error"].met for line in table.lines] == [True, None]
    judged = tables.verdicts([table])
    assert [met for met, _ in judged] == [True, True, True]
    assert judged[0][1] == "pairs: gemm, 30/70, vgpu: error 1.00, asked ≤ 1: met"


def test_a_table_says_what_was_missed_in_every_form() -> None:
    rows = [Row("gemm", "30/70", "vgpu", {"error": error}, ("r", i)) for i, error in enumerate((0.5, 2.0))]
    table = merged("pairs", "Pairs", COLUMNS, rows)
    cell = "1.25 (2.00) [≤ 1 MISSED]"
    assert cell in tables.text(table)
    assert f"| gemm | 30/70 | vgpu | 2 | {cell} |" in tables.markdown(table)
    assert "total" not in tables.text(table)
    (row,) = tables.as_json([table], parse([]))["tables"][0]["rows"]
    assert row["runs"] == 2
    assert row["figures"]["error"] == {"median": 1.25, "worst": 2.0, "repeats": 2, "limit": 1.0, "met": False}


def test_a_row_tells_of_how_many_runs_it_is() -> None:
    """A baseline before and after is two values of one run."""
    sources = [("a", 0), ("a", 0), ("a", 1), ("b", 0)]
    rows = [Row("gemm", "exclusive", "exclusive", {"total": 100.0}, source) for source in sources]
    (line,) = merged("pairs", "Pairs", COLUMNS, rows).lines
    assert (line.runs, line.cells["total"].repeats) == (3, 4)


def test_what_is_in_two_files_counts_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Writer(tmp_path / name, RUN).measured(measurement())
    Writer(tmp_path / "b", replace(RUN, run="r2")).measured(measurement(run="r2"))
    records = read([tmp_path / "a", tmp_path / "b", tmp_path / "b"])
    assert [run.run for run in records.runs] == ["r1", "r2"]
    assert [m.run for m in records.measurements] == ["r1", "r2"]


def test_two_gpus_that_began_in_the_same_second_are_not_compared_with_each_other(tmp_path: Path) -> None:
    for gpu in ("0", "1"):
        writer = Writer(tmp_path / gpu, replace(RUN, command=f"python -m benchmarks.suite --gpu {gpu}"))
        writer.measured(measurement(figures={"nvml_percent": float(gpu)}))
    records = read([tmp_path / "0", tmp_path / "1"])
    assert [run.run for run in records.runs] == ["r1", "r1 #2"]
    assert [(m.run, m.figures["nvml_percent"]) for m in records.measurements] == [("r1", 0.0), ("r1 #2", 1.0)]
    assert len(tables.compared(records.measurements)) == 2


def test_rehearsals_do_not_mix_with_runs_on_a_gpu_nor_early_ones_with_those_since() -> None:
    runs = [
        Run("2026-11-23T10", {"gpu": "H200"}, ""),
        Run("2026-11-24T09", {"gpu": REHEARSAL}, ""),
        Run("2026-11-24T10", {"gpu": "H200"}, ""),
    ]
    records = Records(runs, [measurement(run=run.run) for run in runs])
    assert [m.run for m in counting(records).measurements] == ["2026-11-23T10", "2026-11-24T10"]
    assert [m.run for m in counting(records, "2026-11-24").measurements] == ["2026-11-24T10"]
    rehearsed = Records(runs[1:2], records.measurements[1:2])
    assert counting(rehearsed) == rehearsed


def test_runs_of_one_card_alone() -> None:
    names = {"a": "NVIDIA H200, 580.159.04, 700.00 W", "b": "NVIDIA H100 80GB HBM3, 580.159.04, 700.00 W"}
    runs = [Run(run, {"gpu": gpu}, "") for run, gpu in names.items()]
    records = Records(runs, [measurement(run=run.run) for run in runs])
    assert [run.card for run in runs] == ["H200", "H100 80GB HBM3"]
    assert counting(records) == records
    assert [m.run for m in counting(records, card="H100").measurements] == ["b"]
