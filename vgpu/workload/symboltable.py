"""A function of a loaded library by the library's own symbol table.

Every door of the loader leads to the hook; the table is no door. A probe compares the hook with the driver by it. A
program that reads the table leaves a cooperative hook out, and NVML shows that program to the GPU Server.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_DYNSYM: Final = 11
_LOAD: Final = 1


def value_of(file: bytes, name: str) -> int | None:
    """Where the 64-bit ELF file defines ``name``, as its first loaded byte counts; None if it does not."""
    _, _, _, _, segments, sections, _, _, segment_size, segment_count, section_size, section_count, _ = (
        _HEADER.unpack_from(file)
    )
    loaded = [_SEGMENT.unpack_from(file, segments + i * segment_size) for i in range(segment_count)]
    first = min(address for kind, _, _, address, *_ in loaded if kind == _LOAD)
    for i in range(section_count):
        _, kind, _, _, offset, size, link, *_ = _SECTION.unpack_from(file, sections + i * section_size)
        if kind != _DYNSYM:
            continue
        names = _SECTION.unpack_from(file, sections + link * section_size)[4]
        for at in range(offset, offset + size, _SYMBOL.size):
            string, _, _, section, value, _ = _SYMBOL.unpack_from(file, at)
            begin = names + string
            if section and value and file[begin : begin + len(name) + 1] == name.encode() + b"\0":
                return int(value - first)
    return None


def loaded_at(library: str) -> tuple[Path, int]:
    """The file and the first address of the library with a file name that begins with ``library``. ``LookupError``:
    there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        if path and Path(path[0]).name.startswith(library):
            return Path(path[0]), int(addresses.partition("-")[0], 16)
    raise LookupError(f"{library} is not loaded")


def address_of(library: str, name: str) -> int:
    """Of the function in this process. ``LookupError``: no such library, or no such function in it."""
    path, first = loaded_at(library)
    value = value_of(path.read_bytes(), name)
    if value is None:
        raise LookupError(f"{path} defines no {name}")
    return first + value
