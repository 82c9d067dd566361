"""One unmodified PyTorch workload, counted by itself: what the share benchmarks run inside (and outside) a vGPU.

Nothing in here knows about vGPUs. It warms up, waits for the common start (``--sync``: prints READY, reads the start's
time.monotonic() as a line from stdin), works for ``--seconds`` with a bounded queue of steps, and prints one object::

    {"work", "steps", "seconds", "per_second", "unit", "unit_per_second", "busy_ratio", "p50_ms", "p99_ms", "pid"}

``steps`` counts steps that the GPU finished between start and stop. ``busy_ratio`` (with ``--timestamps``) is the union
of the kernels' device timestamps (CUPTI activity records, through torch.profiler) over the wall time of the window: GPU
time, whatever the clocks did.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

QUEUE_STEPS = {"gemm": 64, "gemm2048": 256, "elementwise": 64, "resnet": 2}


def gemm(n: int) -> tuple[Callable[[], None], float, str]:
    import torch

    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        torch.mm(a, b, out=out)

    return step, 2 * n**3 / 1e12, "TFLOP/s"


def elementwise() -> tuple[Callable[[], None], float, str]:
    import torch

    x = torch.randn(64 * 2**20, device="cuda")
    y = torch.empty_like(x)

    def step() -> None:
        torch.mul(x, 1.0001, out=y)

    return step, 2 * x.numel() * 4 / 1e9, "GB/s"


def resnet(batch: int = 64) -> tuple[Callable[[], None], float, str]:
    import torch
    import torchvision

    model = torchvision.models.resnet50().cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step, float(batch), "img/s"


WORKS: dict[str, Callable[[], tuple[Callable[[], None], float, str]]] = {
    "gemm": lambda: gemm(4096),
    "gemm2048": lambda: gemm(2048),
    "elementwise": elementwise,
    "resnet": resnet,
}


def busy_seconds(profiler: Any, start_ns: int, stop_ns: int) -> float:
    """Union of the device intervals of all kernels, clipped to the window (profiler time is CLOCK_REALTIME ns)."""
    intervals = sorted(
        (max(e.start_ns(), start_ns), min(e.start_ns() + e.duration_ns(), stop_ns))
        for e in profiler.profiler.kineto_results.events()
        if str(e.device_type()).endswith("CUDA")
        and e.start_ns() < stop_ns
        and e.start_ns() + e.duration_ns() > start_ns
    )
    busy, reach = 0, start_ns
    for begin, end in intervals:
        if end > reach:
            busy += end - max(begin, reach)
            reach = end
    return busy / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the window")
    parser.add_argument("--sync", action="store_true", help="print READY, read the start's time.monotonic() from stdin")
    parser.add_argument("--timestamps", action="store_true", help="busy_ratio from the kernels' device timestamps")
    args = parser.parse_args()

    import torch

    step, units, unit = WORKS[args.work]()
    for _ in range(args.warmup_steps):
        step()
    torch.cuda.synchronize()
    if args.sync:
        print("READY", flush=True)
        time.sleep(max(0.0, float(sys.stdin.readline()) - time.monotonic()))

    profiler = None
    if args.timestamps:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.__enter__()
    begin = time.monotonic()
    begin_real_ns = time.time_ns()
    stop = begin + args.seconds
    queue: collections.deque[Any] = collections.deque()
    done: list[float] = []
    while time.monotonic() < stop:
        step()
        event = torch.cuda.Event()
        event.record()
        queue.append(event)
        if len(queue) > QUEUE_STEPS[args.work]:
            queue.popleft().synchronize()
            done.append(time.monotonic())
    end_real_ns = time.time_ns()
    elapsed = time.monotonic() - begin
    steps = len(done)
    for event in list(queue):  # what had finished when the window closed counts too
        if event.query():
            steps += 1
    torch.cuda.synchronize()
    busy = None
    if profiler is not None:
        profiler.__exit__(None, None, None)
        busy = busy_seconds(profiler, begin_real_ns, end_real_ns) / ((end_real_ns - begin_real_ns) / 1e9)
    gaps = sorted((b - a) * 1e3 for a, b in itertools.pairwise(done))
    print(
        json.dumps(
            {
                "work": args.work,
                "pid": os.getpid(),
                "steps": steps,
                "seconds": elapsed,
                "per_second": steps / elapsed,
                "unit": unit,
                "unit_per_second": steps * units / elapsed,
                "busy_ratio": busy,
                "p50_ms": statistics.median(gaps) if gaps else None,
                "p99_ms": gaps[int(len(gaps) * 0.99)] if gaps else None,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
