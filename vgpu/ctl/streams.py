"""Where stdout and stderr lead: nowhere, if whoever started ``vgpuctl`` has closed them; to a disk that is full."""

from __future__ import annotations

import os
import sys


def open_closed_ones() -> None:
    """What is written to stdout fails then, as on a disk that is full; what is written to stderr is lost. Programs
    that we start have them closed, too."""
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
    """What was not written to stdout is lost: Python would complain of it once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
