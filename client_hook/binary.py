"""What the first bytes of a program say of how it starts: ELF header and program headers, or the line of a script.

Pure: bytes in, a description out. Sources: elf(5), the kernel's fs/binfmt_script.c.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PT_INTERP: Final = 3
SCRIPT_BYTES: Final = 256
"""The kernel reads this much of a script's first line (BINPRM_BUF_SIZE)."""
MOST_HEADERS: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class Elf:
    """``bits``: 32 or 64. ``machine``: e_machine, 62 for x86-64 and 183 for aarch64. ``loader``: the path in PT_INTERP;
    "" if no loader is asked for, as in a statically linked program."""

    bits: int
    machine: int
    loader: str


@dataclass(frozen=True, slots=True)
class Script:
    """``interpreter`` and the one argument that the kernel passes ("" if there is none)."""

    interpreter: str
    argument: str


def described(data: bytes) -> Elf | Script | None:
    """What ``data``, a file from its start, is. None: something else, or damaged."""
    if data[:4] == b"\x7fELF":
        return _elf(data)
    if data[:2] == b"#!":
        return _script(data[2:SCRIPT_BYTES])
    return None


def _elf(data: bytes) -> Elf | None:
    if len(data) < 20 or data[4] not in {1, 2} or data[5] not in {1, 2}:
        return None
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    word = f"{order}{'Q' if wide else 'I'}"
    table_at, sizes_at, offset_at, length_at = (32, 54, 8, 32) if wide else (28, 42, 4, 16)

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, data, at)[0])

    try:
        machine, table = number(f"{order}H", 18), number(word, table_at)
        size, count = number(f"{order}H", sizes_at), number(f"{order}H", sizes_at + 2)
        for at in range(table, table + size * count, size) if size and count < MOST_HEADERS else ():
            if number(f"{order}I", at) == PT_INTERP:
                offset, length = number(word, at + offset_at), number(word, at + length_at)
                path = data[offset : offset + length].partition(b"\0")[0]
                return Elf(64 if wide else 32, machine, path.decode(errors="replace")) if path else None
    except (struct.error, OverflowError):
        return None
    return Elf(64 if wide else 32, machine, "")


def _script(line: bytes) -> Script | None:
    words = line.partition(b"\n")[0].partition(b"\0")[0].decode(errors="surrogateescape").strip(" \t").split(None, 1)
    if not words:
        return None
    return Script(words[0], words[1].strip(" \t") if len(words) > 1 else "")


def after_env(arguments: Sequence[str]) -> list[str]:
    """The command that ``env`` starts, given its arguments; empty if it starts none."""
    rest = list(arguments)
    while rest:
        word = rest[0]
        if word in {"-u", "--unset", "-C", "--chdir"}:
            del rest[:2]
        elif word in {"-S", "--split-string"}:
            rest[:2] = rest[1].split() if len(rest) > 1 else []
        elif word.startswith("--split-string="):
            rest[:1] = word.partition("=")[2].split()
        elif word.startswith(("-S", "-vS")):
            rest[:1] = word.partition("S")[2].split()
        elif word.startswith("-") or "=" in word:
            del rest[0]
        else:
            break
    return rest
