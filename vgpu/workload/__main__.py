"""``python -m vgpu.workload``: load the GPU for some seconds, report meanwhile and at the end.

With ``-o json`` every line is one JSON object with an ``event``: started, progress, result or error. Without it, lines
for a person, and Ctrl-C is a way to end it: the result so far, and exit code 130.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_void_p
from dataclasses import asdict, dataclass, field
from typing import Any

from vgpu.workload.driver import NO_DRIVER, CudaError, Gpu
from vgpu.workload.jobs import Appetite, Job, Stamps, compute, memory, take_memory, tiny
from vgpu.workload.kernels import PTX

BATCH_NS = 4_000_000  # GPU time between two checks of what is finished
BATCH_KERNELS = 256  # at most: the queue of a stream holds about a thousand
DEPTH = 4  # batches in flight: enough never to let the GPU run dry, few enough to stop soon
MIB = 1 << 20
STEP_BYTES = 256 * MIB
SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class Tally:
    """What is finished, by the program's own count."""

    kernels: int = 0
    finished_ns: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The last line. `seconds` runs from the start to the last completion counted; `gpu_time_ns` is what
    the kernels took on the GPU: each `kernel_ns`, as measured at the start. Waiting is not in it."""

    mode: str
    seconds: float
    work: int
    work_per_second: float
    unit: str
    kernels: int
    kernel_ns: int
    gpu_time_ns: int
    refusals: int
    bytes_allocated: int
    sm_count: int
    total_mem: int
    gpu: str
    simulated: bool
    intervals_ns: list[tuple[int, int]] = field(default_factory=list)


def working(
    tally: Tally,
    start_ns: int,
    end_ns: int,
    report: Callable[[Tally, int], None],
    every_ns: int,
    stopped: Callable[[], bool],
) -> Iterator[None]:
    """Rounds of the loop until `end_ns` (CLOCK_MONOTONIC) or `stopped`, with reports in between."""
    due_ns = start_ns + every_ns
    while (now_ns := time.monotonic_ns()) < end_ns and not stopped():
        if now_ns >= due_ns:
            report(tally, now_ns)
            due_ns += every_ns
        yield


def saturate(
    gpu: Gpu,
    job: Job,
    start_ns: int,
    end_ns: int,
    report: Callable[[Tally, int], None],
    every_ns: int = SECOND_NS,
    stopped: Callable[[], bool] = lambda: False,
) -> Tally:
    """Keep DEPTH batches queued until `end_ns` (CLOCK_MONOTONIC) or `stopped`, and count those that were finished by
    then."""
    size = max(1, min(BATCH_KERNELS, BATCH_NS // job.kernel_ns))
    spare = [(gpu.event(), gpu.event()) for _ in range(DEPTH)]
    flying: deque[tuple[c_void_p, c_void_p]] = deque()
    tally = Tally(finished_ns=start_ns)
    for _ in working(tally, start_ns, end_ns, report, every_ns, stopped):
        if spare:
            first, last = spare.pop()
            gpu.record(first)
            for _ in range(size):
                job.launch()
            gpu.record(last)
            flying.append((first, last))
            continue
        first, last = flying.popleft()
        gpu.wait(last)
        now_ns = time.monotonic_ns()
        if now_ns <= end_ns:
            tally.kernels += size
            tally.finished_ns = now_ns
        spare.append((first, last))
    gpu.synchronize()
    return tally


def serve(
    gpu: Gpu,
    job: Job,
    start_ns: int,
    end_ns: int,
    host_ns: int,
    report: Callable[[Tally, int], None],
    every_ns: int = SECOND_NS,
    stopped: Callable[[], bool] = lambda: False,
) -> Tally:
    """One kernel, the wait for it, and a pause of ``host_ns``, again and again: a program that its host holds up."""
    tally = Tally(finished_ns=start_ns)
    for _ in working(tally, start_ns, end_ns, report, every_ns, stopped):
        job.launch()
        gpu.synchronize()
        tally.kernels += 1
        tally.finished_ns = time.monotonic_ns()
        time.sleep(host_ns / SECOND_NS)
    return tally


def run(
    options: argparse.Namespace, say: Callable[[str, dict[str, object]], None], stopped: Callable[[], bool]
) -> Result:
    gpu = Gpu(PTX)
    name = gpu.name
    about: dict[str, object] = {
        "mode": options.mode,
        "gpu": name,
        "simulated": name.startswith("Simulated"),
        "sm_count": gpu.sm_count,
        "total_mem": gpu.total_bytes,
    }
    stamps = Stamps(gpu) if options.mode == "timestamps" else None
    make = {"compute": compute, "alloc": compute, "memory": memory, "tiny": tiny}
    job = stamps.job if stamps else make[options.mode](gpu)
    held: list[int] = []
    appetite = Appetite(0, 0)
    if options.mode == "alloc" or options.bytes:
        held, appetite = take_memory(gpu, options.bytes or None, options.step_bytes)
        say("memory", asdict(appetite))
    if options.mode == "alloc":
        for block in held:
            gpu.free(block)
        held = []
    gpu.synchronize()
    say("started", about | {"kernel_ns": job.kernel_ns, "unit": job.unit})
    start_at_ns = int(sys.stdin.readline() or 0) if options.wait else options.start_at_ns
    if start_at_ns:
        time.sleep(max(0, start_at_ns - time.monotonic_ns()) / SECOND_NS)
    start_ns = time.monotonic_ns()

    def report(tally: Tally, now_ns: int) -> None:
        seconds = (now_ns - start_ns) / SECOND_NS
        work = tally.kernels * job.work
        report: dict[str, object] = {"at_ns": now_ns, "seconds": seconds, "work": work, "kernels": tally.kernels}
        say("progress", report | {"kernel_ns": job.kernel_ns})

    end_ns = start_ns + int(options.seconds * SECOND_NS)
    every_ns = int(options.report_every * SECOND_NS)
    if options.host_ms:
        tally = serve(gpu, job, start_ns, end_ns, int(options.host_ms * 1e6), report, every_ns, stopped)
    else:
        tally = saturate(gpu, job, start_ns, end_ns, report, every_ns, stopped)
    for block in held:
        gpu.free(block)
    seconds = (tally.finished_ns - start_ns) / SECOND_NS
    work = tally.kernels * job.work
    return Result(
        mode=options.mode,
        seconds=seconds,
        work=work,
        work_per_second=work / seconds if seconds else 0.0,
        unit=job.unit,
        kernels=tally.kernels,
        kernel_ns=job.kernel_ns,
        gpu_time_ns=tally.kernels * job.kernel_ns,
        refusals=appetite.refusals,
        bytes_allocated=appetite.bytes_allocated,
        sm_count=gpu.sm_count,
        total_mem=gpu.total_bytes,
        gpu=name,
        simulated=name.startswith("Simulated"),
        intervals_ns=stamps.intervals_ns() if stamps else [],
    )


def in_words(event: str, values: Mapping[str, Any]) -> str:
    """A line for a person."""
    match event:
        case "started":
            kernels = SECOND_NS / values["kernel_ns"]
            return f"{values['gpu']}, {values['sm_count']} SMs: alone this would be {kernels:.0f} kernels/s"
        case "progress" | "result":
            seconds, kernels, kernel_ns = (float(values[name]) for name in ("seconds", "kernels", "kernel_ns"))
            rate = kernels / seconds if seconds else 0.0
            busy = 100 * rate * kernel_ns / SECOND_NS
            begin = f"{seconds:.0f} s" if event == "progress" else f"in all, {seconds:.1f} s"
            return f"{begin}: {busy:.1f} % of the GPU's time, {rate:.0f} kernels/s"
        case "memory":
            taken = f"{values['bytes_allocated'] / MIB:.0f} MiB allocated"
            return taken + (f", refused {values['refusals']} times" if values["refusals"] else "")
        case _:
            return f"{event}: " + ", ".join(f"{name} {value}" for name, value in values.items())


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m vgpu.workload", description=__doc__)
    p.add_argument("--mode", choices=("compute", "memory", "tiny", "alloc", "timestamps"), default="compute")
    p.add_argument("--seconds", type=float, default=10.0, help="how long to work (default 10)")
    p.add_argument("--bytes", type=int, default=0, help="memory to hold while working; in mode alloc: to try for")
    p.add_argument("--step-bytes", type=int, default=STEP_BYTES, help="size of one allocation (default 256 MiB)")
    p.add_argument("--start-at-ns", type=int, default=0, help="begin at this CLOCK_MONOTONIC time")
    p.add_argument("--wait", action="store_true", help="once started, read that time from stdin instead")
    p.add_argument("--report-every", type=float, default=1.0, metavar="S", help="seconds between reports (default 1)")
    p.add_argument("--host-ms", type=float, default=0.0, metavar="MS", help="wait for each kernel, then pause so long")
    p.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return p


def main() -> int:
    options = parser().parse_args()

    def say(event: str, values: dict[str, object]) -> None:
        line = json.dumps({"event": event} | values) if options.output == "json" else in_words(event, values)
        print(line, flush=True)

    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        """Stop, without KeyboardInterrupt: the program waits for its queued work, and prints a result. A second signal
        ends it at once."""
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, interrupt)
    try:
        result = run(options, say, lambda: bool(interrupted))
    except (CudaError, MemoryError) as error:
        if options.output == "json":
            say("error", {"error": str(error), "code": error.code if isinstance(error, CudaError) else None})
        print(f"vgpu.workload: {error}", file=sys.stderr)
        if isinstance(error, CudaError) and error.code == NO_DRIVER:
            print("  → in a vGPU: vgpuctl run --sm 30 --mem 8G python -m vgpu.workload", file=sys.stderr)
        return 1
    say("result", asdict(result))
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
