"""No sentence is long: of the README, the quick starts, figures, pages of operators, and each ``vgpuctl … --help``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from vgpu.ctl.main import app

ROOT = Path(__file__).parents[2]
MOST_WORDS = 30
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
SHORT_ENTRIES = [
    *sorted((ROOT / "docs" / "reference" / "performance").glob("*.md")),
    ROOT / "docs" / "explanation" / "concepts.md",
    *(path for path in sorted((ROOT / "docs" / "howto").glob("*.md")) if path.name != "verify.md"),
]
"""Pages in which a quoted command counts as one word, and a cell of a table may list entries between semicolons."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
NEW_TEXT = re.compile(r"#|[*-] |\d+\. ")
ROW_OF_HELP = re.compile(r"^.*\S {2,}\S.*$", re.MULTILINE)
QUOTED = re.compile(r"`[^`]*`")
END_OF_SENTENCE = re.compile(r"[.!?][)*\"]*\s+")


def texts(markdown: str) -> Iterator[str]:
    """Paragraphs, headings, items of lists and cells of tables; links are their words, and code blocks are left out."""
    paragraph: list[str] = []
    for line in [*LINK.sub(r"\1", FENCED.sub("", markdown)).splitlines(), ""]:
        row = line.startswith("|")
        if not line.strip() or row or NEW_TEXT.match(line.lstrip()):
            yield " ".join(paragraph)
            paragraph = []
        if row:
            yield from re.split(r"(?<!\\)\|", line)
        elif not line.startswith("    "):
            paragraph.append(line.strip())


def long_sentences(markdown: str) -> list[str]:
    sentences = (sentence for text in texts(markdown) for sentence in END_OF_SENTENCE.split(text))
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def long_entries(markdown: str) -> list[str]:
    """As ``long_sentences``; see ``SHORT_ENTRIES``."""
    lines = QUOTED.sub("`quoted`", markdown).splitlines()
    return long_sentences("\n".join(line.replace("; ", "| ") if line.startswith("|") else line for line in lines))


def helps(command: Any, name: str = "vgpuctl") -> Iterator[tuple[str, str]]:
    """``command`` and all below it, with each text of their help; its tables are as in Markdown."""
    told = (command.help, command.epilog, *(getattr(parameter, "help", None) for parameter in command.params))
    for text in filter(None, told):
        yield name, ROW_OF_HELP.sub(lambda row: re.sub(" {2,}", "|", f"  {row[0]}"), text.replace("\b", ""))
    for below, part in getattr(command, "commands", {}).items():
        yield from helps(part, f"{name} {below}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_sentences_of_documents_are_short(document: Path) -> None:
    assert long_sentences(document.read_text()) == []


@pytest.mark.parametrize("document", SHORT_ENTRIES, ids=lambda path: path.name)
def test_sentences_and_entries_of_tables_are_short(document: Path) -> None:
    assert long_entries(document.read_text()) == []


def test_sentences_of_help_are_short() -> None:
    told = list(helps(typer.main.get_command(app)))
    assert {"vgpuctl", "vgpuctl create", "vgpuctl gpu set"} <= {name for name, _ in told}
    assert [(name, sentence) for name, text in told for sentence in long_sentences(text)] == []


def test_a_sentence_of_31_words_is_long() -> None:
    words = ["word"] * MOST_WORDS
    assert long_sentences(" ".join(words) + ". Another.") == []
    long = " ".join([*words, "[more](link.md)"])
    assert long_sentences(f"Before. {long}.\nAfter.") == [" ".join([*words, "more"])]
    assert long_sentences(f"| cell | {long} |") != []
    assert long_sentences(f"```console\n{long}\n```\n") == []


def test_an_entry_of_a_table_ends_at_a_semicolon_and_a_command_is_one_word() -> None:
    half = " ".join(["word"] * 20)
    assert long_entries(f"| {half}; {half} |") == []
    assert long_entries(f"{half}; {half}") != []
    assert long_entries(f"| {half} {half} |") != []
    assert long_entries(f"{half} `{half}`") == []
