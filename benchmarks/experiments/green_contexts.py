"""Do green contexts' streams keep neighbours apart better than MPS percentages? An experiment, without any vGPU.

    python -m benchmarks.experiments.green_contexts [--seconds 1.0] [-o json]    (one GPU, less than a minute)

Two workers, each meant to have half of the SMs: *compute* (multiply-adds in registers) and *stream* (reads one buffer,
writes another: an elementwise kernel). For each way of sharing: the rate of each alone, the rate of each beside the
other, and what part of its rate it kept. ``SMs``: how many each was seen on (%smid), and how many both were on.

    threads          one process, two ordinary streams
    threads, green   one process, two streams of green contexts on disjoint SMs
    plain            two processes, no MPS
    plain, green     ... each with a green stream on its own half. If contexts take turns, each keeps half
    MPS 50 %         two processes under MPS, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 each
    MPS green        two processes under MPS, no percentage, each with a green stream on its own half

Below: what a green context and its stream cost to make. A driver without the functions leaves those rows out.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuserver.device.base import MpsDirectories, Partitioner
from gpuserver.device.nvidia.mps import NvidiaMpsDaemon
from gpuserver.device.simulated.mps import SimulatedMpsDaemon
from vgpu.errors import VgpuError
from vgpu.protocol.peer import is_alive
from vgpu.workload.__main__ import saturate
from vgpu.workload.driver import CudaError, Gpu, Kernel
from vgpu.workload.jobs import Job, compute, memory
from vgpu.workload.kernels import PTX

WORKS = ("compute", "stream")
SM_RESOURCE = 1
DEFAULT_STREAM = 1
NON_BLOCKING = 1
WHEREABOUTS = """
// sim: whereabouts ns=2000 sms=132
.visible .entry whereabouts(.param .u64 seen)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [seen];
    mov.u32 %r1, %smid;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r2, 1;
    st.global.u32 [%rd3], %r2;
    ret;
}
"""
MOST_SMS = 1024


class Resource(ctypes.Structure):
    """CUdevResource, version 1: 144 bytes."""

    _fields_ = [("type", c_int), ("padding", ctypes.c_ubyte * 92), ("sm_count", c_uint), ("rest", ctypes.c_ubyte * 44)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one green context: milliseconds for it, and for a stream in it."""

    context_ms: float
    stream_ms: float


class Absent(RuntimeError):
    """The driver has no such function."""


def call(gpu: Gpu, name: str, *arguments: object) -> None:
    try:
        gpu.call(name, *arguments)
    except AttributeError as error:
        raise Absent(f"this driver has no {name}") from error


def green_stream(gpu: Gpu, half: int) -> tuple[c_void_p, Cost]:
    """A stream on the first or second half of the SMs. Every process that asks gets the same halves."""
    whole, rest, halves = Resource(), Resource(), (Resource * 2)()
    call(gpu, "cuDeviceGetDevResource", gpu.device, byref(whole), SM_RESOURCE)
    groups, least = c_uint(2), c_uint(whole.sm_count // 2 // 8 * 8)
    call(gpu, "cuDevSmResourceSplitByCount", halves, byref(groups), byref(whole), byref(rest), c_uint(0), least)
    description, green, stream = c_void_p(), c_void_p(), c_void_p()
    call(gpu, "cuDevResourceGenerateDesc", byref(description), byref(halves[half]), c_uint(1))
    began = time.perf_counter()
    call(gpu, "cuGreenCtxCreate", byref(green), description, gpu.device, c_uint(DEFAULT_STREAM))
    made = time.perf_counter()
    call(gpu, "cuGreenCtxStreamCreate", byref(stream), green, c_uint(NON_BLOCKING), c_int(0))
    return stream, Cost((made - began) * 1e3, (time.perf_counter() - made) * 1e3)


def whereabouts(gpu: Gpu) -> set[int]:
    """The SMs on which blocks of ``gpu.stream`` run."""
    seen = gpu.allocate(4 * MOST_SMS)
    assert seen is not None
    gpu.clear(seen, 4 * MOST_SMS)
    gpu.synchronize()
    for _ in range(4):
        Kernel(gpu, "whereabouts", 4096, 256, (c_uint64(seen),)).launch()
    gpu.synchronize()
    words = memoryview(gpu.read(seen, 4 * MOST_SMS)).cast("I")
    gpu.free(seen)
    return {index for index, word in enumerate(words) if word}


@dataclass(slots=True)
class Worker:
    """One kind of work in one stream, ready to run."""

    gpu: Gpu
    job: Job
    sms: set[int]
    cost: Cost | None

    @classmethod
    def make(cls, gpu: Gpu, work: str, half: int | None) -> Worker:
        """``half``: of a green stream; None: the ordinary one."""
        gpu = copy.copy(gpu)
        cost = None
        if half is None:
            stream = c_void_p()
            gpu.call("cuStreamCreate", byref(stream), c_uint(NON_BLOCKING))
        else:
            stream, cost = green_stream(gpu, half)
        gpu.stream = stream
        return cls(gpu, (compute if work == "compute" else memory)(gpu), whereabouts(gpu), cost)

    def rate(self, start_ns: int, seconds: float) -> float:
        """Work per second, from ``start_ns`` on."""
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        tally = saturate(self.gpu, self.job, start_ns, start_ns + int(seconds * 1e9), lambda *_: None)
        return tally.kernels * self.job.work * 1e9 / max(1, tally.finished_ns - start_ns)


# --- two workers: threads of this process, or processes


class Threads:
    """Both workers in this process."""

    def __init__(self, green: bool, environments: Mapping[str, str]) -> None:
        gpu = Gpu(PTX + WHEREABOUTS)
        self.workers = [Worker.make(gpu, work, half if green else None) for half, work in enumerate(WORKS)]
        self.told: list[dict[str, Any]] = [
            {"sms": sorted(w.sms), "cost": w.cost and asdict(w.cost)} for w in self.workers
        ]

    def rates(self, which: list[int], seconds: float) -> list[float]:
        start_ns = time.monotonic_ns() + 20_000_000
        found = dict.fromkeys(which, 0.0)

        def run(index: int) -> None:
            self.workers[index].gpu.call("cuCtxSetCurrent", self.context)
            found[index] = self.workers[index].rate(start_ns, seconds)

        self.context = c_void_p()
        self.workers[0].gpu.call("cuDevicePrimaryCtxRetain", byref(self.context), self.workers[0].gpu.device)
        threads = [threading.Thread(target=run, args=(index,)) for index in which]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[index] for index in which]

    def close(self) -> None:
        pass


class Processes:
    """Each worker in a process of its own."""

    def __init__(self, green: bool, environment: Mapping[str, str]) -> None:
        halves = [["--half", str(half)] if green else [] for half in range(2)]
        self.children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.experiments.green_contexts", "--worker", work, *half],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for work, half in zip(WORKS, halves, strict=True)
        ]
        try:
            self.told = [self._hear(child) for child in self.children]
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _hear(child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {"error": "it died"}
        if "error" in said:
            raise (Absent if said.get("absent") else RuntimeError)(said["error"])
        return said

    def rates(self, which: list[int], seconds: float) -> list[float]:
        start_ns = time.monotonic_ns() + 20_000_000
        for index in which:
            child = self.children[index]
            assert child.stdin is not None
            child.stdin.write(f"{start_ns} {seconds}\n")
            child.stdin.flush()
        return [float(self._hear(self.children[index])["rate"]) for index in which]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()


def worker(work: str, half: int | None) -> None:
    """A child: says what it is, then runs whenever a line says from when and how long."""

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    try:
        made = Worker.make(Gpu(PTX + WHEREABOUTS), work, half)
        say(sms=sorted(made.sms), cost=made.cost and asdict(made.cost))
        for line in sys.stdin:
            start_ns, seconds = line.split()
            say(rate=made.rate(int(start_ns), float(seconds)))
    except (CudaError, Absent, MemoryError) as error:
        say(error=str(error), absent=isinstance(error, Absent))


@contextmanager
def mps(simulated: bool) -> Iterator[dict[str, str]]:
    """The environment of processes under an MPS daemon of our own."""
    with tempfile.TemporaryDirectory(prefix="green-mps-") as folder:
        directories = MpsDirectories(Path(folder) / "pipe", Path(folder) / "log")
        daemon: Partitioner = (
            SimulatedMpsDaemon(directories)
            if simulated
            else NvidiaMpsDaemon(os.environ.get("CUDA_VISIBLE_DEVICES", "0"), directories, multi_user=False)
        )
        daemon.start()
        process = daemon.status(serving=False).daemon
        try:
            yield {
                "CUDA_MPS_PIPE_DIRECTORY": str(directories.pipe),
                "CUDA_MPS_LOG_DIRECTORY": str(directories.log),
            }
        finally:
            daemon.stop()
            deadline = time.monotonic() + 5
            while process is not None and is_alive(process) and time.monotonic() < deadline:
                time.sleep(0.05)


# --- the table


@dataclass(frozen=True, slots=True)
class Row:
    """Rates in work per second, of compute and of stream."""

    name: str
    alone: tuple[float, float]
    beside: tuple[float, float]
    sms: tuple[int, int]
    sms_of_both: int

    @property
    def kept(self) -> tuple[float, float]:
        return (self.beside[0] / self.alone[0], self.beside[1] / self.alone[1])


def measure(
    name: str, make: Callable[[bool, Mapping[str, str]], Threads | Processes], green: bool,
    environment: Mapping[str, str], seconds: float, costs: list[Cost],
) -> Row | None:  # fmt: skip
    try:
        pair = make(green, environment)
    except (Absent, RuntimeError) as error:
        print(f"{name}: left out: {error}", file=sys.stderr)
        return None
    try:
        (first,), (second,) = pair.rates([0], seconds), pair.rates([1], seconds)
        together = pair.rates([0, 1], seconds)
    except (CudaError, RuntimeError) as error:
        print(f"{name}: failed: {error}", file=sys.stderr)
        return None
    finally:
        pair.close()
    costs += [Cost(**told["cost"]) for told in pair.told if told["cost"]]
    sms = [set(told["sms"]) for told in pair.told]
    return Row(name, (first, second), (together[0], together[1]), (len(sms[0]), len(sms[1])), len(sms[0] & sms[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (18 of them)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--worker", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--half", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.half)
        return
    gpu = Gpu(PTX)
    name, total = gpu.name, gpu.sm_count
    costs: list[Cost] = []
    rows = [
        measure("threads", Threads, False, {}, options.seconds, costs),
        measure("threads, green", Threads, True, {}, options.seconds, costs),
        measure("plain", Processes, False, {}, options.seconds, costs),
        measure("plain, green", Processes, True, {}, options.seconds, costs),
    ]
    try:
        with mps(name.startswith("Simulated")) as environment:
            half = environment | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
            rows.append(measure("MPS 50 %", Processes, False, half, options.seconds, costs))
            rows.append(measure("MPS green", Processes, True, environment, options.seconds, costs))
    except VgpuError as error:
        print(f"MPS: left out: {error}", file=sys.stderr)
    found = [row for row in rows if row is not None]
    if options.output == "json":
        print(json.dumps({"gpu": name, "rows": [asdict(row) for row in found], "costs": [asdict(c) for c in costs]}))
        return
    print(f"{name}, {total} SMs")
    print(f"{'':16}{'SMs (both)':>16}{'compute alone':>16}{'kept':>7}{'stream alone':>16}{'kept':>7}")
    for row in found:
        sms = f"{row.sms[0]}, {row.sms[1]} ({row.sms_of_both})"
        first = f"{row.alone[0] / 1e12:>10.2f} TFMA/s{row.kept[0]:>7.1%}"
        second = f"{row.alone[1] / 1e12:>12.2f} TB/s{row.kept[1]:>7.1%}"
        print(f"{row.name:16}{sms:>16}{first}{second}")
    if costs:
        context_ms, stream_ms = (sorted(getattr(c, field) for c in costs) for field in ("context_ms", "stream_ms"))
        middle = len(costs) // 2
        print(
            f"a green context costs {context_ms[middle]:.2f} ms (most {context_ms[-1]:.2f}), a stream in it "
            f"{stream_ms[middle]:.2f} ms (most {stream_ms[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
