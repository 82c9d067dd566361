"""A node whose directories were removed, and directories that another user has prepared."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.node import ROOT, SimulatedNode, attachment, eventually
from tests.integration.users import ALICE, as_user
from vgpu.ctl.doctor import look
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.health import Health, diagnose
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec
from vgpu.trust import replaceable_part

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        running.directory.chmod(0o755)
        yield running


def test_a_node_whose_runtime_directory_is_gone_ends_with_its_servers() -> None:
    with SimulatedNode() as node:
        server = node.server_pid()
        first = node.supervisor
        shutil.rmtree(node.paths.runtime)
        assert first.wait(60) == 0
        eventually(lambda: not Path(f"/proc/{server}").exists(), "the end of its server", 60)
        node.start()  # the next one serves, and nothing of the first is in its way
        assert node.server_pid() != server
        node.create(sm_percent=30, memory_bytes="1G")


def test_what_is_made_after_the_state_directory_was_removed_is_kept(node: SimulatedNode) -> None:
    shutil.rmtree(node.paths.state)
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    health = look(node.paths)
    assert isinstance(health, Health)
    [found] = [finding for finding in diagnose(health) if finding.check == "state"]
    assert str(node.paths.state) in found.found
    os.kill(server := node.server_pid(), 9)
    eventually(lambda: node.server_pid() != server and node.reading(vgpu.vgpu_id), "it is known to the next server")
    with node.link() as link:
        link.remove(vgpu.vgpu_id)


def test_a_journal_with_another_file_in_its_place_is_not_written(node: SimulatedNode) -> None:
    with node.link() as link:
        journal = node.paths.journal(link.gpus()[0].uuid)
    moved = journal.with_suffix(".moved")
    journal.replace(moved)
    journal.write_bytes(b"")
    try:
        with pytest.raises(VgpuError, match="the journal of GPU 0 cannot be written"):
            node.create(sm_percent=10, memory_bytes="1G")
        assert journal.read_bytes() == b""
    finally:
        moved.replace(journal)
    with node.link() as link:
        link.remove(node.create(sm_percent=10, memory_bytes="1G").vgpu_id)


# --- another user's directories -------------------------------------------------------------------------------------


@contextmanager
def another_users_node(folder: Path, owner: int) -> Iterator[Path]:
    """A socket in ``folder`` at which uid ``owner`` listens."""
    folder.mkdir(parents=True)
    os.chown(folder, owner, owner)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "control.sock"))
            os.setgid(owner)
            os.setuid(owner)
            listener.listen()  # from here on the kernel names ``owner``
            os.write(writing, b"x")
            signal.pause()
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x", "the other user's process ended"
        yield folder
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)


@as_root
def test_no_client_believes_another_users_node(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VGPU_RUNTIME_DIR", raising=False)
    with another_users_node(node.directory / "theirs", OTHER) as folder:
        with pytest.raises(VgpuError, match="another user can replace the node at") as refused:
            ControlLink(folder / "control.sock")
        assert refused.value.code is ErrorCode.NOT_YOURS
        os.chown(folder, 0, 0)  # the directory is root's by now; who listens is not
        with pytest.raises(VgpuError, match=f"uid {OTHER} answers at"):
            ControlLink(folder / "control.sock")


@as_root
def test_no_node_begins_in_a_directory_that_another_user_can_replace(tmp_path: Path) -> None:
    with SimulatedNode() as probe:
        argv, environment, directory = probe.argv, dict(probe.environment), probe.directory
        theirs = directory / "theirs"
        theirs.mkdir(mode=0o755)
        os.chown(theirs, OTHER, OTHER)
        environment |= {"VGPU_RUNTIME_DIR": str(theirs / "run")}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert f"another user can replace {theirs / 'run'}: {theirs} is theirs, or open to all" in done.stderr


@as_root
def test_parts_of_a_path(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    assert replaceable_part(place) is None
    assert replaceable_part(place / "not" / "there") is None
    place.parent.chmod(0o777)
    assert replaceable_part(place) == place.parent
    place.parent.chmod(0o1777)
    assert replaceable_part(place) is None
    os.chown(place, OTHER, OTHER)
    assert replaceable_part(place) == place
    link = tmp_path / "link"
    link.symlink_to(place)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert replaceable_part(link) == link


INIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"


def init(node: SimulatedNode, vgpu: VgpuStatus, **environment: str) -> tuple[str, str]:
    from vgpu.ctl.programs import attachment

    full = attachment([vgpu]).environment(node.environment) | environment
    done = subprocess.run(
        [sys.executable, "-c", INIT], env=full, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip(), done.stderr


@as_root
def test_the_hook_believes_no_broker_of_another_user(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    try:
        folder = node.paths.vgpu_dir(vgpu.vgpu_id)
        assert init(node, vgpu) == ("0", "")
        os.chown(folder, OTHER, OTHER)
        code, said = init(node, vgpu)
        assert code != "0"
        assert "another user can replace its node's directory" in said
        os.chown(folder, 0, 0)
        door = node.paths.broker_socket(vgpu.vgpu_id)
        door.rename(door.with_name("kept"))
        with another_users_node(node.directory / "fake", OTHER) as fake:
            door.symlink_to(fake / "control.sock")
            code, said = init(node, vgpu)
        assert code != "0"
        assert "another user answers in the place of its broker" in said
        door.unlink()
        door.with_name("kept").rename(door)
        assert init(node, vgpu) == ("0", "")
    finally:
        with node.link() as link:
            link.remove(vgpu.vgpu_id, force=True)


# --- VGPU_ID is a name ----------------------------------------------------------------------------------------------


def test_vgpu_id_may_be_a_name(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G", name="trainer")
    assert init(node, vgpu, VGPU_ID="trainer") == ("0", "")
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges(name="tuner"))
    code, said = init(node, vgpu, VGPU_ID="trainer")
    assert code == "100"
    assert "VGPU_ID=trainer is neither a vGPU's id (vgpu- and eight hex digits) nor the name of one of yours" in said
    assert init(node, vgpu, VGPU_ID="tuner") == ("0", "")
    os.kill(server := node.server_pid(), 9)
    eventually(lambda: node.server_pid() != server, "the next server")
    eventually(lambda: init(node, vgpu, VGPU_ID="tuner") == ("0", ""), "its vGPU is there", 60)
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    assert init(node, vgpu, VGPU_ID="tuner")[0] == "100"
    for odd in ("../../etc", "a/b", ".", "x" * 63, "tuner,", "-x"):
        assert init(node, vgpu, VGPU_ID=odd)[0] == "100"


# --- the system's node ----------------------------------------------------------------------------------------------

ATTACHES = """
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : 0;
    return init ? init(0) : 255;
}
"""


@as_root
@pytest.mark.parametrize("dead", [False, True], ids=["no node of the user's", "a dead node of the user's"])
def test_a_user_without_a_node_needs_no_more_than_the_id(node: SimulatedNode, tmp_path: Path, dead: bool) -> None:
    """The client and the hook find the system's node: the mount namespace has the node's directory at /run/vgpu."""
    own = node.directory / f"own-{dead}"
    (own / "vgpu").mkdir(parents=True)
    if dead:
        with socket.socket(socket.AF_UNIX) as control:
            control.bind(str(own / "vgpu" / "control.sock"))
    for place in (own, *own.rglob("*")):
        os.chown(place, ALICE, ALICE)
    program = node.directory / "attaches"
    (tmp_path / "attaches.c").write_text(ATTACHES)
    subprocess.run(["gcc", "-o", program, tmp_path / "attaches.c"], check=True)

    def act() -> list[object]:
        for name in ("VGPU_RUNTIME_DIR", "VGPU_STATE_DIR", "VGPU_ID"):
            os.environ.pop(name, None)
        os.environ["XDG_RUNTIME_DIR"] = str(own)
        with ControlLink() as link:
            vgpu = link.create(VgpuSpec.parse(sm_percent=10, memory_bytes="1G"))
            environment = attachment([vgpu]).environment(node.environment)
            del environment["VGPU_RUNTIME_DIR"]
            environment["XDG_RUNTIME_DIR"] = str(own)
            ran = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
            link.remove(vgpu.vgpu_id, force=True)
        return [vgpu.owner_uid, ran.returncode, ran.stderr]

    assert as_user(ALICE, act, before=lambda: place_system_node(node.paths.runtime)) == [ALICE, 0, ""]


def place_system_node(runtime: Path) -> None:
    """Puts ``runtime`` at /run/vgpu, in a mount namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    for result in (
        libc.unshare(0x20000),  # CLONE_NEWNS
        libc.mount(b"none", b"/", None, 0x44000, None),  # MS_REC | MS_PRIVATE
        libc.mount(b"none", b"/run", b"tmpfs", 0, b"mode=755"),
        Path("/run/vgpu").mkdir() or 0,
        libc.mount(str(runtime).encode(), b"/run/vgpu", None, 0x1000, None),  # MS_BIND
    ):
        assert result == 0, os.strerror(ctypes.get_errno())


# --- a GPU has one node ---------------------------------------------------------------------------------------------


def test_a_second_node_does_not_promise_the_same_gpu(node: SimulatedNode) -> None:
    second = SimulatedNode()
    (second.paths.runtime / "sim").mkdir(parents=True)
    shutil.copy(node.paths.runtime / "sim" / "gpu0", second.paths.runtime / "sim" / "gpu0")  # the same UUID
    with second, second.link() as link:

        def refused() -> str:
            (gpu,) = link.gpus()
            return gpu.reason if gpu.state == "failed" and "served already" in gpu.reason else ""

        assert f"by uid {os.getuid()} (pid {node.server_pid()})" in eventually(refused, "its refusal", 60)
        with pytest.raises(VgpuError):
            link.create(VgpuSpec.parse(sm_percent=10, memory_bytes="1G"))
