"""Bars, sparklines and lines of text, with names for styles, which the widgets turn into colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size


class Span(NamedTuple):
    """A piece of a line. ``style``: one of ``vgpu.top.colours.STYLES``; "": plain."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What a terminal can show. ``levels``: of a sparkline, from nothing to the most."""

    full: str
    half: str
    track: str
    mark: str
    mark_in_full: str
    levels: str
    pointer: str
    opened: str
    closed: str
    branch: str
    up: str
    down: str
    ellipsis: str
    ascii: bool = False

    def said(self, text: str) -> str:
        """``text`` as the terminal can show it: nothing that moves a cursor, and ASCII where it has no more."""
        clean = text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)
        return clean.translate(_TO_ASCII).encode("ascii", "replace").decode() if self.ascii else clean


UNICODE: Final = Glyphs("━", "╾", "─", "┼", "╋", "▁▂▃▄▅▆▇█", "▌", "▾", "▸", "└", "▲", "▼", "…")
ASCII: Final = Glyphs("=", "=", "-", "|", "|", "_.:-=+*#", ">", "v", ">", "`", "^", "v", "~", ascii=True)
_SHORTEST_IN_THE_MIDDLE: Final = 5
_TO_ASCII: Final = str.maketrans("…–—·µ°→↑↓−×’“”", "~--.u'>^v-x'\"\"")


def width_of(spans: Iterable[Span]) -> int:
    return sum(cell_len(span.text) for span in spans)


def fixed(text: str, width: int, glyphs: Glyphs = UNICODE, *, right: bool = False) -> str:
    """``text`` in ``width`` cells: padded, or cut with an ellipsis."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + glyphs.ellipsis if width > 0 else ""
    space = " " * (width - length)
    return space + text if right else text + space


def cut_in_the_middle(text: str, width: int, glyphs: Glyphs = UNICODE) -> str:
    """``text`` in ``width`` cells at most. Names of one kind differ at their ends, so both ends stay."""
    if cell_len(text) <= width:
        return text
    if width < _SHORTEST_IN_THE_MIDDLE:
        return fixed(text, width, glyphs)
    tail = ""
    for letter in reversed(text):
        if cell_len(letter + tail) > (width - 1) // 2:
            break
        tail = letter + tail
    return set_cell_size(text, width - 1 - cell_len(tail)) + glyphs.ellipsis + tail


def cut(spans: Iterable[Span], width: int, glyphs: Glyphs) -> Line:
    """As much of a line as fits ``width`` cells."""
    line: list[Span] = []
    left = width
    for span in spans:
        length = cell_len(span.text)
        if length > left:
            if left > 0:
                line.append(Span(fixed(span.text, left, glyphs), span.style))
            break
        line.append(span)
        left -= length
    return tuple(line)


def bar(ratio: float, width: int, style: str, glyphs: Glyphs, mark: float | None = None) -> Line:
    """A bar of ``width`` cells, filled to ``ratio`` (0–1). ``mark``: a notch there; what is filled beyond it is
    ``beyond``."""
    halves = round(min(max(ratio, 0.0), 1.0) * width * 2)
    if ratio > 0 and halves == 0:
        halves = 1  # little is not nothing
    cells = glyphs.full * (halves // 2) + (glyphs.half if halves % 2 else "")
    filled = len(cells)
    cells += glyphs.track * (width - filled)
    if mark is None or not 0 < mark < 1:
        return tuple(span for span in (Span(cells[:filled], style), Span(cells[filled:], "track")) if span.text)
    at = min(int(mark * width), width - 1)
    notch = glyphs.mark_in_full if at < filled else glyphs.mark
    cells = cells[:at] + notch + cells[at + 1 :]
    inner, outer = min(filled, at), max(filled, at)
    parts = (
        Span(cells[:inner], style),
        Span(cells[inner:at], "track"),
        Span(cells[at : at + 1], "mark"),
        Span(cells[at + 1 : outer], "beyond"),
        Span(cells[max(outer, at + 1) :], "track"),
    )
    return tuple(span for span in parts if span.text)


def spark(cells: Sequence[float | None], glyphs: Glyphs, most: float | None = None) -> str:
    """One character for each cell, by its part of ``most`` (else of a little more than the largest, so that what is
    steady is no wall); blank where nothing is known."""
    top = 1.15 * max((cell for cell in cells if cell is not None), default=0.0) if most is None else most
    last = len(glyphs.levels) - 1
    return "".join(
        " " if cell is None else glyphs.levels[0 if top <= 0 else min(last, round(cell / top * last))] for cell in cells
    )


def chart(cells: Sequence[float | None], height: int, glyphs: Glyphs) -> list[str]:
    """``height`` lines, the highest first: columns of the parts of one, as ``spark`` draws them in one line."""
    if height <= 1:
        return [spark(cells, glyphs, 1.0)]
    lines = []
    for below in reversed(range(height)):  # the lines below this one
        parts = [None if cell is None else cell * height - below for cell in cells]
        lines.append(
            "".join(
                " " if part is None or (part <= 0 and below) else glyphs.levels[_level(part, glyphs)] for part in parts
            )
        )
    return lines


def _level(part: float, glyphs: Glyphs) -> int:
    last = len(glyphs.levels) - 1
    return round(min(max(part, 0.0), 1.0) * last)


def fitting(parts: Sequence[tuple[int, Line]], width: int, gap: int = 2) -> Line:
    """Parts side by side. Where they do not fit ``width`` cells, those of the smallest number are left out first."""
    kept = list(range(len(parts)))
    while len(kept) > 1 and sum(width_of(parts[i][1]) for i in kept) + gap * (len(kept) - 1) > width:
        kept.remove(min(reversed(kept), key=lambda i: parts[i][0]))
    line: list[Span] = []
    for i in kept:
        line += [Span(" " * gap)] if line else []
        line += parts[i][1]
    return tuple(line)
