"""The arguments of a program in a vGPU, from this machine's /proc: the node's readings have its name alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from vgpu.printable import command_name, printable

_FOLDERS: Final = re.compile(r"^\S*/(?=\S)")
LONGEST: Final = 160
"""Letters of a command line in a table."""


def with_arguments(pid: int, command: str, proc: Path = Path("/proc")) -> str:
    """``command`` with the arguments of process ``pid``, shortened and printable. ``command`` alone where the process
    cannot be read, or has another name: the node may count pids in another namespace."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return command
    if not command or command_name(words[0]) != command:
        return command
    line = " ".join(printable(" ".join(words)).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def program_line(pid: int, command: str, proc: Path = Path("/proc")) -> str:
    """As ``with_arguments``, with the program's file name alone: its arguments tell programs apart."""
    return _FOLDERS.sub("", with_arguments(pid, command, proc))
