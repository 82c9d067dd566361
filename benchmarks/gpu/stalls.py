"""What a host does to a thread that never sleeps: how often, and for how long, the core is taken from it.

    python -m benchmarks.gpu.stalls SECONDS

A thread that only looks at the clock sees steps of 0.1 µs. Larger ones are interrupts, other threads, or, on a virtual
machine, the core itself being taken away. Whatever passes from thread to thread on such a host is as late as that now
and then: a hand-over from vGPU to vGPU passes through four.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LEAST_NS: Final = 100_000
"""A longer step is a stall."""


def look(seconds: float) -> dict[str, float]:
    """``stalls_per_second``; ``stalled_ratio``, of the time; ``stall_worst_us``."""
    gc.disable()
    clock = time.perf_counter_ns
    began = before = clock()
    end = began + int(seconds * 1e9)
    steps: list[int] = []
    worst = 0
    while before < end:
        now = clock()
        if now - before > worst:
            worst = now - before
        if now - before > LEAST_NS:
            steps.append(now - before)
        before = now
    return {
        "stalls_per_second": len(steps) / seconds,
        "stalled_ratio": sum(steps) / (before - began),
        "stall_worst_us": worst / 1e3,
    }


@contextmanager
def looking(seconds: float) -> Iterator[dict[str, float]]:
    """A process beside the block does so; its figures are there after the block."""
    figures: dict[str, float] = {}
    command = [sys.executable, "-m", "benchmarks.gpu.stalls", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield figures
            figures |= json.loads(process.communicate(timeout=seconds + 60)[0])
        finally:
            process.kill()


if __name__ == "__main__":
    print(json.dumps(look(float(sys.argv[1]))))
