"""Messages and descriptors over real socket pairs; slow peers on a mock clock."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.protocol.codec import ProtocolError, encode
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import REQUESTS, AnyRequest, List, VgpuList
from vgpu.protocol.peer import is_alive, peer_of, start_time
from vgpu.protocol.service import serve, welcome
from vgpu.protocol.stream import STALL_S, MessageStream, connect, listen


def on_trio(body: Callable[[MessageStream, trio.socket.SocketType], Awaitable[None]]) -> None:
    """Run ``body`` with one end as a stream and the other as a raw socket; time passes when nobody can run."""

    async def run() -> None:
        near, far = trio.socket.socketpair()
        with far:
            async with MessageStream(near) as stream:
                await body(stream, far)

    trio.run(run, clock=MockClock(autojump_threshold=0.05))


def test_descriptors_travel_with_their_message() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        async with MessageStream(far) as other:
            reading, writing = os.pipe()
            await stream.send({"n": 1})
            await stream.send({"n": 2}, (reading,))
            os.close(reading)
            assert await other.receive() == ({"n": 1}, [])
            received = await other.receive()
            assert received is not None
            message, descriptors = received
            assert message == {"n": 2}
            os.write(writing, b"x")
            assert os.read(descriptors[0], 1) == b"x"
            for descriptor in (writing, *descriptors):
                os.close(descriptor)

    on_trio(body)


def test_an_answer_may_be_much_longer_than_what_was_asked(tmp_path: Path) -> None:
    async def run() -> None:
        with listen(tmp_path / "socket", mode=0o600) as listener:
            asking = await connect(tmp_path / "socket")
            sock, _ = await listener.accept()
            async with asking, MessageStream(sock) as answering, trio.open_nursery() as nursery:
                nursery.start_soon(answering.send, {"a": "x" * 8_000_000})
                received = await asking.receive()
                assert received is not None
                assert len(received[0]["a"]) == 8_000_000
                with pytest.raises(ValueError, match="exceeds"):
                    await asking.send({"a": "x" * 2_000_000})
                nursery.start_soon(asking.socket.send, encode({"a": "x" * 2_000_000}, 4_000_000))
                with pytest.raises(ProtocolError, match="announced a message of 2000008 bytes"):
                    await answering.receive()
                nursery.cancel_scope.cancel()

    trio.run(run)


def test_large_messages_arrive_whole() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        async with MessageStream(far) as other, trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, {"a": "x" * 1_000_000})
            received = await other.receive()
            assert received is not None
            assert len(received[0]["a"]) == 1_000_000

    on_trio(body)


def test_silence_between_messages_is_normal() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(100 * STALL_S)
                await far.send(encode({"n": 1}))

            nursery.start_soon(later)
            assert await stream.receive() == ({"n": 1}, [])

    on_trio(body)


def test_half_a_message_is_not_waited_for() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        await far.send(encode({"n": 1})[:-1])
        began = trio.current_time()
        with pytest.raises(ProtocolError, match="unfinished"):
            await stream.receive()
        assert trio.current_time() - began >= STALL_S

    on_trio(body)


def test_a_torn_message_is_an_error_and_an_end_is_not() -> None:
    async def torn(stream: MessageStream, far: trio.socket.SocketType) -> None:
        await far.send(encode({"n": 1})[:-1])
        far.close()
        with pytest.raises(ProtocolError, match="middle"):
            await stream.receive()

    async def ended(stream: MessageStream, far: trio.socket.SocketType) -> None:
        await far.send(encode({"n": 1}))
        far.close()
        assert await stream.receive() == ({"n": 1}, [])
        assert await stream.receive() is None

    on_trio(torn)
    on_trio(ended)


def test_a_peer_that_does_not_read_is_given_up() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        async def send_without_end() -> None:
            while True:
                await stream.send({"a": "x" * 100_000})

        with pytest.raises(VgpuError) as late:
            await send_without_end()
        assert late.value.code is ErrorCode.TIMEOUT

    on_trio(body)


def test_too_many_descriptors_end_the_link_and_leak_nothing() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths
        with socket.socket(fileno=os.dup(far.fileno())) as raw:
            socket.send_fds(raw, [encode({"n": 1})], [raw.fileno()] * 100)
        with pytest.raises(ProtocolError, match="descriptors"):
            await stream.receive()
        stream.close()
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: PTH208 - another thread closes them
            time.sleep(0.01)  # noqa: ASYNC251

    on_trio(body)


def test_who_is_at_the_other_end() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        peer = peer_of(stream.socket)
        assert peer.process == Process(os.getpid(), start_time(os.getpid()))
        assert peer.uid == os.geteuid()
        assert {os.getegid(), *os.getgroups()} == peer.groups
        assert is_alive(peer.process)
        assert not is_alive(Process(os.getpid(), peer.process.start_time + 1))

    on_trio(body)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may choose its groups")
@pytest.mark.parametrize("count", [0, 2, 256, 300])
def test_the_supplementary_groups_of_a_peer(count: int) -> None:
    groups = list(range(70_000, 70_000 + count))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen()
        child = os.fork()
        if child == 0:
            os.setgroups(groups)
            knocking = socket.socket(socket.AF_UNIX)
            knocking.connect(listener.getsockname())
            knocking.recv(1)
            os._exit(0)
        sock, _ = listener.accept()
        with sock:
            assert peer_of(sock).groups == {os.getegid(), *groups}
        os.waitpid(child, 0)


def test_a_peer_that_has_died_has_no_start_time() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        knocked = socket.socket(socket.AF_UNIX)
        knocked.bind("")  # an abstract name of the kernel's choice
        knocked.listen()
        listener = trio.socket.from_stdlib_socket(knocked)
        child = os.fork()
        if child == 0:
            knocking = socket.socket(socket.AF_UNIX)
            knocking.connect(knocked.getsockname())
            os._exit(0)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it does one thing and ends
        sock, _ = await listener.accept()
        with sock, listener:
            assert peer_of(sock).process == Process(child, 0)

    on_trio(body)


async def converse(link: MessageStream) -> None:
    async def answer(request: AnyRequest) -> VgpuList:
        if request.id == 3:
            raise VgpuError(ErrorCode.NO_ROOM, "no room", "make some")
        if request.id == 4:
            raise ZeroDivisionError
        return VgpuList(vgpus=())

    if await welcome(link, 42) is not None:
        await serve(link, REQUESTS, answer, lambda _: None)


def test_one_conversation() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        async def told(message: dict[str, object]) -> dict[str, object]:
            await stream.send(message)
            received = await stream.receive()
            assert received is not None
            return received[0]

        async with MessageStream(far) as other, trio.open_nursery() as nursery:
            nursery.start_soon(converse, other)
            hello = await told(Hello(id=1).model_dump())
            assert hello["ok"]
            assert hello["result"]["pid"] == 42  # type: ignore[index]
            assert await told(List(id=2).model_dump()) == {"id": 2, "ok": True, "result": {"vgpus": []}}
            assert await told(List(id=3).model_dump()) == {
                "id": 3, "ok": False, "code": "no-room", "error": "no room", "hint": "make some",
            }  # fmt: skip
            assert (await told(List(id=4).model_dump()))["code"] == "internal"
            assert (await told({"op": "nonsense", "id": 5}))["code"] == "invalid"
            assert (await told({"op": "list", "id": 6, "more": 1}))["code"] == "invalid"
            assert (await told(List(id=7).model_dump()))["ok"], "and the link goes on"
            stream.close()

    on_trio(body)


def test_whoever_says_nothing_is_not_waited_for() -> None:
    async def body(stream: MessageStream, far: trio.socket.SocketType) -> None:
        with pytest.raises(ProtocolError, match="hello"):
            await welcome(stream, 1)

    on_trio(body)
