"""The identity of the other end of a Unix socket, from the kernel."""

from __future__ import annotations

import array
import errno
import os
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vgpu.identity import Peer, Process

if TYPE_CHECKING:
    import trio

_CREDENTIALS: Final = struct.Struct("iII")
# Not named by the socket module of Python 3.11.
_SO_PEERGROUPS: Final = 59
_SO_PEERPIDFD: Final = 77  # Linux 6.5
_GROUPS_BYTES: Final = 1024
"""The most that Python's getsockopt takes."""
_ENDED: Final = (b"Z", b"X")
_STOPPED: Final = (b"T", b"t")


def peer_of(sock: trio.socket.SocketType | socket.socket) -> Peer:
    """The process that connected. A pid that was reused since then would name another process. So it is checked against
    the kernel's pidfd of the peer (where the kernel has SO_PEERPIDFD). A peer that has died has ``start_time`` 0."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(Process(pid, _checked_start_time(sock, pid)), uid, _groups_of(sock, pid) | {gid})


def peer_now(process: Process) -> Peer | None:
    """As ``peer_of``, of a process as it is now, by its effective user; None if it has ended."""
    found = users_of(process)
    return None if found is None else Peer(process, found.effective, found.groups)


@dataclass(frozen=True, slots=True)
class Users:
    """The users and groups of a process. ``groups``: all of its groups, the effective one included."""

    real: int
    effective: int
    saved: int
    groups: frozenset[int]


def users_of(process: Process) -> Users | None:
    """The users and groups of this very process now; None if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not is_alive(process):  # asked last: then all that was read is this process's
        return None
    fields = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
    real, effective, saved, _ = map(int, fields["Uid"])
    return Users(real, effective, saved, frozenset({int(fields["Gid"][1]), *map(int, fields["Groups"])}))


def _groups_of(sock: trio.socket.SocketType | socket.socket, pid: int) -> frozenset[int]:
    """The supplementary ones that it had when it connected; of one with more than 256, those that it has now."""
    try:
        return frozenset(array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)))
    except OSError as error:
        if error.errno != errno.ERANGE:  # an older kernel
            return frozenset()
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Groups:"):
                return frozenset(int(group) for group in line.split()[1:])
    return frozenset()


def _checked_start_time(sock: trio.socket.SocketType | socket.socket, pid: int) -> int:
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel; or the peer is reaped, and then has no start time either
        with suppress(ProcessLookupError):
            return start_time(pid)
        return 0
    try:
        started = start_time(pid)
        with suppress(PermissionError):  # alive, and of another user
            signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return 0
    finally:
        os.close(pidfd)
    return started


def listener_at(path: Path) -> Process | None:
    """The process of our own user that listens at a Unix socket; None if there is none. That process gets a connection
    without a message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)  # a listener whose backlog is full cannot be asked
        try:
            sock.connect(str(path))
        except OSError:
            return None
        peer = peer_of(sock)
    return peer.process if peer.process.start_time and peer.uid == os.geteuid() else None


def start_time(pid: int) -> int:
    """When ``pid`` started, in clock ticks since boot; ``ProcessLookupError`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return int(_fields(text)[19])


def _fields(text: bytes) -> list[bytes]:
    """Of /proc/PID/stat, from the third on: the second is the name in brackets, and may itself hold brackets and
    blanks."""
    return text[text.rindex(b")") + 2 :].split()


def is_alive(process: Process) -> bool:
    """Whether this very process exists (a zombie still does)."""
    try:
        return start_time(process.pid) == process.start_time
    except ProcessLookupError:
        return False


def is_running(process: Process) -> bool:
    """Whether this very process exists, and is more than a zombie. A process also shows as a zombie once its first
    thread has ended, and runs for as long as it has others."""
    fields = _fields_of(process)
    return fields is not None and (fields[0] not in _ENDED or int(fields[17]) > 1)


def is_stopped(process: Process) -> bool:
    """Whether this very process was stopped by a signal, or by a debugger."""
    fields = _fields_of(process)
    return fields is not None and fields[0] in _STOPPED


def _fields_of(process: Process) -> list[bytes] | None:
    """As ``_fields``; None if it is no more."""
    try:
        fields = _fields(Path(f"/proc/{process.pid}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields if int(fields[19]) == process.start_time else None
