"""What a host does to threads: to one that never sleeps, to one that sleeps, and to one that another process wakes.

    python -m benchmarks.suite.stalls SECONDS

*Awake*: a thread that only looks at the clock sees steps of 0.1 µs. Larger ones are interrupts, other threads, or, on a
virtual machine, the core itself being taken away. *Sleeping*: 1 ms at a time; how long after its time it runs again.
*Woken*: another process writes the time into a pipe that it reads from, every other millisecond; how long after that it
runs. Whatever passes from thread to thread on such a host is as late as that now and then: a hand-over from vGPU to
vGPU passes through five, which are awake for it, but have been asleep shortly before.

Of those that slept and were late by more than a millisecond: which part of that the kernel had them wait for a core
(sched_info, proc(5)), behind threads of this machine. For the rest the core itself was not there, or its timer was
late, as on a virtual machine whose host has others to run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.suite.report.stats import percentile

LEAST_NS: Final = 100_000
"""A longer step is a stall."""
LATE_NS: Final = 1_000_000
"""Who runs later than that after its time is counted."""
SLEEP_S: Final = 0.001
WAKE_S: Final = 0.002
STAMP: Final = struct.Struct("q")

clock = time.perf_counter_ns


def awake(seconds: float) -> dict[str, float]:
    """``stalls_per_second``; ``stalled_ratio``, of the time; ``stall_worst_us``."""
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


def lateness(name: str, late_ns: Sequence[int], seconds: float) -> dict[str, float]:
    """Of a thread that ran so late, each time: ``NAME_late_per_second``, above LATE_NS; ``NAME_late_p99_us`` and
    ``NAME_late_worst_us``. Nothing of one that never ran."""
    if not late_ns:
        return {}
    return {
        f"{name}_late_per_second": sum(late > LATE_NS for late in late_ns) / seconds,
        f"{name}_late_p99_us": percentile(late_ns, 99) / 1e3,
        f"{name}_late_worst_us": max(late_ns) / 1e3,
    }


def waited_ns(schedstat: str) -> int:
    """What a thread has waited for a core until now, by its ``/proc/PID/schedstat``."""
    return int(schedstat.split()[1])


def queued(late_ns: Sequence[int], waits_ns: Sequence[int]) -> dict[str, float]:
    """``sleep_late_queued_ratio``: of the lateness above LATE_NS, what was spent waiting for a core."""
    late = [(late, min(wait, late)) for late, wait in zip(late_ns, waits_ns, strict=True) if late > LATE_NS]
    return {"sleep_late_queued_ratio": sum(wait for _, wait in late) / sum(ns for ns, _ in late)} if late else {}


def sleeping(seconds: float) -> dict[str, float]:
    end = clock() + int(seconds * 1e9)
    late_ns: list[int] = []
    waits_ns: list[int] = []
    with Path("/proc/self/schedstat").open("rb", buffering=0) as schedstat:
        before = waited_ns(os.pread(schedstat.fileno(), 100, 0).decode())
        while (now := clock()) < end:
            time.sleep(SLEEP_S)
            late_ns.append(clock() - now - int(SLEEP_S * 1e9))
            after = waited_ns(os.pread(schedstat.fileno(), 100, 0).decode())
            waits_ns.append(after - before)
            before = after
    return lateness("sleep", late_ns, seconds) | queued(late_ns, waits_ns)


def woken(seconds: float) -> dict[str, float]:
    reader, writer = os.pipe()
    waker = os.fork()
    if waker == 0:
        os.close(reader)
        wake(writer, seconds)
        os._exit(0)
    os.close(writer)
    late_ns: list[int] = []
    while stamp := os.read(reader, STAMP.size):
        late_ns.append(clock() - STAMP.unpack(stamp)[0])
    os.close(reader)
    os.waitpid(waker, 0)
    return lateness("wake", late_ns, seconds)


def wake(writer: int, seconds: float) -> None:
    end = clock() + int(seconds * 1e9)
    while clock() < end:
        time.sleep(WAKE_S)
        try:
            os.write(writer, STAMP.pack(clock()))
        except BrokenPipeError:
            return


LOOKS: Final[dict[str, Callable[[float], dict[str, float]]]] = {
    look.__name__: look for look in (awake, sleeping, woken)
}


@contextmanager
def looking(seconds: float) -> Iterator[dict[str, float]]:
    """Processes beside the block do so; their figures are there after the block."""
    figures: dict[str, float] = {}
    with ExitStack() as running:
        processes = []
        for name in LOOKS:
            command = [sys.executable, "-m", "benchmarks.suite.stalls", str(seconds), "--only", name]
            process = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            running.callback(process.kill)
            processes.append(process)
        yield figures
        for process in processes:
            figures |= json.loads(process.communicate(timeout=seconds + 60)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, metavar="SECONDS")
    parser.add_argument("--only", choices=LOOKS, help="that thread alone; default: all, at the same time")
    options = parser.parse_args()
    gc.disable()
    if options.only is not None:
        print(json.dumps(LOOKS[options.only](options.seconds)))
        return
    with looking(options.seconds) as figures:
        pass
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
