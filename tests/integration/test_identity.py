"""Which processes are in a vGPU is the kernel's word and the journal's; nothing that a tenant writes changes it."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cython_ext.pages.activitypage import ActivityPage
from cython_ext.readings import SlotState
from tests.integration.node import SimulatedNode, eventually
from tests.integration.process import attach_request, knock
from tests.integration.strangers import STRANGER, as_user, become, crowd
from tests.integration.worker import Worker
from tests.processes import ended
from tests.tiers import slow
from vgpu.errors import VgpuError
from vgpu.protocol.messages import ProcessReading, VgpuStatus
from vgpu.protocol.peer import start_time
from vgpu.spec import VgpuSpec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")

SLOT_BYTES, SLOTS, BUSY, COMMITTED = 512, 64, 120, 208  # of layout.pxd, on x86-64


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode(1, hasty=True) as running:
        running.directory.chmod(0o755)
        yield running


@pytest.fixture
def theirs(node: SimulatedNode) -> VgpuStatus:
    """A vGPU of another user than the node's."""

    def create() -> str:
        with node.link() as link:
            return link.create(VgpuSpec.parse(sm_percent=10, memory_bytes="1G")).vgpu_id

    reading = node.reading(as_user(create))
    assert reading is not None
    return reading


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any vGPU."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as stranger, ended(stranger):
        yield stranger
        stranger.kill()


def write_slot(page: mmap.mmap, index: int, pid: int, started: int) -> None:
    """What a tenant can: a slot that says it is an active process's."""
    (size,) = struct.unpack_from("<I", page, 8)
    at = size - (SLOTS - index) * SLOT_BYTES
    struct.pack_into("<IIQ", page, at, SlotState.ACTIVE, pid, started)


def lie(node: SimulatedNode, vgpu_id: str, pid: int) -> int:
    """Another user's process attaches to its vGPU, writes ``pid`` into each slot of the page, and ends."""
    started = start_time(pid)

    def act() -> int:
        reply, descriptors = knock(node.paths.broker_socket(vgpu_id), attach_request())
        with mmap.mmap(descriptors[1], 0) as page:
            for index in range(1, SLOTS):
                write_slot(page, index, pid, started)
        return int(reply["slot"])

    slot = as_user(act)
    assert slot == 0, slot
    return int(slot)


def new_broker(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    """Kill the vGPU's broker, and wait until the next one answers."""
    before = node.reading(vgpu.vgpu_id)
    assert before is not None
    assert before.broker_pid is not None
    os.kill(before.broker_pid, signal.SIGKILL)

    def answers() -> bool:
        now = node.reading(vgpu.vgpu_id)
        if now is None or now.broker_pid in {None, before.broker_pid}:
            return False
        try:
            reply, descriptors = knock(node.paths.broker_socket(vgpu.vgpu_id), attach_request(version=99))
        except (OSError, EOFError):
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(reply["code"] == "version")

    eventually(answers, "another broker")


def test_a_strangers_pid_in_a_page_is_never_killed_nor_shown(
    node: SimulatedNode, theirs: VgpuStatus, victim: subprocess.Popen[bytes]
) -> None:
    lie(node, theirs.vgpu_id, victim.pid)
    with node.link() as link:
        link.suspend(theirs.vgpu_id)
    new_broker(node, theirs)
    with node.link() as link:
        shown = [process.pid for process in link.processes(theirs.vgpu_id).processes]
        link.remove(theirs.vgpu_id, force=True)
    assert victim.poll() is None, "the GPU Server killed a process that was never in the vGPU"
    assert victim.pid not in shown


def test_who_is_in_it_outlives_the_broker_whatever_stands_in_the_page(
    node: SimulatedNode, theirs: VgpuStatus, victim: subprocess.Popen[bytes]
) -> None:
    """The list comes from the server: the process of the vGPU, and no other. The header is written anew."""
    door = node.paths.broker_socket(theirs.vgpu_id)

    def scribble() -> bool:
        reply, descriptors = knock(door, attach_request(slot=9))
        with mmap.mmap(descriptors[1], 0) as page:
            page[:] = os.urandom(len(page))
            page[:4096] = b"\xff" * 4096
        return bool(reply["ok"])

    with crowd() as processes:
        assert processes.knock(door, STRANGER)["slot"] == 0
        assert as_user(scribble) is True
        new_broker(node, theirs)

        def shown() -> list[int]:
            with node.link() as link:
                return [process.pid for process in link.processes(theirs.vgpu_id).processes if process.alive]

        eventually(lambda: shown() == processes.pids, "the process, and it alone")
        with node.link() as link, pytest.raises(VgpuError, match=str(processes.pids[0])):
            link.remove(theirs.vgpu_id)
        now = node.reading(theirs.vgpu_id)
        assert now is not None
        assert now.state != "failed"


@pytest.mark.parametrize("broker", ["stays", *slow("is killed")])
def test_after_a_scribbler_the_next_program_works(node: SimulatedNode, theirs: VgpuStatus, broker: str) -> None:
    """Its hook takes the page for one, it gets leases, and the scribbler's slot is free again."""

    def scribble() -> bool:
        reply, descriptors = knock(node.paths.broker_socket(theirs.vgpu_id), attach_request())
        with mmap.mmap(descriptors[1], 0) as page:
            page[:] = b"\xff" * len(page)
            page[:64] = bytes(64)
        return bool(reply["ok"])

    assert as_user(scribble) is True
    if broker == "is killed":
        new_broker(node, theirs)
    eventually(lambda: not processes_of(node, theirs), "the scribbler's slot is free")

    def start() -> Worker | None:
        with suppress(AssertionError):  # a new broker keeps slots for a while for processes that come back
            return Worker(node, theirs, 1 << 20)
        return None

    worker = eventually(start, "a program starts")
    try:
        worker.goes_on()
        assert [p.pid for p in processes_of(node, theirs)] == [worker.popen.pid]
    finally:
        worker.end()


def test_a_limit_holds_for_the_vgpu_that_has_a_scribblers_key(node: SimulatedNode, theirs: VgpuStatus) -> None:
    """The scribbler drove its counter of busy time to the end. Both vGPUs have one entry in the page of the server."""

    def scribble() -> bool:
        reply, descriptors = knock(node.paths.broker_socket(theirs.vgpu_id), attach_request())
        with mmap.mmap(descriptors[1], 0) as page:
            (size,) = struct.unpack_from("<I", page, 8)
            at = size - (SLOTS - int(reply["slot"])) * SLOT_BYTES
            struct.pack_into("<I", page, at, SlotState.ACTIVE)
            struct.pack_into("<Q", page, at + BUSY, 2**64 - 1)
            time.sleep(2.5)  # the relay reads each slot once a second
        return bool(reply["ok"])

    neighbour = Worker(node, theirs, 1 << 20)  # it rings for the relay until the end
    try:
        assert as_user(scribble) is True
        with node.link() as link:
            link.remove(theirs.vgpu_id, force=True)
    finally:
        neighbour.end()
    worker = Worker(node, node.create(sm_percent=10, memory_bytes="1G"), 1 << 20)
    try:
        worker.goes_on()
        before, began = worker.count, time.monotonic()
        time.sleep(2.0)
        of_1_ms = worker.count - before
        assert of_1_ms / 1000 < 0.4 * (time.monotonic() - began)
    finally:
        worker.end()


def processes_of(node: SimulatedNode, vgpu: VgpuStatus) -> tuple[ProcessReading, ...]:
    with node.link() as link:
        return link.processes(vgpu.vgpu_id).processes


def test_an_observer_cannot_write(node: SimulatedNode, theirs: VgpuStatus) -> None:
    door = node.paths.broker_socket(theirs.vgpu_id)

    def tries() -> list[str]:
        _, descriptors = knock(door, attach_request(role="observer"))
        said = []
        for name, attempt in (
            ("map", lambda: mmap.mmap(descriptors[1], 4096)),
            ("write", lambda: os.pwrite(descriptors[1], b"x", 4096)),
            ("reopen", lambda: os.open(f"/proc/self/fd/{descriptors[1]}", os.O_RDWR)),
            ("read", lambda: mmap.mmap(descriptors[1], 4096, prot=mmap.PROT_READ)),
        ):
            try:
                attempt()
            except OSError as error:
                said.append(f"{name}: {errno.errorcode[error.errno or 0]}")
        return said

    assert as_user(tries) == ["map: EACCES", "write: EBADF", "reopen: EACCES"]


def test_a_container_with_the_vgpus_directory_cannot_take_the_servers_place(
    node: SimulatedNode, theirs: VgpuStatus
) -> None:
    """Root in it can write there. The broker's way to its server lies elsewhere."""
    directory = node.paths.vgpu_dir(theirs.vgpu_id)
    assert not (directory / "server.sock").is_symlink()
    with socket.socket(socket.AF_UNIX) as evil:
        evil.bind(str(directory / "evil.sock"))
        evil.listen()
        evil.setblocking(False)
        (directory / "server.sock").symlink_to("evil.sock")
        before = node.server_pid()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: node.server_pid() != before, "another server")
        eventually(lambda: node.reading(theirs.vgpu_id), "its vGPUs")
        with pytest.raises(BlockingIOError):
            evil.accept()


def test_a_broker_speaks_to_its_own_users_server_alone(node: SimulatedNode, theirs: VgpuStatus) -> None:
    link = node.paths.vgpu_server(theirs.vgpu_id)
    path = node.directory / "evil.sock"
    reading, writing = os.pipe()
    node.directory.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            become(STRANGER)
            with socket.socket(socket.AF_UNIX) as evil:
                evil.bind(str(path))
                evil.listen()
                os.write(writing, b"listens")
                visitor, _ = evil.accept()
                os.write(writing, b"heard " + visitor.recv(200))
        finally:
            os._exit(0)
    assert os.read(reading, 100) == b"listens"
    node.directory.chmod(0o755)
    fresh = link.with_name("fresh")
    fresh.symlink_to(path)
    fresh.replace(link)
    broker = node.reading(theirs.vgpu_id)
    assert broker is not None
    os.kill(node.server_pid(), signal.SIGKILL)  # its broker looks for it again and again, and finds this one first
    assert os.read(reading, 300) == b"heard "
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_a_program_that_becomes_another_user_goes_on_after_a_restart_of_its_server(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G")
    program = node.program(vgpu, DROPS)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "65534\n"
        os.kill(node.server_pid(), signal.SIGKILL)
        said = [program.stdout.readline() for _ in range(2)]
        assert said == ["restarted\n", "launched\n"], said
    finally:
        program.kill()
        program.communicate()
    leftovers = node.paths.vgpu_dir(vgpu.vgpu_id)
    eventually(lambda: [file.name for file in leftovers.iterdir()] == ["broker.sock"], "its own socket is gone")


DROPS = """
import os, time
from ctypes import c_uint32, c_uint64
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import PTX
gpu = Gpu(PTX)
kernel = Kernel(gpu, "compute", 1056, 256, (c_uint64(0), c_uint32(1000)))
kernel.launch()
gpu.synchronize()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(os.getuid(), flush=True)
began = time.monotonic()
while True:  # a launch that waits for a new lease takes as long as the restart
    before = time.monotonic()
    kernel.launch()
    gpu.synchronize()
    if time.monotonic() - before > 0.05 and time.monotonic() - began > 0.1:
        break
print("restarted", flush=True)
for _ in range(20):
    kernel.launch()
    gpu.synchronize()
print("launched", flush=True)
time.sleep(3600)
"""


def test_a_lie_in_ones_own_ledger_keeps_no_memory_from_others(node: SimulatedNode, theirs: VgpuStatus) -> None:
    def lie_about_memory() -> int:
        reply, descriptors = knock(node.paths.broker_socket(theirs.vgpu_id), attach_request())
        with mmap.mmap(descriptors[1], 0) as page:
            (size,) = struct.unpack_from("<I", page, 8)
            at = size - (SLOTS - int(reply["slot"])) * SLOT_BYTES
            struct.pack_into("<I", page, at, SlotState.ACTIVE)
            struct.pack_into("<Q", page, at + COMMITTED, 140 << 30)
            (owned,) = ActivityPage.map(descriptors[1]).slots()[:1]
            time.sleep(3600 if owned.charged_bytes != 140 << 30 else 0)
        os.kill(os.getpid(), signal.SIGSTOP)  # it stays, with its lie
        return 0

    liar = os.fork()
    if liar == 0:
        try:
            become(STRANGER)
            lie_about_memory()
        finally:
            os._exit(0)
    try:
        os.waitpid(liar, os.WUNTRACED)
        with node.link() as link:
            assert link.inspect(theirs.vgpu_id).vgpu.memory_used_bytes >= 140 << 30
        assert node.create(sm_percent=30, memory_bytes="100G").state == "idle"
    finally:
        os.kill(liar, signal.SIGKILL)
        os.waitpid(liar, 0)
