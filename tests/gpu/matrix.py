"""Every way to allocate × every legal way to free × {within, at, one charging unit over the limit}, in one process.

    vgpuctl run --sm 100 --mem 4G -- python -m tests.gpu.matrix

A case is good if what fits is granted, what is one unit too much is refused with CUDA's own out-of-memory error, the
vGPU's free memory falls by what was charged and comes back when it was freed, and nothing is left for one piece more
when all was taken. One JSON object per case; the last line counts them. Runs on a GPU and on a simulated one.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

import pynvml

from tests.sim.graphs import Built
from vgpu.workload.driver import CudaError, Gpu
from vgpu.workload.kernels import PTX

MIB: Final = 1 << 20
PIECE: Final = 2 * MIB
STEP: Final = 32 * MIB
GRANULE: Final = 64 * MIB
"""Graphs: the driver's step is not documented; it divides this. Arrays: of a multiple of it they take nothing more."""
OUT_OF_MEMORY: Final = 2
ROW_BYTES: Final = 64 << 10
FLOAT = 0x20
SETTLE_S: Final = 2.5
"""Contexts and modules are read from NVML once a second, and narrow what is free."""


class Refused(Exception):
    """CUDA's out-of-memory error, from the very call."""


Free = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Way:
    """``take`` allocates so many bytes, or raises ``Refused``, and returns how it may be freed, by name. ``unit``: of
    what is charged."""

    name: str
    take: Callable[[int], dict[str, Free]]
    unit: int = PIECE
    on_card: bool = True
    """As soon as it is allocated."""
    makes_room: bool = False
    """What is kept of it for nothing makes room for others."""


class Matrix:
    def __init__(self) -> None:
        self.gpu = Gpu(PTX)
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.pool = self._pool()

    # --- the driver

    def ask(self, name: str, *arguments: object) -> None:
        """A call that may be refused for want of memory."""
        code = int(getattr(self.gpu.library, name)(*arguments))
        if code == OUT_OF_MEMORY:
            raise Refused(name)
        if code:
            self.gpu.fail(name, code)

    @property
    def free(self) -> int:
        """As the program is told, with nothing under way."""
        self.gpu.synchronize()
        return self.gpu.memory_info()[0]

    @property
    def all_free(self) -> int:
        """The same once nothing is kept for nothing."""
        self.gpu.synchronize()
        self.gpu.call("cuDeviceGraphMemTrim", c_int(self.gpu.device))
        return self.free

    @property
    def shown(self) -> int | None:
        """What the driver shows for this process: its word, not the hook's. None where it does not tell."""
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        return next((process.usedGpuMemory for process in listed if process.pid == os.getpid()), None)

    def _pool(self) -> c_void_p:
        pool = c_void_p()
        properties = (ctypes.c_int * 32)(1, 0, 1, self.gpu.device)  # pinned, on this device
        self.gpu.call("cuMemPoolCreate", byref(pool), properties)
        return pool

    # --- the ways

    def plain(self, size: int) -> dict[str, Free]:
        address = c_uint64()
        self.ask("cuMemAlloc_v2", byref(address), c_size_t(size))
        return {"cuMemFree": lambda: self.gpu.call("cuMemFree_v2", address)}

    def many(self, size: int) -> dict[str, Free]:
        """Small ones, which share pieces."""
        made: list[c_uint64] = []

        def free() -> None:
            while made:
                self.gpu.call("cuMemFree_v2", made.pop())

        try:
            for _ in range(size // (MIB // 2)):
                address = c_uint64()
                self.ask("cuMemAlloc_v2", byref(address), c_size_t(MIB // 2))
                made.append(address)
        except Refused:
            free()
            raise
        return {"cuMemFree of each": free}

    def pitched(self, size: int) -> dict[str, Free]:
        address, pitch = c_uint64(), c_size_t()
        rows = c_size_t(size // ROW_BYTES)
        self.ask("cuMemAllocPitch_v2", byref(address), byref(pitch), c_size_t(ROW_BYTES - 100), rows, c_uint(4))
        return {"cuMemFree": lambda: self.gpu.call("cuMemFree_v2", address)}

    def managed(self, size: int) -> dict[str, Free]:
        address = c_uint64()
        self.ask("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))
        return {"cuMemFree": lambda: self.gpu.call("cuMemFree_v2", address)}

    def mapped(self, size: int) -> dict[str, Free]:
        properties = (ctypes.c_int * 8)(1, 0, 1, self.gpu.device)
        handle, again, address = c_uint64(), c_uint64(), c_uint64()
        self.ask("cuMemCreate", byref(handle), c_size_t(size), properties, c_uint64(0))
        self.gpu.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.gpu.call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))

        def unmap() -> None:
            self.gpu.call("cuMemUnmap", address, c_size_t(size))
            self.gpu.call("cuMemAddressFree", address, c_size_t(size))

        def release_first() -> None:
            self.gpu.call("cuMemRelease", handle)
            unmap()

        def release_last() -> None:
            unmap()
            self.gpu.call("cuMemRelease", handle)

        def retained() -> None:
            self.gpu.call("cuMemRetainAllocationHandle", byref(again), address)
            release_first()
            self.gpu.call("cuMemRelease", again)

        return {"release, unmap": release_first, "unmap, release": release_last, "retain, …, release": retained}

    def _pooled(self, name: str, size: int, *pool: c_void_p) -> dict[str, Free]:
        address = c_uint64()
        self.ask(name, byref(address), c_size_t(size), *pool, self.gpu.stream)
        self.gpu.synchronize()
        return {
            "cuMemFreeAsync": lambda: self.gpu.call("cuMemFreeAsync", address, self.gpu.stream),
            "cuMemFree": lambda: self.gpu.call("cuMemFree_v2", address),
        }

    def default_pool(self, size: int) -> dict[str, Free]:
        return self._pooled("cuMemAllocAsync", size)

    def own_pool(self, size: int) -> dict[str, Free]:
        return self._pooled("cuMemAllocFromPoolAsync", size, self.pool)

    def array(self, size: int) -> dict[str, Free]:
        handle = c_void_p()
        shape = (c_uint64 * 4)(4096, size // (4096 * 16), FLOAT | 4 << 32)  # width, height, format and channels
        self.ask("cuArrayCreate_v2", byref(handle), shape)
        return {"cuArrayDestroy": lambda: self.gpu.call("cuArrayDestroy", handle)}

    def volume(self, size: int) -> dict[str, Free]:
        handle = c_void_p()
        shape = (c_uint64 * 5)(1024, 128, size // (1024 * 128 * 16), FLOAT | 4 << 32, 0)
        self.ask("cuArray3DCreate_v2", byref(handle), shape)
        return {"cuArrayDestroy": lambda: self.gpu.call("cuArrayDestroy", handle)}

    def mipmap(self, size: int) -> dict[str, Free]:
        handle = c_void_p()
        shape = (c_uint64 * 5)(8192, size // (8192 * 16), 0, FLOAT | 4 << 32, 0)  # at most 32,768 rows
        self.ask("cuMipmappedArrayCreate", byref(handle), shape, c_uint(1))
        return {"cuMipmappedArrayDestroy": lambda: self.gpu.call("cuMipmappedArrayDestroy", handle)}

    def _ran(self, executable: c_void_p, graph: c_void_p) -> Free:
        def destroy() -> None:
            self.gpu.synchronize()
            self.gpu.call("cuGraphExecDestroy", executable)
            self.gpu.call("cuGraphDestroy", graph)

        try:
            self.ask("cuGraphLaunch", executable, self.gpu.stream)
        except Refused:
            destroy()
            raise
        self.gpu.synchronize()
        return destroy

    def graph(self, size: int) -> dict[str, Free]:
        built = Built(self.gpu.call)
        built.give(built.take(size))
        return {"destroy, trim": self._ran(built.executable(), built.graph)}

    def left_by_graph(self, size: int) -> dict[str, Free]:
        built = Built(self.gpu.call)
        address = c_uint64(built.take(size))
        destroy = self._ran(built.executable(), built.graph)

        def freed(name: str, *arguments: object) -> Free:
            def free() -> None:
                self.gpu.call(name, address, *arguments)
                destroy()

            return free

        return {"cuMemFreeAsync": freed("cuMemFreeAsync", self.gpu.stream), "cuMemFree": freed("cuMemFree_v2")}

    def captured(self, size: int) -> dict[str, Free]:
        address, graph, executable = c_uint64(), c_void_p(), c_void_p()
        self.gpu.call("cuStreamBeginCapture_v2", self.gpu.stream, c_int(1))
        self.gpu.call("cuMemAllocAsync", byref(address), c_size_t(size), self.gpu.stream)
        self.gpu.call("cuMemFreeAsync", address, self.gpu.stream)
        self.gpu.call("cuStreamEndCapture", self.gpu.stream, byref(graph))
        self.gpu.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        return {"destroy, trim": self._ran(executable, graph)}

    @property
    def ways(self) -> tuple[Way, ...]:
        return (
            Way("cuMemAlloc", self.plain),
            Way("cuMemAlloc, small ones", self.many),
            Way("cuMemAllocPitch", self.pitched),
            Way("cuMemAllocManaged", self.managed, on_card=False),
            Way("cuMemCreate", self.mapped),
            Way("cuMemAllocAsync", self.default_pool, STEP),
            Way("cuMemAllocFromPoolAsync", self.own_pool, STEP),
            Way("cuArrayCreate", self.array, GRANULE),
            Way("cuArray3DCreate", self.volume, GRANULE),
            Way("cuMipmappedArrayCreate", self.mipmap, GRANULE),
            Way("cuGraphAddMemAllocNode, freed by a node", self.graph, GRANULE, makes_room=True),
            Way("cuGraphAddMemAllocNode, left", self.left_by_graph, GRANULE, makes_room=True),
            Way("cuMemAllocAsync under a capture", self.captured, GRANULE, makes_room=True),
        )

    # --- the cases

    def frees_of(self, way: Way) -> list[str]:
        frees = way.take(way.unit)
        names = list(frees)
        frees[names[0]]()
        return names

    def case(self, way: Way, free: str, where: str) -> list[str]:
        """What is wrong."""
        before, shown_before = self.all_free, self.shown
        fits = before // way.unit * way.unit
        size = {"within": fits // 2 // way.unit * way.unit, "at": fits, "over": fits + way.unit}[where]
        try:
            frees = way.take(size)
        except Refused:
            wrong = [] if where == "over" else [f"{size} bytes refused, where {before} are free"]
            return wrong + self.unlike(before, self.all_free, "after the refusal")
        wrong = [f"{size} bytes granted, where {before} are free"] if where == "over" else []
        wrong += self.unlike(before - size, self.free, "while allocated")
        shown, charged = self.shown, before - self.free
        if shown is not None and shown_before is not None and way.on_card and shown - shown_before != charged:
            wrong.append(f"the driver shows {shown - shown_before} bytes more, charged are {charged}")
        if where == "at" and not way.makes_room:
            try:
                more = self.plain(before - fits + 1)
                more["cuMemFree"]()
                wrong.append("and one byte more than is free")
            except Refused:
                pass
        frees[free]()
        return wrong + self.unlike(before, self.all_free, "after the free")

    def unlike(self, expected: int, found: int, when: str) -> list[str]:
        return [] if found == expected else [f"{found} bytes free {when}, not {expected}"]

    def cases(self) -> Iterator[tuple[Way, str, str]]:
        for way in self.ways:
            for free in self.frees_of(way):
                for where in ("within", "at", "over"):
                    yield way, free, where


def main() -> None:
    matrix = Matrix()
    cases = list(matrix.cases())  # and each way once, before what is implicit is read
    time.sleep(SETTLE_S)
    bad = 0
    for way, free, where in cases:
        try:
            wrong = matrix.case(way, free, where)
        except CudaError as error:
            wrong = [str(error)]
        bad += bool(wrong)
        print(json.dumps({"allocated by": way.name, "freed by": free, "where": where, "wrong": wrong}), flush=True)
    print(json.dumps({"cases": len(cases), "bad": bad}), flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
