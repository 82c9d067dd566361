"""The documents against the program: commands and exit codes, links, paths and names, constants, lengths, words."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.ctl.references import PAGES
from vgpu import retired
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import app
from vgpu.ctl.present.output import Column
from vgpu.ctl.present.tables import GPUS, PROCESSES, VGPUS
from vgpu.event_types import EventType

GIVEN_AS_LETTERS = {"--output", "--help", "--force", "--quiet", "--watch"}
ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LONGEST_PAGE = 200
LONGEST = {
    "docs/explanation/architecture.md": 150,
    "docs/reference/cli.md": 60,
    "docs/explanation/faq.md": 150,
    "docs/internals/policy-evidence.md": 150,
    "docs/reference/metrics.md": 210,
    "docs/reference/performance.md": 140,
    "docs/howto/runbook.md": 150,
    "docs/explanation/scheduling.md": 170,
}
LONGEST_PLAIN_PAGE = 120
PLAIN_FOLDERS = ("adr", "internals", "cli")
PLAIN_NAMES = {
    "architecture.md",
    "cli.md",
    "compare.md",
    "faq.md",
    "glossary.md",
    "known-limits.md",
    "policy-constants.md",
    "requests.md",
    "runbook.md",
    "scheduling.md",
    "upgrade.md",
}
FOR_SPECIALISTS = {"driver-functions.md", "mutation.md"}
"""Pages in a plain folder whose cells are long: one for each function or result."""
PLAIN = [
    path
    for path in DOCUMENTS
    if (path.parent.name in PLAIN_FOLDERS or path.name in PLAIN_NAMES) and path.name not in FOR_SPECIALISTS
]
"""Pages whose tables have short cells and whose sentences have concrete subjects."""
WRITTEN = [path for path in PLAIN if path not in PAGES]
LONGEST_CELL = 200
PLAIN_WORDS = [
    *WRITTEN,
    *sorted((ROOT / "docs" / "reference" / "performance").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
    *(ROOT / "docs" / f"{page}.md" for page in ("explanation/concepts", "explanation/security", "internals/mutation")),
]
"""Pages in which processes are no persons; their tables may have long cells."""
REFERENCE = [ROOT / "docs" / "reference" / "cli.md", *sorted((ROOT / "docs" / "reference" / "cli").glob("*.md"))]
"""The command line: one page that lists all commands, and the pages that it leads to."""
TEXT = "\n\n".join(path.read_text() for path in REFERENCE)
QUOTED_PATH = r"`((?:\w[\w.-]*/)+(?:[\w.-]+\.(?:py|pyx|pxd|h|c|cu|md|sh|toml))?)(?:::(\w+))?`"
UNITS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "": 1, "MiB": 1 << 20, "GiB": 1 << 30}
CONSTANT = re.compile(r"^\| ([\d.]+) ?(\w*) \| `(\w+)` in `([^`]+)` \|", re.MULTILINE)
VAGUE = re.compile(r"\b(?:who|whoever|whom|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
TALK = re.compile(r"\b(?:tells?|told|hears?|heard|looks?(?!-)|looked|looking)\b", re.IGNORECASE)
NOT_PROSE = re.compile(r"^```.*?^```$|^#[^\n]*$|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_every_command_and_option_is_documented() -> None:
    described = set(re.findall(r"`([a-z][a-z-]*(?: [a-z]+)?)\b", TEXT))
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
    text = (ROOT / "docs" / "howto" / "operations.md").read_text()
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


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in PAGES], ids=lambda path: path.name)
def test_paths_and_the_names_in_them_exist(document: Path) -> None:
    """``path`` with a suffix of source code, or a folder that ends with a slash; ``path::name`` is defined there."""
    for path, name in re.findall(QUOTED_PATH, document.read_text()):
        assert (ROOT / path).exists(), path
        defined = rf"(?:\b(?:def|class)\s+{name}\b|^(?:cdef|static|void)[^=\n]*\b{name}\()"
        assert not name or re.search(defined, (ROOT / path).read_text(), re.M), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_made_from_docstrings_are_up_to_date(page: Path) -> None:
    """If this fails: python -m tests.ctl.references."""
    assert page.read_text() == PAGES[page]()


def test_the_site_has_every_page() -> None:
    """``make docs`` fails without it; this test needs no mkdocs."""
    listed = re.findall(r"^ +- .*?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    here = {name if name.startswith("repository/") else f"docs/{name}" for name in listed}
    pages = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert pages == {name.removeprefix("repository/") for name in here} - {
        "tests/README.md",
        "cython_ext/hook/DESIGN.md",
    }


def in_code(name: str, path: str) -> Fraction:
    """The value of a constant, in nanoseconds if its name says that it is a time."""
    assignment = rf"^\s*{name}(?:: Final)? = ([\d_.]+)(?: << (\d+))?"
    found = re.search(assignment, (ROOT / path).read_text(), re.MULTILINE)
    assert found is not None, f"{path} has no {name}"
    value = Fraction(found[1].replace("_", "")) * 2 ** int(found[2] or 0)
    return value * UNITS["s"] if name.endswith(("_S", "_SECONDS")) else value


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.name)
def test_constants_have_the_values_of_the_code(document: Path) -> None:
    listed = CONSTANT.findall(document.read_text())
    assert len(listed) == document.read_text().count("` in `")
    for value, unit, name, path in listed:
        assert Fraction(value) * UNITS[unit] == in_code(name, path), name


def test_every_field_with_evidence_is_one_of_the_policy() -> None:
    evidence = (ROOT / "docs" / "internals" / "policy-evidence.md").read_text()
    constants = (ROOT / "docs" / "reference" / "policy-constants.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", evidence, re.MULTILINE))
    assert named
    assert named <= set(re.findall(r"^\| `(\w+)` \|", constants, re.MULTILINE))


def test_the_runbook_has_every_alert() -> None:
    alerts = re.findall(r"^ *- alert: (\w+)$", (ROOT / "deploy" / "prometheus" / "rules.yml").read_text(), re.MULTILINE)
    assert alerts
    assert re.findall(r"^## (\w+)$", (ROOT / "docs" / "howto" / "runbook.md").read_text(), re.MULTILINE) == alerts


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_pages_are_short(document: Path) -> None:
    name = document.relative_to(ROOT).as_posix()
    lines = len(document.read_text().splitlines())
    if document not in PAGES:
        assert lines <= LONGEST.get(name, LONGEST_PLAIN_PAGE if document in PLAIN else LONGEST_PAGE)


@pytest.mark.parametrize("document", PLAIN, ids=lambda path: path.name)
def test_cells_of_tables_are_short(document: Path) -> None:
    rows = [line for line in document.read_text().splitlines() if line.startswith("|")]
    cells = (cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row))
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.name)
def test_sentences_name_their_subject(document: Path) -> None:
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", document.read_text())
    assert VAGUE.findall(prose) == []


@pytest.mark.parametrize("document", PLAIN_WORDS, ids=lambda path: path.name)
def test_processes_are_no_persons(document: Path) -> None:
    prose = NOT_PROSE.sub("", document.read_text())
    assert VAGUE.findall(prose) + TALK.findall(prose) == []


def test_headings_and_quotations_are_not_prose() -> None:
    assert TALK.findall(
        NOT_PROSE.sub("", "# It looks\nThe hook `tells` it.\n```\nheard\n```\nIt told the node.\n")
    ) == ["told"]


def test_the_picture_that_compares_is_what_its_script_draws() -> None:
    """If this fails: python docs/images/compare.py."""
    images = ROOT / "docs" / "images"
    assert (images / "compare.svg").read_text() == runpy.run_path(str(images / "compare.py"))["picture"]()
