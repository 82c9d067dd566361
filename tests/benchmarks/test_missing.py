"""Which rows lack runs: held against the runs that are kept, by their own commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import benchmarks.suite
from benchmarks.suite.__main__ import arguments, options_of, tell_missing
from benchmarks.suite.parts import PARTS
from benchmarks.suite.parts.part import Options
from benchmarks.suite.report.missing import Count, barred, counts, errands
from benchmarks.suite.report.records import REHEARSAL, Measurement, Records, Run, read
from benchmarks.suite.report.tables import Labels

MEASURED = read([Path(benchmarks.__file__).parent / "results/measurements.jsonl.xz"])
TODAYS = [run for run in MEASURED.runs if run.run > "2026-11-23T13:30"]
"""Since then rows have the names that they have now."""


def run_of(part: str, options: Options, run: str = "r") -> list[Measurement]:
    """A run of shares by this suite, with what its bars need."""
    found = []
    for work, row, way in PARTS[part].rows(options):
        asked = tuple(float(percent) for percent in row.split("/")) if way == "temporal" else ()
        result = {"taken_ratio": 0.3, "busy_ratio": 0.3, "seconds": 10.0, "units_per_second": 100.0}
        figures = {"nvml_percent": 30.0}
        found.append(Measurement(run, part, 0, work, row, way, asked, tuple(result for _ in asked or (1,)), figures))
    return found


def of(run: Run) -> list[Measurement]:
    return [m for m in MEASURED.measurements if m.run == run.run]


def test_many_runs_are_kept() -> None:
    assert len(TODAYS) > 40
    assert all(of(run) for run in TODAYS)


@pytest.mark.parametrize("run", TODAYS, ids=lambda run: run.run)
def test_rows_are_those_that_were_measured(run: Run) -> None:
    """Less, if a run was cut short."""
    args = arguments(shlex.split(run.command)[3:])
    for part in (PARTS[name] for name in args.part):
        assert {row.labels for row in part.found(of(run))} <= set(part.rows(options_of(part, args)))


@pytest.mark.parametrize("run", [run for run in TODAYS if run.run < "2026-11-24T12"], ids=lambda run: run.run)
def test_whole_runs_have_every_row_and_every_figure_that_is_judged(run: Run) -> None:
    args = arguments(shlex.split(run.command)[3:])
    (part,) = [PARTS[name] for name in args.part]
    rows = part.found(of(run))
    assert {row.labels for row in rows} == set(part.rows(options_of(part, args)))
    judged = [row for row in rows if barred(part, row.labels)]
    assert judged
    assert all(barred(part, row.labels) <= row.figures.keys() for row in judged)


def test_evidence_has_the_time_that_it_takes() -> None:
    """Each part of evidence.sh ends within its limit, by its own estimate, and within ten minutes."""
    script = Path(benchmarks.suite.__file__).with_name("evidence.sh").read_text()
    lines = re.findall(r"^ *suite (\S+) (\d+|\$\(\(300 .*?\)\)) (.*?)(?: *#.*)?$", script, re.MULTILINE)
    assert len(lines) >= 12
    for name, limit, words in lines:
        plain = re.sub(r" --repeat .*", "", words).replace('"$work"', "long-kernel")
        args = arguments(shlex.split(plain))
        estimated = sum(PARTS[part].estimate(options_of(PARTS[part], args)) for part in args.part)
        assert estimated <= int(limit if limit.isdigit() else 300) <= 600, name


def test_every_row_of_a_part_is_named_once_and_some_are_judged() -> None:
    for part in PARTS.values():
        rows = part.rows(Options(part.seconds))
        assert len(rows) == len(set(rows)) > 0
        assert any(barred(part, labels) for labels in rows)
        for work in part.works:
            assert set(part.rows(Options(part.seconds, works=(work,)))) < set(rows)


def runs_of(count: Count) -> list[str]:
    return sorted(run for run, _ in count.runs)


def test_runs_are_counted_and_those_that_cannot_be_judged_are_not() -> None:
    part, options = PARTS["shares"], Options(10.0, works=("graph",), splits=((30.0,), (30.0, 70.0)))
    measured = run_of("shares", options, "a") + run_of("shares", options, "b")
    told = {count.labels: (runs_of(count), count.lacks) for count in counts(part, options, measured, 3)}
    assert told[("graph", "30", "temporal")] == (["a", "b"], 1)
    assert told[("graph", "2 of them", "mps")] == (["a", "b"], None)
    without = [m for m in measured if m.way != "exclusive" or m.run == "a"]  # no exclusive run: no error can be claimed
    told = {count.labels: (runs_of(count), count.lacks) for count in counts(part, options, without, 3)}
    assert told[("graph", "30/70", "temporal")] == (["a"], 2)


def commands(part: str, measured: list[Measurement], wanted: int, options: Options) -> list[str]:
    return [e.command for e in errands(PARTS[part], options, counts(PARTS[part], options, measured, wanted))]


def test_what_is_lacking_is_asked_for_and_nothing_else() -> None:
    everything = Options(10.0, works=("graph", "gemm2048"))
    measured = run_of("shares", everything)
    assert commands("shares", measured, 1, everything) == []
    again = "python -m benchmarks.suite --part shares --works {} --ways temporal --repeat 2"
    assert commands("shares", measured, 3, everything) == [again.format("gemm2048"), again.format("graph")]
    lost: Labels = ("graph", "10/90", "temporal")
    rest = [m for m in measured if (m.block, m.row, m.way) != lost]
    assert commands("shares", rest, 1, everything) == [
        "python -m benchmarks.suite --part shares --works graph --splits 10/90 --ways temporal"
    ]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_the_commands_give_all_that_is_judged(part: object) -> None:
    """Parsed again, they measure every row that lacked a run, as long as they say."""
    assert isinstance(part, type(PARTS["shares"]))
    options = Options(part.seconds)
    told = counts(part, options, [], 2)
    due = {count.labels for count in told if count.lacks}
    given: set[Labels] = set()
    for errand in errands(part, options, told):
        chosen = options_of(part, arguments(shlex.split(errand.command)[3:]))
        assert errand.seconds == pytest.approx(part.estimate(chosen))
        given |= set(part.rows(chosen))
    assert due
    assert due <= given


def test_a_rehearsal_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    part, options = PARTS["shares"], Options(10.0, works=("graph",), splits=((30.0,),))
    for gpu, lacking in ((REHEARSAL, 1), ("NVIDIA H200", 0)):
        records = Records([Run("r", {"gpu": gpu}, "")], run_of("shares", options))
        tell_missing([part], {part.name: options}, records, 1, seconds_chosen=False)
        told = capsys.readouterr().out
        assert f"{lacking} of 1 rows that are judged" in told
        assert ("1 H200" in told) == (lacking == 0)
