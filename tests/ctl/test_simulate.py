"""vgpuctl simulate: its table, its JSON, demand from a file, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.enums import PlacementName


def test_the_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--gpus", "20"]) == Exit.OK
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["PLACEMENT", "VGPUS", "REFUSED", "TIME", "MEMORY", "STRANDED"]
    assert [row.split()[0] for row in rows] == list(PlacementName)


def test_the_same_seed_draws_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        assert run(["simulate", "--demand", "small", "--seed", seed, "-o", "json"]) == Exit.OK
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] != answers[2]
    assert answers[0]["fit"]["time_ratio"] <= 1


def test_demand_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Halves alone: each policy fills every GPU, and strands nothing."""
    file = tmp_path / "demand.csv"
    file.write_text("# sm,mem,weight\n50,40G\n\n50,40G,3\n")
    assert run(["simulate", "--gpus", "4", "--memory", "80G", "--demand", str(file), "-o", "json"]) == Exit.OK
    for filled in json.loads(capsys.readouterr().out).values():
        assert filled == {"placed": 8, "refused": 0, "time_ratio": 1, "memory_ratio": 1, "stranded_gpus": 0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("30", "line 1: '30' is no request"),
        ("30,8G,x", "is no request"),
        ("300,8G", "--sm"),
        ("30,8X", "--mem"),
        ("30,81G", "is more than a GPU has"),
        ("", "has no request"),
    ],
)
def test_bad_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    file = tmp_path / "demand.csv"
    file.write_text(line)
    assert run(["simulate", "--demand", str(file)]) == Exit.USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "x"], "--memory"),
        (["--memory", "1K"], "less than 1 MiB"),
        (["--demand", "/nowhere"], "one of openb, mixed, small"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert run(["simulate", *options]) == Exit.USAGE
    assert words in capsys.readouterr().err
