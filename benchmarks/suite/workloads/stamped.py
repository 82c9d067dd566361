"""Kernels of our own, in PTX by the driver API, that note %globaltimer at their start and end.

On a real GPU that is the work ``stamped``. On a simulated one it stands in for every work: kernels as many and as long
as the catalogue says, and the host's time between them, to rehearse the benchmarks; the figures say nothing of a GPU.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p

from benchmarks.suite.report.stats import Interval, Look
from benchmarks.suite.workloads.catalogue import Work
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.jobs import STAMPS
from vgpu.workload.kernels import BLOCKS_PER_SM, PTX, THREADS

SMS = 132  # of the whole GPU; a process that sees fewer takes longer for the same work
ITERATION_NS = 300  # on an H200; vgpu.workload.kernels tells the simulated GPU the same
START_NS = 1500
LOOKS = 20


class StampedProgram:
    """``work`` as the catalogue describes its kernels, on the first GPU that this process finds."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._gpu = gpu = Gpu(PTX)
        buffer = gpu.allocate(16 * (STAMPS + 1))
        if buffer is None:
            raise MemoryError("no room for a buffer of 1 MiB: give the vGPU more memory")
        self._buffer = buffer
        self._index = ctypes.c_uint64(0)
        rounds = ctypes.c_uint32(max(1, (work.kernel_ns - START_NS) // ITERATION_NS))
        parameters = (ctypes.c_uint64(buffer), self._index, rounds)
        self._kernel = Kernel(gpu, "stamped", SMS * BLOCKS_PER_SM, THREADS, parameters)
        self._moment = buffer + 16 * STAMPS
        shortest = (ctypes.c_uint64(self._moment), ctypes.c_uint64(0), ctypes.c_uint32(1))
        self._short = Kernel(gpu, "stamped", BLOCKS_PER_SM, THREADS, shortest)
        self._spare: list[c_void_p] = []
        self.step()
        self.look()

    def step(self) -> None:
        if self._work.host_ns:
            time.sleep(self._work.host_ns / 1e9)
        for _ in range(self._work.kernels):
            self._kernel.launch()
            self._index.value = (self._index.value + 1) % STAMPS

    def look(self) -> Look:
        looks = []
        for _ in range(LOOKS):
            self._gpu.synchronize()
            before = time.monotonic_ns()
            self._short.launch()
            self._gpu.synchronize()
            after = time.monotonic_ns()
            start = array("Q", self._gpu.read(self._moment, 8))[0]
            looks.append(Look(start, (before + after) // 2, (after - before) // 2))
        return min(looks, key=lambda look: look.apart_ns)

    def mark(self, timed: bool = False) -> c_void_p:
        event = self._spare.pop() if self._spare and not timed else self._gpu.event()
        self._gpu.record(event)
        return event

    def wait(self, mark: c_void_p) -> None:
        self._gpu.wait(mark)
        self._spare.append(mark)

    def elapsed_ms(self, first: c_void_p, last: c_void_p) -> float:
        return self._gpu.elapsed_ns(first, last) / 1e6

    def synchronize(self) -> None:
        self._gpu.synchronize()

    @contextmanager
    def stamped(self) -> Iterator[Callable[[], list[Interval]]]:
        """The last STAMPS kernels, on the GPU's own clock; the simulated GPU's is CLOCK_MONOTONIC."""
        self._gpu.clear(self._buffer, 16 * STAMPS)
        yield self._intervals
        self._gpu.synchronize()

    def _intervals(self) -> list[Interval]:
        words = memoryview(self._gpu.read(self._buffer, 16 * STAMPS)).cast("Q")
        return sorted((start, end) for start, end in zip(words[::2], words[1::2], strict=True) if end)
