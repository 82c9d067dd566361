"""An owner and replicas of a model on a simulated node: the bytes, the charges, and what a death leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from tests.integration.users import ALICE, as_user, needs_root
from tests.models import files
from vgpu.ctl.programs import attachment
from vgpu.errors import VgpuError
from vgpu.models import places
from vgpu.models.replica import asked, connected
from vgpu.protocol.messages import ProcessReading, VgpuStatus

MIB = 1 << 20
MODEL = 6 * MIB
"""What the driver takes for the tests' model."""
REPLICA = """
import hashlib, json, os, sys, warnings
from ctypes import c_size_t, c_uint64
import vgpu.models
from vgpu.errors import VgpuError
warnings.simplefilter("ignore")
try:
    model = vgpu.models.open_model(sys.argv[1], float(sys.argv[2]))
except VgpuError as error:
    print(json.dumps([error.code, error.message, error.hint]), flush=True)
    sys.exit()
def digests():
    return {name: hashlib.sha256(model.read(name)).hexdigest() for name in model.tensors}
def write():
    tensor = model.tensors["lm.weight"]
    model._mapping.card.call("cuMemcpyHtoD_v2", model.address(tensor), b"!", 1)
    return vgpu.models.check()
print(json.dumps("open"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Replica:
    def __init__(self, scene: Scene, vgpu: VgpuStatus, name: str = "m", wait_s: float = 60, **more: str) -> None:
        environment = attachment([vgpu]).environment(scene.environment | more)
        pipe = subprocess.PIPE
        argv = [sys.executable, "-c", REPLICA, name, str(wait_s)]
        self.popen = scene.node.popen(argv, env=environment, stdin=pipe, stdout=pipe)

    def heard(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def asked(self, expression: str) -> Any:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{expression}\n")
        self.popen.stdin.flush()
        return self.heard()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class Scene:
    """One user's models: their files, their folder, and owners and replicas of them."""

    def __init__(self, node: SimulatedNode, folder: Path) -> None:
        self.node = node
        self.files, contents = files.model(folder)
        self.digests = {name: sha256(data) for name, data in contents.items()}
        self.environment = node.environment | {"VGPU_MODELS_DIR": str(node.directory / "models")}

    def start(self, vgpu: VgpuStatus, name: str = "m", *paths: Path, **more: str) -> subprocess.Popen[str]:
        environment = attachment([vgpu]).environment(self.environment | more)
        argv = [sys.executable, "-m", "vgpu.ctl", "models", "serve", name, *map(str, paths or self.files)]
        return self.node.popen(argv, env=environment, stderr=subprocess.PIPE)

    def owner(self, vgpu: VgpuStatus, **more: str) -> subprocess.Popen[str]:
        popen = self.start(vgpu, **more)
        line = said(popen)
        while "serves m" not in line:
            assert line, popen.wait()
            line = said(popen)
        return popen

    def listed(self) -> Any:
        argv = [sys.executable, "-m", "vgpu.ctl", "models", "ls", "-o", "json"]
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def reading(self, vgpu: VgpuStatus) -> VgpuStatus:
        found = self.node.reading(vgpu.vgpu_id)
        assert found is not None
        return found

    def processes(self, vgpu: VgpuStatus) -> list[ProcessReading]:
        with self.node.link() as link:
            return list(link.inspect(vgpu.vgpu_id).processes)

    def on_card(self) -> int:
        """Without contexts."""
        engine = Engine(self.node.paths.runtime / "sim")
        engine.refresh()
        return engine.memory_used_bytes - engine.context_bytes * len(engine.contexts())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def said(popen: subprocess.Popen[str]) -> str:
    assert popen.stderr is not None
    return popen.stderr.readline()


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@pytest.fixture
def scene(shared: SimulatedNode, tmp_path: Path) -> Iterator[Scene]:
    yield Scene(shared, tmp_path)
    shared.clear()


def made(scene: Scene, memory: str = "4G") -> VgpuStatus:
    return scene.node.create(sm_percent=10, memory_bytes=memory)


def test_three_replicas_read_one_copy_and_its_owner_alone_is_charged(scene: Scene) -> None:
    vgpu = made(scene)
    scene.owner(vgpu)
    replicas = [(Replica(scene, one), one) for one in (made(scene) for _ in range(3))]
    for replica, _ in replicas:
        assert replica.heard() == "open"
        assert replica.asked("digests()") == scene.digests
        assert replica.asked("model.read_only, vgpu.models.check()") == [True, []]
    assert scene.on_card() == MODEL
    reading = eventually(lambda: (now := scene.reading(vgpu)).memory_implicit_bytes and now, "its context is charged")
    assert reading.memory_shared_bytes == MODEL
    assert reading.memory_used_bytes == MODEL + reading.memory_implicit_bytes
    for _, one in replicas:
        now = scene.reading(one)
        assert (now.memory_imported_bytes, now.memory_shared_bytes) == (MODEL, 0)
        assert now.memory_used_bytes == now.memory_implicit_bytes == reading.memory_implicit_bytes
    (owner,) = scene.processes(vgpu)
    assert (owner.memory_by_kind_bytes["shared"], owner.memory_imported_bytes) == (MODEL, 0)
    (process,) = scene.processes(replicas[0][1])
    assert (process.memory_bytes, process.memory_imported_bytes, process.memory_drift_bytes) == (0, MODEL, 0)
    (listed,) = scene.listed()
    assert (listed["name"], listed["vgpu_id"], listed["total_bytes"]) == ("m", vgpu.vgpu_id, MODEL)
    assert listed["replicas"] == sorted(replica.popen.pid for replica, _ in replicas)
    replicas[0][0].kill()
    eventually(lambda: len(scene.listed()[0]["replicas"]) == 2, "the owner sees its end")
    assert replicas[1][0].asked("digests()") == scene.digests


@pytest.mark.slow
def test_replicas_outlive_the_owner_whose_vgpu_stays_charged_until_they_end(scene: Scene) -> None:
    vgpu, other = made(scene), made(scene)
    owner = scene.owner(vgpu)
    replicas = [Replica(scene, other) for _ in range(2)]
    assert [replica.heard() for replica in replicas] == ["open"] * 2
    context = eventually(lambda: scene.reading(vgpu).memory_implicit_bytes, "its context is charged")
    owner.kill()
    owner.wait()
    eventually(lambda: scene.reading(vgpu).memory_used_bytes == MODEL, "its context is not charged any more")
    assert [replica.asked("digests()") for replica in replicas] == [scene.digests] * 2
    reading = scene.reading(vgpu)
    assert (reading.memory_shared_bytes, reading.processes, scene.on_card()) == (MODEL, 0, MODEL)
    assert scene.reading(other).memory_used_bytes == 2 * context
    code, message, _ = Replica(scene, other, wait_s=0.3).heard()
    assert (code, message) == ("not-found", "no process serves the model m: none came within 0.3 s")
    assert scene.listed() == []
    new = scene.owner(vgpu)  # of the same name, in the same vGPU
    third = Replica(scene, other)
    assert third.heard() == "open"
    assert (scene.reading(vgpu).memory_shared_bytes, scene.on_card()) == (2 * MODEL, 2 * MODEL)
    replicas[0].kill()
    assert replicas[1].asked("digests()") == scene.digests
    assert scene.reading(vgpu).memory_shared_bytes == 2 * MODEL
    replicas[1].kill()
    eventually(lambda: scene.reading(vgpu).memory_shared_bytes == MODEL, "the first copy is not charged any more")
    eventually(lambda: scene.on_card() == MODEL, "it has left the card")
    assert third.asked("digests()") == scene.digests
    new.send_signal(signal.SIGTERM)
    assert new.wait() == 0


@pytest.mark.slow
def test_an_owner_without_replicas_gives_its_memory_back_though_others_share(scene: Scene, tmp_path: Path) -> None:
    """An importer of the same user counts as one of every dead owner."""
    vgpu, other = made(scene), made(scene)
    scene.owner(vgpu)
    replica = Replica(scene, other)
    assert replica.heard() == "open"
    second = made(scene)
    lone = scene.start(second, "lone")
    while "serves lone" not in (line := said(lone)):
        assert line, lone.wait()
    assert scene.reading(second).memory_shared_bytes == MODEL
    lone.send_signal(signal.SIGTERM)
    assert lone.wait() == 0
    eventually(lambda: scene.reading(second).memory_used_bytes == 0, "its vGPU is not charged any more")
    assert (scene.reading(vgpu).memory_shared_bytes, scene.on_card()) == (MODEL, MODEL)
    assert replica.asked("digests()") == scene.digests


@pytest.mark.slow
def test_what_a_removed_vgpu_has_shared_is_promised_to_no_other(scene: Scene) -> None:
    with scene.node.link() as link:
        total = link.gpus()[0].total_memory_bytes
    vgpu, other = made(scene), made(scene)
    scene.owner(vgpu)
    replica = Replica(scene, other)
    assert replica.heard() == "open"
    context = eventually(lambda: scene.reading(other).memory_implicit_bytes, "its context is charged")
    with scene.node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    rest = total - other.memory_limit_bytes
    with pytest.raises(VgpuError, match="memory"):
        made(scene, f"{rest - MODEL + 1}")
    made(scene, f"{rest - MODEL}")
    eventually(lambda: scene.on_card() == MODEL, "the owner's context has gone")
    for _ in range(3):  # the driver shows the memory as the replica's now
        with scene.node.link() as link:
            link.gpus()
        assert scene.reading(other).memory_used_bytes == context
    assert replica.asked("digests()") == scene.digests


@pytest.mark.slow
def test_a_server_that_is_started_again_knows_what_is_shared(scene: Scene) -> None:
    vgpu, other = made(scene), made(scene)
    owner = scene.owner(vgpu)
    replica = Replica(scene, other)
    assert replica.heard() == "open"
    owner.kill()
    owner.wait()
    eventually(lambda: scene.reading(vgpu).memory_used_bytes == MODEL, "the owner's death is noticed")
    before = scene.node.server_pid()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: scene.node.server_pid() != before, "a new server")
    eventually(lambda: (now := scene.node.reading(vgpu.vgpu_id)) and now.memory_used_bytes == MODEL, "the same charge")
    assert replica.asked("digests()") == scene.digests
    replica.kill()
    eventually(lambda: scene.reading(vgpu).memory_used_bytes == 0, "nothing is charged any more")


def test_a_replica_may_come_before_its_owner(scene: Scene) -> None:
    replica = Replica(scene, made(scene))
    scene.owner(made(scene))
    assert replica.heard() == "open"
    assert replica.asked("digests()") == scene.digests
    assert replica.asked("model.close(), vgpu.models.check()") == [None, []]


def test_where_the_driver_has_no_read_only_access_a_write_is_found(scene: Scene) -> None:
    vgpu = made(scene)
    owner = scene.start(vgpu, VGPU_SIM_READ_ONLY="0")
    assert "refuses read-only access" in said(owner)
    replica = Replica(scene, vgpu, VGPU_SIM_READ_ONLY="0")
    assert replica.heard() == "open"
    assert replica.asked("model.read_only, vgpu.models.check()") == [False, []]
    assert replica.asked("write()") == ["lm.weight"]
    (listed,) = scene.listed()
    assert listed["read_only"] is False


def test_what_an_owner_is_refused(scene: Scene, tmp_path: Path) -> None:
    vgpu = made(scene)
    scene.owner(vgpu)
    cut, zeros = tmp_path / "cut.safetensors", files.sparse(tmp_path / "zeros.safetensors", 600 << 20)
    cut.write_bytes(scene.files[0].read_bytes()[:-1])
    argv = [sys.executable, "-m", "vgpu.ctl", "models", "serve", "n", str(cut)]
    expected = {
        "another process serves the model m → vgpuctl models ls": scene.start(vgpu),
        "a model cannot be called 'a/b'": scene.start(vgpu, "a/b"),
        f"{cut} is no whole safetensors file": scene.start(vgpu, "damaged", cut),
        "the model large needs 600 MiB, and this vGPU has": scene.start(made(scene, "512M"), "large", zeros),
        "runs in a vGPU, which is charged": scene.node.popen(argv, env=scene.environment, stderr=subprocess.PIPE),
    }
    for reason, popen in expected.items():
        text = popen.communicate()[1]
        assert popen.returncode
        assert reason in " ".join(text.split()), text


@needs_root
def test_another_user_is_refused(scene: Scene) -> None:
    scene.owner(made(scene))
    folder = Path(scene.environment["VGPU_MODELS_DIR"])
    for path in (scene.node.directory, folder):
        path.chmod(0o755)
    (folder / "m.sock").chmod(0o666)

    def as_alice() -> str:
        found = []
        os.environ["VGPU_MODELS_DIR"] = str(folder)
        try:
            connected("m", 0)
        except VgpuError as error:
            found.append(error.message)
        try:
            places.private_folder()
        except VgpuError as error:
            found.append(error.message)
        # ... and one that does not care whose the owner is.
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(folder / "m.sock"))
            try:
                asked(link, {"op": "load"})
            except VgpuError as error:
                found.append(error.message)
        return "\n".join(found)

    first, second, third = as_user(ALICE, as_alice).splitlines()
    assert first.startswith(f"uid {os.getuid()} serves the model m")
    assert second.endswith("is another user's, or open to others")
    assert third == "the model m is another user's"


@pytest.mark.slow
def test_a_driver_that_cannot_suspend_shared_memory_leaves_all_as_it_was(scene: Scene) -> None:
    vgpu, other = made(scene), made(scene)
    scene.owner(vgpu)
    replica = Replica(scene, other)
    assert replica.heard() == "open"
    for one in (vgpu, other):
        with scene.node.link() as link, pytest.raises(VgpuError, match=r"is as it was: .* shared memory"):
            link.suspend(one.vgpu_id)
    assert replica.asked("digests()") == scene.digests
    assert Replica(scene, other).heard() == "open"


@pytest.mark.slow
def test_a_replica_on_another_gpu_is_refused(tmp_path: Path) -> None:
    with SimulatedNode(2) as node:
        scene = Scene(node, tmp_path)
        scene.owner(node.create("0", sm_percent=10, memory_bytes="4G"))
        code, message, hint = Replica(scene, node.create("1", sm_percent=10, memory_bytes="4G")).heard()
        assert (code, "the model m is on GPU-" in message, "vgpuctl run --gpu" in hint) == ("invalid", True, True)
