"""How answers look: tables that fit the terminal, whole lines when piped, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

WIDE_COLUMNS: Final = 110
"""From this width on, tables show their secondary columns too."""
_UNBOUNDED: Final = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """``wide``: left out on narrow terminals. ``elastic``: the one that is cut if a row still does not fit."""

    title: str
    right: bool = False
    wide: bool = False
    elastic: bool = False


def console() -> Console:
    """For stdout. Not a terminal: no colours, and no width, so that grep and awk see whole rows."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_UNBOUNDED, color_system=None)


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> Table:
    """Rows hold rich markup, one cell per column, hidden ones included."""
    from rich.table import Table

    shown = [i for i, column in enumerate(columns) if not column.wide or width >= WIDE_COLUMNS]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in shown:
        column = columns[i]
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if column.elastic else len(column.title),
            ratio=None,
        )
    for row in rows:
        made.add_row(*(row[i] for i in shown))
    return made


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    out = console()
    out.print(table(columns, rows, out.width))


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
    print(json.dumps(plain, indent=2, ensure_ascii=False))
