"""Messages over a Unix stream socket, on trio: the codec's shell. Descriptors travel with a message's first byte.

A peer gets ``STALL_S`` to finish what it began, in either direction: half a message, or a reply it does not read. Then
its link is closed. Silence between messages is normal.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, Self

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.openfiles import is_kept
from vgpu.protocol.codec import MAX_ANSWER_BYTES, MAX_CONTROL_BYTES, Decoder, Message, ProtocolError, encode
from vgpu.protocol.descriptors import (
    KERNEL_MOST,
    close_aside,
    refuse_descriptors,
    refuses_descriptors,
    take_descriptors,
)

LINK_ENDED: Final = (OSError, trio.ClosedResourceError, trio.BrokenResourceError)
"""What sending and receiving raise when the other end has gone."""

STALL_S: Final = 5.0
MAX_DESCRIPTORS: Final = 8
_READ_BYTES: Final = 64 << 10
LOOK_S: Final = 1.0
"""How often a process checks whether its socket is still its own."""
LONGEST_PATH: Final = 107  # sun_path without its NUL
_BREATH_S: Final = 0.1
LAST_DESCRIPTORS: Final = 32
"""Of a process, for what it opens for a moment and closes again."""


class MessageStream:
    """One link, by default of the serving end. ``receive`` from one task, ``send`` from any: whole messages do not
    interleave. ``takes_bytes``, ``gives_bytes``: the longest message that is received, and sent. ``first_bytes``,
    ``most_items``: as of ``Decoder``. ``takes_descriptors`` False: a peer that passes any has broken the rules, until
    ``admit_descriptors`` is called.

    Resource handling: owns ``sock``; ``aclose`` or ``async with``. Descriptors that arrive belong to the caller.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        takes_bytes: int = MAX_CONTROL_BYTES,
        gives_bytes: int = MAX_ANSWER_BYTES,
        *,
        takes_descriptors: bool = True,
        first_bytes: int | None = None,
        most_items: int | None = None,
    ) -> None:
        self.socket = sock
        self._takes_descriptors = takes_descriptors
        self._kernel_refuses = refuses_descriptors(sock)
        self._gives_bytes = gives_bytes
        self._decoder = Decoder(takes_bytes, first_bytes=first_bytes, max_items=most_items)
        self._inbox: deque[tuple[Message, list[int]]] = deque()
        self._arrived: list[int] = []  # with the latest read
        self._pending: list[int] = []  # of the message that is not complete yet
        self._sending = trio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def admit_descriptors(self) -> None:
        """The peer is known by now, and may pass some."""
        take_descriptors(self.socket)
        self._takes_descriptors, self._kernel_refuses = True, False

    def close(self) -> None:
        """Idempotent. Descriptors received but never collected are closed too."""
        if self._takes_descriptors or self._kernel_refuses:
            self.socket.close()
        elif self.socket.fileno() >= 0:
            # What the peer passed and this end never received is closed with the socket, which may block.
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            trio.lowlevel.notify_closing(self.socket)
            close_aside([self.socket.detach()])
        for descriptors in (self._arrived, self._pending, *(found for _, found in self._inbox)):
            close_aside(descriptors)
            descriptors.clear()

    async def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and the descriptors that came with it; None at the end of the stream.

        Errors: ``ProtocolError`` for a message that is malformed, oversized, torn or too slow; ``OSError`` of the link.
        """
        while not self._inbox:
            if not await self._read_more():
                return None
        return self._inbox.popleft()

    async def _read_more(self) -> bool:
        self._decoder.next()  # raises if what came after the last good message was none
        mid_frame = self._decoder.mid_frame
        with trio.move_on_after(STALL_S if mid_frame else float("inf")) as scope:
            data = await self._receive_bytes()
            if data:
                self._sort(data)
                return True
            if mid_frame:
                raise ProtocolError("the peer left in the middle of a message")
            return False
        assert scope.cancelled_caught
        raise ProtocolError(f"the peer left a message unfinished for {STALL_S:g} s")

    def _sort(self, data: bytes) -> None:
        """Descriptors come with their message's first byte, and the kernel ends a read behind the piece that carries
        them: so they belong to the last message that begins in this read."""
        self._decoder.feed(data)
        with suppress(ProtocolError):  # it is raised again once the good messages before it are delivered
            for message in self._decoder:
                self._inbox.append((message, self._pending))
                self._pending = []
        if not self._decoder.mid_frame and self._inbox:
            self._inbox[-1][1].extend(self._arrived)
        else:
            self._pending += self._arrived
        self._arrived = []

    async def _receive_bytes(self) -> bytes:
        if self._kernel_refuses:
            return await self.socket.recv(_READ_BYTES)
        room = socket.CMSG_SPACE(KERNEL_MOST * array.array("i").itemsize)
        data, ancillary, _, _ = await self.socket.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._arrived += received
        most = MAX_DESCRIPTORS if self._takes_descriptors else 0
        if len(self._arrived) + len(self._pending) > most:
            raise ProtocolError(f"the peer sent more than {most} descriptors" if most else "the peer sent descriptors")
        return data

    async def until_left(self) -> None:
        """Until the peer has closed its end, or half of it; what it has sent before is not read."""
        events = select.poll()
        events.register(self.socket.fileno(), select.POLLRDHUP)
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            if any(found & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, found in events.poll(0)):
                return
            await trio.sleep(_BREATH_S)  # it has asked for something else already

    async def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Errors: ``VgpuError`` (timeout) if the peer does not read; ``OSError`` of the link."""
        data = memoryview(encode(message, self._gives_bytes))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with trio.move_on_after(STALL_S) as scope:
            async with self._sending:
                sent = await self.socket.sendmsg([data], ancillary)
                while sent < len(data):
                    sent += await self.socket.send(data[sent:])
        if scope.cancelled_caught:
            raise VgpuError(ErrorCode.TIMEOUT, f"the peer did not read its messages for {STALL_S:g} s")


async def connect(path: Path, *, takes_descriptors: bool = False) -> MessageStream:
    """A link to the socket at ``path``; ``OSError`` if no process listens. ``takes_descriptors``: from the listener."""
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not takes_descriptors:
            refuse_descriptors(sock)
        await sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return MessageStream(sock, MAX_ANSWER_BYTES, MAX_CONTROL_BYTES, takes_descriptors=takes_descriptors)


def check_length(path: Path) -> None:
    """``VgpuError`` (invalid) where the path does not fit a socket address."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise VgpuError(
            ErrorCode.INVALID, f"the path {path} is too long for a Unix socket", "set VGPU_RUNTIME_DIR to a shorter one"
        )


def listen(path: Path, *, mode: int, uid: int = -1, gid: int = -1) -> trio.socket.SocketType:
    """A listening socket at ``path`` with these permissions from its first instant. It replaces a socket that a dead
    process left there. Its connections take no descriptors.

    Errors: ``VgpuError`` (invalid) where the path does not fit a socket address; ``OSError``.
    """
    fresh = path.with_suffix(".new")
    check_length(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        fresh.unlink(missing_ok=True)
        sock.bind(str(fresh))
        fresh.chmod(mode)
        if uid >= 0 or gid >= 0:
            os.chown(fresh, uid, gid)
        refuse_descriptors(sock)
        sock.listen(128)
        fresh.rename(path)
    except BaseException:
        sock.close()
        raise
    return trio.socket.from_stdlib_socket(sock)


def file_at(path: Path) -> tuple[int, int]:
    """Device and inode of what is at ``path``; (0, 0) if nothing is there."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


async def until_replaced(path: Path) -> None:
    """Until the socket at ``path`` has been removed or replaced: no client reaches its listener any more."""
    own = file_at(path)
    while file_at(path) == own:  # noqa: ASYNC110 - another process does it, and no event reports it
        await trio.sleep(LOOK_S)


async def serve_links(
    listener: trio.socket.SocketType,
    serve: Callable[[trio.socket.SocketType], Awaitable[None]],
    complain: Callable[[OSError], object],
    *,
    most: int,
) -> NoReturn:
    """Serve each link in a task of its own, at most ``most`` at once: the next one waits at the door.

    ``serve`` owns its socket. ``complain`` gets the reason why a link could not be accepted, and the listener goes on.
    Where descriptors have run out, links that end will give some back. The last ``LAST_DESCRIPTORS`` are for no link.
    """
    room = trio.CapacityLimiter(most)

    async def serve_one(sock: trio.socket.SocketType) -> None:
        try:
            await serve(sock)
        finally:
            room.release_on_behalf_of(sock)

    with listener:
        async with trio.open_nursery() as links:
            while True:
                try:
                    sock, _ = await listener.accept()
                    if is_kept(sock.fileno(), LAST_DESCRIPTORS):
                        MessageStream(sock, takes_descriptors=False).close()
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                except OSError as error:
                    complain(error)
                    await trio.sleep(_BREATH_S)
                    continue
                await room.acquire_on_behalf_of(sock)
                links.start_soon(serve_one, sock)
