"""A workload that runs with the gate and past it in turns, and times both: what ``parts/gate.py`` compares.

    python -m benchmarks.suite.workloads.gate_toggle --work NAME --steps 50 [--simulated]

It speaks like ``sharer.py`` and needs ``bypass.c`` preloaded. A result has ``gated_s`` and ``direct_s``, a pair for
each turn: what ``--steps`` steps took, from one synchronisation to the next; who goes first alternates.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Any

from benchmarks.suite.workloads.catalogue import WORKS
from benchmarks.suite.workloads.program import Program
from benchmarks.suite.workloads.sharer import Window, build, serve, sleep_until


class Switch:
    """``bypass_direct`` and the counts of ``bypass.c`` in this process. ValueError if it is not preloaded."""

    def __init__(self) -> None:
        own = ctypes.CDLL(None)
        self._direct = ctypes.c_int.in_dll(own, "bypass_direct")
        self._launches = (ctypes.c_uint64 * 2).in_dll(own, "bypass_launches")

    def turn(self, direct: bool) -> None:
        self._direct.value = direct

    def launches(self) -> dict[str, int]:
        return {"gated_launches": self._launches[0], "direct_launches": self._launches[1]}


def timed(program: Program, steps: int) -> float:
    program.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        program.step()
    program.synchronize()
    return time.perf_counter() - began


def in_turns(program: Program, switch: Switch, steps: int, window: Window) -> dict[str, Any]:
    """Pairs of turns until the window is over, and at least one; the first, uncounted pair warms up."""
    took: tuple[list[float], list[float]] = ([], [])
    late_s = sleep_until(window.start)
    pair = -1
    while pair < 1 or time.monotonic() < window.start + window.seconds:
        for direct in (False, True) if pair % 2 else (True, False):
            switch.turn(direct)
            seconds = timed(program, steps)
            if pair >= 0:
                took[direct].append(seconds)
        pair += 1
    switch.turn(False)
    return {"gated_s": took[False], "direct_s": took[True], "steps": steps, "late_s": late_s, **switch.launches()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--simulated", action="store_true", help="the stand-in, on a simulated GPU")
    options = parser.parse_args()
    switch = Switch()
    serve(
        lambda: build(options.work, options.simulated),
        lambda program, window: in_turns(program, switch, options.steps, window),
    )


if __name__ == "__main__":
    main()
