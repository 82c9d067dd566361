"""What a program does with memory, each as a whole: it begins and ends with nothing of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ushort, c_void_p
from typing import Final

from tests.hook.app import App, create_physical

MIB: Final = 1 << 20
SIZES: Final = (70 * MIB, 5 * MIB + 3, 1000)
"""Several chunks, of which the last is smaller; no whole pieces; a part of a piece."""
ARRAY_FLOAT: Final = 0x20
READ_WRITE: Final = 3


def linear(app: App) -> None:
    for address in [app.allocate(size) for size in SIZES]:
        assert address is not None
        app.free(address)


def pitched(app: App) -> None:
    for width, height in ((1000, 9000), (10, 10)):
        address, pitch = c_uint64(), c_size_t()
        app.call("cuMemAllocPitch_v2", byref(address), byref(pitch), c_size_t(width), c_size_t(height), c_uint(4))
        app.free(address.value)


def managed(app: App) -> None:
    address = c_uint64()
    app.call("cuMemAllocManaged", byref(address), c_size_t(SIZES[1]), c_uint(1))
    app.free(address.value)


def pooled(app: App) -> None:
    """Stream-ordered; the pool keeps what it has until it is trimmed."""
    pool, threshold, addresses = c_void_p(), c_uint64(1 << 40), [c_uint64() for _ in SIZES]
    app.call("cuDeviceGetDefaultMemPool", byref(pool), app.device)
    app.call("cuMemPoolSetAttribute", pool, c_int(4), byref(threshold))
    for address, size in zip(addresses, SIZES, strict=True):
        app.call("cuMemAllocAsync", byref(address), c_size_t(size), app.stream)
    for address in addresses:
        app.call("cuMemFreeAsync", address, app.stream)
    app.call("cuStreamSynchronize", app.stream)
    app.call("cuMemPoolTrimTo", pool, c_size_t(0))


class Access(ctypes.Structure):
    _fields_ = (("type", c_int), ("device", c_int), ("flags", c_int))


def mapped(app: App, size: int) -> int:
    """The address of memory that the program makes and maps itself. Its handle is released."""
    place = c_uint64()
    code, handle = create_physical(app, size)
    assert code == 0
    app.call("cuMemAddressReserve", byref(place), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    app.call("cuMemMap", place, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
    app.call("cuMemSetAccess", place, c_size_t(size), byref(Access(1, app.device, READ_WRITE)), c_size_t(1))
    app.call("cuMemRelease", c_uint64(handle))
    return place.value


def physical(app: App) -> None:
    """A handle, two mappings of it, and nothing of it any more."""
    size, place = 4 * MIB, c_uint64()
    code, handle = create_physical(app, size)
    assert code == 0
    app.call("cuMemAddressReserve", byref(place), c_size_t(2 * size), c_size_t(0), c_uint64(0), c_uint64(0))
    for at in (place.value, place.value + size):
        app.call("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
    app.call("cuMemSetAccess", place, c_size_t(2 * size), byref(Access(1, app.device, READ_WRITE)), c_size_t(1))
    app.call("cuMemRelease", c_uint64(handle))
    app.call("cuMemUnmap", place, c_size_t(2 * size))
    app.call("cuMemAddressFree", place, c_size_t(2 * size))


class Flat(ctypes.Structure):
    _fields_ = (("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint))


def array(app: App) -> None:
    handle = c_void_p()
    app.call("cuArrayCreate_v2", byref(handle), byref(Flat(1000, 1000, ARRAY_FLOAT, 1)))
    app.call("cuArrayDestroy", handle)


class PoolProperties(ctypes.Structure):
    _fields_ = (
        *(("type", c_int), ("handles", c_int), ("location", c_int), ("id", c_int)),
        *(("security", c_void_p), ("most", c_size_t), ("usage", c_ushort), ("left", ctypes.c_ubyte * 54)),
    )


def own_pool(app: App) -> None:
    """It goes with all that it has."""
    pool, address = c_void_p(), c_uint64()
    app.call("cuMemPoolCreate", byref(pool), byref(PoolProperties(type=1, location=1, id=app.device)))
    app.call("cuMemAllocFromPoolAsync", byref(address), c_size_t(SIZES[1]), pool, app.stream)
    app.call("cuMemFreeAsync", address, app.stream)
    app.call("cuMemPoolDestroy", pool)
    app.synchronize()


def graph(app: App) -> None:
    """Memory that a graph takes and gives back when it is launched."""
    made, instance, address = c_void_p(), c_void_p(), c_uint64()
    app.call("cuStreamBeginCapture_v2", app.stream, 2)
    app.call("cuMemAllocAsync", byref(address), c_size_t(SIZES[1]), app.stream)
    app.call("cuMemFreeAsync", address, app.stream)
    app.call("cuStreamEndCapture", app.stream, byref(made))
    app.call("cuGraphInstantiateWithFlags", byref(instance), made, c_uint64(0))
    app.call("cuGraphLaunch", instance, app.stream)
    app.call("cuStreamSynchronize", app.stream)
    app.call("cuGraphExecDestroy", instance)
    app.call("cuGraphDestroy", made)
    app.call("cuDeviceGraphMemTrim", app.device)


def context(app: App) -> None:
    """It takes its memory along."""
    before, made = c_void_p(), c_void_p()
    app.call("cuCtxGetCurrent", byref(before))
    app.call("cuCtxCreate_v2", byref(made), c_uint(0), app.device)
    for size in SIZES[1:]:
        assert app.allocate(size) is not None
    app.call("cuCtxDestroy_v2", made)
    app.call("cuCtxSetCurrent", before)


OPERATIONS: Final[dict[str, Callable[[App], None]]] = {
    made.__name__: made for made in (linear, pitched, managed, pooled, own_pool, physical, array, graph, context)
}
