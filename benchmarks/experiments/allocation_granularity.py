"""What the driver takes from the card for each way to ask it for memory: what the unit of the ledger stands on.

    python -m benchmarks.experiments.allocation_granularity

It runs alone on the GPU, and without a vGPU, whose limit would hide the card's memory.

*Taken* is what cuMemGetInfo's free memory falls by, *kept* what of it stays away after the memory was given back and
the context synchronised. Of pools, and of the graphs' own, also what they say they have reserved and use. Ends with
what NVML shows for this process beside what it knows to have taken. One JSON object per line on request (``--json``).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Final

from cython_ext.testing.bindings_memory import Pieces
from vgpu.workload.driver import CudaError, Gpu
from vgpu.workload.kernels import PTX

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES: Final = (
    *(1, 512, 4 * KIB, 64 * KIB, 512 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1),
    *(3 * MIB, 5 * MIB + 1, 32 * MIB, 32 * MIB + 1, GIB, GIB + 1),
)
MANY: Final = ((4096, 256), (4096, 4 * KIB), (256, 256 * KIB), (256, MIB - 512), (64, MIB + 512), (64, 3 * MIB))
MIXED: Final = (1, 300, 4 * KIB, 70 * KIB, 512 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB, 5 * MIB + 7, 33 * MIB)
DEVICE, PINNED, GLOBAL = 1, 1, 1
POOL_THRESHOLD, POOL_RESERVED, POOL_USED = 4, 5, 7
GRAPH_USED, GRAPH_RESERVED = 0, 2
RANGE_SIZE, POOL_HANDLE = 12, 17
FLOAT, DEFERRED = 0x20, 0x80
FOREVER: Final = 2**64 - 1


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class PhysicalProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        *(("type", c_int), ("handle_types", c_int), ("location", Location), ("security", c_void_p)),
        ("flags", c_ubyte * 8),
    ]


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        *(("type", c_int), ("handle_types", c_int), ("location", Location), ("security", c_void_p)),
        *(("most_bytes", c_size_t), ("usage", c_ushort), ("reserved", c_ubyte * 54)),
    ]


class AllocationNode(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = [
        *(("pool", PoolProperties), ("accesses", c_void_p), ("access_count", c_size_t), ("size", c_size_t)),
        ("address", c_uint64),
    ]


class Shape(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = [
        *(("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)),
        *(("format", c_int), ("channels", c_uint), ("flags", c_uint)),
    ]


class Requirements(ctypes.Structure):
    """CUDA_ARRAY_MEMORY_REQUIREMENTS."""

    _fields_ = [("size", c_size_t), ("alignment", c_size_t), ("reserved", c_uint * 4)]


class Asked:
    """The driver, what is free, and the lines that are printed."""

    def __init__(self, as_json: bool) -> None:
        self.gpu = Gpu(PTX)
        self.here = Location(DEVICE, self.gpu.device)
        self._as_json = as_json

    @property
    def free(self) -> int:
        return self.gpu.memory_info()[0]

    def tell(self, question: str, **figures: int | str) -> None:
        if self._as_json:
            print(json.dumps({"question": question, **figures}), flush=True)
        else:
            print(f"{question:44}", *(f"{name} {_size(value)}" for name, value in figures.items()), flush=True)

    @contextmanager
    def question(self, question: str) -> Iterator[None]:
        """What the driver refuses, or does not have, is an answer, too."""
        try:
            yield
        except CudaError as error:
            self.tell(question, refused=f"{error.call}: {error.name}")
        except AttributeError as error:
            self.tell(question, refused=str(error).rpartition(" ")[2])

    def taken(self, question: str, asked: int, take: Callable[[], Callable[[], object]]) -> None:
        """``take`` returns how to give it back."""
        with self.question(question):
            before = self.free
            give_back = take()
            taken = before - self.free
            give_back()
            self.gpu.synchronize()
            self.tell(question, asked=asked, taken=taken, kept=before - self.free)


def _size(value: int | str) -> str:
    if isinstance(value, str):
        return value
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value and value % unit == 0:
            return f"{value // unit} {name}"
    return f"{value} B"


def plain(ask: Asked) -> None:
    gpu = ask.gpu

    def several(count: int, size: int) -> Callable[[], object]:
        blocks = [gpu.allocate(size) for _ in range(count)]

        def free() -> None:
            for block in blocks:
                assert block is not None
                gpu.free(block)

        return free

    for size in SIZES:
        ask.taken(f"cuMemAlloc {_size(size)}", size, lambda size=size: several(1, size))  # type: ignore[misc]
    for count, size in MANY:
        ask.taken(f"cuMemAlloc {count} × {_size(size)}", count * size, lambda c=count, s=size: several(c, s))  # type: ignore[misc]

    def pitched() -> Callable[[], object]:
        address, pitch = c_uint64(), c_size_t()
        gpu.call("cuMemAllocPitch_v2", byref(address), byref(pitch), c_size_t(100), c_size_t(100_000), c_uint(4))
        ask.tell("its pitch for rows of 100 B", pitch=pitch.value)
        return lambda: gpu.free(address.value)

    def managed() -> Callable[[], object]:
        address = c_uint64()
        gpu.call("cuMemAllocManaged", byref(address), c_size_t(20 * MIB), c_uint(GLOBAL))
        gpu.clear(address.value, 20 * MIB)
        gpu.synchronize()
        return lambda: gpu.free(address.value)

    ask.taken("cuMemAllocPitch 100 B × 100000", 100 * 100_000, pitched)
    ask.taken("cuMemAllocManaged 20 MiB, written by the GPU", 20 * MIB, managed)


def pieces(ask: Asked) -> None:
    """Whether what is touched by address (cython_ext/logic/memory/pieces.pxd) is what is taken, as blocks come and
    go."""
    gpu, chosen, touched = ask.gpu, random.Random(0), Pieces()
    blocks: list[tuple[int, int]] = []
    before, charged = ask.free, 0

    def free(block: int) -> int:
        address, size = blocks.pop(block)
        gpu.free(address)
        return touched.give(address, size)

    for count in range(1, 401):
        size = chosen.choice(MIXED)
        address = gpu.allocate(size)
        assert address is not None
        blocks.append((address, size))
        charged += touched.take(address, size)
        if chosen.random() < 0.5:
            charged -= free(chosen.randrange(len(blocks)))
        if count % 50 == 0:
            ask.tell(f"pieces: {count} blocks, half of them freed", taken=before - ask.free, touched=charged)
    while blocks:
        charged -= free(-1)
    ask.tell("pieces: all of them freed", taken=before - ask.free, touched=charged)

    # Whether small ones come into what large ones leave of their last piece
    for size in (MIB + 512, 256 * KIB):
        for _ in range(32):
            address = gpu.allocate(size)
            assert address is not None
            blocks.append((address, size))
        ask.tell(f"pieces: 32 × {_size(size)}", taken=before - ask.free)
    for address, _ in blocks:
        gpu.free(address)


def physical(ask: Asked) -> None:
    gpu, properties = ask.gpu, PhysicalProperties(PINNED, 0, ask.here)
    for what, name in ((0, "least"), (1, "recommended")):
        with ask.question(f"cuMemGetAllocationGranularity, {name}"):
            unit = c_size_t()
            gpu.call("cuMemGetAllocationGranularity", byref(unit), byref(properties), c_int(what))
            ask.tell(f"cuMemGetAllocationGranularity, {name}", granularity=unit.value)

    def create() -> Callable[[], object]:
        handle = c_uint64()
        gpu.call("cuMemCreate", byref(handle), c_size_t(6 * MIB), byref(properties), c_uint64(0))
        return lambda: gpu.call("cuMemRelease", handle)

    ask.taken("cuMemCreate 6 MiB", 6 * MIB, create)


def _of_pointer(gpu: Gpu, address: c_uint64) -> dict[str, int]:
    size, handle = c_size_t(), c_void_p()
    gpu.call("cuPointerGetAttribute", byref(size), c_int(RANGE_SIZE), address)
    gpu.call("cuPointerGetAttribute", byref(handle), c_int(POOL_HANDLE), address)
    return {"range": size.value, "handle": handle.value or 0}


def pool(ask: Asked) -> None:
    """The device's default pool, step by step."""
    gpu, found = ask.gpu, c_void_p()

    def attribute(which: int) -> int:
        value = c_uint64()
        gpu.call("cuMemPoolGetAttribute", found, c_int(which), byref(value))
        return value.value

    def allocate(size: int) -> c_uint64:
        address = c_uint64()
        gpu.call("cuMemAllocAsync", byref(address), c_size_t(size), gpu.stream)
        return address

    before = ask.free

    def told(step: str) -> None:
        ask.tell(f"pool: {step}", taken=before - ask.free, reserved=attribute(POOL_RESERVED), used=attribute(POOL_USED))

    with ask.question("pool"):
        gpu.call("cuDeviceGetDefaultMemPool", byref(found), c_int(gpu.device))
        blocks = []
        for size in (1, 256, 4 * KIB, MIB, 3 * MIB, 30 * MIB, 33 * MIB, 65 * MIB, GIB + 1):
            blocks.append(allocate(size))
            told(f"and {_size(size)}")
        for block in blocks:
            gpu.call("cuMemFreeAsync", block, gpu.stream)
        told("all freed in their stream")
        gpu.call("cuStreamSynchronize", gpu.stream)
        told("the stream synchronised")
        small = allocate(4353)
        ask.tell("pool: of 4353 B its pointer says", **_of_pointer(gpu, small), pool=found.value or 0)
        gpu.call("cuMemFreeAsync", small, gpu.stream)
        plainly_freed = allocate(GIB)
        gpu.synchronize()
        gpu.call("cuMemFree_v2", plainly_freed)
        told("1 GiB, freed by cuMemFree")
        gpu.synchronize()
        told("the context synchronised")
        next_one = allocate(2 * GIB)
        told("2 GiB")
        gpu.call("cuMemFreeAsync", next_one, gpu.stream)
        gpu.synchronize()
        told("freed in its stream, synchronised")
        gpu.call("cuMemPoolTrimTo", found, c_size_t(0))
        told("trimmed")
        gpu.call("cuMemPoolSetAttribute", found, c_int(POOL_THRESHOLD), byref(c_uint64(FOREVER)))
        gpu.call("cuMemFreeAsync", allocate(GIB), gpu.stream)
        gpu.synchronize()
        told("threshold for ever: 1 GiB came and went")
        gpu.call("cuMemFreeAsync", allocate(GIB // 2), gpu.stream)
        told("512 MiB of it came and went")
        free = ask.free
        big = gpu.allocate(free + GIB // 2)
        told("cuMemAlloc of what is free and half of that: " + ("refused" if big is None else "granted"))
        if big is not None:
            gpu.free(big)
        gpu.call("cuMemPoolTrimTo", found, c_size_t(0))
        told("trimmed")
        captured = c_void_p()
        for call, arguments in (
            ("cuMemPoolGetAttribute", (found, c_int(POOL_USED), byref(c_uint64()))),
            ("cuMemPoolTrimTo", (found, c_size_t(0))),
        ):
            gpu.call("cuStreamBeginCapture_v2", gpu.stream, c_int(0))
            code = getattr(gpu.library, call)(*arguments)
            ended = gpu.library.cuStreamEndCapture(gpu.stream, byref(captured))
            ask.tell(f"pool: {call} while its thread captures, globally", answer=str(code), capture_ends=str(ended))
        gpu.call("cuMemPoolSetAttribute", found, c_int(POOL_THRESHOLD), byref(c_uint64(0)))


def arrays(ask: Asked) -> None:
    gpu = ask.gpu
    shapes = {
        "1D 1000": Shape(1000, 0, 0, FLOAT, 1, 0),
        "2D 1000 × 1000": Shape(1000, 1000, 0, FLOAT, 1, 0),
        "2D 4096 × 4096 × 4": Shape(4096, 4096, 0, FLOAT, 4, 0),
        "3D 100 × 100 × 100": Shape(100, 100, 100, FLOAT, 1, 0),
        "2D layered 1000 × 1000 × 7": Shape(1000, 1000, 7, FLOAT, 1, 0x01),
    }
    for name, shape in shapes.items():
        asked = 4 * shape.channels * shape.width * max(1, shape.height) * max(1, shape.depth)

        def create(levels: int, shape: Shape = shape, name: str = name) -> Callable[[], object]:
            kind, more = ("Mipmapped", (c_uint(levels),)) if levels else ("", ())
            make = "cuMipmappedArrayCreate" if levels else "cuArray3DCreate_v2"
            deferred, needs, array = c_void_p(), Requirements(), c_void_p()
            later = Shape.from_buffer_copy(shape)
            later.flags |= DEFERRED
            free = ask.free
            with ask.question(f"{name}, deferred"):
                gpu.call(make, byref(deferred), byref(later), *more)
                gpu.call(f"cu{kind}ArrayGetMemoryRequirements", byref(needs), deferred, c_int(gpu.device))
                ask.tell(f"{name}, deferred", needs=needs.size, alignment=needs.alignment, taken=free - ask.free)
                gpu.call(f"cu{kind}ArrayDestroy", deferred)
            gpu.call(make, byref(array), byref(shape), *more)
            return lambda: gpu.call(f"cu{kind}ArrayDestroy", array)

        ask.taken(f"array {name}", asked, lambda create=create: create(0))  # type: ignore[misc]
        ask.taken(f"array {name}, 5 levels", asked, lambda create=create: create(5))  # type: ignore[misc]

    def several(count: int) -> Callable[[], object]:
        made = [c_void_p() for _ in range(count)]
        for array in made:
            gpu.call("cuArray3DCreate_v2", byref(array), byref(shapes["1D 1000"]))

        def destroy() -> None:
            for array in made:
                gpu.call("cuArrayDestroy", array)

        return destroy

    ask.taken("64 arrays of 1D 1000", 64 * 4000, lambda: several(64))


def graphs(ask: Asked) -> None:
    """Three nodes: 100 MiB, its free, then 60 MiB that may take its place; and 30 MiB that nothing frees."""
    gpu, before = ask.gpu, ask.free

    def told(step: str) -> None:
        figures = {}
        for name, which in (("reserved", GRAPH_RESERVED), ("used", GRAPH_USED)):
            value = c_uint64()
            gpu.call("cuDeviceGetGraphMemAttribute", c_int(gpu.device), c_int(which), byref(value))
            figures[name] = value.value
        ask.tell(f"graph: {step}", taken=before - ask.free, **figures)

    with ask.question("graph"):
        graph, runnable = c_void_p(), c_void_p()
        gpu.call("cuGraphCreate", byref(graph), c_uint(0))
        last: list[c_void_p] = []

        def add(call: str, *arguments: object) -> None:
            node = c_void_p()
            needs = (c_void_p * max(1, len(last)))(*last)
            gpu.call(call, byref(node), graph, needs if last else None, c_size_t(len(last)), *arguments)
            last[:] = [node]

        def allocation(size: int) -> c_uint64:
            node = AllocationNode(PoolProperties(PINNED, 0, ask.here), None, 0, size, 0)
            add("cuGraphAddMemAllocNode", byref(node))
            return c_uint64(node.address)

        add("cuGraphAddMemFreeNode", allocation(100 * MIB))
        add("cuGraphAddMemFreeNode", allocation(60 * MIB))
        left = allocation(30 * MIB)
        told("made")
        gpu.call("cuGraphInstantiateWithFlags", byref(runnable), graph, c_uint64(0))
        told("instantiated")
        gpu.call("cuGraphUpload", runnable, gpu.stream)
        gpu.call("cuStreamSynchronize", gpu.stream)
        told("uploaded")
        gpu.call("cuGraphLaunch", runnable, gpu.stream)
        gpu.call("cuStreamSynchronize", gpu.stream)
        told("launched")
        ask.tell("graph: of what it left its pointer says", **_of_pointer(gpu, left))
        gpu.call("cuMemFreeAsync", left, gpu.stream)
        gpu.call("cuStreamSynchronize", gpu.stream)
        told("what it left freed")
        gpu.call("cuGraphExecDestroy", runnable)
        gpu.call("cuGraphDestroy", graph)
        told("destroyed")
        gpu.call("cuDeviceGraphMemTrim", c_int(gpu.device))
        told("trimmed")


def own_process(ask: Asked) -> None:
    """Beside 1 GiB of plain memory: what is left is the context's."""
    import pynvml

    with ask.question("NVML"):
        block = ask.gpu.allocate(GIB)
        try:
            pynvml.nvmlInit()
            shown = [
                process.usedGpuMemory
                for index in range(pynvml.nvmlDeviceGetCount())
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
                if process.pid == os.getpid() and process.usedGpuMemory is not None
            ]
            ask.tell("NVML: this process, with 1 GiB of plain memory", shown=sum(shown))
        except pynvml.NVMLError as error:
            ask.tell("NVML", refused=str(error))
        if block is not None:
            ask.gpu.free(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object per line")
    ask = Asked(parser.parse_args().json)
    for part in (plain, pieces, physical, pool, arrays, graphs, own_process):
        part(ask)


if __name__ == "__main__":
    main()
