"""Signals and the driver's checkpoints reach a process by its number, and a number may be another's by now. So a pidfd
is opened first; then the kernel is asked whether it is the very process, and whether it runs as a user that may be in
the vGPU. A signal goes through that pidfd. The name of the process never comes from a page.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from vgpu.identity import Process
from vgpu.protocol.peer import is_alive, users_of

ANY_USER = "any"


@dataclass(frozen=True, slots=True)
class Target:
    """A process of a vGPU. ``uids``: users that it may run as, by its real or saved uid, as for kill(2); None: any,
    since it was root's when it attached. ``gid``: a group whose members may as well, −1: none."""

    process: Process
    uids: frozenset[int] | None = frozenset()
    gid: int = -1

    @classmethod
    def of(cls, process: Process, owner_uid: int, share_gid: int, admitted_uid: int) -> Self:
        """``admitted_uid``: as which it attached, −1: not known."""
        if admitted_uid == 0:
            return cls(process, None)
        return cls(process, frozenset({owner_uid, admitted_uid} - {-1}), share_gid)

    @property
    def text(self) -> str:
        """As an argument of another process of ours."""
        users = ANY_USER if self.uids is None else ",".join(map(str, sorted(self.uids)))
        return f"{self.process.pid}:{self.process.start_time}:{users}:{self.gid}"

    @classmethod
    def parse(cls, text: str) -> Self:
        pid, started, users, gid = text.split(":")
        uids = None if users == ANY_USER else frozenset(map(int, users.split(",")))
        return cls(Process(int(pid), int(started)), uids, int(gid))


@contextmanager
def opened(target: Target) -> Iterator[int]:
    """The pidfd of ``target``. ``ProcessLookupError``: the process has ended. ``PermissionError``: its user may not use
    the vGPU. ``OSError``: there is no descriptor for it."""
    pidfd = _open(target.process)
    try:
        if target.uids is not None and not _may(target):
            raise PermissionError(f"process {target.process.pid} runs as another user than the vGPU's")
        if not is_alive(target.process):  # asked last: all that was read until here was of this very process
            raise ProcessLookupError(f"no process {target.process.pid}")
        yield pidfd
    finally:
        os.close(pidfd)


def send(process: Process, number: signal.Signals) -> bool:
    """A signal to a process of our own software. False: it is no more."""
    with suppress(ProcessLookupError), opened(Target(process, None)) as pidfd:
        signal.pidfd_send_signal(pidfd, number)
        return True
    return False


def _open(process: Process) -> int:
    if process.pid <= 0:
        raise ProcessLookupError("no process")
    try:
        return os.pidfd_open(process.pid)
    except OverflowError as error:
        raise ProcessLookupError(f"no process {process.pid}") from error


def _may(target: Target) -> bool:
    assert target.uids is not None
    found = users_of(target.process)
    if found is None:
        raise ProcessLookupError(f"no process {target.process.pid}")
    return bool({found.real, found.saved} & target.uids) or (target.gid >= 0 and target.gid in found.groups)
