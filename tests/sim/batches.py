"""Batches and arrays as a program: what is moved, and what is refused. ``python -m tests.sim.batches NAME``."""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.sim.cuda import Cuda

POINTER, ARRAY = 1, 2
SIZE = 1 << 16


class Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("id", c_int)]


class Operand(ctypes.Structure):
    _fields_ = [("kind", c_int), ("address", c_uint64), ("x", c_size_t), ("y", c_size_t), ("z", c_size_t)]


class BatchedCopy(ctypes.Structure):
    _fields_ = [
        *(("source", Operand), ("target", Operand)),
        *(("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)),
        *(("order", c_int), ("flags", c_uint)),
    ]


class ArrayShape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]


def copies() -> dict[str, object]:
    """Bytes through an array and back, two rows of it; then what is refused."""
    cuda = Cuda()
    source, target = (ctypes.create_string_buffer(SIZE) for _ in range(2))
    source.raw = bytes(range(256)) * (SIZE // 256)
    array, one = c_void_p(), cuda.new("cuMemAlloc_v2", c_size_t(SIZE))
    cuda.ok("cuArrayCreate_v2", byref(array), byref(ArrayShape(SIZE // 32, 2, 3, 4)))
    cuda.ok("cuMemcpyHtoA_v2", array, c_size_t(0), source, c_size_t(SIZE))
    at = Operand(ARRAY, array.value, 0, 0, 0)
    rows = BatchedCopy(at, Operand(POINTER, one, 0, 0, 0), SIZE // 32, 2, 1, 1, 0)

    def batch(change: BatchedCopy, flags: int = 0, stream: c_void_p = cuda.stream) -> list[int]:
        each, failed = (BatchedCopy * 2)(rows, change), c_size_t(7)
        code = cuda("cuMemcpy3DBatchAsync", c_size_t(2), each, byref(failed), c_uint64(flags), stream)
        return [code, failed.value]

    def changed(**fields: object) -> BatchedCopy:
        other = BatchedCopy.from_buffer_copy(rows)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    good = batch(rows)
    cuda.ok("cuStreamSynchronize", cuda.stream)
    cuda.ok("cuMemcpyDtoH_v2", target, c_uint64(one), c_size_t(SIZE))
    answers = {
        "good": good,
        "copied": target.raw == source.raw,
        "no order": batch(changed(order=0)),
        "empty": batch(changed(depth=0)),
        "beyond the array": batch(changed(height=3)),
        "no array": batch(changed(source=Operand(ARRAY, ctypes.addressof(source), 0, 0, 0))),
        "short rows": batch(changed(target=Operand(POINTER, one, 1, 0, 0))),
        "flags": batch(rows, flags=1),
        "default stream": batch(rows, stream=c_void_p(0)),
        "beyond": cuda("cuMemcpyAtoD_v2", c_uint64(one), array, c_size_t(1), c_size_t(SIZE)),
    }
    cuda.ok("cuArrayDestroy", array)
    return answers | {"destroyed": cuda("cuMemcpyAtoD_v2", c_uint64(one), array, c_size_t(0), c_size_t(1))}


def prefetches() -> dict[str, object]:
    cuda = Cuda()
    managed, plain = c_uint64(), cuda.new("cuMemAlloc_v2", c_size_t(SIZE))
    cuda.ok("cuMemAllocManaged", byref(managed), c_size_t(SIZE), 1)

    def batch(address: int, places: tuple[Location, ...] = (Location(1, 0),), first: tuple[int, ...] = (0,)) -> int:
        ranges = (c_uint64 * 2)(managed.value, address), (c_size_t * 2)(SIZE, SIZE), c_size_t(2)
        where = (Location * len(places))(*places), (c_size_t * len(first))(*first), c_size_t(len(places))
        answers = {
            cuda(name, *ranges, *where, c_uint64(0), cuda.stream)
            for name in ("cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync_ptsz")
        }
        (answer,) = answers  # both check the same
        return answer

    host = Location(2, 0)
    return {
        "one place": batch(managed.value),
        "two places": batch(managed.value, (Location(1, 0), host), (0, 1)),
        "not managed": batch(plain),
        "no such device": batch(managed.value, (Location(1, 9),)),
        "first place not at 0": batch(managed.value, (host,), (1,)),
        "places in disorder": batch(managed.value, (host, host), (0, 0)),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
