"""The part of the CUDA driver API that the workload uses, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

OUT_OF_MEMORY = 2
NOT_READY = 600
MULTIPROCESSOR_COUNT = 16
NON_BLOCKING = 1

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


NO_DRIVER = -1
"""``CudaError.code`` where there is no driver to answer."""


class CudaError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name


class Kernel:
    """A function with its grid and parameters prepared once, so that a launch is a single foreign call."""

    def __init__(self, gpu: Gpu, name: str, blocks: int, threads: int, parameters: Sequence[ctypes._SimpleCData[int]]):
        function = c_void_p()
        gpu.call("cuModuleGetFunction", byref(function), gpu.module, name.encode())
        self.parameters = parameters
        self._pointers = (c_void_p * max(1, len(parameters)))(*(ctypes.addressof(p) for p in parameters))
        self.arguments = (function, blocks, 1, 1, threads, 1, 1, 0, gpu.stream, self._pointers, None)
        self._launch = gpu.library.cuLaunchKernel
        self._gpu = gpu

    def launch(self) -> None:
        code = self._launch(*self.arguments)
        if code:
            self._gpu.fail("cuLaunchKernel", code)


class Gpu:
    """One visible device: its primary context, one stream, and the workload's module. Owns nothing else."""

    def __init__(self, ptx: str, ordinal: int = 0) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("dlopen libcuda.so.1", NO_DRIVER, str(error)) from error
        for name, arguments in _SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
        device = c_int()
        context = c_void_p()
        self.module = c_void_p()
        self.stream = c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), ordinal)
        self.device = device.value
        self.call("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self.context = context
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", byref(self.module), ptx.encode())
        self.call("cuStreamCreate", byref(self.stream), NON_BLOCKING)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver; CudaError if it refuses."""
        code = getattr(self.library, name)(*arguments)
        if code:
            self.fail(name, code)

    def fail(self, call: str, code: int) -> None:
        text = c_char_p()
        self.library.cuGetErrorName(code, byref(text))
        raise CudaError(call, code, text.value.decode() if text.value else "unknown result")

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, self.device)
        return text.value.decode()

    @property
    def sm_count(self) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), MULTIPROCESSOR_COUNT, self.device)
        return value.value

    @property
    def total_bytes(self) -> int:
        size = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(size), self.device)
        return size.value

    def memory_info(self) -> tuple[int, int]:
        """(free, total) in bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int | None:
        """Device memory; None where it is refused as out of memory."""
        address = c_uint64()
        code = self.library.cuMemAlloc_v2(byref(address), size)
        if code == OUT_OF_MEMORY:
            return None
        if code:
            self.fail("cuMemAlloc_v2", code)
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", buffer, address, size)
        return buffer.raw

    def clear(self, address: int, size: int) -> None:
        self.call("cuMemsetD8_v2", address, 0, size)

    def event(self) -> c_void_p:
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0)
        return event

    def record(self, event: c_void_p) -> None:
        self.call("cuEventRecord", event, self.stream)

    def wait(self, event: c_void_p) -> None:
        self.call("cuEventSynchronize", event)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def elapsed_ns(self, first: c_void_p, second: c_void_p) -> int:
        ms = c_float()
        self.call("cuEventElapsedTime", byref(ms), first, second)
        return int(ms.value * 1e6)
