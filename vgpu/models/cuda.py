"""Memory that processes share by the CUDA driver's handles, through ctypes. PyTorch is not needed."""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Final, Self

from vgpu.errors import ErrorCode, VgpuError
from vgpu.workload.driver import CudaError

OUT_OF_MEMORY: Final = 2
READ: Final = 1
READ_WRITE: Final = 3
_POSIX_DESCRIPTOR: Final = 1
_PINNED: Final = 1
_ON_DEVICE: Final = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location", _Location)),
        *(("security", c_void_p), ("flags", c_uint64)),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class Card:
    """A device of this process, and its primary context, which PyTorch uses, too. ``enter`` comes before memory."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise VgpuError(
                ErrorCode.UNAVAILABLE, f"there is no CUDA driver here: {error}", "run it in a vGPU: vgpuctl run"
            ) from error
        for name, arguments in _SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
        device = c_int()
        self.context: c_void_p | None = None
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), ordinal)
        self.ordinal = ordinal
        self.device = device.value

    @classmethod
    def of(cls, gpu_uuid: str, name: str) -> Self:
        """The device on which the model ``name`` is. ``VgpuError`` (invalid): this process does not have it."""
        first = cls()
        count = c_int()
        first.call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            card = first if ordinal == 0 else cls(ordinal)
            if card.uuid == gpu_uuid:
                return card
        raise VgpuError(
            ErrorCode.INVALID,
            f"the model {name} is on {gpu_uuid}, and this program has {first.uuid}",
            "start the program in a vGPU of the same GPU: vgpuctl run --gpu",
        )

    def result(self, name: str, *arguments: object) -> int:
        code: int = getattr(self.library, name)(*arguments)
        return code

    def call(self, name: str, *arguments: object) -> None:
        """``VgpuError`` if the driver refuses."""
        code = self.result(name, *arguments)
        if code:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the CUDA driver refused: {self.error(name, code)}")

    def error(self, name: str, code: int) -> CudaError:
        text = c_char_p()
        self.library.cuGetErrorName(code, byref(text))
        return CudaError(name, code, text.value.decode() if text.value else "unknown result")

    def enter(self) -> None:
        """Make the context current, in a thread that has none. The first call makes the context."""
        current = c_void_p()
        if self.context is None:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), self.device)
            self.context = context
        self.call("cuCtxGetCurrent", byref(current))
        if not current.value:
            self.call("cuCtxSetCurrent", self.context)

    @property
    def uuid(self) -> str:
        raw = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid", raw, self.device)
        return f"GPU-{uuid.UUID(bytes=raw.raw)}"

    @property
    def granularity(self) -> int:
        size = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(size), byref(self._properties()), 0)
        return size.value

    def memory_info(self) -> tuple[int, int]:
        """(free, total) in bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def _properties(self) -> _Properties:
        return _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, self.device), None, 0)

    def create(self, size: int) -> int | None:
        """A handle of physical memory; None where it is refused as out of memory."""
        handle = c_uint64()
        code = self.result("cuMemCreate", byref(handle), size, byref(self._properties()), 0)
        if code == OUT_OF_MEMORY:
            return None
        if code:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the CUDA driver refused: {self.error('cuMemCreate', code)}")
        return handle.value

    def exported(self, handle: int) -> int:
        """A descriptor, for other processes. The caller closes it."""
        descriptor = c_int(-1)
        self.call("cuMemExportToShareableHandle", byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        return descriptor.value

    def imported(self, descriptor: int) -> int:
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), descriptor, _POSIX_DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", handle)

    def copy_in(self, address: int, source: int, size: int) -> None:
        self.call("cuMemcpyHtoD_v2", address, source, size)

    def read(self, address: int, size: int) -> bytearray:
        data = bytearray(size)
        if size:
            self.call("cuMemcpyDtoH_v2", (ctypes.c_char * size).from_buffer(data), address, size)
        return data


class Mapping:
    """Physical memory at an address of this process. It is unmapped by ``close``, or with the last reference."""

    def __init__(self, card: Card, handle: int, size: int) -> None:
        """The caller keeps the handle, and may release it at once."""
        self.card, self.size, self._mapped = card, size, False
        address = c_uint64()
        card.call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self.address = address.value
        try:
            card.call("cuMemMap", self.address, size, 0, handle, 0)
            self._mapped = True
        finally:
            if not self._mapped:
                card.result("cuMemAddressFree", self.address, size)

    def allow(self, flags: int) -> bool:
        """Set the access, READ or READ_WRITE. False: the driver refuses."""
        access = _Access(_Location(_ON_DEVICE, self.card.device), flags)
        return self.card.result("cuMemSetAccess", self.address, self.size, byref(access), 1) == 0

    def close(self) -> None:
        """Idempotent. It waits for the GPU first, which may be reading."""
        if self._mapped:
            self._mapped = False
            self.card.enter()
            self.card.result("cuCtxSynchronize")
            self.card.result("cuMemUnmap", self.address, self.size)
            self.card.result("cuMemAddressFree", self.address, self.size)

    def __del__(self) -> None:
        try:
            self.close()
        except (VgpuError, AttributeError, TypeError):  # at the process's end the driver may be gone already
            return
