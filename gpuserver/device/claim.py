"""One GPU Server for each GPU of the machine, whichever user's node it belongs to: two would both promise all of it.

The claim is a listening socket in the abstract namespace, named after the GPU's UUID. The kernel releases it with its
process, and reports that process's user. A file could have permissions by which another user keeps root out. Processes
in another network namespace do not see the socket.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Peer
from vgpu.loggers import get_logger
from vgpu.protocol.peer import is_alive, peer_of

log = get_logger(__name__)

END_S: Final = 10.0
"""How long a GPU Server that is asked to end may take."""
_ASK_AGAIN_S: Final = 0.05


def claim(uuid: str, *, take: bool) -> socket.socket:
    """The GPU is this process's until the socket is closed. ``take``: root ends another user's server first.

    ``VgpuError`` (exists): another process serves it.
    """
    address = f"\0st-vgpu/{uuid}"
    deadline = time.monotonic() + END_S
    number = signal.SIGTERM
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            held.bind(address)
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            held.listen()
            threading.Thread(target=_answer, args=(held,), daemon=True).start()
            return held
        holder = _holder(address)
        if holder is not None and not (take and os.geteuid() == 0 and holder.uid != 0):
            raise _refusal(uuid, holder)
        if holder is not None:
            log.warning("another user's server is ended", gpu=uuid, pid=holder.process.pid, uid=holder.uid)
            _end(holder, number)
        if time.monotonic() > deadline:
            if number == signal.SIGKILL or holder is None:
                raise VgpuError(ErrorCode.EXISTS, f"GPU {uuid} is claimed by a process that does not answer")
            number, deadline = signal.SIGKILL, time.monotonic() + END_S
        time.sleep(_ASK_AGAIN_S)


def _answer(held: socket.socket) -> None:
    """Accept and close. The kernel shows the peer which process this is; nothing else is sent."""
    with suppress(OSError):
        while True:
            held.accept()[0].close()


def _holder(address: str) -> Peer | None:
    """Of the claim; None if it has been given up, or its backlog is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(address)
        except OSError:
            return None
        peer = peer_of(asking)
    return peer if peer.process.start_time else None


def _end(holder: Peer, number: signal.Signals) -> None:
    """The very process that holds the claim, and no later one of its pid."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(holder.process.pid)
        try:
            if is_alive(holder.process):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _refusal(uuid: str, holder: Peer) -> VgpuError:
    pid, uid = holder.process.pid, holder.uid
    if os.geteuid() == 0 and uid != 0:
        hint = "the node of that user promises all of it; to take it from them: vgpuctl serve --take"
    elif uid == 0:
        hint = "vgpuctl create makes a vGPU on root's node, where no node of yours runs"
    else:
        hint = "vgpuctl stop ends that node, if it is yours; its VGPU_RUNTIME_DIR is another"
    return VgpuError(ErrorCode.EXISTS, f"GPU {uuid} is served already, by uid {uid} (pid {pid})", hint)
