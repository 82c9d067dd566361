"""Where the time of each hand-over went: the kernels' own stamps beside what both hooks logged.

    python -m benchmarks.experiments.gaps [--seconds 30] [--split 50/50] [--mode temporal] [--over 1000] [--ahead off]

Two vGPUs run kernels that note %globaltimer, as in ``--part handover``, under VGPU_HOOK_LOG. Printed are the instants
of every hand-over whose gap on the device was longer than ``--over`` µs, in µs after the giver's last kernel had ended,
and for comparison the medians of all. Then which step of it took longest, how often, and how late the host let threads
run meanwhile (``stalls.py``). ``--ahead off``: nothing is queued ahead of a lease (VGPU_AHEAD=0). ``--keep FOLDER``:
the logs, and all instants as ``gaps.json``. The logs themselves cost a hand-over some tens of µs. ``--simulate``:
stand-ins on the simulated GPU.

The device's clock is brought to ours by looks at both before and after; how far they may be apart is told.
"""

from __future__ import annotations

import argparse
import bisect
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.experiments.hook_logs import Held, leases, parse
from benchmarks.experiments.timeline import crowded
from benchmarks.suite.parts.handover import clocks
from benchmarks.suite.report.stats import Handover, handovers, on_our_clock, percentile
from benchmarks.suite.stage import Ground, Stage
from benchmarks.suite.stalls import looking
from benchmarks.suite.workloads.catalogue import STAMPED

STEPS: Final = {
    "told": "last end → its hook tells of it",
    "go": "told → GO: relay, dispatcher",
    "begins": "GO → the taker's hook is awake",
    "released": "→ its queue is released",
    "start": "→ its first kernel: the GPU",
}
"""What leads to each instant of the chain from the giver's last kernel to the taker's first."""


@dataclass(frozen=True, slots=True)
class Passed:
    """One hand-over; every other time is in µs after ``at_s``, None where the logs tell of none.

    ``at_s``: the giver's last end, ``time.monotonic()``. Of the giver: its lease's end; when its hook took it to be
    over, queued the first launch ahead of its next one, told that it had come to its tail, and that it had drained. Of
    the taker: GO, its hook finding its lease begun, its queue released, its first kernel (which is the gap).
    """

    at_s: float
    giver: int
    taker: int
    start: float
    end: float | None = None
    over: float | None = None
    queues: float | None = None
    tail: float | None = None
    drained: float | None = None
    go: float | None = None
    begins: float | None = None
    released: float | None = None

    @property
    def told(self) -> float | None:
        """When others first heard that they need wait no longer."""
        return min((at for at in (self.tail, self.drained) if at is not None), default=None)

    def steps(self) -> dict[str, float]:
        """How long each of STEPS took, as far as it came after the last end: together the gap. What is not known took
        no time of its own: it counts with what comes after it."""
        took: dict[str, float] = {}
        before = 0.0
        for name in STEPS:
            at = getattr(self, name)
            if at is not None and at > before:
                took[name] = min(at, self.start) - before
                before = min(at, self.start)
        return took


INSTANTS: Final = ("end", "over", "queues", "tail", "drained", "go", "begins", "released", "start")
TITLES: Final = {"end": "lease end", "over": "taken so", "queues": "queues", "go": "GO", "start": "starts"}


def passed(handover: Handover, at_ns: int, logs: Sequence[Sequence[Held]]) -> Passed:
    """``at_ns``: its giver's last end on our clock; ``logs``: each sharer's leases, in order."""
    start = handover.gap / 1e3

    def after(moment_ns: int | None) -> float | None:
        return None if moment_ns is None else (moment_ns - at_ns) / 1e3

    given = in_force(logs[handover.giver], at_ns)
    taken = in_force(logs[handover.taker], at_ns + handover.gap)
    told: dict[str, float | None] = {}
    if given is not None:
        told |= {
            "end": after(given.end_ns),
            "over": after(given.over_ns),
            "queues": after(given.queues_ns),
            "tail": after(given.tail_ns),
            "drained": after(given.drained_ns),
        }
    if taken is not None:
        told |= {"go": after(taken.go_ns), "begins": after(taken.begins_ns), "released": after(taken.released_ns)}
    return Passed(at_ns / 1e9, handover.giver, handover.taker, start, **told)


def in_force(held: Sequence[Held], at_ns: int) -> Held | None:
    """The last lease that had begun by then."""
    index = bisect.bisect_right(held, at_ns, key=lambda lease: lease.begins_ns)
    return held[index - 1] if index else None


def line(gap: Passed) -> str:
    cells = " ".join("       –" if (at := getattr(gap, name)) is None else f"{at:8.0f}" for name in INSTANTS)
    return f"{gap.at_s:12.4f}  {gap.giver} → {gap.taker}  {cells}"


def medians(gaps: Sequence[Passed], percent: float) -> str:
    cells = []
    for name in INSTANTS:
        known = [at for gap in gaps if (at := getattr(gap, name)) is not None]
        cells.append(f"{percentile(known, percent):8.0f}" if known else "       –")
    return f"{f'of all, p{percent:g}':12}  {'':5}  {' '.join(cells)}"


def report(gaps: Sequence[Passed], over_us: float) -> list[str]:
    """Lines: the long ones, all of them in the middle, and what took longest. ``gaps``: none that overlaps."""
    long = [gap for gap in gaps if gap.start > over_us]
    heads = " ".join(f"{TITLES.get(name, name):>8.8}" for name in INSTANTS)
    lines = [f"{len(gaps)} gaps, {len(long)} over {over_us:g} µs; µs after the giver's last end"]
    lines += [f"{'at, s':>12}  {'':5}  {heads}", *map(line, long)]
    lines += [medians(gaps, percent) for percent in (50, 99)] if gaps else []
    for title, some in ((f"over {over_us:g} µs", long), ("all", gaps)):
        longest = Counter(max(took, key=took.__getitem__) for gap in some if (took := gap.steps()))
        lines.append(f"\n{title}: which step took longest, how often; what it took, p50 and longest, µs")
        for name, what in STEPS.items():
            took_us = [gap.steps().get(name, 0.0) for gap in some]
            if took_us:
                lines.append(f"    {what:40} {longest[name]:5}  {percentile(took_us, 50):8.0f} {max(took_us):8.0f}")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.gaps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--split", type=crowded, default=(50.0, 50.0), metavar="A/B", help="shares, in percent")
    parser.add_argument("--mode", choices=("temporal", "spatial"), default="temporal")
    parser.add_argument("--over", type=float, default=1000.0, metavar="US", help="gaps that are told one by one")
    parser.add_argument("--ahead", choices=("on", "off"), default="on", help="queue work ahead of leases")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="what was found")
    Ground.add_options(parser)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    memory = Path("/dev/shm")  # a log line opens its file: that is to be quick
    with tempfile.TemporaryDirectory(prefix="vgpu-gaps-", dir=memory if memory.is_dir() else None) as folder:
        logs = [Path(folder, f"hook-{which}.log") for which in range(len(args.split))]
        results, stalls = measured(args, logs)
        found, gaps = brought_together(results, [leases(parse(log.read_text().splitlines())) for log in logs])
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for log in logs:
                shutil.copy(log, args.keep)
            told = {"command": sys.argv[1:], "stalls": stalls, "gaps": [asdict(gap) for gap in gaps]}
            (args.keep / "gaps.json").write_text(json.dumps(told))
    apart_us = max(look.apart_ns for result in results for look in clocks(result)) / 1e3
    print(f"{len(found)} hand-overs, {len(found) - len(gaps)} overlaps; clocks within {apart_us:.0f} µs of each other")
    print("\n".join(report(gaps, args.over)))
    print("\nthe host meanwhile:", json.dumps(stalls))
    return 0


def measured(args: argparse.Namespace, logs: Sequence[Path]) -> tuple[Sequence[Mapping[str, Any]], dict[str, float]]:
    """What the sharers say of a window, and what the host did meanwhile."""
    options = ["--overcommit"] if sum(args.split) > 100 else []
    queueing = {} if args.ahead == "on" else {"VGPU_AHEAD": "0"}
    with Ground(args.simulate, args.gpu) as ground, Stage(ground) as stage:
        sharers = [
            stage.vgpu(args.mode, STAMPED, percent, *options, environment={"VGPU_HOOK_LOG": str(log), **queueing})
            for percent, log in zip(args.split, logs, strict=True)
        ]
        stage.ready()
        with looking(args.seconds + ground.pace.settle_s + 2 * ground.pace.lead_s) as stalls:
            outcome = stage.window(sharers, args.seconds, kernels=True)
    return outcome.results, stalls


def brought_together(
    results: Sequence[Mapping[str, Any]], logs: Sequence[Sequence[Held]]
) -> tuple[list[Handover], list[Passed]]:
    """All hand-overs, and those of them that do not overlap with their instants."""
    found = handovers([[(start, end) for start, end in result["kernels_ns"]] for result in results])
    gaps = []
    for each in found:
        if each.gap >= 0:
            first, last = clocks(results[each.giver])
            gaps.append(passed(each, on_our_clock(each.end, first, last), logs))
    return found, gaps


if __name__ == "__main__":
    sys.exit(main())
