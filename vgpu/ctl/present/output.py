"""How answers are printed: tables that fit the terminal, whole rows when piped, JSON for programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vgpu.printable import printable, printable_json

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.text import Text

GAP: Final = "  "
_SHORTEST: Final = 8
"""An elastic column is never cut below this."""


class Cell(NamedTuple):
    """One field of a table; ``style`` is a rich style, seen on terminals only."""

    text: str
    style: str = ""


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Column:
    """``extra``: left out where there is no room, the rightmost first. ``elastic``: cut where that was not enough."""

    title: str
    right: bool = False
    extra: bool = False
    elastic: bool = False


def laid_out(columns: Sequence[Column], rows: Iterable[Row], width: int | None) -> list[list[Cell]]:
    """Header and rows as padded cells that fit into ``width`` columns (None: as wide as it takes).

    Every row has a field for every column, extra ones included.
    """
    table = [[Cell(c.title, "bold") for c in columns]]
    table += [[_clean(field) for field in row] for row in rows]
    widths = [max(len(line[i].text) for line in table) for i in range(len(columns))]
    shown = list(range(len(columns)))
    if width is not None:
        shown, widths = _fitted(columns, widths, width)
    return [[_padded(line[i], widths[i], columns[i].right) for i in shown] for line in table]


def _clean(field: str | Cell, keep: str = "") -> Cell:
    """A cell that is fit for a terminal, since a tenant wrote some of the text."""
    cell = field if isinstance(field, Cell) else Cell(field)
    return cell._replace(text=printable(cell.text, keep))


def _fitted(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    shown, fitted = list(range(len(columns))), list(widths)

    def excess() -> int:
        return sum(fitted[i] for i in shown) + len(GAP) * (len(shown) - 1) - width

    for i in reversed(range(len(columns))):
        if excess() > 0 and columns[i].extra:
            shown.remove(i)
    for i in shown:
        if columns[i].elastic:
            fitted[i] = max(min(fitted[i], _SHORTEST), fitted[i] - max(0, excess()))
    return shown, fitted


def _padded(cell: Cell, width: int, right: bool) -> Cell:
    text = cell.text if len(cell.text) <= width else cell.text[: width - 1] + "…"
    return Cell(text.rjust(width) if right else text.ljust(width), cell.style)


def print_table(columns: Sequence[Column], rows: Iterable[Row], *, whole: bool = False) -> None:
    """The table on stdout: cut to a terminal's width; whole and without styles anywhere else, and with ``whole``."""
    if whole or not sys.stdout.isatty():
        for line in laid_out(columns, rows, None):
            print(GAP.join(cell.text for cell in line).rstrip())
        return
    console().print(table_text(columns, rows, shutil.get_terminal_size().columns), soft_wrap=True)


def print_wrapped_table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """For cells that are sentences: on a terminal they are wrapped, elsewhere the table is that of ``print_table``."""
    if not sys.stdout.isatty():
        print_table(columns, rows)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*(column.title for column in columns), box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    for row in rows:
        cells = map(_clean, row)
        table.add_row(*(Text(cell.text, cell.style) for cell in cells))
    console().print(table)


def table_text(columns: Sequence[Column], rows: Iterable[Row], width: int) -> Text:
    """The table for a terminal."""
    from rich.text import Text

    def line_text(line: Sequence[Cell]) -> Text:
        return Text(GAP).join(Text(cell.text, cell.style) for cell in line)

    return Text("\n").join(map(line_text, laid_out(columns, rows, width)))


def line_printer() -> Callable[[Iterable[Cell]], None]:
    """A function that prints one line at a time, as it comes: whole, and wrapped by a terminal."""
    if not sys.stdout.isatty():
        return lambda cells: print(GAP.join(_clean(cell, "\n\t").text for cell in cells).rstrip(), flush=True)
    from rich.text import Text

    terminal = console()

    def show(cells: Iterable[Cell]) -> None:
        clean = (_clean(cell, "\n\t") for cell in cells)  # of a traceback
        terminal.print(Text(GAP).join(Text(c.text, c.style) for c in clean), soft_wrap=True)

    return show


def print_facts(facts: Mapping[str, str | Cell]) -> None:
    """One line per fact, its name before it; nothing is cut or wrapped."""
    widest = max(map(len, facts))
    styled = console() if sys.stdout.isatty() else None
    for name, said in facts.items():
        cell = _clean(said)
        if styled is None:
            print(f"{name:<{widest}}{GAP}{cell.text}")
        else:
            from rich.text import Text

            line = Text.assemble((f"{name:<{widest}}{GAP}", "bold"), (cell.text, cell.style))
            styled.print(line, soft_wrap=True)


def wrapped(sentence: str, indent: int) -> list[str]:
    """The lines of ``sentence`` to the right of ``indent`` columns; a single one where stdout is no terminal."""
    if not sentence or not sys.stdout.isatty():
        return [sentence] if sentence else []
    import textwrap

    width = max(shutil.get_terminal_size().columns - indent, 20)
    return textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)


def console() -> Console:
    """The console for stdout on a terminal. rich itself reads NO_COLOR and TERM."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any]) -> None:
    """A model as an object, several as an array; two spaces of indentation, UTF-8."""
    import json

    plain: Any
    if isinstance(value, dict):
        plain = value
    elif hasattr(value, "model_dump"):
        plain = value.model_dump(mode="json")
    else:
        plain = [model.model_dump(mode="json") for model in value]
    print_json_text(json.dumps(plain, indent=2, ensure_ascii=False))


def print_yaml(models: Iterable[BaseModel]) -> None:
    """Models as a sequence of mappings. Each field is JSON, which YAML includes."""
    import json

    items = []
    for model in models:
        fields = model.model_dump(mode="json").items()
        items.append("\n  ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields))
    print_json_text("\n".join(f"- {item}" for item in items) or "[]")


def print_json_text(text: str) -> None:
    """Print JSON that is fit for a terminal, since a tenant wrote some of its strings."""
    print(printable_json(text), flush=True)
