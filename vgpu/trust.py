"""Whether another user could pretend to be a node: by a directory of theirs, or by a socket at which they listen.

The hook has the same rules in C (``cython_ext/hook/connect.h``).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from functools import cache
from pathlib import Path
from typing import Final

OVERFLOW_UID: Final = 65534
"""In a user namespace, each uid from outside of it appears as this one."""
_CREDENTIALS: Final = struct.Struct("iII")
_ALL_UIDS: Final = ["0", "0", "4294967295"]


def trusts(uid: int) -> bool:
    """Whether ``uid`` is root or this user. In a user namespace it may also be a uid from outside, as that of root."""
    return uid in {0, os.getuid(), os.geteuid()} or (uid == OVERFLOW_UID and not _sees_all_uids())


def replaceable_part(path: Path) -> Path | None:
    """The first part of ``path`` that another user owns, or to which all may write; None if there is none. A part that
    does not exist yet is no danger."""
    for part in (*reversed(path.parents), path):
        try:
            found = part.lstat()
        except OSError:
            return None
        open_to_all = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if not trusts(found.st_uid) or open_to_all:
            return part
    return None


def listener_uid(link: socket.socket) -> int:
    """The uid of the process that listens at the other end of a Unix socket, from the kernel."""
    return int(_CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


@cache
def _sees_all_uids() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() == _ALL_UIDS
    except OSError:
        return True
