"""Descriptors that a peer may pass with its bytes (SCM_RIGHTS): which socket takes any, and which thread closes them.

A descriptor that arrives is a danger by itself. ``close(2)`` of a TCP socket with SO_LINGER, or of a file of a FUSE
mount, blocks for as long as the sender likes. The kernel closes them, too: those of a message that is never received,
and those for which the receiver has no room.

So the kernel refuses them where it can: with SO_PASSRIGHTS 0 (Linux 6.16) the sender gets EPERM. Connections inherit
the option from their listener, also those that no process has accepted yet. On an older kernel the receiver has room
for all that one message can carry. ``close_aside`` closes them, and the socket itself, in threads of its own.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import trio

_SO_PASSRIGHTS: Final = 83
"""Not named by the socket module. asm-generic/socket.h of Linux 6.16."""
KERNEL_MOST: Final = 253
"""SCM_MAX_FD: what one message carries at most."""
_MOST_THREADS: Final = 64


def refuse_descriptors(sock: socket.socket | trio.socket.SocketType) -> bool:
    """From now on a peer cannot pass any. False: this kernel does not know how."""
    return _set(sock, 0)


def take_descriptors(sock: socket.socket | trio.socket.SocketType) -> None:
    """From now on a peer can pass some."""
    _set(sock, 1)


def refuses_descriptors(sock: socket.socket | trio.socket.SocketType) -> bool:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS) == 0
    except OSError:
        return False


def _set(sock: socket.socket | trio.socket.SocketType, value: int) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, value)
    except OSError:
        return False
    return True


def close_aside(descriptors: Iterable[int]) -> None:
    """Close them in other threads, since each may block. With ``_MOST_THREADS`` that block, the others wait."""
    for descriptor in descriptors:
        _closing.put(descriptor)


class _Closing:
    """A queue and the threads that empty it. They are made when they are needed, and never keep a process alive."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unclosed = 0

    def put(self, descriptor: int) -> None:
        with self._lock:
            self._unclosed += 1
            short = self._threads < min(self._unclosed, _MOST_THREADS)
            self._threads += short
        self._queue.put(descriptor)
        if short:
            threading.Thread(target=self._run, name="closes descriptors", daemon=True).start()

    def _run(self) -> None:
        while True:
            with suppress(OSError):
                os.close(self._queue.get())
            with self._lock:
                self._unclosed -= 1


_closing: Final = _Closing()
