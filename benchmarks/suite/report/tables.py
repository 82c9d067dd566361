"""From measurements to tables: rows of all repeats merged into median and worst, judged by the bars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.suite.report.records import Measurement, Records
from benchmarks.suite.report.stats import worst

Better = Literal["low", "high", ""]
Labels = tuple[str, str, str]
"""Work, row, way."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach, in rows whose labels ``where`` accepts. Its direction is the column's."""

    limit: float
    where: Callable[[Row], bool] = lambda row: True


@dataclass(frozen=True, slots=True)
class Column:
    """One figure. ``better``: which way is good; "" for what is only told. ``digits`` behind the point."""

    figure: str
    title: str
    better: Better = ""
    digits: int = 1
    bars: tuple[Bar, ...] = ()

    def bar(self, row: Row) -> float | None:
        return next((bar.limit for bar in self.bars if bar.where(row)), None)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of one run: what it is about (``work``, ``row``, ``way``, as in ``Measurement``) and its figures.

    ``source``: the run, and which repeat of it.
    """

    work: str
    row: str
    way: str
    figures: dict[str, float]
    source: tuple[str, int] = ("", 0)

    @property
    def labels(self) -> Labels:
        return self.work, self.row, self.way


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure over all repeats. ``met`` None: there is no bar for it. Judged is the worst, never the median.

    ``repeats``: how many values it is of; a baseline is measured before and after, which makes two in one run.
    """

    median: float
    worst: float
    repeats: int
    limit: float | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class Line:
    """``runs``: how many it is of, each repeat of one counting as one."""

    labels: Labels
    cells: dict[str, Cell]
    runs: int


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]


def merged(name: str, title: str, columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """One line for each combination of labels, in order of their first appearance."""
    together: dict[Labels, list[Row]] = {}
    for row in rows:
        together.setdefault(row.labels, []).append(row)
    lines = []
    for labels, same in together.items():
        found = {c.figure: _cell(c, same) for c in columns}
        runs = len({row.source for row in same})
        lines.append(Line(labels, {figure: cell for figure, cell in found.items() if cell is not None}, runs))
    return Table(name, title, tuple(columns), tuple(lines))


def _cell(column: Column, rows: Sequence[Row]) -> Cell | None:
    values = [row.figures[column.figure] for row in rows if column.figure in row.figures]
    if not values:
        return None
    limit = column.bar(rows[0])
    least = worst(values, column.better or "high")
    met = None if limit is None else (least <= limit if column.better == "low" else least >= limit)
    return Cell(statistics.median(values), least, len(values), limit, met)


def verdicts(tables: Iterable[Table]) -> list[tuple[bool, str]]:
    """(met, sentence) for every figure that has a bar."""
    return [
        (cell.met, f"{table.name}: {', '.join(filter(None, line.labels))}: {_sentence(column, cell)}")
        for table in tables
        for line in table.lines
        for column in table.columns
        if (cell := line.cells.get(column.figure)) is not None and cell.met is not None
    ]


def _sentence(column: Column, cell: Cell) -> str:
    sign = "≤" if column.better == "low" else "≥"
    return (
        f"{column.title} {cell.worst:.{column.digits}f}, asked {sign} {cell.limit:g}: {'met' if cell.met else 'MISSED'}"
    )


def _shown(column: Column, cell: Cell | None) -> str:
    if cell is None:
        return "–"
    text = f"{cell.median:.{column.digits}f}"
    if cell.repeats > 1 and column.better:
        text += f" ({cell.worst:.{column.digits}f})"
    if cell.met is not None:
        sign = "≤" if column.better == "low" else "≥"
        text += f" [{sign} {cell.limit:g} {'met' if cell.met else 'MISSED'}]"
    return text


def _grid(table: Table) -> list[list[str]]:
    used = [c for c in table.columns if any(c.figure in line.cells for line in table.lines)]
    lines = [
        [*line.labels, str(line.runs), *(_shown(c, line.cells.get(c.figure)) for c in used)] for line in table.lines
    ]
    return [["work", "row", "way", "runs", *(c.title for c in used)], *lines]


def text(table: Table) -> str:
    """For a terminal: columns side by side."""
    return "\n".join([f"{table.name}: {table.title}", *aligned(_grid(table))])


def aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, columns side by side."""
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]


def markdown(table: Table) -> str:
    """For a document. Median (worst of the repeats) [bar]."""
    head, *rows = _grid(table)
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join([f"## {table.name}", "", f"{table.title}.", "", *lines])


def as_json(tables: Iterable[Table], records: Records) -> dict[str, Any]:
    """Everything that the tables say, and what they were made from, for programs."""
    return {
        "runs": [{"run": r.run, "machine": r.machine, "command": r.command} for r in records.runs],
        "failures": records.failures,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "rows": [
                    {
                        **dict(zip(("work", "row", "way"), line.labels, strict=True)),
                        "runs": line.runs,
                        "figures": {
                            figure: {
                                "median": cell.median,
                                "worst": cell.worst,
                                "repeats": cell.repeats,
                                "limit": cell.limit,
                                "met": cell.met,
                            }
                            for figure, cell in line.cells.items()
                        },
                    }
                    for line in table.lines
                ],
            }
            for table in tables
        ],
    }


def compared(measurements: Iterable[Measurement]) -> list[list[Measurement]]:
    """Measurements that belong together: of one run, repeat and block."""
    together: dict[tuple[str, str, int, str], list[Measurement]] = {}
    for m in measurements:
        together.setdefault((m.run, m.part, m.repeat, m.block), []).append(m)
    return list(together.values())
