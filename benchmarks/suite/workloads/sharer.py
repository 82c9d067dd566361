"""One sharer: an unmodified workload in a process of its own, which counts what it gets done.

    python -m benchmarks.suite.workloads.sharer --work NAME [--simulated]

Nothing in here knows about vGPUs. It warms up, prints ``READY``, and then answers each line of stdin, a window as JSON
(``Window``), by one line, ``RESULT`` and an object; it ends with stdin. Times are ``time.monotonic()``.

A window has a lead-in and a tail in which the sharer works but does not count, so that all sharers are at work for the
whole of it. Steps count in parts (``stats.work_at``).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from random import Random
from typing import Any, Final, Protocol, TypeVar

from benchmarks.suite.report.stats import Interval, closed, covered_ratio, gaps_within, percentile, rate
from benchmarks.suite.workloads.catalogue import STAMPED, WORKS, Work
from benchmarks.suite.workloads.program import Mark, Program

SWITCH_NS: Final = 138_000
"""The GPU needs so long from one process's kernels to another's (``benchmarks/experiments/context_switch.cu``).
No other process can use a shorter gap between two kernels of one process."""
SILENCE_S: Final = 0.5
"""The longest time without a kernel, of a sharer that always has work: a token of 10 % waits 0.1 s for its turn."""


@dataclass(frozen=True, slots=True)
class Window:
    """From ``start`` on for ``seconds``. ``stamps``: how long the GPU was busy by device timestamps, too;
    ``kernels``: the timestamps themselves instead, of lead-in and tail as well.

    ``requests_per_second``: 0, or an open loop: requests arrive at random at that rate, whether or not the GPU keeps
    up, and each is waited for before the next one is submitted; ``seed`` says when. ``lead_s``: lead-in and tail.
    ``samples``: all latencies, too: of requests, or the times between steps.
    """

    start: float
    seconds: float
    stamps: bool = False
    kernels: bool = False
    requests_per_second: float = 0.0
    samples: bool = False
    seed: int = 1
    lead_s: float = 0.7


def sleep_until(at: float) -> float:
    """How late it was, in seconds, if it was too late for that already."""
    left = at - time.monotonic()
    time.sleep(max(0.0, left))
    return max(0.0, -left)


def closed_loop(program: Program, depth: int, until: float) -> list[float]:
    """Keep ``depth`` steps in flight until then; when each was seen to be done."""
    flying: collections.deque[Mark] = collections.deque()
    done: list[float] = []

    def finish_one() -> None:
        program.wait(flying.popleft())
        done.append(time.monotonic())

    while time.monotonic() < until:
        program.step()
        flying.append(program.mark())
        if len(flying) >= depth:
            finish_one()
    while flying:
        finish_one()
    return done


def steady(work: Work, program: Program, window: Window) -> dict[str, Any]:
    """Steps a second, and the times between their ends, in a closed loop."""
    start, stop = window.start, window.start + window.seconds
    with program.stamped() if window.stamps else nullcontext() as stamps:
        looks = [program.look()] if window.kernels else []
        late_s = sleep_until(start - window.lead_s)
        done = closed_loop(program, work.depth, stop + window.lead_s)
    steps = rate(done, start, stop)
    gaps_ms = [1e3 * gap for gap in gaps_within(done, start, stop)]
    result: dict[str, Any] = {
        "steps_per_second": steps,
        "units_per_second": steps * work.units,
        "steps": len(gaps_ms),
        "step_p50_ms": percentile(gaps_ms, 50) if gaps_ms else None,
        "step_p99_ms": percentile(gaps_ms, 99) if gaps_ms else None,
        "slowest_steps": slowest(done, start, stop),
        "late_s": late_s,
    }
    if window.samples:
        result["samples_ms"] = [round(took, 4) for took in gaps_ms]
    if stamps is not None and window.kernels:
        result |= {"kernels_ns": stamps(), "looks": [*looks, program.look()]}
    elif stamps is not None:
        kernels = stamps()
        check_whole(kernels, start, stop)
        result |= {
            "busy_ratio": covered_ratio(kernels, start, stop),
            "taken_ratio": covered_ratio(closed(kernels, SWITCH_NS), start, stop),
            "kernels": len(kernels),
        }
    return result


def slowest(done: Sequence[float], start: float, stop: float) -> list[tuple[float, float]]:
    """The five longest steps that ended in the window: when they did, and their length in ms."""
    steps = [(end, 1e3 * (end - before)) for before, end in pairwise(done) if start <= end <= stop]
    return sorted(nlargest(5, steps, key=itemgetter(1)))


def check_whole(kernels: Sequence[Interval], start: float, stop: float) -> None:
    """RuntimeError if the kernels begin long after the window or end long before it: a profiler's buffers were full."""
    if not kernels:
        raise RuntimeError("no device timestamps at all")
    first, last = min(kernels)[0] / 1e9, max(end for _, end in kernels) / 1e9
    if first > start + SILENCE_S or last < stop - SILENCE_S:
        seen = f"{len(kernels)} kernels from {first - start:.2f} to {last - start:.2f} s of {stop - start:g}"
        raise RuntimeError(f"device timestamps are missing ({seen}): choose fewer --seconds")


def requests(program: Program, window: Window) -> dict[str, Any]:
    """Latencies of requests that arrive by a Poisson process. From arrival to the host's knowing; and between device
    events around the request, which leave out what it waited in the host's own queue. Those of the lead-in do not
    count: the first ones after a pause find clocks and caches cold, whoever is beside them.

    Who cannot keep up is given half a window more; for what is ``unserved`` then, the time until then counts.
    """
    dice = Random(window.seed)
    arrivals = []
    arrival = window.start - window.lead_s
    while arrival < window.start + window.seconds:
        arrivals.append(arrival)
        arrival += dice.expovariate(window.requests_per_second)
    late_s = sleep_until(window.start - window.lead_s)
    host_ms: list[float] = []
    gpu_ms: list[float] = []
    enough = window.start + 1.5 * window.seconds
    unserved = 0
    for arrival in arrivals:
        counts = arrival >= window.start
        if time.monotonic() > enough:
            unserved += counts
            if counts:
                host_ms.append(1e3 * (enough - arrival))
            continue
        while (left := arrival - time.monotonic()) > 0:
            time.sleep(left - 0.0002 if left > 0.0003 else 0)  # a wake-up that is late would count as latency
        first = program.mark(timed=True)
        program.step()
        last = program.mark(timed=True)
        program.wait(last)
        if counts:
            host_ms.append(1e3 * (time.monotonic() - arrival))
            gpu_ms.append(program.elapsed_ms(first, last))
    host_ms = [round(took, 4) for took in host_ms]
    if window.samples:
        return {"unserved": unserved, "late_s": late_s, "samples_ms": host_ms}
    return {
        "unserved": unserved,
        "late_s": late_s,
        "host_ms": host_ms,
        "gpu_ms": [round(took, 4) for took in gpu_ms],
    }


def build(name: str, simulated: bool) -> Program:
    if simulated or name == STAMPED:
        from benchmarks.suite.workloads.stamped import StampedProgram

        return StampedProgram(WORKS[name])
    from benchmarks.suite.workloads.cuda import TorchProgram

    return TorchProgram(name)


class Synchronizes(Protocol):
    def synchronize(self) -> None: ...


Served = TypeVar("Served", bound=Synchronizes)


def serve(make: Callable[[], Served], answer: Callable[[Served, Window], dict[str, Any]]) -> None:
    """The conversation: READY once the program has warmed up, then a RESULT for each window, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    program = make()
    program.synchronize()
    print("READY", file=answers)
    for line in sys.stdin:
        window = Window(**json.loads(line))
        print("RESULT", json.dumps({"pid": os.getpid(), **asdict(window), **answer(program, window)}), file=answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--simulated", action="store_true", help="the stand-in, on a simulated GPU")
    options = parser.parse_args()
    work = WORKS[options.work]

    def answer(program: Program, window: Window) -> dict[str, Any]:
        result = requests(program, window) if window.requests_per_second else steady(work, program, window)
        return {"work": work.name, **result}

    serve(lambda: build(work.name, options.simulated), answer)


if __name__ == "__main__":
    main()
