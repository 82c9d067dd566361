"""How fast chunks come to the card: a mapping waits for the copies before it. Does another order help?

    python -m benchmarks.experiments.chunk_arrival [--gib 16] [--rounds 3]

Without a vGPU. Each chunk gets physical memory, is mapped, becomes accessible, and is copied from pinned host memory,
in one stream. ``order``: each chunk is copied once it is mapped, as the hook does it; or some are mapped first, with
one access for each or for all together. One JSON object per line: the rate of all, and the mean of each call in
microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from ctypes import byref, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

from benchmarks.experiments.physical_memory import MIB, Calls
from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX

HOST_BYTES: Final = 2048 * MIB
NON_BLOCKING: Final = 1


@dataclass(frozen=True)
class Order:
    """``batch`` chunks are mapped before the first of them is copied."""

    name: str
    chunk_bytes: int
    batch: int
    one_access: bool = False


ORDERS: Final = (
    Order("each mapped, then copied", 20 * MIB, 1),
    Order("8 mapped, then copied", 20 * MIB, 8),
    Order("8 mapped with one access, then copied", 20 * MIB, 8, one_access=True),
    Order("all mapped, then copied", 20 * MIB, 1 << 20),
    Order("chunks of 128 MiB", 128 * MIB, 1),
)


class Arrival:
    def __init__(self, gpu: Gpu, host: int, order: Order, count: int) -> None:
        self.gpu, self.host, self.order, self.count = gpu, host, order, count
        self.calls = Calls(gpu)
        self.base = self.calls.reserve(order.chunk_bytes * count)
        self.stream = c_void_p()
        gpu.call("cuStreamCreate", byref(self.stream), NON_BLOCKING)
        self.handles: list[int] = []

    def map(self, first: int, end: int) -> None:
        size = self.order.chunk_bytes
        for chunk in range(first, end):
            self.handles.append(self.calls.create(size))
            self.calls.map(self.base + chunk * size, size, self.handles[-1])
            if not self.order.one_access:
                self.calls.allow(self.base + chunk * size, size)
        if self.order.one_access:
            self.calls.allow(self.base + first * size, (end - first) * size)

    def copy(self, chunk: int) -> None:
        size = self.order.chunk_bytes
        host = c_void_p(self.host + chunk * size % (HOST_BYTES - size))
        card = c_uint64(self.base + chunk * size)
        self.calls.timed("copy", lambda: self.gpu.library.cuMemcpyHtoDAsync_v2(card, host, c_size_t(size), self.stream))

    def run(self) -> float:
        """GB/s."""
        began = time.perf_counter_ns()
        for first in range(0, self.count, self.order.batch):
            end = min(first + self.order.batch, self.count)
            self.map(first, end)
            for chunk in range(first, end):
                self.copy(chunk)
        self.gpu.call("cuStreamSynchronize", self.stream)
        return self.order.chunk_bytes * self.count / (time.perf_counter_ns() - began)

    def close(self) -> None:
        size = self.order.chunk_bytes
        for chunk, handle in enumerate(self.handles):
            self.calls.unmap(self.base + chunk * size, size)
            self.calls.release(handle)
        self.gpu.call("cuMemAddressFree", c_uint64(self.base), c_size_t(size * self.count))
        self.gpu.call("cuStreamDestroy_v2", self.stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    gpu = Gpu(PTX)
    host = c_void_p()
    gpu.call("cuMemHostAlloc", byref(host), c_size_t(HOST_BYTES), 0)
    for order in ORDERS:
        rates = []
        for _ in range(args.rounds):
            arrival = Arrival(gpu, host.value or 0, order, max(2, int(args.gib * 1024 * MIB) // order.chunk_bytes))
            rates.append(arrival.run())
            arrival.close()
        us = {name: round(mean(ns) / 1e3, 1) for name, ns in arrival.calls.ns.items()}
        print(json.dumps({"order": order.name, "gb_s": round(median(rates), 1)} | us), flush=True)


if __name__ == "__main__":
    main()
