"""``vgpuctl --help``: every command in a section, and each of them in one line."""

from __future__ import annotations

import pytest
import typer.main

from vgpu.ctl.main import app, run
from vgpu.ctl.present.help_sections import MEANT, OTHER, SECTIONS, SYNONYMS, sections


def test_every_command_has_its_section(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(app)
    assert run(["--help"]) == 0
    told = capsys.readouterr().out
    assert OTHER not in told
    table = told.partition("vGPUs:")[2].partition("To begin:")[0]
    listed = [line.split()[0] for line in table.splitlines() if line.strip() and line.startswith("  ")]
    assert sorted(listed) == sorted(group.commands)  # type: ignore[attr-defined]
    assert "..." not in table  # a text that is cut off


def test_nothing_stands_in_two_sections() -> None:
    names = [name for members in SECTIONS.values() for name in members]
    assert len(names) == len(set(names))


def test_what_nobody_placed_is_shown_all_the_same() -> None:
    assert list(sections(["new", "ls"])) == [("vGPUs", ["ls"]), (OTHER, ["new"])]


def test_synonyms_lead_to_commands_and_hide_none() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {meant.split()[0] for meant in (SYNONYMS | MEANT).values()} <= commands
    assert not (SYNONYMS.keys() | MEANT.keys()) & commands
