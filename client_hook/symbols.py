"""The one list of driver functions that the hook intercepts or calls. Everything else is derived from it.

``cython_ext/generate_hook.py`` generates from it:

* the linker's export list,
* the table by which ``dlsym`` and ``cuGetProcAddress`` find a wrapper,
* a typed call of the real function for each entry (``real_NAME``),
* the wrappers that only call one function before or after the real one (``before``, ``after``), or none (``bare``).

The other wrappers, functions called NAME, are in ``cython_ext/hook/*/*.pyx``. The link fails if one is missing.

To intercept one more function: add a line here. Without ``before``, ``after`` or ``bare``, write the function NAME
there. docs/internals/driver-functions.md says for every function of the driver what the hook does with it.

Names, versions and arguments: cuda.h and cudaTypedefs.h of CUDA 13.5, nvml.h. Arguments are written with plain C types
(handles are ``void*``, device pointers ``unsigned long long``, devices and enums ``int``): the hook is built without
NVIDIA's headers.
"""

from __future__ import annotations

from collections.abc import Iterator

from client_hook.calls import calls
from client_hook.symbol import PER_THREAD, PER_THREAD_SYNCHRONOUS, Symbol


def _words(name: str, arguments: str, first: int) -> Iterator[Symbol]:
    """A function that reads or writes words of memory in a stream, of version ``first`` and of 11.7, with twins."""
    arguments = f"void* stream, {arguments}"
    yield from _work(name, arguments, first, "touching()", twin=first)
    yield from _work(f"{name}_v2", arguments, 11070, "touching()", base=name, twin=11070)


def _cuda(
    name: str, arguments: str, version: int, *, base: str = "", twin: int = 0, intercepted: bool = True
) -> Iterator[Symbol]:
    """The function and, where it takes a stream, its per-thread twin, known to cuGetProcAddress since version
    ``twin``."""
    base = base or name
    yield Symbol("cuda", name, arguments, base, version, False, intercepted)
    if twin:
        yield Symbol("cuda", name + PER_THREAD, arguments, base, twin, True, intercepted)


def _work(name: str, arguments: str, version: int, before: str, *, base: str = "", twin: int = 0) -> Iterator[Symbol]:
    """A function that submits work, let through by ``before``, and its twin. Those that take no stream have another
    suffix."""
    base = base or name
    suffix = PER_THREAD if "void* stream" in arguments else PER_THREAD_SYNCHRONOUS
    yield Symbol("cuda", name, arguments, base, version, False, True, before)
    if twin:
        yield Symbol("cuda", name + suffix, arguments, base, twin, True, True, before)


def _update(name: str, arguments: str, version: int, *, base: str = "") -> Iterator[Symbol]:
    """A change of an executable graph."""
    yield Symbol("cuda", name, arguments, base or name, version, False, True, after="graph_updated(executable)")


def _shrinks(name: str, arguments: str, version: int, *, base: str = "", twin: int = 0) -> Iterator[Symbol]:
    """After it, memory pools may have given memory back to the card."""
    base = base or name
    yield Symbol("cuda", name, arguments, base, version, False, True, after="settle_pools()")
    if twin:
        yield Symbol("cuda", name + PER_THREAD, arguments, base, twin, True, True, after="settle_pools()")


def _after(name: str, arguments: str, version: int, after: str) -> Iterator[Symbol]:
    """Reported to the hook once the driver has done it."""
    yield Symbol("cuda", name, arguments, name, version, False, True, after=after)


def _found(name: str, arguments: str, version: int) -> Iterator[Symbol]:
    """It names a pool that the program has not made."""
    yield Symbol("cuda", name, arguments, name, version, False, True, after="pool_found(pool, place, type)")


def _turn(
    name: str, arguments: str, version: int, *, base: str = "", after: str = "context_turned()"
) -> Iterator[Symbol]:
    """A change of the thread's current context."""
    yield Symbol("cuda", name, arguments, base or name, version, False, True, after=after)


def _made(name: str, arguments: str, version: int, *, base: str = "") -> Iterator[Symbol]:
    """A context beside the devices' primary ones."""
    yield from _turn(name, arguments, version, base=base, after="context_made(device)")


def _fills(bits: int, value: str) -> Iterator[Symbol]:
    """The memsets of elements of so many bits."""
    bytes_ = bits // 8
    line = f"unsigned long long target, {value} value, size_t count"
    rows = f"unsigned long long target, size_t pitch, {value} value, size_t width, size_t height"
    fill, fill_rows = f"fill({bytes_} * count, 0)", f"fill({bytes_} * width * height, {bytes_} * width)"
    yield from _work(f"cuMemsetD{bits}_v2", line, 3020, fill, base=f"cuMemsetD{bits}", twin=7000)
    yield from _work(f"cuMemsetD{bits}Async", line + ", void* stream", 3020, fill, twin=7000)
    yield from _work(f"cuMemsetD2D{bits}_v2", rows, 3020, fill_rows, base=f"cuMemsetD2D{bits}", twin=7000)
    yield from _work(f"cuMemsetD2D{bits}Async", rows + ", void* stream", 3020, fill_rows, twin=7000)


def _copies(name: str, arguments: str, before: str, *, asynchronous: bool = True) -> Iterator[Symbol]:
    """A copy, and the same in a stream. Their first versions, which took 32-bit addresses, reach no device memory of a
    64-bit process: they are left alone, as are the memsets'."""
    yield from _work(f"{name}_v2", arguments, 3020, before, base=name, twin=7000)
    if asynchronous:
        yield from _work(f"{name}Async_v2", f"{arguments}, void* stream", 3020, before, base=f"{name}Async", twin=7000)


def _bare(name: str, arguments: str, version: int, base: str = "", twin: int = 0) -> Iterator[Symbol]:
    """A function in which a thread may have to wait, and no more."""
    base = base or name
    yield Symbol("cuda", name, arguments, base, version, False, True, bare=True)
    if twin:
        yield Symbol("cuda", name + PER_THREAD, arguments, base, twin, True, True, bare=True)


def _nvml(name: str, arguments: str, *, intercepted: bool = True) -> Iterator[Symbol]:
    yield Symbol("nvml", name, arguments, name, 0, False, intercepted)


def _nvml_lists(name: str) -> Iterator[Symbol]:
    """A list of processes, in the versions that there are."""
    for version in ("", "_v2", "_v3"):
        yield from _nvml(name + version, "void* device, unsigned* count, void* infos")


_SHAPE = "unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared"
_TO_DEVICE = "unsigned long long target, const void* source, size_t size"
_FROM_DEVICE = "void* target, unsigned long long source, size_t size"
_IN_DEVICE = "unsigned long long target, unsigned long long source, size_t size"
_PEER = "unsigned long long target, void* target_context, unsigned long long source, void* source_context, size_t size"
_BATCH = "void* targets, void* sources, size_t* sizes, size_t count, void* attributes, void* indices, size_t kinds"
_PLACES = "void* addresses, size_t* sizes, size_t count, void* places, void* indices, size_t kinds"
_NODE = "void* executable, void* node, const void* params"
_INSTANTIATE = "void** executable, void* graph, void** wrong, char* log, size_t size"
_WORD = "unsigned long long address, unsigned value, unsigned flags"
_LONG_WORD = "unsigned long long address, unsigned long long value, unsigned flags"
_VDPAU = "void** context, unsigned flags, int device, unsigned display, void* proc"
_PROC = "const char* symbol, void** pfn, int version, unsigned long long flags"

SYMBOLS: tuple[Symbol, ...] = (
    # --- doors and start-up (doors.pyx, wrappers.pyx)
    *_cuda("cuInit", "unsigned flags", 2000),
    *_cuda("cuGetProcAddress", _PROC, 11030),
    *_cuda("cuGetProcAddress_v2", _PROC + ", int* status", 12000, base="cuGetProcAddress"),
    # --- work to gate (wrappers.pyx)
    *_cuda("cuLaunchKernel", f"void* f, {_SHAPE}, void* stream, void** params, void** extra", 4000, twin=7000),
    *_cuda("cuLaunchKernelEx", "const void* config, void* f, void** params, void** extra", 11060, twin=11060),
    *_cuda("cuLaunchCooperativeKernel", f"void* f, {_SHAPE}, void* stream, void** params", 9000, twin=9000),
    *_cuda("cuGraphLaunch", "void* graph, void* stream", 10000, twin=10000),
    *_cuda("cuLaunchCooperativeKernelMultiDevice", "void* launches, unsigned count, unsigned flags", 9000),
    # ... of CUDA 3, not in the header any more: the driver still has them
    *_work("cuLaunch", "void* f", 2000, "grid(f, 1, 1)"),
    *_work("cuLaunchGrid", "void* f, int width, int height", 2000, "grid(f, width, height)"),
    *_work("cuLaunchGridAsync", "void* f, int width, int height, void* stream", 2000, "grid(f, width, height)"),
    # --- memory that the GPU fills, copies and moves (transfers.pyx)
    *_fills(8, "unsigned char"),
    *_fills(16, "unsigned short"),
    *_fills(32, "unsigned"),
    *_copies("cuMemcpyHtoD", _TO_DEVICE, "host_copy(size)"),
    *_copies("cuMemcpyDtoH", _FROM_DEVICE, "host_copy(size)"),
    *_copies("cuMemcpyDtoD", _IN_DEVICE, "copy(size)"),
    *_work("cuMemcpy", _IN_DEVICE, 4000, "copy_between(target, source, size)", twin=7000),
    *_work("cuMemcpyAsync", _IN_DEVICE + ", void* stream", 4000, "copy_between(target, source, size)", twin=7000),
    *_work("cuMemcpyPeer", _PEER, 4000, "peer_copy(size)", twin=7000),
    *_work("cuMemcpyPeerAsync", _PEER + ", void* stream", 4000, "peer_copy(size)", twin=7000),
    *_copies("cuMemcpyHtoA", "void* target, size_t at, const void* source, size_t size", "host_copy(size)"),
    *_copies("cuMemcpyAtoH", "void* target, void* source, size_t at, size_t size", "host_copy(size)"),
    *_copies(
        "cuMemcpyDtoA",
        "void* target, size_t at, unsigned long long source, size_t size",
        "copy(size)",
        asynchronous=False,
    ),
    *_copies(
        "cuMemcpyAtoD",
        "unsigned long long target, void* source, size_t at, size_t size",
        "copy(size)",
        asynchronous=False,
    ),
    *_copies(
        "cuMemcpyAtoA",
        "void* target, size_t target_at, void* source, size_t source_at, size_t size",
        "copy(size)",
        asynchronous=False,
    ),
    *_copies("cuMemcpy2D", "const void* copy", "copy_2d(copy)"),
    *_copies("cuMemcpy2DUnaligned", "const void* copy", "copy_2d(copy)", asynchronous=False),
    *_copies("cuMemcpy3D", "const void* copy", "copy_3d(copy)"),
    *_work("cuMemcpy3DPeer", "const void* copy", 4000, "peer_copy_3d(copy)", twin=7000),
    *_work("cuMemcpy3DPeerAsync", "const void* copy, void* stream", 4000, "peer_copy_3d(copy)", twin=7000),
    *_work(
        "cuMemcpyBatchAsync",
        _BATCH + ", size_t* failed, void* stream",
        12080,
        "copy_batch(targets, sources, sizes, count)",
        twin=12080,
    ),
    *_work(
        "cuMemcpyBatchAsync_v2",
        _BATCH + ", void* stream",
        13000,
        "copy_batch(targets, sources, sizes, count)",
        base="cuMemcpyBatchAsync",
        twin=13000,
    ),
    *_work(
        "cuMemcpy3DBatchAsync",
        "size_t count, void* copies, size_t* failed, unsigned long long flags, void* stream",
        12080,
        "copy_3d_batch(copies, count)",
        twin=12080,
    ),
    *_work(
        "cuMemcpy3DBatchAsync_v2",
        "size_t count, void* copies, unsigned long long flags, void* stream",
        13000,
        "copy_3d_batch(copies, count)",
        base="cuMemcpy3DBatchAsync",
        twin=13000,
    ),
    *_work(
        "cuMemcpyWithAttributesAsync",
        _IN_DEVICE + ", void* attributes, void* stream",
        13020,
        "copy_between(target, source, size)",
        twin=13020,
    ),
    *_work(
        "cuMemcpy3DWithAttributesAsync",
        "void* copy, unsigned long long flags, void* stream",
        13020,
        "copy_3d_batch(copy, 1)",
        twin=13020,
    ),
    *_work(
        "cuFabricCpyBatchAsync",
        "size_t count, void* copies, unsigned long long flags, void* stream",
        13050,
        "fabric_copies(copies, count)",
        twin=13050,
    ),
    *_work(
        "cuMemPrefetchAsync",
        "unsigned long long address, size_t size, int device, void* stream",
        8000,
        "prefetch(size)",
        twin=8000,
    ),
    *_work(  # CUmemLocation, by value: two ints, which travel in one register
        "cuMemPrefetchAsync_v2",
        "unsigned long long address, size_t size, unsigned long long place, unsigned flags, void* stream",
        12020,
        "prefetch(size)",
        base="cuMemPrefetchAsync",
        twin=12020,
    ),
    *_work(
        "cuMemPrefetchBatchAsync",
        _PLACES + ", unsigned long long flags, void* stream",
        13000,
        "prefetch_batch(sizes, count)",
        twin=13000,
    ),
    *_work(
        "cuMemDiscardAndPrefetchBatchAsync",
        _PLACES + ", unsigned long long flags, void* stream",
        13000,
        "prefetch_batch(sizes, count)",
        twin=13000,
    ),
    # --- the current context changes, and with it the default stream (app_threads.pyx)
    *_turn("cuCtxSetCurrent", "void* context", 4000),
    *_turn("cuCtxPushCurrent", "void* context", 2000),
    *_turn("cuCtxPushCurrent_v2", "void* context", 4000, base="cuCtxPushCurrent"),
    *_turn("cuCtxPopCurrent", "void** context", 2000),
    *_turn("cuCtxPopCurrent_v2", "void** context", 4000, base="cuCtxPopCurrent"),
    *_made("cuCtxCreate", "void** context, unsigned flags, int device", 2000),
    *_made("cuCtxCreate_v2", "void** context, unsigned flags, int device", 3020, base="cuCtxCreate"),
    *_made(
        "cuCtxCreate_v3",
        "void** context, void* affinities, int count, unsigned flags, int device",
        11040,
        base="cuCtxCreate",
    ),
    *_made("cuCtxCreate_v4", "void** context, void* params, unsigned flags, int device", 12050, base="cuCtxCreate"),
    *_made("cuGLCtxCreate", "void** context, unsigned flags, int device", 2000),
    *_made("cuGLCtxCreate_v2", "void** context, unsigned flags, int device", 3020, base="cuGLCtxCreate"),
    *_made("cuVDPAUCtxCreate", _VDPAU, 3010),
    *_made("cuVDPAUCtxCreate_v2", _VDPAU, 3020, base="cuVDPAUCtxCreate"),
    *_made("cuGreenCtxCreate", "void** green, void* description, int device, unsigned flags", 12040),
    # --- what an executable graph does is changed (endings.pyx)
    *_update("cuGraphExecUpdate", "void* executable, void* graph, void** wrong, int* answer", 10020),
    *_update("cuGraphExecUpdate_v2", "void* executable, void* graph, void* answer", 12000, base="cuGraphExecUpdate"),
    *_update("cuGraphExecKernelNodeSetParams", _NODE, 10010),
    *_update(
        "cuGraphExecKernelNodeSetParams_v2",
        _NODE,
        12000,
        base="cuGraphExecKernelNodeSetParams",
    ),
    *_update("cuGraphExecMemcpyNodeSetParams", _NODE + ", void* context", 10020),
    *_update("cuGraphExecMemsetNodeSetParams", _NODE + ", void* context", 10020),
    *_update("cuGraphExecChildGraphNodeSetParams", "void* executable, void* node, void* graph", 11010),
    *_update("cuGraphExecNodeSetParams", "void* executable, void* node, void* params", 12020),
    *_update("cuGraphExecHostNodeSetParams", _NODE, 10020),
    *_update("cuGraphExecBatchMemOpNodeSetParams", _NODE, 11070),
    *_update("cuGraphExecEventRecordNodeSetEvent", "void* executable, void* node, void* event", 11010),
    *_update("cuGraphExecEventWaitNodeSetEvent", "void* executable, void* node, void* event", 11010),
    *_update("cuGraphExecExternalSemaphoresSignalNodeSetParams", _NODE, 11020),
    *_update("cuGraphExecExternalSemaphoresWaitNodeSetParams", _NODE, 11020),
    *_update("cuGraphNodeSetEnabled", "void* executable, void* node, unsigned enabled", 11060),
    # --- captures, and handles that die (wrappers.pyx, contexts.pyx)
    *_cuda("cuStreamBeginCapture", "void* stream", 10000, twin=10000),
    *_cuda("cuStreamBeginCapture_v2", "void* stream, int mode", 10010, base="cuStreamBeginCapture", twin=10010),
    *_cuda(
        "cuStreamBeginCaptureToGraph",
        "void* stream, void* graph, const void* nodes, const void* edges, size_t count, int mode",
        12030,
        twin=12030,
    ),
    *_cuda(
        "cuStreamBeginRecaptureToGraph",
        "void* stream, int mode, void* graph, void* differs, void* data",
        13030,
        twin=13030,
    ),
    *_cuda("cuStreamEndCapture", "void* stream, void** graph", 10000, twin=10000),
    *_cuda("cuStreamDestroy", "void* stream", 2000),
    *_cuda("cuStreamDestroy_v2", "void* stream", 4000, base="cuStreamDestroy"),
    *_cuda("cuGraphExecDestroy", "void* graph", 10000),
    *_cuda("cuModuleUnload", "void* module", 2000),
    *_cuda("cuLibraryUnload", "void* library", 12000),
    *_cuda("cuCtxDestroy", "void* context", 2000),
    *_cuda("cuCtxDestroy_v2", "void* context", 4000, base="cuCtxDestroy"),
    *_cuda("cuCtxDetach", "void* context", 2000),
    *_cuda("cuGreenCtxDestroy", "void* green", 12040),
    *_cuda("cuDevicePrimaryCtxRetain", "void** context, int device", 7000),
    *_cuda("cuDevicePrimaryCtxRelease", "int device", 7000),
    *_cuda("cuDevicePrimaryCtxRelease_v2", "int device", 11000, base="cuDevicePrimaryCtxRelease"),
    *_cuda("cuDevicePrimaryCtxReset", "int device", 7000),
    *_cuda("cuDevicePrimaryCtxReset_v2", "int device", 11000, base="cuDevicePrimaryCtxReset"),
    # --- memory (memory.pyx)
    *_cuda("cuMemAlloc", "unsigned* pointer, unsigned size", 2000),
    *_cuda("cuMemAlloc_v2", "unsigned long long* pointer, size_t size", 3020, base="cuMemAlloc"),
    *_cuda(
        "cuMemAllocPitch", "unsigned* pointer, unsigned* pitch, unsigned width, unsigned height, unsigned element", 2000
    ),
    *_cuda(
        "cuMemAllocPitch_v2",
        "unsigned long long* pointer, size_t* pitch, size_t width, size_t height, unsigned element",
        3020,
        base="cuMemAllocPitch",
    ),
    *_cuda("cuMemAllocManaged", "unsigned long long* pointer, size_t size, unsigned flags", 6000),
    *_cuda("cuMemAllocAsync", "unsigned long long* pointer, size_t size, void* stream", 11020, twin=11020),
    *_cuda(
        "cuMemAllocFromPoolAsync",
        "unsigned long long* pointer, size_t size, void* pool, void* stream",
        11020,
        twin=11020,
    ),
    # --- stream-ordered memory (pools.pyx)
    *_cuda("cuMemPoolCreate", "void** pool, const void* properties", 11020),
    *_cuda("cuMemPoolDestroy", "void* pool", 11020),
    *_found("cuMemGetDefaultMemPool", "void** pool, const void* place, int type", 13000),
    *_found("cuMemGetMemPool", "void** pool, const void* place, int type", 13000),
    *_after("cuMemPoolGetAttribute", "void* pool, int which, void* value", 11020, "pool_attribute(pool, which, value)"),
    *_after("cuMemPoolSetAttribute", "void* pool, int which, void* value", 11020, "pool_set(pool, which, value)"),
    *_after("cuMemPoolTrimTo", "void* pool, size_t keep", 11020, "pool_trimmed(keep)"),
    *_cuda("cuDeviceGetMemPool", "void** pool, int device", 11020, intercepted=False),
    *_cuda("cuDeviceGetDefaultMemPool", "void** pool, int device", 11020, intercepted=False),
    *_shrinks("cuStreamSynchronize", "void* stream", 2000, twin=7000),
    *_shrinks("cuEventSynchronize", "void* event", 2000),
    *_shrinks("cuCtxSynchronize", "void", 2000),
    *_shrinks("cuCtxSynchronize_v2", "void* context", 13000, base="cuCtxSynchronize"),
    # --- memory of graphs (graphmemory.pyx)
    *_cuda("cuGraphInstantiate", _INSTANTIATE, 10000),
    *_cuda("cuGraphInstantiate_v2", _INSTANTIATE, 11000, base="cuGraphInstantiate"),
    *_cuda("cuGraphInstantiateWithFlags", "void** executable, void* graph, unsigned long long flags", 11040),
    *_cuda("cuGraphInstantiateWithParams", "void** executable, void* graph, void* params", 12000, twin=12000),
    *_cuda("cuGraphUpload", "void* executable, void* stream", 11010, twin=11010),
    *_cuda("cuGraphGetNodes", "void* graph, void** nodes, size_t* count", 10000, intercepted=False),
    *_cuda("cuGraphNodeGetType", "void* node, int* type", 10000, intercepted=False),
    *_cuda("cuGraphMemAllocNodeGetParams", "void* node, void* params", 11040, intercepted=False),
    *_cuda("cuGraphMemFreeNodeGetParams", "void* node, unsigned long long* address", 11040, intercepted=False),
    *_cuda("cuGraphChildGraphNodeGetGraph", "void* node, void** graph", 10000, intercepted=False),
    *_cuda("cuDeviceGetGraphMemAttribute", "int device, int which, void* value", 11040, intercepted=False),
    *_cuda("cuDeviceGraphMemTrim", "int device", 11040),
    # --- arrays (arrays.pyx)
    *_cuda("cuArrayCreate", "void** array, const void* descriptor", 2000),
    *_cuda("cuArrayCreate_v2", "void** array, const void* descriptor", 3020, base="cuArrayCreate"),
    *_cuda("cuArray3DCreate", "void** array, const void* descriptor", 2000),
    *_cuda("cuArray3DCreate_v2", "void** array, const void* descriptor", 3020, base="cuArray3DCreate"),
    *_cuda("cuMipmappedArrayCreate", "void** array, const void* descriptor, unsigned levels", 5000),
    *_cuda("cuArrayDestroy", "void* array", 2000),
    *_cuda("cuMipmappedArrayDestroy", "void* array", 5000),
    *_cuda("cuArrayGetMemoryRequirements", "void* needs, void* array, int device", 11060, intercepted=False),
    *_cuda("cuMipmappedArrayGetMemoryRequirements", "void* needs, void* array, int device", 11060, intercepted=False),
    # --- words of memory that streams read and write (transfers.pyx)
    *_words("cuStreamWaitValue32", _WORD, 8000),
    *_words("cuStreamWriteValue32", _WORD, 8000),
    *_words("cuStreamWaitValue64", _LONG_WORD, 9000),
    *_words("cuStreamWriteValue64", _LONG_WORD, 9000),
    *_words("cuStreamBatchMemOp", "unsigned count, void* operations, unsigned flags", 8000),
    # --- memory, again
    *_cuda("cuMemFree", "unsigned pointer", 2000),
    *_cuda("cuMemFree_v2", "unsigned long long pointer", 3020, base="cuMemFree"),
    *_cuda("cuMemFreeAsync", "unsigned long long pointer, void* stream", 11020, twin=11020),
    *_cuda(
        "cuMemCreate",
        "unsigned long long* handle, size_t size, const void* properties, unsigned long long flags",
        10020,
    ),
    *_cuda("cuMemRelease", "unsigned long long handle", 10020),
    *_cuda(
        "cuMemMap",
        "unsigned long long pointer, size_t size, size_t offset, unsigned long long handle, unsigned long long flags",
        10020,
    ),
    *_cuda("cuMemUnmap", "unsigned long long pointer, size_t size", 10020),
    *_cuda("cuMemRetainAllocationHandle", "unsigned long long* handle, void* address", 11000),
    *_cuda(
        "cuMemGetAllocationPropertiesFromHandle",
        "void* properties, unsigned long long handle",
        10020,
    ),
    *_cuda("cuMemMapArrayAsync", "void* infos, unsigned count, void* stream", 11010, twin=11010),
    *_cuda(
        "cuMulticastBindMem",
        "unsigned long long multicast, size_t place, unsigned long long handle, size_t offset, size_t size, "
        "unsigned long long flags",
        12010,
    ),
    *_cuda(
        "cuMulticastBindMem_v2",
        "unsigned long long multicast, int device, size_t place, unsigned long long handle, size_t offset, "
        "size_t size, unsigned long long flags",
        13010,
        base="cuMulticastBindMem",
    ),
    # ... which can leave the card (program_memory.pyx)
    *_cuda(
        "cuMemSetAccess",
        "unsigned long long address, size_t size, const void* accesses, size_t count",
        10020,
    ),
    *_cuda("cuMemGetAccess", "unsigned long long* flags, const void* location, unsigned long long address", 10020),
    *_cuda(
        "cuMemExportToShareableHandle",
        "void* shareable, unsigned long long handle, int type, unsigned long long flags",
        10020,
    ),
    # ... which other processes have (shared.pyx)
    *_cuda("cuMemImportFromShareableHandle", "unsigned long long* handle, void* shareable, int type", 10020),
    # ... as the driver would answer of memory that was not made to leave the card (attributes.pyx)
    *_cuda(
        "cuMemGetAddressRange_v2",
        "unsigned long long* base, size_t* size, unsigned long long address",
        3020,
        base="cuMemGetAddressRange",
    ),
    *_cuda("cuPointerGetAttribute", "void* value, int which, unsigned long long address", 4000),
    *_cuda("cuPointerGetAttributes", "unsigned count, int* which, void** values, unsigned long long address", 7000),
    *_cuda("cuIpcGetMemHandle", "void* handle, unsigned long long address", 4010),
    *_cuda(
        "cuMemGetHandleForAddressRange",
        "void* handle, unsigned long long address, size_t size, int type, unsigned long long flags",
        11070,
    ),
    *_cuda("cuMemGetInfo", "unsigned* free, unsigned* total", 2000),
    *_cuda("cuMemGetInfo_v2", "size_t* free, size_t* total", 3020, base="cuMemGetInfo"),
    *_cuda("cuDeviceTotalMem", "unsigned* bytes, int device", 2000),
    *_cuda("cuDeviceTotalMem_v2", "size_t* bytes, int device", 3020, base="cuDeviceTotalMem"),
    # --- NVML (nvml.pyx)
    *_nvml("nvmlDeviceGetCount", "unsigned* count"),
    *_nvml("nvmlDeviceGetCount_v2", "unsigned* count"),
    *_nvml("nvmlDeviceGetHandleByIndex", "unsigned index, void** device"),
    *_nvml("nvmlDeviceGetHandleByIndex_v2", "unsigned index, void** device"),
    *_nvml("nvmlDeviceGetIndex", "void* device, unsigned* index"),
    *_nvml("nvmlDeviceGetMemoryInfo", "void* device, void* memory"),
    *_nvml("nvmlDeviceGetMemoryInfo_v2", "void* device, void* memory"),
    *_nvml_lists("nvmlDeviceGetComputeRunningProcesses"),
    *_nvml_lists("nvmlDeviceGetGraphicsRunningProcesses"),
    *_nvml_lists("nvmlDeviceGetMPSComputeRunningProcesses"),
    *_nvml(
        "nvmlDeviceGetProcessUtilization",
        "void* device, void* samples, unsigned* count, unsigned long long since",
    ),
    *_nvml("nvmlDeviceGetRunningProcessDetailList", "void* device, void* list"),
    *_nvml("nvmlDeviceGetProcessesUtilizationInfo", "void* device, void* list"),
    *_nvml("nvmlDeviceGetAccountingPids", "void* device, unsigned* count, unsigned* pids"),
    *_nvml("nvmlDeviceGetAccountingStats", "void* device, unsigned pid, void* stats"),
    *_nvml("nvmlDeviceGetAccountingStats_v2", "void* device, void* stats"),
    *_nvml("nvmlDeviceGetEncoderSessions", "void* device, unsigned* count, void* infos"),
    *_nvml("nvmlDeviceGetFBCSessions", "void* device, unsigned* count, void* infos"),
    *_nvml("nvmlDeviceGetConfComputeProtectedMemoryUsage", "void* device, void* memory"),
    # --- calls in which a thread may have to wait; first those that the hook makes, too
    *_bare("cuStreamQuery", "void* stream", 2000, twin=7000),
    *_bare("cuEventCreate", "void** event, unsigned flags", 2000),
    *_bare("cuEventDestroy_v2", "void* event", 4000, base="cuEventDestroy"),
    *_bare("cuEventRecord", "void* event, void* stream", 2000, twin=7000),
    *_bare("cuEventQuery", "void* event", 2000),
    *_bare("cuEventElapsedTime", "float* ms, void* start, void* end", 2000),
    *_bare(
        "cuMemHostRegister_v2",
        "void* memory, size_t size, unsigned flags",
        6050,
        base="cuMemHostRegister",
    ),
    *_bare("cuMemHostUnregister", "void* memory", 4000),
    *_bare(
        "cuMemAddressReserve",
        "unsigned long long* address, size_t size, size_t alignment, unsigned long long at, unsigned long long flags",
        10020,
    ),
    *_bare("cuMemAddressFree", "unsigned long long address, size_t size", 10020),
    *_bare("cuStreamCreate", "void** stream, unsigned flags", 2000),
    *_bare("cuCtxRecordEvent", "void* context, void* event", 12050),
    *(s for name, arguments, base, version, twin in calls() for s in _bare(name, arguments, version, base, twin)),
    # --- called by the hook, not intercepted
    *_cuda("cuThreadExchangeStreamCaptureMode", "int* mode", 10010, intercepted=False),
    *_cuda("cuStreamIsCapturing", "void* stream, int* status", 10000, twin=10000, intercepted=False),
    *_cuda("cuStreamGetCtx", "void* stream, void** context", 9020, intercepted=False),
    *_cuda("cuStreamGetFlags", "void* stream, unsigned* flags", 5050, intercepted=False),
    *_cuda(
        "cuMemHostGetDevicePointer_v2",
        "unsigned long long* address, void* memory, unsigned flags",
        3020,
        base="cuMemHostGetDevicePointer",
        intercepted=False,
    ),
    *_cuda("cuCtxGetCurrent", "void** context", 4000, intercepted=False),
    *_cuda("cuCtxGetDevice", "int* device", 2000, intercepted=False),
    *_cuda("cuCtxFromGreenCtx", "void** context, void* green", 12040, intercepted=False),
    *_cuda("cuDeviceGet", "int* device, int ordinal", 2000, intercepted=False),
    *_cuda("cuDeviceGetAttribute", "int* value, int attribute, int device", 2000, intercepted=False),
    *_cuda("cuDevicePrimaryCtxGetState", "int device, unsigned* flags, int* active", 7000, intercepted=False),
    *_nvml("nvmlDeviceGetUUID", "void* device, char* uuid, unsigned length", intercepted=False),
    *_nvml("nvmlDeviceGetHandleByUUID", "const char* uuid, void** device", intercepted=False),
)


def intercepted() -> tuple[Symbol, ...]:
    """The functions that the hook exports, in the order of the table (sorted by name)."""
    return tuple(sorted((s for s in SYMBOLS if s.intercepted), key=lambda s: s.name))
