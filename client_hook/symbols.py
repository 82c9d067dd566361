"""The one list of driver functions that the hook intercepts or calls. Everything else is derived from it.

``cython_ext/generate_hook.py`` makes of it: the linker's export list, the table by which ``dlsym`` and
``cuGetProcAddress`` find a wrapper, and a typed call of the real function for each entry (``real_NAME``). The
wrappers themselves, functions called NAME, stand in ``cython_ext/hook/*.pyx``; the link fails if one is missing.

To intercept one more function: add a line here, write the function NAME there.

Names, versions and arguments: cuda.h and cudaTypedefs.h of CUDA 13.0, nvml.h. Arguments are written with plain C types
(handles are ``void*``, device pointers ``unsigned long long``, devices and enums ``int``): the hook is built without
NVIDIA's headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PER_THREAD = "_ptsz"
"""Suffix of the twin for which stream 0 is the calling thread's own default stream."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported function of ``library``.

    ``base`` and ``version`` are what one passes to ``cuGetProcAddress`` to get exactly this function (version 0: it
    cannot be asked for that way); ``per_thread`` then needs the flag for per-thread default streams.
    """

    library: str  # "cuda" or "nvml"
    name: str
    arguments: str  # C parameter list, or "void"
    base: str
    version: int
    per_thread: bool
    intercepted: bool

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(type, name) pairs."""
        if self.arguments == "void":
            return ()
        return tuple(
            (kind.strip(), name) for kind, _, name in (p.strip().rpartition(" ") for p in self.arguments.split(","))
        )


def _cuda(
    name: str, arguments: str, version: int, *, base: str = "", twin: int = 0, intercepted: bool = True
) -> Iterator[Symbol]:
    """The function and, where it takes a stream, its per-thread twin, known to cuGetProcAddress since version
    ``twin``."""
    base = base or name
    yield Symbol("cuda", name, arguments, base, version, False, intercepted)
    if twin:
        yield Symbol("cuda", name + PER_THREAD, arguments, base, twin, True, intercepted)


def _nvml(name: str, arguments: str, *, intercepted: bool = True) -> Iterator[Symbol]:
    yield Symbol("nvml", name, arguments, name, 0, False, intercepted)


_SHAPE = "unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared"
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
    # --- captures, and handles that die (wrappers.pyx)
    *_cuda("cuStreamBeginCapture", "void* stream", 10000, twin=10000),
    *_cuda("cuStreamBeginCapture_v2", "void* stream, int mode", 10010, base="cuStreamBeginCapture", twin=10010),
    *_cuda(
        "cuStreamBeginCaptureToGraph",
        "void* stream, void* graph, const void* nodes, const void* edges, size_t count, int mode",
        12030,
        twin=12030,
    ),
    *_cuda("cuStreamEndCapture", "void* stream, void** graph", 10000, twin=10000),
    *_cuda("cuStreamDestroy", "void* stream", 2000),
    *_cuda("cuStreamDestroy_v2", "void* stream", 4000, base="cuStreamDestroy"),
    *_cuda("cuGraphExecDestroy", "void* graph", 10000),
    *_cuda("cuModuleUnload", "void* module", 2000),
    *_cuda("cuLibraryUnload", "void* library", 12000),
    *_cuda("cuCtxDestroy", "void* context", 2000),
    *_cuda("cuCtxDestroy_v2", "void* context", 4000, base="cuCtxDestroy"),
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
    # --- called by the hook, not intercepted
    *_cuda("cuThreadExchangeStreamCaptureMode", "int* mode", 10010, intercepted=False),
    *_cuda("cuStreamIsCapturing", "void* stream, int* status", 10000, twin=10000, intercepted=False),
    *_cuda("cuStreamQuery", "void* stream", 2000, twin=7000, intercepted=False),
    *_cuda("cuStreamGetFlags", "void* stream, unsigned* flags", 7000, intercepted=False),
    *_cuda("cuEventCreate", "void** event, unsigned flags", 2000, intercepted=False),
    *_cuda("cuEventDestroy_v2", "void* event", 4000, base="cuEventDestroy", intercepted=False),
    *_cuda("cuEventRecord", "void* event, void* stream", 2000, intercepted=False),
    *_cuda("cuEventQuery", "void* event", 2000, intercepted=False),
    *_cuda("cuEventElapsedTime", "float* ms, void* start, void* end", 2000, intercepted=False),
    *_cuda(
        "cuStreamWaitValue32_v2",
        "void* stream, unsigned long long address, unsigned value, unsigned flags",
        11070,
        base="cuStreamWaitValue32",
        intercepted=False,
    ),
    *_cuda(
        "cuMemHostRegister_v2",
        "void* memory, size_t size, unsigned flags",
        6050,
        base="cuMemHostRegister",
        intercepted=False,
    ),
    *_cuda(
        "cuMemHostGetDevicePointer_v2",
        "unsigned long long* address, void* memory, unsigned flags",
        3020,
        base="cuMemHostGetDevicePointer",
        intercepted=False,
    ),
    *_cuda("cuCtxGetCurrent", "void** context", 4000, intercepted=False),
    *_cuda("cuCtxSetCurrent", "void* context", 4000, intercepted=False),
    *_cuda("cuCtxGetDevice", "int* device", 2000, intercepted=False),
    *_cuda("cuDeviceGet", "int* device, int ordinal", 2000, intercepted=False),
    *_cuda("cuDeviceGetAttribute", "int* value, int attribute, int device", 2000, intercepted=False),
    *_cuda("cuDevicePrimaryCtxRetain", "void** context, int device", 7000, intercepted=False),
    *_cuda("cuDevicePrimaryCtxGetState", "int device, unsigned* flags, int* active", 7000, intercepted=False),
    *_nvml("nvmlDeviceGetUUID", "void* device, char* uuid, unsigned length", intercepted=False),
    *_nvml("nvmlDeviceGetHandleByUUID", "const char* uuid, void** device", intercepted=False),
)


def intercepted() -> tuple[Symbol, ...]:
    """The functions that the hook exports, in the order of the table (sorted by name)."""
    return tuple(sorted((s for s in SYMBOLS if s.intercepted), key=lambda s: s.name))
