"""The driver as programs of the tests call it: by ctypes, by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_size_t, c_uint, c_uint64, c_void_p

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1
MIB = 1 << 20
PIECE = 2 * MIB

PTX = """
.version 7.0
.target sm_52
.address_size 64
// sim: work ns=p0 sms=p1
.visible .entry work(.param .u64 ns, .param .u32 sms) { ret; }
// sim: touch ns=p1
.visible .entry touch(.param .u64 target, .param .u64 ns) { ret; }
// sim: stamp ns=p1 interval=p0
.visible .entry stamp(.param .u64 target, .param .u64 ns) { ret; }
.visible .entry plain(.param .align 8 .b8 blob[20], .param .u32 n) { ret; }
"""


class Cuda:
    """The driver by name; every call answers with its CUresult, `ok` insists on success."""

    def __init__(self, context: bool = True) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.stream = c_void_p()
        self.module = c_void_p()
        if context:
            self.ok("cuInit", 0)
            self.context = c_void_p()
            self.ok("cuDevicePrimaryCtxRetain", byref(self.context), 0)
            self.ok("cuCtxSetCurrent", self.context)
            self.ok("cuModuleLoadData", byref(self.module), PTX.encode())
            self.ok("cuStreamCreate", byref(self.stream), NON_BLOCKING)

    def __call__(self, name: str, *arguments: object) -> int:
        converted = [c_uint64(a) if isinstance(a, int) and a > 0x7FFFFFFF else a for a in arguments]
        return int(getattr(self.library, name)(*converted))

    def ok(self, name: str, *arguments: object) -> None:
        code = self(name, *arguments)
        assert code == 0, f"{name} answered {code}"

    def new(self, name: str, *arguments: object) -> int:
        """A call whose first argument receives a handle."""
        out = c_void_p()
        self.ok(name, byref(out), *arguments)
        return out.value or 0

    def new_last(self, name: str, *arguments: object) -> int:
        """A call whose last argument receives a handle."""
        out = c_void_p()
        self.ok(name, *arguments, byref(out))
        return out.value or 0

    def launch(self, kernel: str, *values: int, stream: object = None, blocks: int = 132) -> int:
        function = c_void_p()
        self.ok("cuModuleGetFunction", byref(function), self.module, kernel.encode())
        kept = [c_uint64(v) for v in values]
        pointers = (c_void_p * len(kept))(*(ctypes.addressof(v) for v in kept))
        place = self.stream if stream is None else c_void_p(stream) if isinstance(stream, int) else stream
        return self("cuLaunchKernel", function, blocks, 1, 1, 32, 1, 1, 0, place, pointers, None)

    def held(self, stream: c_void_p) -> Callable[[], None]:
        """Nothing that comes after runs in the stream before what is returned was called."""
        page = self.new("cuMemHostAlloc", c_size_t(4096), 0)
        self.ok("cuStreamWaitValue32_v2", stream, c_uint64(page), 1, 0)

        def release() -> None:
            c_uint.from_address(page).value = 1

        return release

    def elapsed_ns(self, first: int, second: int) -> float:
        ms = c_float()
        self.ok("cuEventElapsedTime", byref(ms), c_void_p(first), c_void_p(second))
        return ms.value * 1e6
