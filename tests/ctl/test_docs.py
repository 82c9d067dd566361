"""The documents against the program: commands and exit codes, links, paths and names, the constants of the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from vgpu import retired
from vgpu.ctl.exits import Exit
from vgpu.ctl.main import app
from vgpu.ctl.output import Column
from vgpu.ctl.tables import GPUS, PROCESSES, VGPUS
from vgpu.event_types import EventType
from vgpu.share import PPM

GIVEN_AS_LETTERS = {"--output", "--help", "--force", "--quiet", "--watch"}
ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TEXT = (ROOT / "docs" / "cli.md").read_text()
QUOTED_PATH = r"`((?:\w[\w.-]*/)+(?:[\w.-]+\.(?:py|pyx|pxd|h|c|cu|md|sh|toml))?)(?:::(\w+))?`"
UNITS = {"ms": 1_000_000, "µs": 1_000, "s": 1_000_000_000, "%": PPM // 100, "": 1}


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
            long = {option for option in parameter.opts if option.startswith("--")}
            plain = {"--output", "--help", "--force", "--quiet", "--watch", *retired.OPTIONS}
            assert all(option in TEXT for option in long - plain)


@pytest.mark.parametrize(("heading", "columns"), [("ls`, `set", VGPUS), ("gpu ls`, `status", GPUS), ("ps", PROCESSES)])
def test_every_column_is_explained(heading: str, columns: tuple[Column, ...]) -> None:
    rows = TEXT.partition(f"| `{heading}` | means |")[2].partition("\n\n")[0].splitlines()
    explained = {title for row in rows if row.startswith("|") for title in row.split("|")[1].strip().split(", ")}
    assert explained - {"---"} == {column.title for column in columns}


def test_every_kind_of_event_is_explained_and_told_of() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("| kind | when |") :].split("\n\n")[0]
    assert sorted(re.findall(r"`([a-z-]+)`", re.sub(r"\|[^|]*\|$", "", table, flags=re.MULTILINE))) == sorted(EventType)
    told = "".join(path.read_text() for folder in ("gpuserver", "vgpu/node") for path in (ROOT / folder).rglob("*.py"))
    assert {kind.name for kind in EventType} == set(re.findall(r"\bEventType\.(\w+)", told))


def test_no_documented_option_is_made_up() -> None:
    program = typer.main.get_command(app)
    known = {
        option
        for command in (program, *(command for _, command in commands(program)))
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert mentioned - known <= {"--help"}


def test_every_exit_code_is_documented() -> None:
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", TEXT, re.M) for code in row.split(",")}
    assert {int(code) for code in Exit} <= listed


def links(document: Path) -> Iterator[str]:
    return (link for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()) if "://" not in link)


def heading_anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_the_names_in_them_exist(document: Path) -> None:
    """``path`` with a suffix of source code, or a folder that ends with a slash; ``path::name`` is defined there."""
    for path, name in re.findall(QUOTED_PATH, document.read_text()):
        assert (ROOT / path).exists(), path
        defined = rf"(?:\b(?:def|class)\s+{name}\b|^(?:cdef|static|void)[^=\n]*\b{name}\()"
        assert not name or re.search(defined, (ROOT / path).read_text(), re.M), f"{path}::{name}"


def test_the_constants_of_the_policy_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / "policy.md").read_text(), re.M))
    assert set(rows) == {field.name for field in fields(Policy)}
    for name, written in rows.items():
        value = re.fullmatch(r"([\d.]+) ?(\S*)", written)
        if value:  # else it says in words where the value comes from
            assert round(float(value[1]) * UNITS[value[2]]) == getattr(DEFAULT_POLICY, name), name
