"""Who gets a link: everybody in turn, and nobody so many that the others get none. Real sockets."""

from __future__ import annotations

import errno
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Peer, Process
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.node import supervisor
from vgpu.node.link import ControlLink
from vgpu.node.servers import Servers, Sharing
from vgpu.node.sources import Owners, Places, owners
from vgpu.node.supervisor import Node
from vgpu.paths import NodePaths
from vgpu.protocol.codec import encode
from vgpu.protocol.hello import Hello
from vgpu.protocol.messages import Failure
from vgpu.protocol.service import open_link
from vgpu.protocol.stream import MessageStream, connect, listen, serve_links

STRANGER = 54321


def test_at_most_so_many_at_once(tmp_path: Path) -> None:
    served: list[int] = []

    async def run() -> None:
        leave = trio.Event()

        async def serve(sock: trio.socket.SocketType) -> None:
            served.append(len(served))
            await leave.wait()
            sock.close()

        path = tmp_path / "door.sock"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_links, listen(path, mode=0o600), serve, served.remove, most=2))
            links = [await connect(path) for _ in range(5)]
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert served == [0, 1]
            leave.set()
            for link in links:
                assert await link.receive() is None
                link.close()
            assert served == [0, 1, 2, 3, 4]
            nursery.cancel_scope.cancel()

    trio.run(run)


def test_what_cannot_be_accepted_is_told_and_the_listener_goes_on(tmp_path: Path) -> None:
    complaints: list[int | None] = []

    class Exhausted:
        """A listener whose process is out of descriptors twice."""

        def __init__(self, listener: trio.socket.SocketType) -> None:
            self.listener = listener

        def __enter__(self) -> Exhausted:
            return self

        def __exit__(self, *_: object) -> None:
            self.listener.close()

        async def accept(self) -> object:
            if len(complaints) < 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return await self.listener.accept()

    async def run() -> None:
        async def serve(sock: trio.socket.SocketType) -> None:
            sock.close()

        path = tmp_path / "door.sock"
        listener = Exhausted(listen(path, mode=0o600))
        async with trio.open_nursery() as nursery:
            complain = lambda error: complaints.append(error.errno)  # noqa: E731
            nursery.start_soon(partial(serve_links, listener, serve, complain, most=2))  # type: ignore[arg-type]
            async with await connect(path) as link:
                assert await link.receive() is None
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert complaints == [errno.EMFILE] * 2


@pytest.mark.parametrize(("uid", "refused"), [(STRANGER, True), (os.geteuid(), False)])
def test_one_user_does_not_take_all_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, refused: bool
) -> None:
    monkeypatch.setattr(supervisor, "peer_of", lambda sock: Peer(Process(1, 1), uid, frozenset()))

    async def run() -> None:
        paths = NodePaths(tmp_path, tmp_path)
        node = Node(paths, Servers(Sharing(), simulated=True, environment={}), (), simulated=True)
        links: list[MessageStream] = []
        async with trio.open_nursery() as nursery:

            async def another() -> dict[str, object] | None:
                near, far = trio.socket.socketpair()
                nursery.start_soon(node._converse, far)
                links.append(MessageStream(near))
                await links[-1].send(Hello().model_dump(mode="json"))
                received = await links[-1].receive()
                return received and received[0]

            for _ in range(DEFAULT_LIMITS.links_per_user):
                answer = await another()
                assert answer is not None
                assert answer["ok"]
            answer = await another()
            assert answer is not None
            assert answer["ok"] is not refused
            if refused:
                assert answer["code"] == ErrorCode.UNAVAILABLE
                links.pop(0).close()
                await trio.testing.wait_all_tasks_blocked(0.01)
                answer = await another()
                assert answer is not None
                assert answer["ok"], "a link that ended makes room"
            for link in links:
                link.close()

    trio.run(run)


SUBUID = "alice:100000:65536\nbob:165536:65536\n1007:300000:10\nsomebody:x:y\nghost:400000:5\n\n"
PASSWD = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000:::\nbob:x:1001:1001:::\nbroken\n"


@pytest.mark.parametrize(
    ("uid", "source"),
    [
        *((0, 0), (1000, 1000), (99_999, 99_999)),
        *((100_000, 1000), (165_535, 1000), (165_536, 1001), (231_072, 231_072)),
        *((300_009, 1007), (300_010, 300_010), (400_001, "ghost")),
    ],
)
def test_a_subordinate_uid_counts_as_its_owner(uid: int, source: int | str) -> None:
    assert owners(SUBUID, PASSWD).source_of(uid) == source
    assert Owners().source_of(uid) == uid


def test_a_users_subordinate_uids_share_the_places_of_the_user() -> None:
    places = Places(Limits(links_per_user=10), frozenset({0, 500}), owners(SUBUID, PASSWD))
    taken = [places.enter(uid) for uid in range(100_000, 100_010)]
    for uid in (1000, 100_050):
        with pytest.raises(VgpuError, match="has 10 links to this node already"):
            places.enter(uid)
    places.enter(1001)
    places.leave(taken[0])
    places.owners = Owners()  # the files changed meanwhile
    for place in taken[1:]:
        places.leave(place)
    assert places.enter(1000) == 1000


def test_users_together_leave_the_kept_places_to_root_and_the_nodes_own_uid() -> None:
    limits = Limits(links=64, links_kept=10, links_per_user=9)
    places = Places(limits, frozenset({0, 500}))
    for uid in range(1000, 1054):
        places.enter(uid)
    with pytest.raises(VgpuError, match="this node has 54 links already, its most for users"):
        places.enter(2000)
    assert places.enter(0) is None
    assert places.enter(500) is None


def test_who_listens_and_dies_before_it_has_read_is_nobody(tmp_path: Path) -> None:
    """A socket that is closed with something unread in it is reset."""

    async def run() -> None:
        path = tmp_path / "door.sock"
        listener = listen(path, mode=0o600)

        async def die() -> None:
            sock, _ = await listener.accept()
            await trio.lowlevel.wait_readable(sock)
            sock.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            with pytest.raises(VgpuError, match="is gone") as refused:
                await open_link(path, Hello())
            assert refused.value.code is ErrorCode.UNAVAILABLE
        listener.close()

    trio.run(run)


def test_a_refusal_is_read_though_the_link_is_closed_before_the_request_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            link, _ = listener.accept()
            failure = Failure(id=0, code=ErrorCode.UNAVAILABLE, error="uid 7 has 64 links to this node already")
            link.sendall(encode(failure.model_dump(mode="json")))
            link.close()
            closed.set()

        closed = threading.Event()
        refusing = threading.Thread(target=refuse)
        refusing.start()
        with pytest.MonkeyPatch.context() as patch:
            sends = ControlLink._send

            def send_late(link: ControlLink, request: Any) -> None:
                closed.wait()
                sends(link, request)

            patch.setattr(ControlLink, "_send", send_late)
            with pytest.raises(VgpuError, match="uid 7 has 64 links") as refused:
                ControlLink(path)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        refusing.join()
