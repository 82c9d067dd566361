"""The suite on the simulated GPU, by its command line: nodes, vGPUs, sharers, records, tables. No figure counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.records import read


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def rehearse(out: Path, *arguments: str) -> str:
    done = suite("--simulate", "--seconds", "0.3", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_shares_and_pairs_with_all_their_baselines(tmp_path: Path) -> None:
    chosen = ["--works", "gemm4096", "--splits", "30", "30/70"]
    shown = rehearse(tmp_path, "--part", "shares", "pairs", *chosen)
    records = read([tmp_path])
    did = {(m.part, m.row, m.way) for m in records.measurements}
    assert did == {
        ("shares", "exclusive", "exclusive"),
        ("shares", "30", "temporal"),
        ("shares", "30/70", "temporal"),
        ("pairs", "exclusive", "exclusive"),
        ("pairs", "30/70", "temporal"),
        ("pairs", "2 of them", "hardware"),
        ("pairs", "2 of them", "mps"),
    }
    assert all(r["units_per_second"] > 0 for m in records.measurements for r in m.results)
    assert all(0 < r["busy_ratio"] <= 1 for m in records.measurements if m.part == "shares" for r in m.results)
    assert "share error, points" in shown
    table = json.loads((tmp_path / "tables.json").read_text())
    assert {t["name"] for t in table["tables"]} == {"shares", "pairs"}
    assert "| gemm4096 | 30/70 | temporal |" in (tmp_path / "tables.md").read_text()
    merged = suite("--merge", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "both"))
    assert merged.returncode == 0, merged.stderr
    (pair, *_) = json.loads((tmp_path / "both" / "tables.json").read_text())["tables"][0]["rows"]
    assert pair["figures"]["busy1_percent"]["repeats"] == 2


def test_handovers(tmp_path: Path) -> None:
    rehearse(tmp_path, "--part", "handover")
    ours, hardware = read([tmp_path]).measurements
    assert ours.figures["handovers"] >= 2
    assert ours.figures["gap_p99_us"] > 0
    assert "kernels_ns" not in hardware.results[0]


def test_an_estimate_measures_nothing(tmp_path: Path) -> None:
    done = suite("--estimate", "--out", str(tmp_path / "none"))
    assert done.returncode == 0
    assert "in all" in done.stdout
    assert not (tmp_path / "none").exists()
