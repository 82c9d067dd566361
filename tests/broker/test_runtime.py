"""The broker's link to its GPU Server, which may be of another release: the broker outlives it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, get_args

import pytest
import trio

from vgpu.broker.runtime import Broker, agreed
from vgpu.protocol.broker import Closed, FromBroker, Look, ToBroker
from vgpu.protocol.codec import ProtocolError
from vgpu.protocol.hello import PROTOCOL_VERSION, Hello, Welcome
from vgpu.protocol.messages import Reply
from vgpu.protocol.service import welcome
from vgpu.protocol.stream import MessageStream

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
    """An older end closes the link of whoever tells it such a thing. Servers do not ask yet what their brokers know."""
    assert names(FromBroker, since=1) == {"Register", "Listening", "Attached", "Died", "Reaped", "Closed"}
    assert names(ToBroker) == {"Adopt", "Gone", "Stop"}
    assert max(message.since for message in get_args(get_args(FromBroker)[0])) <= PROTOCOL_VERSION
