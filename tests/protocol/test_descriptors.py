"""Doors take no descriptors: the kernel refuses them, or another thread closes them. Real sockets."""

from __future__ import annotations

import array
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from vgpu.errors import VgpuError
from vgpu.protocol import descriptors
from vgpu.protocol.codec import encode
from vgpu.protocol.descriptors import refuse_descriptors, refuses_descriptors
from vgpu.protocol.hello import Hello
from vgpu.protocol.service import open_link, welcome
from vgpu.protocol.stream import MessageStream, connect, listen, serve_links


def kernel_refuses() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return refuse_descriptors(sock)


needs_passrights = pytest.mark.skipif(not kernel_refuses(), reason="SO_PASSRIGHTS is new in Linux 6.16")


@pytest.fixture
def older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_SO_PASSRIGHTS", 9999)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vgpu-test-") as directory:  # not tmp_path: a socket's path is short
        yield Path(directory) / "door.sock"


def passed(sock: socket.socket, data: bytes, passed: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))])


@contextmanager
def lingering() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP socket whose last close(2) blocks for an hour, and the end that could read what is unsent."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sock = socket.create_connection(listener.getsockname())
        reading, _ = listener.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sock.setblocking(False)
    try:
        while True:
            sock.send(b"x" * 65536)
    except BlockingIOError:
        pass
    with reading:  # closed with unread data it resets the connection, which ends every wait
        yield sock, reading


@needs_passrights
def test_a_sender_is_refused_before_it_is_accepted_and_after(door: Path) -> None:
    async def run() -> None:
        with listen(door, mode=0o600) as listener, socket.socket(socket.AF_UNIX) as early:
            early.connect(str(door))
            with pytest.raises(PermissionError):
                passed(early, b"x", [0])
            sock, _ = await listener.accept()
            with sock, pytest.raises(PermissionError):
                passed(early, b"x", [0])

    trio.run(run)


@needs_passrights
def test_who_connects_takes_none_unless_it_says_so(door: Path) -> None:
    async def run() -> None:
        with listen(door, mode=0o600) as listener:
            for takes in (False, True):
                async with await connect(door, takes_descriptors=takes) as link:
                    sock, _ = await listener.accept()
                    with sock:
                        assert refuses_descriptors(link.socket) is not takes

    trio.run(run)


@needs_passrights
def test_a_peer_that_is_known_may_pass_some_from_then_on(door: Path) -> None:
    async def run() -> None:
        with listen(door, mode=0o600) as listener, socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(door))
            sock, _ = await listener.accept()
            async with MessageStream(sock, takes_descriptors=False) as link:
                link.admit_descriptors()
                passed(peer, encode({"n": 1}), [0])
                received = await link.receive()
                assert received is not None
                message, [descriptor] = received
                assert message == {"n": 1}
                os.close(descriptor)

    trio.run(run)


@pytest.mark.parametrize("many", [1, 9, 253])
@pytest.mark.usefixtures("older_kernel")
def test_on_an_older_kernel_the_link_ends_and_none_stays(door: Path, many: int) -> None:
    async def run() -> None:
        with listen(door, mode=0o600) as listener, socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(door))
            sock, _ = await listener.accept()
            reading, writing = os.pipe()
            async with MessageStream(sock, takes_descriptors=False) as link:
                passed(peer, encode({"n": 1}), [writing] * many)
                os.close(writing)
                with pytest.raises(VgpuError, match="the peer sent descriptors"):
                    await link.receive()
            await trio.lowlevel.wait_readable(reading)  # its end: every copy of the other end is closed
            assert os.read(reading, 1) == b""
            os.close(reading)

    trio.run(run)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("received", [False, True], ids=["never received", "received"])
@pytest.mark.usefixtures("older_kernel")
def test_on_an_older_kernel_a_close_that_blocks_stops_no_other_link(door: Path, received: bool) -> None:
    async def run() -> None:
        ended = trio.Event()

        async def serve(sock: trio.socket.SocketType) -> None:
            async with MessageStream(sock, takes_descriptors=False) as link:
                try:
                    if received or ended.is_set():
                        await welcome(link, os.getpid())
                    else:
                        await trio.lowlevel.wait_readable(sock)
                except VgpuError:
                    pass
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_links, listen(door, mode=0o600), serve, print, most=8))
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(door))
                passed(peer, b"\x10\0\0\0x", [hostile.fileno()])
                hostile.close()
            await ended.wait()
            link, _ = await open_link(door, Hello())
            link.close()
            nursery.cancel_scope.cancel()

    with lingering() as (hostile, _):
        trio.run(run)
