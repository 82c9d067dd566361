"""What a swap pays the driver for beside its copies: calls that make, map and give back physical memory.

    python -m benchmarks.experiments.physical_memory

It runs alone on the GPU, and without a vGPU. Times are microseconds a call, in the median of ``--count`` chunks.
*Beside copies*: while another thread copies between host and device. *Two processes*: while another process makes and
gives back memory, too. One JSON object per line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Final

from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX

MIB: Final = 1 << 20
PINNED, DEVICE, READ, READ_WRITE, POSIX_DESCRIPTOR = 1, 1, 1, 3, 1


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location_type", c_int), ("location_id", c_int)),
        *(("security", c_void_p), ("flags", c_uint64)),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("type", c_int), ("device", c_int), ("flags", c_int))


class Calls:
    """Each call of the driver, and how long it took."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.ns: dict[str, list[int]] = {}

    def timed(self, name: str, call: Callable[[], int]) -> None:
        began = time.perf_counter_ns()
        code = call()
        self.ns.setdefault(name, []).append(time.perf_counter_ns() - began)
        if code:
            self.gpu.fail(name, code)

    def reserve(self, size: int) -> int:
        address = c_uint64()
        zero = c_uint64(0)
        code = self.gpu.library.cuMemAddressReserve(byref(address), c_size_t(size), c_size_t(2 * MIB), zero, zero)
        if code:
            self.gpu.fail("cuMemAddressReserve", code)
        return address.value

    def create(self, size: int, handle_types: int = 0) -> int:
        handle = c_uint64()
        properties = Properties(type=PINNED, location_type=DEVICE, handle_types=handle_types, flags=0x100)
        self.timed(
            "create",
            lambda: self.gpu.library.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_uint64(0)),
        )
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        numbers = c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0)
        self.timed("map", lambda: self.gpu.library.cuMemMap(*numbers))

    def allow(self, address: int, size: int, flags: int = READ_WRITE) -> None:
        access = Access(DEVICE, 0, flags)
        self.timed(
            "access",
            lambda: self.gpu.library.cuMemSetAccess(c_uint64(address), c_size_t(size), byref(access), c_size_t(1)),
        )

    def unmap(self, address: int, size: int) -> None:
        self.timed("unmap", lambda: self.gpu.library.cuMemUnmap(c_uint64(address), c_size_t(size)))

    def release(self, handle: int) -> None:
        self.timed("release", lambda: self.gpu.library.cuMemRelease(c_uint64(handle)))

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(ns) / 1e3, 1) for name, ns in self.ns.items()}


def cycle(gpu: Gpu, size: int, count: int, handle_types: int = 0, accesses: int = 1) -> dict[str, float]:
    """``count`` chunks of ``size`` come and go; access is set for ``accesses`` chunks together."""
    calls = Calls(gpu)
    base = calls.reserve(size * count)
    handles = []
    began = time.perf_counter_ns()
    for k in range(count):
        handles.append(calls.create(size, handle_types))
        calls.map(base + k * size, size, handles[-1])
        if (k + 1) % accesses == 0:
            calls.allow(base + (k + 1 - accesses) * size, accesses * size)
    came = time.perf_counter_ns()
    for k, handle in enumerate(handles):
        calls.unmap(base + k * size, size)
        calls.release(handle)
    went = time.perf_counter_ns()
    gpu.library.cuMemAddressFree(c_uint64(base), c_size_t(size * count))
    mean = {"in_mean": round((came - began) / 1e3 / count, 1), "out_mean": round((went - came) / 1e3 / count, 1)}
    return calls.medians() | mean


class Copies:
    """A thread that copies between pinned host memory and the card, until the block ends."""

    def __init__(self, gpu: Gpu, to_card: bool, piece: int = 32 * MIB, rest_s: float = 0) -> None:
        self.gpu, self.to_card, self.piece, self.rest_s = gpu, to_card, piece, rest_s
        self.stopping = threading.Event()
        self.copied = 0
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        library, size = self.gpu.library, 160 * MIB
        library.cuCtxSetCurrent(self.gpu.context)
        host, card, stream = c_void_p(), c_uint64(), c_void_p()
        assert library.cuMemHostAlloc(byref(host), c_size_t(size), 0) == 0
        assert library.cuMemAlloc_v2(byref(card), c_size_t(size)) == 0
        assert library.cuStreamCreate(byref(stream), 1) == 0
        while not self.stopping.is_set():
            for at in range(0, size, self.piece):
                if self.to_card:
                    library.cuMemcpyHtoDAsync_v2(
                        c_uint64(card.value + at), c_void_p((host.value or 0) + at), c_size_t(self.piece), stream
                    )
                else:
                    library.cuMemcpyDtoHAsync_v2(
                        c_void_p((host.value or 0) + at), c_uint64(card.value + at), c_size_t(self.piece), stream
                    )
                self.copied += self.piece
            library.cuStreamSynchronize(stream)
            if self.rest_s:
                time.sleep(self.rest_s)
        library.cuMemFree_v2(card)
        library.cuMemFreeHost(host)

    def __enter__(self) -> Copies:
        self.began = time.monotonic()
        self.thread.start()
        time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join()
        self.rate = self.copied / (time.monotonic() - self.began) / 1e9


def parallel(gpu: Gpu, size: int, count: int, threads: int) -> dict[str, float]:
    """Each of so many threads has chunks come and go: microseconds a chunk, of all together."""
    results: list[dict[str, float]] = []

    def run() -> None:
        gpu.library.cuCtxSetCurrent(gpu.context)
        results.append(cycle(gpu, size, count))

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        name: round(statistics.mean(result[name] for result in results) / threads, 1)
        for name in ("in_mean", "out_mean")
    }


def read_only(gpu: Gpu) -> dict[str, int]:
    """What the driver answers to access for reading alone, and to writes there."""
    calls = Calls(gpu)
    address = calls.reserve(2 * MIB)
    handle = calls.create(2 * MIB)
    calls.map(address, 2 * MIB, handle)
    access = Access(DEVICE, 0, READ)
    answers = {
        "set_access": gpu.library.cuMemSetAccess(c_uint64(address), c_size_t(2 * MIB), byref(access), c_size_t(1))
    }
    if answers["set_access"] == 0:
        answers["write"] = gpu.library.cuMemsetD8_v2(c_uint64(address), 1, c_size_t(64))
        answers["after"] = gpu.library.cuCtxSynchronize()
    return answers


def other_process(what: str, piece: int, rest_us: int) -> None:
    """Until its input ends. It prints the rate of its copies."""
    gpu = Gpu(PTX)
    if what == "memory":
        print("ready", flush=True)
        stopping = threading.Event()

        def wait() -> None:
            sys.stdin.read()
            stopping.set()

        threading.Thread(target=wait).start()
        while not stopping.is_set():
            cycle(gpu, 20 * MIB, 100)
        print(0)
    else:
        with Copies(gpu, what == "to-card", piece, rest_us / 1e6) as copies:
            print("ready", flush=True)
            sys.stdin.read()
        print(round(copies.rate, 1))


@contextmanager
def another_process(what: str, piece: int, rest_us: int) -> Iterator[list[float]]:
    """The list has the rate of its copies afterwards, GB/s."""
    argv = [sys.executable, "-m", "benchmarks.experiments.physical_memory"]
    other = subprocess.Popen(
        [*argv, "--other", what, str(piece), str(rest_us)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    time.sleep(0.5)
    ended: list[float] = []
    yield ended
    ended.append(float(other.communicate()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--other", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.other:
        other_process(args.other[0], int(args.other[1]), int(args.other[2]))
        return
    gpu = Gpu(PTX)

    def show(what: str, result: dict[str, float] | dict[str, int]) -> None:
        print(json.dumps({"what": what} | result), flush=True)

    show("warm-up", cycle(gpu, 20 * MIB, args.count))
    for size in (2, 20, 32, 128, 512):
        show(f"{size} MiB", cycle(gpu, size * MIB, min(args.count, 24576 // size)))
    show("20 MiB, exportable", cycle(gpu, 20 * MIB, args.count, POSIX_DESCRIPTOR))
    show("20 MiB, access of 8 together", cycle(gpu, 20 * MIB, args.count, accesses=8))
    for threads in (2, 4):
        show(f"20 MiB, {threads} threads", parallel(gpu, 20 * MIB, args.count, threads))
    for to_card in (True, False):
        with Copies(gpu, to_card) as copies:
            result = cycle(gpu, 20 * MIB, args.count)
            exportable = cycle(gpu, 20 * MIB, args.count, POSIX_DESCRIPTOR)
            together = cycle(gpu, 20 * MIB, args.count, accesses=8)
        direction = "to the card" if to_card else "from the card"
        show(f"20 MiB, beside copies {direction}", result | {"copies_gb_s": round(copies.rate, 1)})
        show(f"20 MiB, exportable, beside copies {direction}", exportable)
        show(f"20 MiB, access of 8 together, beside copies {direction}", together)
    for what, piece, rest in (
        *(("memory", 2 * MIB, 0), ("to-card", 2 * MIB, 0), ("from-card", 32 * MIB, 0), ("from-card", 2 * MIB, 0)),
        *(("from-card", 2 * MIB, 200), ("from-card", 2 * MIB, 500)),
    ):
        with another_process(what, piece, rest) as ended:
            results = {"": cycle(gpu, 20 * MIB, args.count), " of 128 MiB": cycle(gpu, 128 * MIB, args.count // 2)}
            for threads in (4, 8):
                results[f", {threads} threads"] = parallel(gpu, 20 * MIB, args.count // 4, threads)
        name = f"another process: {what} in pieces of {piece >> 10} KiB, rests of {rest} us"
        for which, result in results.items():
            show(f"{name}; chunks{which}", result | {"gb_s": ended[0]})
    show("read only", read_only(gpu))


if __name__ == "__main__":
    main()
