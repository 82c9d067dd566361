"""Draws ``docs/images/compare.svg``: two jobs that always have work, as rectangles of time × SMs, under five ways to
share a GPU. ``python docs/images/compare.py`` writes the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

PICTURE = Path(__file__).with_name("compare.svg")
TITLE = "Two jobs that always have work, A 30 % and B 70 %: what each gets of time and SMs"
COLOURS = {"A": "#8ab6f9", "B": "#f7b77a"}
WIDTH, TOP, ROW = 850, 62, 96
LEFT, LENGTH, HEIGHT = 210, 330, 66
"""Of each drawing: its left edge, its time axis, its axis of SMs."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A way to share: ``turns`` are (job, part of a round of time), ``parts`` are (job, part of the SMs)."""

    name: str
    subtitle: str
    notes: tuple[str, ...]
    turns: tuple[tuple[str, float], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()
    lost: float = 0.0
    """The part of the time that goes by between turns."""


WAYS = (
    Way(
        "time slicing",
        "equal slices",
        ("A 50 %, B 50 %", "no shares can be set"),
        turns=(("A", 0.5), ("B", 0.5)),
        lost=0.1,
    ),
    Way(
        "MPS",
        "limits of 30 and 70 %",
        ("A 38 of 132 SMs (H200)", "fixed for a process's life"),
        parts=(("A", 38 / 132), ("B", 0.7)),
    ),
    Way(
        "MIG",
        "partitions of sevenths",
        ("A 3/7, B 4/7: the largest", "partition beside another"),
        parts=(("A", 3 / 7), ("B", 4 / 7)),
    ),
    Way(
        "HAMi",
        "launches are delayed",
        ("GEMM: A 50 %, B 50 %", "training: A 31 %, B 65 % (H200)"),
        turns=(("A", 0.5), ("B", 0.5)),
        lost=0.1,
    ),
    Way(
        "st-vgpu",
        "temporal mode",
        ("A 30 %, B 70 %", "resized while they run"),
        turns=(("A", 0.3), ("B", 0.7)),
        lost=0.01,
    ),
)


def rectangles(way: Way) -> Iterator[tuple[str, float, float, float, float]]:
    """Job, left, top, width, height; as parts of the drawing, from its top left corner."""
    if way.parts:
        top = 0.0
        for job, part in way.parts:
            yield job, 0.0, top, 1.0, part
            top += part
        return
    left, pause = 0.0, way.lost / (ROUNDS * len(way.turns))
    for job, part in islice(cycle(way.turns), ROUNDS * len(way.turns)):
        width = part * (1 - way.lost) / ROUNDS
        yield job, left, 0.0, width, 1.0
        left += width + pause


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{style}>{words}</text>'


def drawing(way: Way, top: float) -> Iterator[str]:
    grey = ' fill="#52606d" font-size="13"'
    yield text(30, top + 28, way.name, ' font-weight="600"')
    yield text(30, top + 48, way.subtitle, grey)
    yield f'<rect x="{LEFT}" y="{top}" width="{LENGTH}" height="{HEIGHT}" fill="#f0f3f6" stroke="#c5ced8"/>'
    for job, x, y, width, height in rectangles(way):
        left, upper, wide, high = LEFT + x * LENGTH, top + y * HEIGHT, width * LENGTH, height * HEIGHT
        area = f'x="{left:.1f}" y="{upper:.1f}" width="{wide:.1f}" height="{high:.1f}"'
        yield f'<rect {area} fill="{COLOURS[job]}" stroke="#4a5b6c"/>'
        yield text(round(left + wide / 2, 1), round(upper + high / 2 + 5, 1), job, ' text-anchor="middle"')
    for line, note in enumerate(way.notes):
        yield text(LEFT + LENGTH + 30, top + 28 + 20 * line, note, grey if line else "")


def picture() -> str:
    height = TOP + ROW * len(WAYS) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{TITLE}" font-family="system-ui, sans-serif" font-size="14" fill="#1f2933">',
        f"<title>{TITLE}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff" stroke="#c5ced8"/>',
        text(30, 36, TITLE, ' font-weight="600"'),
    ]
    for row, way in enumerate(WAYS):
        lines += drawing(way, TOP + ROW * row)
    foot = TOP + ROW * len(WAYS) + 2
    axes = ' fill="#52606d" font-size="13"'
    lines.append(text(LEFT, foot, "time goes to the right, SMs go down; grey: no job computes (not to scale)", axes))
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
