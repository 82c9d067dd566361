"""Descriptors at the doors of a real node: what a peer passes, and what is left when there are few."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode
from tests.protocol.test_descriptors import needs_passrights


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as node:
        yield node


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@needs_passrights
@pytest.mark.parametrize("place", ["control", "server", "broker"])
def test_no_door_takes_descriptors(node: SimulatedNode, place: str) -> None:
    vgpu = node.create(sm_percent=10)
    paths: dict[str, Path] = {
        "control": node.paths.control_socket,
        "server": node.paths.server_socket(0),
        "broker": node.paths.broker_socket(vgpu.vgpu_id),
    }
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(paths[place]))
        with pytest.raises(PermissionError):
            peer.sendmsg([b"\x10\0\0\0x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 8))])
    node.clear()
    assert node.create(sm_percent=10).vgpu_id, "brokers still bring their pages"
    node.clear()
