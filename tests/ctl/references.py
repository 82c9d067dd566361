"""Pages made from docstrings, and the texts of ``--help``. ``python -m tests.ctl.references`` writes them."""

from __future__ import annotations

import ast
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from gpuserver.core.scheduler import policy
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy
from vgpu.ctl import entry
from vgpu.ctl.main import app, run
from vgpu.protocol.requests import TABLE
from vgpu.share import PPM

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("gpuserver", "vgpu", "client_hook", "cython_ext", "benchmarks")
SUFFIXES = (".py", ".pyx", ".pxd")
MADE_BY_THE_BUILD = "generated"
LONGEST_CELL = 200
DOCSTRING = re.compile(r'(?:[ \t]*#[^\n]*\n|\s*\n)*"""(.*?)"""', re.DOTALL)
UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))


class UndocumentedError(Exception):
    """A module or a constant lacks the docstring that its page needs."""


def code_map() -> str:
    return "".join(_code_map_lines())


def policy_constants() -> str:
    return "".join(_policy_lines())


def requests() -> str:
    return "".join(_request_lines())


def helps(words: Sequence[str]) -> str:
    """``vgpuctl WORDS --help``, as a terminal of 80 columns and every wider one gets it."""
    shown = io.StringIO()
    with redirect_stdout(shown), mock.patch.dict(os.environ, COLUMNS="80"):
        run([*words, "--help"])
    return shown.getvalue()


def commands(group: Any = None, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """``vgpuctl`` itself, and each of its commands, by their words."""
    group = typer.main.get_command(app) if group is None else group
    yield above
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*above, name))


FROM_FILES = {("dashboard",)}
"""Commands whose help depends on the configuration file."""

PAGES = {
    **{Path(entry.page(list(words))): partial(helps, words) for words in commands() if words not in FROM_FILES},
    DOCS / "internals" / "code-map.md": code_map,
    DOCS / "reference" / "policy-constants.md": policy_constants,
    DOCS / "reference" / "requests.md": requests,
}


def _request_lines() -> Iterator[str]:
    yield "# Requests\n\n"
    yield "Made by `python -m tests.ctl.references` from `vgpu/protocol/requests.py`. Do not edit it.\n\n"
    yield "A client sends these to the node. `vgpu/protocol/messages.py` has their fields.\n"
    yield "The node waits for a GPU Server's answer as long as the fourth column says.\n\n"
    yield "| request | answer | answered by | limit, s | HTTP, below `/api/v1` |\n| --- | --- | --- | --- | --- |\n"
    for request in TABLE:
        answer = f"`{request.answer.__name__}`" + (", a stream" if request.is_stream else "")
        http = f"`{request.http}`" if request.http else ""
        yield f"| `{request.op}` | {answer} | {request.route.value} | {request.limit_s:g} | {http} |\n"


def _code_map_lines() -> Iterator[str]:
    yield "# Code map\n\n"
    yield "Made by `python -m tests.ctl.references` from the first sentence of each docstring. Do not edit it.\n"
    for folder, modules in groupby(_modules(), key=lambda path: path.parent):
        yield f"\n## {folder.relative_to(ROOT).as_posix()}\n\n"
        listed = []
        for module in modules:
            if module.stem != "__init__":
                listed.append(f"| `{module.name}` | {first_sentence(module)} |\n")
            elif module.read_text().strip():
                yield f"{first_sentence(module)}\n\n"
        if listed:
            yield "| file | what it is |\n| --- | --- |\n"
            yield from listed


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        found = (path for path in (ROOT / package).rglob("*") if path.suffix in SUFFIXES)
        yield from sorted((path for path in found if MADE_BY_THE_BUILD not in path.parts), key=_folder_first)


def _folder_first(path: Path) -> tuple[tuple[str, ...], str]:
    return path.parent.parts, path.name


def first_sentence(module: Path) -> str:
    """The first sentence of a module's docstring. A sentence that is too long ends at its first colon or semicolon."""
    docstring = DOCSTRING.match(module.read_text())
    if docstring is None:
        raise UndocumentedError(f"{module.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(docstring[1].strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?])\s", paragraph, maxsplit=1)[0]
    if len(sentence) > LONGEST_CELL - 20:
        sentence = re.split(r"[:;](?=\s)", sentence, maxsplit=1)[0]
    return _cell(sentence.rstrip(":.") + ("" if sentence.endswith("?") else "."))


def _policy_lines() -> Iterator[str]:
    yield "# The scheduler's constants\n\n"
    yield "Made by `python -m tests.ctl.references` from `gpuserver/core/scheduler/policy.py`. Do not edit it.\n"
    yield "[Scheduling](../explanation/scheduling.md) explains the symbols. "
    yield "[Evidence](../internals/policy-evidence.md) has measurements.\n\n"
    yield "| field | value | reason |\n| --- | --- | --- |\n"
    reasons = _field_docstrings()
    for field in fields(Policy):
        if field.name not in reasons:
            raise UndocumentedError(f"Policy.{field.name} has no docstring")
        yield f"| `{field.name}` | {_value(field.name)} | {_cell(reasons[field.name])} |\n"


def _field_docstrings() -> dict[str, str]:
    tree = ast.parse(Path(policy.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Policy")
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _value(name: str) -> str:
    value = getattr(DEFAULT_POLICY, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_ppm"):
        return f"{value * 100 / PPM:g} %"
    if name.endswith("_ns"):
        size, unit = next((size, unit) for size, unit in UNITS if value >= size)
        return f"{value / size:g} {unit}"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for page, made in PAGES.items():
        page.write_text(made())
