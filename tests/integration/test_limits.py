"""What one user, or one peer, can take of a real node. The users are real where the tests run as root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode
from tests.integration.users import RawLink, opened
from vgpu.errors import ErrorCode, VgpuError
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
