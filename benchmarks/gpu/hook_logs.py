"""Where a hand-over's time goes: the logs that hooks write under VGPU_HOOK_LOG, laid side by side.

    python -m benchmarks.gpu.hook_logs LOG [LOG ...]

Each log belongs to one process. From every drain to the beginning of the next lease (of another process), how long
leases were held, and how long after their ends they had drained. Medians, 90th percentiles and means in microseconds.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

LINE = re.compile(r"^(\d+) (.*?) (-?\d+) (-?\d+)$")


def show(name: str, values: list[float]) -> None:
    if values:
        values.sort()
        p90 = values[int(len(values) * 0.9)]
        print(
            f"{name:44} n {len(values):5}  p50 {statistics.median(values):9.1f}  p90 {p90:9.1f}"
            f"  mean {statistics.fmean(values):9.1f} us"
        )


def main() -> None:
    events: list[tuple[int, int, str, int, int]] = []
    for index, path in enumerate(sys.argv[1:]):
        found = (LINE.match(line) for line in Path(path).read_text().splitlines())
        events += [(int(m[1]), index, m[2], int(m[3]), int(m[4])) for m in found if m]
    events.sort()
    begun: dict[int, int] = {}
    last_drain: tuple[int, int] | None = None
    drain_to_begin: list[float] = []
    overruns: dict[int, list[float]] = {}
    lengths: dict[int, list[float]] = {}
    for at, who, what, _, overrun_ns in events:
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
