"""``benchmarks/results``: what is kept of measurements, and the tables that are made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import benchmarks
from benchmarks.suite.__main__ import save, tables_of
from benchmarks.suite.report.archive import UNREAD, kept
from benchmarks.suite.report.records import Measurement, Run, Writer, read, text_of

RESULTS = Path(benchmarks.__file__).parent / "results"
MEASUREMENTS = RESULTS / "measurements.jsonl.xz"


def test_the_tables_are_made_of_what_is_kept(tmp_path: Path) -> None:
    """If this fails: python -m benchmarks.suite --merge benchmarks/results/measurements.jsonl.xz --out FOLDER."""
    records = read([MEASUREMENTS])
    save(tmp_path, tables_of(records), records)
    assert (tmp_path / "tables.md").read_text() == (RESULTS / "tables.md").read_text()


def test_nothing_is_left_to_leave_out() -> None:
    lines = text_of(MEASUREMENTS).splitlines()
    assert list(kept(lines)) == lines


def test_what_tables_read_is_kept() -> None:
    second = {"seconds": 1.00000004, "held_ratio": 0.25}
    result = {"work": "graph", "units_per_second": 1 / 3, "parts": [second]} | dict.fromkeys(UNREAD, 1)
    line = json.dumps({"measurement": {"part": "shares", "results": [result]}})
    assert [json.loads(found) for found in kept([line, line])] == [
        {
            "measurement": {
                "part": "shares",
                "results": [
                    {"work": "graph", "units_per_second": 1 / 3, "parts": [{"seconds": 1.0, "held_ratio": 0.25}]}
                ],
            }
        }
    ]


def test_runs_are_added_once(tmp_path: Path) -> None:
    into = tmp_path / "all.jsonl.xz"
    for name in ("one", "two"):
        writer = Writer(tmp_path / name, Run(name, {"gpu": "H200"}, "python -m benchmarks.suite"))
        writer.measured(
            Measurement(name, "shares", 0, "graph", "30", "temporal", results=({"pid": 7, "work": "graph"},))
        )
    archive = [sys.executable, "-m", "benchmarks.suite.report.archive", "--into", str(into)]
    for folders in (["one"], ["one", "two"]):
        subprocess.run([*archive, *(str(tmp_path / folder) for folder in folders)], check=True, timeout=60)
    found = read([into])
    assert [run.run for run in found.runs] == ["one", "two"]
    assert [m.results for m in found.measurements] == [({"work": "graph"},), ({"work": "graph"},)]
