"""The launches of each mode, and how much work each one is."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import BLOCKS_PER_SM, FMAS_PER_ITERATION, THREADS

COMPUTE_KERNEL_NS = 500_000  # aim of the calibration: inside the 0.2 to 1 ms of usual large kernels
STREAM_BYTES = 256 << 20
STAMPS = 1 << 16
CALIBRATION_BATCHES = 2
BATCH_RUNS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """Launch once; `work` is what that is worth, in `unit`."""

    launch: Callable[[], None]
    work: int
    unit: str
    kernel_ns: int


def timed_ns(gpu: Gpu, launch: Callable[[], None]) -> int:
    """Shortest of a few runs. Another program on the GPU can only make one longer: the first of a batch waits for the
    time slice, and those behind it run in that slice."""
    marks = [gpu.event() for _ in range(BATCH_RUNS + 1)]
    best = 1 << 62
    for _ in range(CALIBRATION_BATCHES):
        gpu.record(marks[0])
        for mark in marks[1:]:
            launch()
            gpu.record(mark)
        gpu.wait(marks[-1])
        best = min(best, *(gpu.elapsed_ns(a, b) for a, b in pairwise(marks)))
    return max(best, 1)


def _calibrated(gpu: Gpu, kernel: Kernel, iterations: ctypes.c_uint32) -> int:
    """Set the iterations so that one kernel takes about COMPUTE_KERNEL_NS; how long it then takes."""
    iterations.value = 256
    kernel.launch()  # loads the code
    per_iteration_ns = timed_ns(gpu, kernel.launch) / iterations.value
    iterations.value = max(16, int(COMPUTE_KERNEL_NS / per_iteration_ns))
    return timed_ns(gpu, kernel.launch)


def compute(gpu: Gpu) -> Job:
    """Multiply-adds on every SM the process sees; unit: FMA."""
    blocks = gpu.sm_count * BLOCKS_PER_SM
    sink = gpu.allocate(4096)
    iterations = ctypes.c_uint32()
    kernel = Kernel(gpu, "compute", blocks, THREADS, (ctypes.c_uint64(sink or 0), iterations))
    kernel_ns = _calibrated(gpu, kernel, iterations)
    return Job(kernel.launch, blocks * THREADS * iterations.value * FMAS_PER_ITERATION, "fma", kernel_ns)


def memory(gpu: Gpu) -> Job:
    """Read one buffer and write another, as large as fit up to STREAM_BYTES each; unit: byte moved."""
    size = STREAM_BYTES
    while (source := gpu.allocate(size)) is None or (target := gpu.allocate(size)) is None:
        if source is not None:
            gpu.free(source)
        size //= 2
        if size < 1 << 20:
            raise MemoryError("no room for two buffers of 1 MiB: give the vGPU more memory")
    gpu.clear(source, size)
    parameters = (ctypes.c_uint64(source), ctypes.c_uint64(target), ctypes.c_uint64(size // 4))
    kernel = Kernel(gpu, "stream", gpu.sm_count * BLOCKS_PER_SM, THREADS, parameters)
    kernel.launch()
    return Job(kernel.launch, 2 * size, "byte", timed_ns(gpu, kernel.launch))


def tiny(gpu: Gpu) -> Job:
    """One block that returns: all cost is in the launch; unit: kernel."""
    kernel = Kernel(gpu, "tiny", 1, 32, (ctypes.c_uint64(0),))
    kernel.launch()
    return Job(kernel.launch, 1, "kernel", timed_ns(gpu, kernel.launch))


class Stamps:
    """Compute kernels that store %globaltimer at their start and end; unit: FMA."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        blocks = gpu.sm_count * BLOCKS_PER_SM
        buffer = gpu.allocate(16 * STAMPS)
        if buffer is None:
            raise MemoryError("no room for a buffer of 1 MiB: give the vGPU more memory")
        self._buffer = buffer
        gpu.clear(buffer, 16 * STAMPS)
        self._index = ctypes.c_uint64(0)
        iterations = ctypes.c_uint32()
        self._kernel = Kernel(gpu, "stamped", blocks, THREADS, (ctypes.c_uint64(buffer), self._index, iterations))
        kernel_ns = _calibrated(gpu, self._kernel, iterations)
        gpu.synchronize()
        gpu.clear(buffer, 16 * STAMPS)
        self.job = Job(self._launch, blocks * THREADS * iterations.value * FMAS_PER_ITERATION, "fma", kernel_ns)

    def _launch(self) -> None:
        self._kernel.launch()
        self._index.value = (self._index.value + 1) % STAMPS

    def intervals_ns(self) -> list[tuple[int, int]]:
        """(start, end) of the last STAMPS kernels on the GPU's clock, in order."""
        raw = self._gpu.read(self._buffer, 16 * STAMPS)
        return sorted((start, end) for start, end in struct.iter_unpack("<QQ", raw) if end)


@dataclass(frozen=True, slots=True)
class Appetite:
    """The results of requests for memory: the most that was granted, and the number of refusals."""

    bytes_allocated: int
    refusals: int


def take_memory(gpu: Gpu, wanted_bytes: int | None, step_bytes: int) -> tuple[list[int], Appetite]:
    """Allocate step by step up to `wanted_bytes` (None: until refused); the blocks are still held."""
    blocks: list[int] = []
    taken = refusals = 0
    while wanted_bytes is None or taken < wanted_bytes:
        step = step_bytes if wanted_bytes is None else min(step_bytes, wanted_bytes - taken)
        block = gpu.allocate(step)
        if block is None:
            refusals += 1
            break
        blocks.append(block)
        taken += step
    return blocks, Appetite(taken, refusals)
