"""What one user, or one peer, can take of a real node. The users are real where the tests run as root."""

from __future__ import annotations

import grp
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.users import ALICE, BOB, RawLink, as_user, needs_root, opened
from vgpu.errors import ErrorCode, VgpuError
from vgpu.limits import Limits
from vgpu.protocol.codec import encode
from vgpu.spec import VgpuChanges


@pytest.fixture(scope="module")
def module_node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as node:
        yield opened(node)


@pytest.fixture
def node(module_node: SimulatedNode) -> Iterator[SimulatedNode]:
    yield module_node
    module_node.clear()


def made_by(node: SimulatedNode, uid: int, count: int = 1, **fields: object) -> list[str]:
    """The ids of new vGPUs of that user, up to the first refusal, whose text comes last."""

    def make() -> list[str]:
        made = []
        for _ in range(count):
            try:
                made.append(node.create(**({"sm_percent": 1, "memory_bytes": 64 << 20} | fields)).vgpu_id)
            except VgpuError as error:
                return [*made, str(error)]
        return made

    found: list[str] = as_user(uid, make)
    return found


def node_log(node: SimulatedNode) -> Path:
    return node.directory / "node.log"


# --- what one message can cost


def test_a_first_message_is_short(node: SimulatedNode) -> None:
    link = RawLink(node, hello=False)
    link.socket.sendall(encode({"op": "hello", **{f"field {n}": n for n in range(1000)}}))
    assert link.socket.recv(1 << 16) == b"", "it is closed unread"
    link.close()


def test_unknown_fields_cost_three_complaints_and_a_line_of_log(node: SimulatedNode) -> None:
    before = node_log(node).stat().st_size
    first = RawLink(node, hello=False)
    answer = first.ask({"op": "hello", **{f"\x1b[2J{n}": n for n in range(200)}})
    first.close()
    link = RawLink(node)
    for message in ({"op": "status", **{f"\x1b{n}": n for n in range(1000)}}, {"op": "x" * 60_000}):
        answer = link.ask(message)
        assert answer["code"] == ErrorCode.INVALID
        assert len(answer["error"]) < 700
        assert "\x1b" not in answer["error"]
    link.socket.sendall(encode({"op": "status", **{f"{n}": n for n in range(2000)}}))
    assert link.socket.recv(1 << 16) == b"", "such a map is none of ours"
    link.close()
    with node.link() as other:
        other.status()
    assert node_log(node).stat().st_size - before < 4000


# --- numbers


def test_a_duration_beyond_64_bits_is_refused_and_the_journal_takes_others(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10)
    for ttl_ns in (2562047 * 3600 * 10**9, (1 << 63) - 1, (1 << 64) - 1):
        link = RawLink(node)
        answer = link.ask({"op": "set", "vgpu": vgpu.vgpu_id, "changes": {"ttl_ns": ttl_ns}})
        assert answer["code"] == ErrorCode.INVALID
        link.close()
    with pytest.raises(VgpuError, match="--ttl: 106751d23h is more than 36500d"):
        VgpuChanges.parse(ttl_ns="2562047h")
    with node.link() as asked:
        assert asked.set(vgpu.vgpu_id, VgpuChanges.parse(ttl_ns="876000h")).expires_unix_s is not None


# --- names


@needs_root
def test_two_users_may_use_one_name_and_each_means_the_own_one(node: SimulatedNode) -> None:
    [alices] = made_by(node, ALICE, name="train")
    [bobs] = made_by(node, BOB, name="train")
    assert "has the name 'train' already" in made_by(node, ALICE, name="train")[0]

    def inspect() -> str:
        with node.link() as link:
            return link.inspect("train").vgpu.vgpu_id

    assert as_user(ALICE, inspect) == alices
    assert as_user(BOB, inspect) == bobs
    with node.link() as link, pytest.raises(VgpuError) as refused:
        link.remove("train")
    assert refused.value.code is ErrorCode.AMBIGUOUS
    assert alices in refused.value.message
    assert bobs in refused.value.message


@needs_root
def test_a_name_that_looks_like_an_id_is_refused_and_no_foreign_name_wins_over_an_id(node: SimulatedNode) -> None:
    [alices] = made_by(node, ALICE)
    for name in (alices.removeprefix("vgpu-"), alices.removeprefix("vgpu-").upper(), "0123abcd"):
        assert "looks like a vGPU's id" in made_by(node, BOB, name=name)[0]
    [bobs] = made_by(node, BOB, name=alices[5:9])

    def set_name() -> str:
        with node.link() as link, pytest.raises(VgpuError) as refused:
            link.set(bobs, VgpuChanges.parse(name=alices[5:]))
        return refused.value.message

    assert "looks like a vGPU's id" in as_user(BOB, set_name)

    def remove() -> str:
        with node.link() as link:
            return link.remove(alices[5:9]).vgpu_id

    with node.link() as link, pytest.raises(VgpuError, match="fits 2 vGPUs"):
        link.remove(alices[5:9])
    assert as_user(ALICE, remove) == alices


# --- groups and recordings


@pytest.mark.parametrize("group", ["a\0b", "", "x" * 300, "a\nb", "a:b"])
def test_a_name_that_no_group_can_have_is_refused(node: SimulatedNode, group: str) -> None:
    link = RawLink(node)
    answer = link.ask({"op": "create", "spec": {"sm_percent": 10, "share_group": group}})
    assert answer["code"] == ErrorCode.INVALID
    assert "is not the name of a group" in answer["error"]
    link.close()


def test_the_node_finds_the_group_whatever_a_peer_says(node: SimulatedNode) -> None:
    link = RawLink(node)
    answer = link.ask({"op": "create", "spec": {"sm_percent": 10, "share_group": "no such group"}, "share_gid": 0})
    assert answer["code"] == ErrorCode.INVALID
    created = link.ask({"op": "create", "spec": {"sm_percent": 10, "share_group": "daemon"}, "share_gid": 0})
    link.close()
    assert created["ok"]
    door = node.paths.broker_socket(created["result"]["vgpu_id"])
    assert door.stat().st_gid == grp.getgrnam("daemon").gr_gid


@needs_root
def test_one_user_holds_one_recording_and_leaves_one_to_root(node: SimulatedNode) -> None:
    def record(uid: int) -> RawLink:
        """A link that records, or was refused, as that user."""

        def connect() -> None:
            nonlocal link
            link = RawLink(node)

        link: RawLink | None = None
        os.seteuid(uid)
        try:
            connect()
        finally:
            os.seteuid(0)
        assert link is not None
        link.socket.sendall(encode({"op": "trace", "id": 3, "gpu": "0", "duration_ns": 60 * 10**9}))
        return link

    users = [record(uid) for uid in (ALICE, BOB, 61003)]
    for link in users:
        assert link.receive()["trace"] is not None
    refusals = [record(ALICE), record(61004)]
    assert "is being recorded 1 time by uid 61001, a user's most" in refusals[0].receive()["error"]
    assert "is being recorded by 3 others" in refusals[1].receive()["error"]
    roots = record(0)
    assert roots.receive()["trace"] is not None
    for link in (*users, *refusals, roots):
        link.close()


# --- locks


@needs_root
def test_no_other_user_can_lock_what_a_node_locks(node: SimulatedNode) -> None:
    locks = [path for path in node.paths.runtime.rglob("*lock") if path.is_file()]
    assert len(locks) == 2

    def lockable() -> list[str]:
        found = []
        for path in locks:
            try:
                with path.open():
                    found.append(str(path))
            except PermissionError:
                continue
        return found

    assert as_user(ALICE, lockable) == []
    assert {path.stat().st_mode & 0o777 for path in locks} == {0o600}


# --- events


def test_garbage_at_a_broker_is_told_of_once_in_a_while_and_counted(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10)
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(60)
            peer.connect(str(node.paths.broker_socket(vgpu.vgpu_id)))
            peer.sendall(b"\xff" * 64)
            assert peer.recv(100) == b""

    def told() -> list[str]:
        with node.link() as link:
            return [event.text for event in link.events(vgpu.vgpu_id, kinds=("link-closed",))]

    def count(texts: list[str]) -> int:
        return sum(1 + int((re.search(r"\(and (\d+) more\)", text) or [0, 0])[1]) for text in texts)

    eventually(lambda: count(told()) == 50, "every one's being told or counted")
    assert len(told()) < 25


@needs_root
def test_members_of_the_share_group_leave_places_at_the_broker_to_the_owner(node: SimulatedNode) -> None:
    link = RawLink(node)
    created = link.ask({"op": "create", "spec": {"sm_percent": 10, "share_group": "daemon"}})
    link.close()
    vgpu_id = created["result"]["vgpu_id"]
    visitors: list[socket.socket] = []
    os.setegid(grp.getgrnam("daemon").gr_gid)
    os.seteuid(ALICE)
    try:
        for _ in range(Limits().visitors_per_broker):
            visitors.append(socket.socket(socket.AF_UNIX))
            visitors[-1].connect(str(node.paths.broker_socket(vgpu_id)))
    finally:
        os.seteuid(0)
        os.setegid(0)
    child = node.attach(vgpu_id, use=False)
    eventually(lambda: node.reading(vgpu_id).processes == 1, "the owner's attaching")  # type: ignore[union-attr]
    for visitor in visitors:
        visitor.close()
    child.kill()
