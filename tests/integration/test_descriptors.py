"""Descriptors at the doors of a real node: what a peer passes, and what is left when there are few."""

from __future__ import annotations

import array
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.protocol.test_descriptors import needs_passrights
from vgpu.errors import ErrorCode, VgpuError


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


def limit_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def limited(pid: int, soft: int) -> int:
    """The limit that it had."""
    had, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return had


def test_each_process_raises_its_soft_limit_and_programs_keep_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with SimulatedNode() as node:
            vgpu = node.create(sm_percent=10)
            broker = eventually(lambda: (node.reading(vgpu.vgpu_id) or vgpu).broker_pid, "the broker's start")
            for pid in (node.supervisor.pid, node.server_pid(), broker):
                assert limit_of(pid) == min(hard, 1 << 20)
            with node.program(vgpu, "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[0])") as program:
                assert program.communicate()[0] == "200\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors_a_gpu_server_refuses_and_works_again_after_removals(node: SimulatedNode) -> None:
    server = node.server_pid()
    most = descriptors_of(server) + 40
    had = limited(server, most)
    made = []
    with pytest.raises(VgpuError, match="the server of GPU 0 has no descriptors left") as refused:
        made.extend(node.create(sm_percent=1, memory_bytes=64 << 20).vgpu_id for _ in range(20))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    with node.link() as link:
        there = [vgpu.vgpu_id for vgpu in link.list()]
        assert 1 <= len(there) < 20
        for vgpu_id in there:
            link.remove(vgpu_id)
    vgpu = node.create(sm_percent=1)
    assert node.server_pid() == server, "it has not been started again"
    limited(server, had)
    with node.link() as link:
        link.remove(vgpu.vgpu_id)


def test_out_of_descriptors_a_node_refuses_links_and_works_again(node: SimulatedNode) -> None:
    pid = node.supervisor.pid
    most = descriptors_of(pid) + 40
    had = limited(pid, most)
    visitors = []
    try:
        for _ in range(60):
            visitor = socket.socket(socket.AF_UNIX)
            visitor.connect(str(node.paths.control_socket))
            visitors.append(visitor)
        eventually(lambda: descriptors_of(pid) >= most - 20, "the links' being accepted")
    finally:
        for visitor in visitors:
            visitor.close()
    with node.link() as link:
        assert link.gpus()[0].state == "serving"
    assert node.supervisor.poll() is None
    limited(pid, had)


def test_out_of_descriptors_a_broker_stays(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10)
    broker = eventually(lambda: (node.reading(vgpu.vgpu_id) or vgpu).broker_pid, "the broker's start")
    most = descriptors_of(broker) + 2
    had = limited(broker, most)
    visitors = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for visitor in visitors:
        visitor.connect(str(node.paths.broker_socket(vgpu.vgpu_id)))
    for visitor in visitors:
        visitor.settimeout(60)
        assert visitor.recv(100) == b"", "it is closed"
        visitor.close()
    limited(broker, had)
    child = node.attach(vgpu.vgpu_id, use=False)
    eventually(lambda: (node.reading(vgpu.vgpu_id) or vgpu).processes == 1, "the process's attaching")
    child.kill()
    assert (node.reading(vgpu.vgpu_id) or vgpu).broker_pid == broker
