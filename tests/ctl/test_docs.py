"""docs/cli.md against the program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from vgpu.ctl.exits import Exit
from vgpu.ctl.main import app

GIVEN_AS_LETTERS = {"--output", "--help", "--force", "--quiet", "--watch"}
TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_every_command_and_option_is_documented() -> None:
    described = set(re.findall(r"`([a-z]+(?: [a-z]+)?)\b", TEXT))
    for name, command in commands(typer.main.get_command(app)):
        assert name in described, name
        for parameter in command.params:
            long = [option for option in parameter.opts if option.startswith("--")]
            assert all(
                option in TEXT or option in {"--output", "--help", "--force", "--quiet", "--watch"} for option in long
            )


def test_no_documented_option_is_made_up() -> None:
    known = {
        option
        for _, command in commands(typer.main.get_command(app))
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert mentioned - known <= {"--help", "--install-completion"}


def test_every_exit_code_is_documented() -> None:
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", TEXT, re.M) for code in row.split(",")}
    assert {int(code) for code in Exit} <= listed
