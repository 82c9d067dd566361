"""``vgpuctl --help``: every command in a section, and each of them in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tests.ctl.references import PAGES
from vgpu.ctl import entry
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


@pytest.mark.parametrize("argument", [[], ["-h"], ["--help"]])
@pytest.mark.parametrize("columns", ["60", "80", "", "200"])
def test_the_overview_is_the_same_as_typers(
    argument: list[str], columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails: python -m tests.ctl.references."""
    monkeypatch.setenv("COLUMNS", columns)
    run(argument)
    told = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["vgpuctl", *argument])
    monkeypatch.setattr("client_hook.interpreter.become", lambda *_: pytest.fail("a second interpreter"))
    if columns == "60":
        assert told != Path(entry.page([])).read_text()
        with pytest.raises(pytest.fail.Exception):
            entry.main()
    else:
        assert entry.main() == 0
        assert capsys.readouterr().out == told


@pytest.mark.parametrize("words", [["ls"], ["gpu", "set"], ["run"]], ids=" ".join)
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_of_a_command_is_the_same_as_typers(
    words: list[str], columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails: python -m tests.ctl.references."""
    monkeypatch.setenv("COLUMNS", columns)
    run([*words, "--help"])
    told = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["vgpuctl", *words, "--help"])
    monkeypatch.setattr("client_hook.interpreter.become", lambda *_: sys.exit("typer makes it"))
    if columns == "60":
        with pytest.raises(SystemExit):
            entry.main()
    else:
        assert entry.main() == 0
        assert capsys.readouterr().out == told


def test_each_file_of_help_is_a_commands() -> None:
    assert {str(path) for path in Path(entry.HELP).iterdir()} == {
        str(page) for page in PAGES if str(page).endswith(".txt")
    }
    assert entry.page(["dashboard"]) not in map(str, PAGES)


@pytest.mark.parametrize(
    "words",
    [["exec", "ls", "--help"], ["run", "--", "ls", "--help"], ["../ls", "--help"], ["dashboard", "--help"], ["ls"]],
)
def test_other_command_lines_are_typers(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["vgpuctl", *words])
    monkeypatch.setattr("client_hook.interpreter.become", lambda module, *given: sys.exit(" ".join([module, *given])))
    with pytest.raises(SystemExit, match=" ".join(["vgpu.ctl", *words])):
        entry.main()


@pytest.mark.parametrize("words", [[], ["ls"], ["gpu", "set"]], ids=" ".join)
def test_help_imports_nothing_slow(words: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {[*words, '-h']}; from vgpu.ctl.entry import main; main(); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert not {"typer", "typing", "re", "pathlib", "subprocess"} & set(done.stdout.splitlines()[-1].split())
    assert done.stdout.startswith(" ".join(["Usage: vgpuctl", *words]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_overview_that_cannot_be_written_is_an_error() -> None:
    command = [sys.executable, "-P", "-m", "vgpu.ctl", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "cannot write to stdout" in done.stderr
