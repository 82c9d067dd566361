"""CUDA programs about virtual memory, pools and memory of graphs: ``python -m tests.sim.memory_programs NAME
[ARGUMENT…]``. Each prints one JSON line when it is done."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from tests.sim.cuda import MIB, PIECE, THREAD_LOCAL, Cuda
from tests.sim.graphs import Built


def mapped(cuda: Cuda) -> int:
    """One 2 MiB piece of physical memory, mapped and accessible."""
    properties = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)
    address = cuda.new("cuMemAddressReserve", c_size_t(PIECE), c_size_t(0), c_uint64(0), c_uint64(0))
    piece = c_void_p(cuda.new("cuMemCreate", c_size_t(PIECE), properties, c_uint64(0)))
    cuda.ok("cuMemMap", address, c_size_t(PIECE), c_size_t(0), piece, c_uint64(0))
    cuda.ok("cuMemSetAccess", address, c_size_t(PIECE), (c_int * 3)(1, 0, 3), c_size_t(1))
    cuda.ok("cuMemRelease", piece)
    return address


def virtual_memory() -> dict[str, object]:
    """Contents survive unmapping; physical memory is charged until neither handle nor mapping is left."""
    cuda = Cuda()

    def used() -> int:
        free, total = c_size_t(), c_size_t()
        cuda.ok("cuMemGetInfo_v2", byref(free), byref(total))
        return total.value - free.value

    before = used()
    properties = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)
    address = cuda.new("cuMemAddressReserve", c_size_t(2 * PIECE), c_size_t(0), c_uint64(0), c_uint64(0))
    piece = c_void_p(cuda.new("cuMemCreate", c_size_t(PIECE), properties, c_uint64(0)))
    charged = used() - before
    access = (c_int * 3)(1, 0, 3)
    unmapped = cuda("cuMemsetD8_v2", address, 1, c_size_t(16))
    for place in (address, address + PIECE):
        cuda.ok("cuMemMap", place, c_size_t(PIECE), c_size_t(0), piece, c_uint64(0))
    no_access = cuda("cuMemsetD8_v2", address, 1, c_size_t(16))
    cuda.ok("cuMemSetAccess", address, c_size_t(2 * PIECE), access, c_size_t(1))
    cuda.ok("cuMemsetD8_v2", address + 64, 42, c_size_t(PIECE))
    cuda.ok("cuCtxSynchronize")
    twice = ctypes.string_at(address, 65)[-1] == ctypes.string_at(address + PIECE + 64, 1)[0] == 42
    cuda.ok("cuMemRelease", piece)
    cuda.ok("cuMemUnmap", address, c_size_t(PIECE))
    survives = ctypes.string_at(address + PIECE + 64, 1)[0]
    base, size = c_uint64(), c_size_t()
    cuda.ok("cuMemGetAddressRange_v2", byref(base), byref(size), address + PIECE + 5)
    ipc = cuda("cuIpcGetMemHandle", ctypes.create_string_buffer(64), address + PIECE)
    early = cuda("cuMemAddressFree", address, c_size_t(2 * PIECE))
    cuda.ok("cuMemUnmap", address + PIECE, c_size_t(PIECE))
    return {
        "charged": charged,
        "unmapped": unmapped,
        "no_access": no_access,
        "twice": twice,
        "survives": survives,
        "range": [base.value - address, size.value],
        "ipc": ipc,
        "early_free": early,
        "left": used() - before,
        "free": cuda("cuMemAddressFree", address, c_size_t(2 * PIECE)),
    }


def unmap_under_work(how: str) -> dict[str, object]:
    """Unmapping does not wait; queued work that touches the range takes the context with it."""
    cuda = Cuda()
    address = mapped(cuda)
    release = cuda.held(cuda.stream)
    if how == "memset":
        cuda.ok("cuMemsetD8Async", address, 1, c_size_t(PIECE), cuda.stream)
    elif how == "kernel":
        cuda.launch("touch", address, 1000)
    elif how == "synchronised":
        release()
        cuda.ok("cuMemsetD8Async", address, 1, c_size_t(PIECE), cuda.stream)
        cuda.ok("cuStreamSynchronize", cuda.stream)
    started = time.monotonic_ns()
    cuda.ok("cuMemUnmap", address, c_size_t(PIECE))
    took_ns = time.monotonic_ns() - started
    release()
    return {"unmap_ns": took_ns, "sync": cuda("cuCtxSynchronize"), "after": cuda.launch("work", 1, 1)}


def pools() -> dict[str, object]:
    """Reserved and used memory of the default pool, before and after free, synchronise and a threshold."""
    cuda = Cuda()
    pool = c_void_p(cuda.new("cuDeviceGetDefaultMemPool", 0))

    def attribute(number: int) -> int:
        value = c_uint64()
        cuda.ok("cuMemPoolGetAttribute", pool, number, byref(value))
        return value.value

    threshold = c_uint64(0)
    report: dict[str, object] = {}
    for name, keep in (("trimmed", 0), ("kept", 1 << 62)):
        threshold.value = keep
        cuda.ok("cuMemPoolSetAttribute", pool, 4, byref(threshold))
        address = cuda.new("cuMemAllocAsync", c_size_t(40 * MIB), cuda.stream)
        had = [attribute(5), attribute(7)]
        cuda.ok("cuMemFreeAsync", address, cuda.stream)
        freed = [attribute(5), attribute(7)]
        cuda.ok("cuStreamSynchronize", cuda.stream)
        report[name] = [had, freed, [attribute(5), attribute(7)]]
    return report


def graph_memory() -> dict[str, object]:
    """100 MiB, freed; 60 in its place; 20 that stay until the program frees them."""
    cuda = Cuda()
    made = Built(cuda.ok)
    first = made.take(100 * MIB)
    made.give(first)
    made.give(made.take(60 * MIB))
    left = made.take(20 * MIB)
    early = cuda("cuMemcpyDtoH_v2", ctypes.create_string_buffer(1), left, c_size_t(1))
    report: dict[str, object] = {"before it ran": early}
    taken = [made.taken()]
    graph = made.executable()
    taken.append(made.taken())
    cuda.ok("cuGraphUpload", graph, cuda.stream)
    taken.append(made.taken())
    cuda.ok("cuGraphLaunch", graph, cuda.stream)
    cuda.ok("cuStreamSynchronize", cuda.stream)
    taken.append(made.taken())
    report["the one that stays"] = cuda("cuMemsetD8_v2", left, 7, c_size_t(MIB))
    report["the one that was freed"] = cuda("cuMemsetD8_v2", first, 7, c_size_t(MIB))
    report["again before that is freed"] = cuda("cuGraphLaunch", graph, cuda.stream)
    cuda.ok("cuMemFreeAsync", left, cuda.stream)
    report["again"] = cuda("cuGraphLaunch", graph, cuda.stream)
    cuda.ok("cuMemFree_v2", left)
    report["a second time executable"] = cuda("cuGraphInstantiateWithFlags", byref(c_void_p()), made.graph, c_uint64(0))
    cuda.ok("cuDeviceGraphMemTrim", 0)
    taken.append(made.taken())
    report["after a trim"] = cuda("cuGraphLaunch", graph, cuda.stream)
    taken.append(made.taken())
    cuda.ok("cuMemFreeAsync", left, cuda.stream)
    cuda.ok("cuStreamSynchronize", cuda.stream)
    cuda.ok("cuGraphExecDestroy", graph)
    cuda.ok("cuGraphDestroy", made.graph)
    taken.append(made.taken())
    cuda.ok("cuDeviceGraphMemTrim", 0)
    taken.append(made.taken())
    return report | {"taken": taken}


def captured_memory() -> dict[str, object]:
    """Stream-ordered allocations under a capture become nodes."""
    cuda = Cuda()
    cuda.ok("cuStreamBeginCapture_v2", cuda.stream, THREAD_LOCAL)
    address = cuda.new("cuMemAllocAsync", c_size_t(40 * MIB), cuda.stream)
    cuda.ok("cuMemsetD8Async", address, 3, c_size_t(MIB), cuda.stream)
    cuda.ok("cuMemFreeAsync", address, cuda.stream)
    graph = c_void_p(cuda.new_last("cuStreamEndCapture", cuda.stream))
    count = c_size_t()
    cuda.ok("cuGraphGetNodes", graph, None, byref(count))
    executable = c_void_p(cuda.new("cuGraphInstantiateWithFlags", graph, c_uint64(0)))
    answers = [cuda("cuGraphLaunch", executable, cuda.stream) for _ in range(3)]
    cuda.ok("cuStreamSynchronize", cuda.stream)
    return {"nodes": count.value, "launches": answers, "clone": cuda("cuGraphClone", byref(c_void_p()), graph)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
