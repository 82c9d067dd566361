"""Requests at a fixed rate, each of about 10 ms of a GPU's time, whatever the vGPU's size is.

    vgpuctl run --sm 20..60 --mem 2G -- python -m tests.gpu.requests

It reads lines with a percentage of the GPU, and sends so many requests from then on. A request arrives when it is due,
and waits for those before it. Once a second a line says how many were done, and their latencies in milliseconds. Runs
on a GPU and on a simulated one.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import Final

from vgpu.workload.driver import Gpu
from vgpu.workload.jobs import compute
from vgpu.workload.kernels import PTX

REQUEST_NS: Final = 10_000_000
REPORT_S: Final = 1.0
GIVEN_UP_S: Final = 5.0
"""A request that has waited for so long is not sent."""


class Rate:
    """The demand in percent of the GPU, as the last line said."""

    def __init__(self) -> None:
        self.percent = 0.0

    def follow(self) -> None:
        for line in sys.stdin:
            self.percent = float(line)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    gpu = Gpu(PTX)
    job = compute(gpu)
    kernels = max(1, round(REQUEST_NS / job.kernel_ns))
    request_s = kernels * job.kernel_ns / 1e9
    say(request_ms=round(1e3 * request_s, 2), gpu=gpu.name)
    rate = Rate()
    threading.Thread(target=rate.follow, daemon=True).start()
    due = report_at = time.monotonic()
    latencies: list[float] = []
    given_up = 0
    while True:
        now = time.monotonic()
        if now >= report_at + REPORT_S:
            report(rate.percent, latencies, given_up)
            latencies, given_up, report_at = [], 0, now
        if rate.percent <= 0:
            due = now
            time.sleep(0.01)
            continue
        if due > now:
            time.sleep(min(due - now, 0.05))
            continue
        if now - due > GIVEN_UP_S:
            given_up += 1
        else:
            for _ in range(kernels):
                job.launch()
            gpu.synchronize()
            latencies.append(time.monotonic() - due)
        due += request_s / (rate.percent / 100)


def report(percent: float, latencies: list[float], given_up: int) -> None:
    ordered = sorted(latencies)
    say(
        percent=percent,
        requests=len(ordered),
        given_up=given_up,
        p50_ms=round(1e3 * statistics.median(ordered), 1) if ordered else None,
        p95_ms=round(1e3 * ordered[int(0.95 * len(ordered))], 1) if ordered else None,
    )


if __name__ == "__main__":
    main()
