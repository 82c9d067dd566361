"""The command as people run it, on a simulated GPU: what holds, and what does not where nothing holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.verify.judge import KILL, LAUNCH, LIGHT, MEMORY, SMS, checks
from vgpu.verify.plan import Plan
from vgpu.verify.run import examine
from vgpu.verify.tolerances import tolerances

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of most checks, and where its report is."""
    report = tmp_path_factory.mktemp("verify") / "report.html"
    only = [part for name in ("share-30-70", LIGHT, MEMORY, KILL, LAUNCH, SMS) for part in ("--only", name)]
    command = ["verify", "--simulate", "--quick", "-o", "json", "--report", str(report), *only]
    argv = [sys.executable, "-m", "vgpu.ctl", *command]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=110, check=False)
    return done, report


def found(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.slow
def test_limits_hold_and_without_them_every_check_fails(
    verified: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = verified
    said = found(done)
    assert json.loads(done.stdout)["simulated"] is True
    assert list(said) == ["share-30-70", LIGHT, MEMORY, KILL, LAUNCH, SMS], done.stderr
    assert {name: check["control"] for name, check in said.items()} == dict.fromkeys(said, True)
    assert [said[name]["verdict"] for name in (MEMORY, SMS)] == ["pass"] * 2, said
    # Times, and shares of a program without a core, say something about this machine, too; everything else is exact.
    timed = {"ns a launch", "ns until the lease is back"}
    exact = [one for name in (KILL, LAUNCH) for one in said[name]["quantities"] if one["unit"] not in timed]
    assert len(exact) == 5
    assert all(one["held"] for one in exact), exact
    good = all(check["verdict"] == "pass" for check in said.values())
    assert done.returncode == (Exit.OK if good else Exit.FAILURE)


@pytest.mark.slow
def test_the_report_is_written_and_nothing_is_said_on_a_pipe(
    verified: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, report = verified
    assert done.stderr == ""
    assert report.read_text().count("<svg") == 7
    assert [*report.parent.iterdir()] == [report]


@pytest.mark.slow
def test_where_nothing_keeps_the_promises_the_checks_fail() -> None:
    plan = Plan("A simulated GPU, as asked for", quick=True, checks=(MEMORY, SMS), limited=False)
    evidence = trio.run(examine, plan, lambda what, part: None).evidence
    made = checks(evidence, tolerances(simulated=True, quick=True))
    assert [(check.name, check.verdict) for check in made] == [(MEMORY, "fail"), (SMS, "fail")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", "speed"], "'speed' is no check"), (["--report", "/nonexistent/x.html"], "cannot write")],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "--simulate", *arguments]) == Exit.USAGE
    assert said in capsys.readouterr().err
