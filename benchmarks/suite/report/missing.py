"""How often each row of the suite has been measured, and what it would take to have each of them so many times. Pure.

A run counts for a row if every figure of it that has a bar can be judged by it: one of an earlier suite, which measured
less, does not. Rows without a bar are what others are compared with, and are measured along with them.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.suite.parts.part import WAYS, Options, Part
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Labels, Row


@dataclass(frozen=True, slots=True)
class Count:
    """Of one row. ``runs``: those that count, with each repeat; ``lacks``: how many are still to be made; None where
    nothing is judged. ``shortest_s``: the shortest windows of the runs that count, where any are told."""

    labels: Labels
    runs: frozenset[tuple[str, int]]
    lacks: int | None
    shortest_s: float | None


@dataclass(frozen=True, slots=True)
class Errand:
    """A command for what is lacking of a part, or of one of its works; by the part's own estimate it takes so long, and
    with one repeat ``once_s``."""

    command: str
    seconds: float
    once_s: float


def barred(part: Part, labels: Labels) -> set[str]:
    """The figures of such a row that have a bar."""
    row = Row(*labels, {})
    return {column.figure for column in part.columns if column.bar(row) is not None}


def counts(part: Part, options: Options, measurements: Iterable[Measurement], wanted: int) -> list[Count]:
    """Of each row that ``part`` has with these options."""
    own = [m for m in measurements if m.part == part.name]
    windows: dict[tuple[str, int], float] = {}
    for m in own:
        seconds = max((result.get("seconds", 0.0) for result in m.results), default=0.0)
        windows[m.run, m.repeat] = max(seconds, windows.get((m.run, m.repeat), 0.0))
    there: dict[Labels, set[tuple[str, int]]] = {}
    for row in part.found(own):
        if row.figures.keys() >= barred(part, row.labels):
            there.setdefault(row.labels, set()).add(row.source)
    expected = part.rows(options)
    told = []
    for labels in expected:
        sources = frozenset(there.get(labels, ()))
        lacks = max(0, wanted - len(sources)) if barred(part, labels) else None
        shortest_s = min((windows[source] for source in sources), default=0.0) or None
        told.append(Count(labels, sources, lacks, shortest_s))
    return told


def errands(part: Part, options: Options, told: Iterable[Count], seconds_chosen: bool = False) -> Iterator[Errand]:
    """What would make up for all that ``told`` says is lacking: a command for each work, for they can be started one by
    one. Where rows of a work lack different numbers, it makes as many as the one that lacks most."""
    lacks = {count.labels: count.lacks for count in told if count.lacks}
    each: list[tuple[str, ...]] = [(work,) for work in options.some(part.works)]
    for works in each or [options.works]:
        of_work = replace(options, works=works)
        due = {labels: lacks[labels] for labels in part.rows(of_work) if labels in lacks}
        if not due:
            continue
        splits = [replace(of_work, splits=(split,)) for split in options.splits or part.splits]
        ways = [replace(of_work, ways=(way,)) for way in options.ways or WAYS]
        fewer = replace(
            of_work,
            splits=tuple(split for one in _needed(part, splits, due, not options.splits) for split in one.splits),
            ways=tuple(way for one in _needed(part, ways, due, not options.ways) for way in one.ways),
        )
        chosen = fewer if due.keys() <= set(part.rows(fewer)) else of_work
        chosen = replace(chosen, repeat=max(due.values()))
        yield Errand(
            shlex.join(command(part, chosen, seconds_chosen)),
            part.estimate(chosen),
            part.estimate(replace(chosen, repeat=1)),
        )


def _needed(part: Part, single: Sequence[Options], due: Collection[Labels], free: bool) -> Sequence[Options]:
    """Those of ``single``, each of which chooses one thing, that give a row that is due and that not all of them give.

    None of them, and so no choice, if ``free`` and each is needed on which any row depends.
    """
    gives = [set(part.rows(one)) for one in single]
    always = set.intersection(*gives) if len(gives) > 1 else set()
    found = [one for one, rows in zip(single, gives, strict=True) if not (rows - always).isdisjoint(due)]
    return [] if free and len(found) == sum(bool(rows - always) for rows in gives) else found


def command(part: Part, options: Options, seconds_chosen: bool) -> list[str]:
    words = ["python", "-m", "benchmarks.suite", "--part", part.name]
    if part.works:
        words += ["--works", *options.works]
    if options.splits:
        words += ["--splits", *("/".join(f"{percent:g}" for percent in split) for split in options.splits)]
    if options.ways:
        words += ["--ways", *options.ways]
    if seconds_chosen:
        words += ["--seconds", f"{options.seconds:g}"]
    return [*words, "--repeat", str(options.repeat)] if options.repeat > 1 else words
