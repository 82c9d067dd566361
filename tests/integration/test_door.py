"""A broker's socket: who is let in, who is not, and what a hostile or broken visitor can do (nothing)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing.fake_peer import Process
from tests.integration.node import SimulatedNode, eventually
from tests.integration.process import attach_request, knock
from tests.integration.strangers import crowd
from vgpu.ctl.main import run as vgpuctl
from vgpu.protocol.messages import VgpuStatus


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@pytest.fixture
def vgpu(node: SimulatedNode) -> Iterator[VgpuStatus]:
    created = node.create(sm_percent=30, memory_bytes="4G")
    yield created
    with node.link() as link:
        link.remove(created.vgpu_id, force=True)


@pytest.fixture
def door(node: SimulatedNode, vgpu: VgpuStatus) -> Path:
    return node.paths.broker_socket(vgpu.vgpu_id)


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_pages_that_are_handed_out(door: Path, vgpu: VgpuStatus) -> None:
    reply, descriptors = knock(door, attach_request())
    assert (reply["ok"], reply["slot"]) == (True, 0)
    with GrantsPage.map_readonly(descriptors[0]) as grants, ActivityPage.map(descriptors[1]) as activity:
        assert (grants.vgpu_id, grants.gpu_uuid) == (vgpu.vgpu_id, vgpu.gpu_uuid)
        assert grants.memory_limit_bytes == 4 << 30
        assert activity.read_slot(0).pid == os.getpid()
        assert grants.generation == activity.generation == reply["generation"]
        writable = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDWR)  # even for who may open it so: it is sealed
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        close([writable])
    close(descriptors)


def test_an_observer_gets_pages_and_no_slot(door: Path, node: SimulatedNode, vgpu: VgpuStatus) -> None:
    reply, descriptors = knock(door, attach_request(role="observer"))
    assert (reply["ok"], reply["slot"], len(descriptors)) == (True, -1, 2)
    close(descriptors)
    now = node.reading(vgpu.vgpu_id)
    assert now is not None
    assert now.processes == 0


def test_a_process_that_attaches_again_keeps_its_slot(door: Path) -> None:
    """It has one, however often it comes, and whatever slot it asks for."""
    for asked in (-1, -1, 0, 5):
        reply, descriptors = knock(door, attach_request(slot=asked))
        close(descriptors)
        assert reply["slot"] == 0


def test_nobody_gets_another_process_s_slot(door: Path, node: SimulatedNode, vgpu: VgpuStatus) -> None:
    other = node.attach(vgpu.vgpu_id, use=False)
    reply, descriptors = knock(door, attach_request(slot=other.replies[0]["slot"]))
    close(descriptors)
    assert reply["slot"] != other.replies[0]["slot"]


def test_sixty_four_processes_and_no_more(door: Path, vgpu: VgpuStatus) -> None:
    with crowd() as processes:
        assert [processes.knock(door)["slot"] for _ in range(64)] == list(range(64))
        refused, descriptors = knock(door, attach_request())
        assert (refused["ok"], refused["code"], descriptors) == (False, "full", [])
        assert vgpu.vgpu_id in refused["error"]


def test_a_process_that_is_at_work_does_not_attach_again(door: Path) -> None:
    """A second slot would be a second place, and a second share of what goes round among processes."""
    reply, descriptors = knock(door, attach_request())
    program = Process(ActivityPage.map(descriptors[1]), GrantsPage.map_readonly(descriptors[0]), reply["slot"])
    program.activate()
    refused, _ = knock(door, attach_request())
    assert (refused["ok"], refused["code"]) == (False, "unavailable")
    assert refused["error"].startswith(f"process {os.getpid()} is in ")
    again, fresh = knock(door, attach_request(slot=reply["slot"]))
    assert again["slot"] == reply["slot"]
    close([*descriptors, *fresh])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 99}, "version"),
        ({"now_ns": 1}, "mode"),
        ({"op": "open sesame"}, "protocol"),
        ({"slot": 64}, "protocol"),
        ({"version": "one"}, "protocol"),
        ({"command": ["x"]}, "protocol"),
    ],
)
def test_refusals_say_why(door: Path, change: dict[str, object], code: str) -> None:
    refused, descriptors = knock(door, attach_request(**change))
    assert (refused["ok"], refused["code"], descriptors) == (False, code, [])
    assert "\n" not in refused["error"]


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<I", (64 << 10) + 1),  # more than a hook may say
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",  # not msgpack
        struct.pack("<I", 1) + b"\x01",  # not a map
        struct.pack("<I", 4) + msgpack.packb({1: 2, 3: 4})[:4],  # torn
        struct.pack("<I", 2000) + b"\x91" * 2000,  # nested without end
        struct.pack("<I", 0),
    ],
)
def test_malformed_requests_end_their_link_alone(door: Path, raw: bytes) -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        knock(door, raw=raw)
    reply, descriptors = knock(door, attach_request())
    close(descriptors)
    assert reply["ok"]


def test_a_slow_visitor_keeps_nobody_waiting(door: Path) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(door))
        slow.sendall(b"\x40")
        reply, descriptors = knock(door, attach_request())
        close(descriptors)
        assert reply["ok"]
        slow.settimeout(30)
        assert slow.recv(1) == b"", "and is shown the door"


def test_descriptors_that_nobody_asked_for_are_closed(door: Path, vgpu: VgpuStatus) -> None:
    folder = Path(f"/proc/{vgpu.broker_pid}/fd")
    before = len(list(folder.iterdir()))
    body = msgpack.packb(attach_request(version=99))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as link, Path(os.devnull).open("rb") as nothing:
            link.settimeout(30)
            link.connect(str(door))
            try:
                socket.send_fds(link, [struct.pack("<I", len(body)) + body], [nothing.fileno()] * 8)
            except PermissionError:  # this kernel refuses them in the broker's place
                continue
            assert link.recv(1 << 16)
    eventually(lambda: len(list(folder.iterdir())) <= before, "the broker's descriptors")


def test_a_crowd_of_visitors_is_served(door: Path) -> None:
    """More links than the broker takes at once, all silent; the one that speaks waits until they are sent away."""
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(140)]
    try:
        for visitor in crowd:
            visitor.connect(str(door))
        reply, descriptors = knock(door, attach_request())
        close(descriptors)
        assert reply["ok"]
    finally:
        for visitor in crowd:
            visitor.close()


def reading_of(node: SimulatedNode, vgpu: VgpuStatus) -> VgpuStatus:
    found = node.reading(vgpu.vgpu_id)
    assert found is not None
    return found


def test_what_a_tenant_writes_into_its_page_harms_only_itself(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    import mmap

    other = node.create(sm_percent=50, memory_bytes="1G")
    neighbour = node.attach(other.vgpu_id)
    _, descriptors = knock(node.paths.broker_socket(vgpu.vgpu_id), attach_request())
    with mmap.mmap(descriptors[1], 0) as page:
        page[64:] = os.urandom(len(page) - 64)
        page[64:] = b"\xff" * (len(page) - 64)
    close(descriptors)
    eventually(lambda: neighbour.epochs, "the neighbour's lease")
    used = reading_of(node, other).busy_ns
    eventually(lambda: reading_of(node, other).busy_ns > used, "the neighbour's work under it")
    with node.link() as link:
        assert len(link.list()) == 2
        link.inspect(vgpu.vgpu_id)
        link.remove(other.vgpu_id, force=True)


def test_a_command_that_would_write_on_roots_terminal(
    door: Path,
    node: SimulatedNode,
    vgpu: VgpuStatus,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it enters, and in every list that shows it."""
    hostile = "x\x1b[2J\x9b2J\r\n12:00:00 GPU 0 removed by uid 0\u202e"
    reply, descriptors = knock(door, attach_request(command=hostile))
    assert reply["ok"]
    with ActivityPage.map(descriptors[1]) as activity:
        assert activity.read_slot(reply["slot"]).command.isprintable()
    close(descriptors)
    for name, value in node.environment.items():
        monkeypatch.setenv(name, value)

    def listed() -> bool:
        with node.link() as link:
            return any("attached" in event.text for event in link.events(vgpu.vgpu_id))

    eventually(listed, "the event of the process")
    for command in (["events"], ["events", "-o", "json"], ["ps"], ["ps", "-o", "json"], ["logs"], ["top", "--once"]):
        vgpuctl(command)
        said = capsys.readouterr().out
        assert said.replace("\n", "").isprintable(), command
