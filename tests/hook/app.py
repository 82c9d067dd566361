"""The programs of the hook's tests: a little CUDA through ctypes, run in processes that have the hook preloaded."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import BLOCKS_PER_SM, PTX, THREADS

LEGACY = 1
PER_THREAD = 2
NS_PER_ITERATION = 282  # of the simulated compute kernel, when it fills the GPU
CAPTURE_GLOBAL = 0


class App(Gpu):
    """A primary context on one device, one non-blocking stream, and kernels of a chosen length."""

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(PTX, ordinal)
        self.blocks = self.sm_count * BLOCKS_PER_SM

    def kernel(self, ms: float, stream: Any = None) -> Kernel:
        iterations = ctypes.c_uint32(int(ms * 1e6 / NS_PER_ITERATION))
        kernel = Kernel(self, "compute", self.blocks, THREADS, (c_uint64(0), iterations))
        if stream is not None:
            kernel.arguments = (*kernel.arguments[:8], stream, *kernel.arguments[9:])
        return kernel

    def new_stream(self, flags: int = 0) -> c_void_p:
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), flags)
        return stream

    def green_context(self) -> tuple[c_void_p, c_void_p]:
        """(CUgreenCtx, its CUcontext) with all SMs of the device."""
        resource, description = ctypes.create_string_buffer(144), c_void_p()
        self.call("cuDeviceGetDevResource", self.device, resource, 1)
        self.call("cuDevResourceGenerateDesc", byref(description), resource, 1)
        green, context = c_void_p(), c_void_p()
        self.call("cuGreenCtxCreate", byref(green), description, self.device, 1)
        self.call("cuCtxFromGreenCtx", byref(context), green)
        return green, context

    def result(self, name: str, *arguments: Any) -> int:
        """Call the driver; the CUresult."""
        code: int = getattr(self.library, name)(*arguments)
        return code


def create_physical(app: App, size: int, device: int = 0, handle_types: int = 0, flags: int = 0) -> tuple[int, int]:
    """(CUresult, handle) of cuMemCreate. ``flags``: compression, RDMA and usage."""

    class Properties(ctypes.Structure):
        _fields_ = [
            ("type", c_int),
            ("handle_types", c_int),
            ("location_type", c_int),
            ("location_id", c_int),
            ("win32", c_void_p),
            ("flags", c_uint64),
        ]

    handle = c_uint64()
    properties = Properties(1, handle_types, 1, device, None, flags)
    code = app.result("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
    return code, handle.value


def proc_address(library: ctypes.CDLL, name: str, version: int, flags: int = 0) -> int:
    """What cuGetProcAddress_v2 answers; 0 if nothing."""
    library.cuGetProcAddress_v2.argtypes = (ctypes.c_char_p, POINTER(c_void_p), c_int, c_uint64, c_void_p)
    address = c_void_p()
    library.cuGetProcAddress_v2(name.encode(), byref(address), version, flags, None)
    return address.value or 0
