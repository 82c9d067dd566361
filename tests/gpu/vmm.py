"""What the driver answers about memory of cuMemCreate, one line of JSON a question. Run plain, and in a vGPU with swap:
the answers are the same."""

from __future__ import annotations

import ctypes
import json
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX

PIECE = 2 << 20


class Properties(ctypes.Structure):
    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location_type", c_int), ("location_id", c_int)),
        *(("security", c_void_p), ("flags", c_uint64)),
    )


class Access(ctypes.Structure):
    _fields_ = (("type", c_int), ("device", c_int), ("flags", c_int))


class Questions:
    def __init__(self) -> None:
        self.gpu = Gpu(PTX)

    def ask(self, name: str, *arguments: Any) -> int:
        code: int = getattr(self.gpu.library, name)(*arguments)
        return code

    def make(self, size: int, handle_types: int = 0, **changes: int) -> tuple[int, int]:
        properties = Properties(type=1, location_type=1, location_id=0, handle_types=handle_types)
        for name, value in changes.items():
            setattr(properties, name, value)
        handle = c_uint64()
        return self.ask("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0)), handle.value

    def reserve(self, size: int) -> int:
        address = c_uint64()
        assert (
            self.ask("cuMemAddressReserve", byref(address), c_size_t(size), *([c_size_t(0)] + [c_uint64(0)] * 2)) == 0
        )
        return address.value

    def map(self, address: int, size: int, handle: int, offset: int = 0, flags: int = 0) -> int:
        numbers = c_uint64(address), c_size_t(size), c_size_t(offset), c_uint64(handle), c_uint64(flags)
        return self.ask("cuMemMap", *numbers)

    def allow(self, address: int, size: int, flags: int = 3) -> int:
        access = Access(1, 0, flags)
        return self.ask("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def access(self, address: int) -> tuple[int, int]:
        flags, place = c_uint64(77), (c_int * 2)(1, 0)
        return self.ask("cuMemGetAccess", byref(flags), byref(place), c_uint64(address)), flags.value

    def unmap(self, address: int, size: int) -> int:
        return self.ask("cuMemUnmap", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> int:
        return self.ask("cuMemRelease", c_uint64(handle))

    def attribute(self, which: int, address: int, relative_to: int = 0) -> tuple[int, int]:
        value = c_uint64(77)
        code = self.ask("cuPointerGetAttribute", byref(value), which, c_uint64(address))
        return code, value.value - relative_to if code == 0 else 0

    def range_of(self, address: int) -> tuple[int, int, int]:
        base, size = c_uint64(), c_size_t()
        code = self.ask("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return code, base.value - address if code == 0 else 0, size.value

    def properties(self, handle: int) -> tuple[int, list[int]]:
        found = Properties()
        code = self.ask("cuMemGetAllocationPropertiesFromHandle", byref(found), c_uint64(handle))
        return code, [found.type, found.handle_types, found.location_type, found.location_id, found.flags]

    def export(self, handle: int) -> int:
        descriptor = c_int(-1)
        code = self.ask("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0))
        if code == 0:
            os.close(descriptor.value)
        return code

    def content(self, address: int, size: int) -> list[int]:
        return sorted({byte for at in range(address, address + size, PIECE) for byte in self.gpu.read(at, 16)})

    def fill(self, address: int, size: int, byte: int) -> int:
        code = self.ask("cuMemsetD8_v2", c_uint64(address), byte, c_size_t(size))
        self.gpu.synchronize()
        return code


def say(name: str, *answers: object) -> None:
    print(json.dumps([name, *answers]), flush=True)


def mappings(q: Questions) -> None:
    size = 35 * PIECE
    code, handle = q.make(size)
    place = q.reserve(3 * size)
    say(
        "made", code, q.make(1000)[0], q.make(PIECE // 2)[0], q.make(PIECE, type=0)[0], q.make(PIECE, location_id=99)[0]
    )
    say("refused", q.map(place, 0, handle), q.map(place, size, handle, PIECE), q.map(place, size, handle, 0, 1))
    say("too large", q.map(place, 2 * size, handle), q.map(place + 4096, size, handle))
    say("mapped", q.map(place, size, handle), q.map(place, size, handle), q.map(place + size, size, handle))
    say("access", q.access(place), q.allow(place, 2 * size), q.access(place), q.access(place + 2 * size))
    say("content", q.fill(place, size, 7), q.content(place + size, size), q.fill(place + size, PIECE, 9))
    say("both", q.content(place, size), q.content(place + size, size))
    say("a part", q.allow(place, PIECE, 1), q.access(place), q.access(place + PIECE))
    say("all", q.allow(place, 2 * size), q.access(place))
    for which in (1, 2, 3, 4, 8, 9, 10, 13, 17):
        say(f"attribute {which}", q.attribute(which, place)[0], which == 1 or q.attribute(which, place)[1] & 0xFF)
    inside = place + 20 * PIECE + 5
    say("inside", q.range_of(inside), q.attribute(11, inside, place), q.attribute(12, inside))
    say("its mapping", q.attribute(19, inside, place), q.attribute(18, inside))
    retained = c_uint64()
    say("retained", q.ask("cuMemRetainAllocationHandle", byref(retained), c_void_p(inside)), retained.value == handle)
    say("retain nothing", q.ask("cuMemRetainAllocationHandle", byref(c_uint64()), c_void_p(place + 2 * size)))
    say("properties", q.properties(handle))
    say("released", q.release(handle), q.release(handle))
    say("unmapped in part", q.unmap(place, PIECE), q.unmap(place, size + PIECE))
    say("unmapped", q.unmap(place, 2 * size), q.unmap(place, size))
    say("freed", q.ask("cuMemAddressFree", c_uint64(place), c_size_t(3 * size)))


def part_of_a_handle(q: Questions) -> None:
    code, handle = q.make(4 * PIECE)
    place = q.reserve(4 * PIECE)
    say("part", code, q.map(place, PIECE, handle))
    say("released", q.release(handle), q.unmap(place, PIECE))


def exports(q: Questions) -> None:
    _, plain = q.make(PIECE)
    code, shared = q.make(20 * PIECE, handle_types=1)
    place = q.reserve(20 * PIECE)
    say("exported", code, q.export(plain) != 0, q.export(shared), q.export(shared), q.properties(shared))
    say("used", q.map(place, 20 * PIECE, shared), q.allow(place, 20 * PIECE), q.fill(place, 20 * PIECE, 3))
    say("content", q.content(place, 20 * PIECE), q.range_of(place + 50))
    say("gone", q.release(shared), q.unmap(place, 20 * PIECE), q.release(plain))


def linear(q: Questions) -> None:
    address = q.gpu.allocate(10 * PIECE) or 0
    handle = c_uint64()
    say("linear", q.ask("cuMemRetainAllocationHandle", byref(handle), c_void_p(address)) != 0)


def main() -> None:
    questions = Questions()
    for asks in (mappings, part_of_a_handle, exports, linear):
        asks(questions)


if __name__ == "__main__":
    main()
