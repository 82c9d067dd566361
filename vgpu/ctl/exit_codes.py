"""How ``vgpuctl`` fails: the exit codes, which scripts depend on, and the line on stderr.

docs/reference/cli.md lists the codes.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.printable import harmless


class Exit(IntEnum):
    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3  # no such vGPU or GPU, or several that fit
    REFUSED = 4  # understood, and not granted: no room, in use, not yours
    NODE_DOWN = 5  # no node answers
    LAUNCH = 125  # exec and run: vgpuctl itself failed, so the program never ran (126, 127: not executable, not found)


FOR_ERROR: Final[dict[ErrorCode, Exit]] = {
    ErrorCode.INVALID: Exit.USAGE,
    ErrorCode.NOT_FOUND: Exit.NOT_FOUND,
    ErrorCode.AMBIGUOUS: Exit.NOT_FOUND,
    ErrorCode.REMOVED: Exit.NOT_FOUND,
    ErrorCode.EXISTS: Exit.REFUSED,
    ErrorCode.NOT_YOURS: Exit.REFUSED,
    ErrorCode.NO_ROOM: Exit.REFUSED,
    ErrorCode.QUOTA: Exit.REFUSED,
    ErrorCode.IN_USE: Exit.REFUSED,
    ErrorCode.FULL: Exit.REFUSED,
    ErrorCode.MODE: Exit.REFUSED,
    ErrorCode.UNREACHABLE: Exit.NODE_DOWN,
    ErrorCode.UNAVAILABLE: Exit.NODE_DOWN,
    ErrorCode.TIMEOUT: Exit.FAILURE,
    ErrorCode.VERSION: Exit.FAILURE,
    ErrorCode.PROTOCOL: Exit.FAILURE,
    ErrorCode.MISSING: Exit.FAILURE,
    ErrorCode.INTERNAL: Exit.FAILURE,
}


def report(error: VgpuError) -> Exit:
    """Prints ``error`` on stderr, and returns its exit code."""
    say(error.message, error.hint)
    return FOR_ERROR[error.code]


def say(message: str, hint: str = "", speaker: str = "vgpuctl") -> None:
    """One line on stderr, and one with what to type next."""
    print(f"{speaker}: {harmless(message)}", file=sys.stderr)
    if hint:
        print(f"  → {harmless(hint)}", file=sys.stderr)
