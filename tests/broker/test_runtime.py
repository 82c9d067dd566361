"""The broker's link to its GPU Server, which may be of another release: the broker outlives it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from vgpu.broker import runtime
from vgpu.broker.runtime import Broker, agreed
from vgpu.identity import Peer, Process
from vgpu.integrations.cgroups import Place
from vgpu.protocol.broker import Adopt, Closed, FromBroker, Look, Starting, ToBroker
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.hello import Hello, Welcome
from vgpu.protocol.messages import Reply
from vgpu.protocol.peer import start_time
from vgpu.protocol.service import welcome
from vgpu.protocol.stream import MessageStream
from vgpu.protocol.versions import PROTOCOL_VERSION

CLOSED = Closed(pid=1, uid=2, reason="said")


async def heard(link: MessageStream) -> dict[str, Any]:
    received = await link.receive()
    assert received is not None
    return received[0]


@pytest.mark.parametrize(("version", "told"), [(1, ["closed"]), (2, ["look", "closed"])])
def test_a_server_is_told_only_what_it_knows(version: int, told: list[str]) -> None:
    async def scene() -> None:
        near, far = (trio.socket.from_stdlib_socket(sock) for sock in socket.socketpair())
        broker = Broker("vgpu-00000001", Path("/nowhere"), Path("/nowhere"))
        async with MessageStream(near) as link, MessageStream(far) as server, trio.open_nursery() as nursery:
            nursery.start_soon(broker._converse, link)
            hello = Hello.model_validate(await heard(server))
            result = Welcome(version=min(version, hello.version), software="other", pid=os.getpid())
            await server.send(Reply(id=0, result=result.model_dump()).model_dump())
            assert (await heard(server))["op"] == "register"
            broker._link = link
            for message in (Look(), CLOSED):
                await broker._tell(message)
            assert [(await heard(server))["op"] for _ in told] == told
            nursery.cancel_scope.cancel()

    trio.run(scene)


def test_an_older_broker_and_an_older_server_agree_on_what_both_know() -> None:
    async def scene() -> None:
        near, far = (trio.socket.from_stdlib_socket(sock) for sock in socket.socketpair())
        async with MessageStream(near) as broker, MessageStream(far) as server:
            await broker.send(Hello(version=1, role="broker").model_dump())
            assert await welcome(server, 1) is not None
            assert agreed(await heard(broker)) == 1

    trio.run(scene)


def test_why_there_is_no_common_version_is_the_servers_word() -> None:
    with pytest.raises(ProtocolError, match=r"^this end speaks versions 5 to 7"):
        agreed({"id": 0, "ok": False, "code": "version", "error": "this end speaks versions 5 to 7"})


def names(union: Any, since: int | None = None) -> set[str]:
    messages = get_args(get_args(union)[0])
    return {message.__name__ for message in messages if since is None or message.since == since}


def test_what_the_first_version_does_not_know_says_since_when_it_is() -> None:
    """An older end closes the link of whoever tells it such a thing."""
    assert names(FromBroker, since=1) == {"Register", "Listening", "Attached", "Died", "Reaped", "Closed"}
    assert names(ToBroker, since=1) == {"Adopt", "Gone", "Stop"}
    assert max(message.since for message in get_args(get_args(FromBroker)[0])) <= PROTOCOL_VERSION


@pytest.mark.parametrize("error", [trio.ClosedResourceError("it fills"), OSError("no descriptor"), CLOSED])
def test_no_end_of_a_link_ends_the_broker(monkeypatch: pytest.MonkeyPatch, error: object) -> None:
    """A link whose other end does not read is closed by whoever sends, while this task receives."""

    async def scene() -> None:
        broker = Broker("vgpu-00000001", Path("/nowhere"), Path("/nowhere"))
        tries = []
        near, far = (trio.socket.from_stdlib_socket(sock) for sock in socket.socketpair())

        async def connect(path: Path, *, takes_descriptors: bool) -> MessageStream:
            assert takes_descriptors, "its GPU Server sends pages"
            tries.append(path)
            if len(tries) == 3:
                broker._nursery.cancel_scope.cancel()
                await trio.sleep_forever()
            return MessageStream(near)

        async def converse(link: MessageStream) -> None:
            if isinstance(error, Exception):
                raise error
            link.close()
            await link.receive()

        monkeypatch.setattr(runtime, "connect", connect)
        monkeypatch.setattr(broker, "_converse", converse)
        await broker.run()
        assert len(tries) == 3
        far.close()

    trio.run(scene)


def test_a_visitor_of_whom_the_kernel_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(sock: object) -> None:
        raise OSError(24, "Too many open files")

    async def scene() -> None:
        near, far = (trio.socket.from_stdlib_socket(sock) for sock in socket.socketpair())
        monkeypatch.setattr(runtime, "peer_of", none_left)
        await Broker("vgpu-00000001", Path("/nowhere"), Path("/nowhere"))._receive(near)
        assert await far.recv(1) == b""
        far.close()

    trio.run(scene)


def test_an_error_of_ours_ends_one_visitors_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(stream: MessageStream, peer: object) -> None:
        raise KeyError("ours")

    async def scene() -> None:
        near, far = (trio.socket.from_stdlib_socket(sock) for sock in socket.socketpair())
        broker = Broker("vgpu-00000001", Path("/nowhere"), Path("/nowhere"))
        monkeypatch.setattr(broker, "_attach", fails)
        await broker._receive(near)
        assert await far.recv(1) == b""
        far.close()

    trio.run(scene)


def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[Broker, list[int]]:
    """A broker of a suspended vGPU, and what it says of new processes that wait."""
    broker, told = Broker("vgpu-00000001", Path("/nowhere"), Path("/nowhere")), list[int]()

    async def tell(message: Starting) -> None:
        told.append(message.processes)

    monkeypatch.setattr(broker, "_tell", tell)
    broker._vgpu = cast(Adopt, SimpleNamespace(suspended=True))
    return broker, told


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as popen:
        yield popen
        popen.kill()


def peer_of_child(child: subprocess.Popen[bytes]) -> Peer:
    return Peer(Process(child.pid, start_time(child.pid)), os.getuid(), frozenset())


def test_a_new_process_that_is_killed_resumes_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    broker, told = waiting(monkeypatch)

    async def scene() -> None:
        with trio.fail_after(60):
            peer = peer_of_child(child)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(broker._be_resumed, peer, float("inf"), trio.CancelScope())
                await trio.testing.wait_all_tasks_blocked()
                assert told == [1]
                child.kill()  # it is a zombie
            assert told == [1, 0]
            await broker._be_resumed(peer, float("inf"), trio.CancelScope())
            assert told == [1, 0]

    trio.run(scene)


def test_the_waits_for_a_pod_and_for_a_resume_end_at_one_time(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    """So the hook, which waits for ten seconds, has its answer."""
    broker, _ = waiting(monkeypatch)
    monkeypatch.setattr(runtime, "_place_of", lambda _: Place(pod="pod-1"))

    async def tell_awaited() -> None:
        pass

    monkeypatch.setattr(broker, "_tell_awaited", tell_awaited)
    broker._vgpu = cast(Adopt, SimpleNamespace(suspended=True, pods=(), vgpu_id="vgpu-00000001"))
    ends = []

    async def scene() -> None:
        until = trio.current_time() + runtime.WAIT_S
        with trio.CancelScope() as patience:
            peer = peer_of_child(child)
            await broker._foreign(peer, until, patience)
            ends.append((trio.current_time() - until, patience.deadline - until))
            await broker._be_resumed(peer, until, patience)
            ends.append((trio.current_time() - until, patience.deadline - until))

    trio.run(scene, clock=MockClock(autojump_threshold=0))
    assert ends == [pytest.approx((0, runtime.ATTACH_S))] * 2
