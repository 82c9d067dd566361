"""stdout and stderr if the parent of ``vgpuctl`` has closed them, or if they lead to a disk that is full."""

from __future__ import annotations

import os
import sys


def open_closed_ones() -> None:
    """Open a closed stdout or stderr. Writes to stdout then fail, as on a disk that is full. Writes to stderr are lost.
    Programs that we start have them closed, too."""
    if sys.stdout is None:
        _lead_to_null(1, os.O_RDONLY)
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        _lead_to_null(2, os.O_WRONLY)
        sys.stderr = os.fdopen(2, "w")


def _lead_to_null(descriptor: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != descriptor:
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def refuses() -> bool:
    """Whether stdout takes no more, not even the end of a line."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def silence() -> None:
    """Drop what was not written to stdout. Otherwise Python would complain of it once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
