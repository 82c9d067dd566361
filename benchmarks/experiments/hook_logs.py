"""Where a hand-over's time goes: the logs that hooks write under VGPU_HOOK_LOG, laid side by side.

    python -m benchmarks.experiments.hook_logs LOG [LOG ...]

Each log belongs to one process. From every drain to the beginning of the next lease (of another process), how long
leases were held, and how long after their ends they had drained. Medians, 90th percentiles and means in microseconds.
Beside the stamps of the kernels themselves: ``gaps.py``.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

LINE: Final = re.compile(r"^(\d+) (.*?) (-?\d+) (-?\d+)$")


class Said(NamedTuple):
    """One line: when (CLOCK_MONOTONIC ns), what, and its two numbers."""

    at_ns: int
    what: str
    a: int
    b: int


@dataclass(slots=True)
class Held:
    """One lease as the hook's log tells it; None: that did not happen, or was not told. CLOCK_MONOTONIC ns."""

    epoch: int
    begins_ns: int
    """When a thread of the hook found it begun."""
    go_ns: int | None = None
    """When the dispatcher gave GO."""
    released_ns: int | None = None
    """When the word had moved behind which work was queued ahead of it."""
    end_ns: int | None = None
    """Its end; and when the hook took that it was over."""
    over_ns: int | None = None
    queues_ns: int | None = None
    """When the first launch was queued ahead of the next lease, behind that word."""
    tail_ns: int | None = None
    """When others were told that little was left of its queue, and that nothing was."""
    drained_ns: int | None = None


def parse(lines: Iterable[str]) -> list[Said]:
    """Whatever is no line of a hook's log is left out."""
    found = (LINE.match(line) for line in lines)
    return [Said(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found if m]


def leases(log: Iterable[Said]) -> list[Held]:
    """Of one process, in order. What a log says before the first lease is about none."""
    held: list[Held] = []
    for said in log:
        if said.what == "lease begins":
            held.append(Held(said.a, said.at_ns))
        elif held:
            _note(held, said)
    return held


def _note(held: list[Held], said: Said) -> None:
    last = held[-1]
    if said.what == "released: launches, ns":
        last.released_ns = said.at_ns
    elif said.what == "opened without the lock: epoch, launches":
        last.released_ns = last.released_ns or said.at_ns
    elif said.what == "lease has GO since ns, flags":
        last.go_ns = said.a
    elif said.what.startswith("queues ahead"):
        last.queues_ns = said.at_ns
    elif said.what == "lease ends" and said.a == last.epoch:
        last.end_ns, last.over_ns = said.b, said.at_ns
    elif said.what == "tail of epoch, ns" and said.a == last.epoch:
        last.tail_ns = said.at_ns
    elif said.what == "drained epoch, overrun ns":
        for lease in held[-2:]:  # the next may follow at once, and begin before this one has drained
            if lease.epoch == said.a:
                lease.drained_ns = said.at_ns


def show(name: str, values: list[float]) -> None:
    if values:
        values.sort()
        p90 = values[int(len(values) * 0.9)]
        print(
            f"{name:44} n {len(values):5}  p50 {statistics.median(values):9.1f}  p90 {p90:9.1f}"
            f"  mean {statistics.fmean(values):9.1f} us"
        )


def main() -> None:
    events: list[tuple[int, int, Said]] = []
    for index, path in enumerate(sys.argv[1:]):
        events += [(said.at_ns, index, said) for said in parse(Path(path).read_text().splitlines())]
    events.sort()
    begun: dict[int, int] = {}
    last_drain: tuple[int, int] | None = None
    drain_to_begin: list[float] = []
    overruns: dict[int, list[float]] = {}
    lengths: dict[int, list[float]] = {}
    for at, who, (_, what, _, overrun_ns) in events:
        if what.startswith("lease begins"):
            begun[who] = at
            if last_drain is not None and last_drain[1] != who:
                drain_to_begin.append((at - last_drain[0]) / 1e3)
        elif what.startswith("drained epoch"):
            overruns.setdefault(who, []).append(overrun_ns / 1e3)
            if who in begun:
                lengths.setdefault(who, []).append((at - begun.pop(who)) / 1e3)
            last_drain = (at, who)
    show("drain seen → next lease begins", drain_to_begin)
    for who in sorted(lengths):
        show(f"{sys.argv[1 + who]}: begin → drained", lengths[who])
        show(f"{sys.argv[1 + who]}: drained after the end by", overruns[who])


if __name__ == "__main__":
    main()
