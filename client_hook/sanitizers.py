"""Sanitizer runtimes that a program is linked with and that must be first: they go before the hook.

gcc links them as shared libraries by default. AddressSanitizer ends a program at its start if ``LD_PRELOAD`` has
another library in front of it. The others intercept only what comes after them.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SANITIZER: Final = re.compile(r"lib(?:(?:hw)?asan|lsan|tsan|ubsan)\.so(?:\.\d+)*|libclang_rt\.\w*san[\w.-]*\.so")
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRING_TABLE = 1, 5
_MOST_BYTES: Final = 1 << 20
"""More than any table of names of a program's libraries."""


def with_sanitizers_first(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for ``program``, which is looked up on its PATH; as it is where that needs none."""
    merged = dict(environment)
    path = shutil.which(program, path=environment.get("PATH"))
    preload = environment.get("LD_PRELOAD", "")
    first = [] if path is None else sanitizers(Path(path))
    others = [entry for entry in re.split(r"[\s:]+", preload) if entry and Path(entry).name not in first]
    if first:
        merged["LD_PRELOAD"] = ":".join([*first, *others])
    return merged


def sanitizers(path: Path) -> list[str]:
    """The sonames of those that the program at ``path`` needs, in its order; none where it cannot be read."""
    if not path.is_file():  # a FIFO would wait for its writer
        return []
    try:
        return [name for name in needed(path) if SANITIZER.fullmatch(name)]
    except (OSError, ValueError, struct.error):
        return []


def needed(path: Path) -> Iterator[str]:
    """The libraries that a 64-bit little-endian ELF file names (``DT_NEEDED``). ``ValueError``, ``struct.error``: it is
    none."""
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit ELF file")
        offset, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
        segments = [struct.unpack_from("<IIQQQQ", table, size * i) for i in range(count)]
        loads = [(address, at, length) for kind, _, at, address, _, length in segments if kind == _LOAD]
        for kind, _, at, _, _, length in segments:
            if kind != _DYNAMIC:
                continue
            file.seek(at)
            dynamic = list(struct.iter_unpack("<QQ", file.read(min(length, _MOST_BYTES) // 16 * 16)))
            strings = next(value for tag, value in dynamic if tag == _STRING_TABLE)
            start = next(at + strings - address for address, at, size_ in loads if address <= strings < address + size_)
            file.seek(start)
            names = file.read(_MOST_BYTES)
            for tag, value in dynamic:
                if tag == _NEEDED:
                    yield names[value : names.index(b"\0", value)].decode(errors="replace")
