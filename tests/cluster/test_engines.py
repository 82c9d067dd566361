"""podman and Docker with runc, unmodified: ``vgpuctl container``, and CDI devices with podman.

Skipped where the engine is not installed or runs no container. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import engines
from tests.integration.node import SimulatedNode, eventually
from vgpu.paths import CDI_DIR
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

pytestmark = pytest.mark.slow
VGPUCTL = str(Path(sys.executable).with_name("vgpuctl"))


@dataclass
class Place:
    """A node, an engine's command, and the words that stand for an image in its ``run``."""

    node: SimulatedNode
    command: Path
    image: tuple[str, ...]

    def vgpuctl(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return self.node.popen([VGPUCTL, *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def container(self, *words: str, command: tuple[str, ...], sm: str = "30") -> subprocess.Popen[str]:
        """``vgpuctl container run``; ``words``: further options."""
        own = ["--sm", sm, "--mem", "8G", "--engine", str(self.command), *words]
        return self.vgpuctl("container", "run", *own, *self.image, *command)

    def engine(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.command, *words], capture_output=True, text=True, check=False, timeout=120)

    def run(self, *words: str, command: tuple[str, ...] = ("/probe",)) -> str:
        """The output of ``podman run`` and its errors."""
        ran = self.engine("run", "--rm", *words, *self.image, *command)
        return (ran.stdout + ran.stderr).strip()

    def create(self, **fields: str) -> VgpuStatus:
        with self.node.link() as link:
            spec = VgpuSpec.parse(**({"sm_percent": "30", "memory_bytes": "8G"} | fields))
            return link.create(spec, attach="mount")

    def vgpus(self) -> list[VgpuStatus]:
        with self.node.link() as link:
            return link.list()

    def is_empty(self) -> bool:
        return not self.vgpus()

    def remove(self, *names: str) -> None:
        if names:
            at_once = ["--time", "0"] if self.command.name == "podman" else []
            removed = self.engine("rm", "--force", *at_once, *names)
            assert removed.returncode == 0, removed.stderr

    def clear(self) -> None:
        self.remove(*self.engine("ps", "--all", "--format", "{{.Names}}").stdout.split())
        self.node.clear()


@contextmanager
def engine_of(kind: str, folder: Path, probe: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The command of that engine, and the words for an image. Skips, or fails, where it runs no container."""
    find = {"podman": engines.why_no_podman, "docker": engines.why_no_docker}[kind]
    if why := find(folder, probe):
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    root = engines.make_root(folder, probe)
    if kind == "podman":
        yield engines.podman(folder), ("--rootfs", f"{root}:O")
    else:
        with engines.Dockerd(folder) as docker:
            yield docker, ("--network", "none", engines.import_root(docker, root))


@contextmanager
def placed(kind: str, probe: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        # podman's own folder has 50 characters at most
        directory = tempfile.TemporaryDirectory(prefix="engine-", dir="/tmp", ignore_cleanup_errors=True)
        command, image = stack.enter_context(engine_of(kind, Path(stack.enter_context(directory)), probe))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VGPU_CDI_DIR", str(CDI_DIR))  # podman 4 looks nowhere else
        yield Place(stack.enter_context(SimulatedNode(1)), command, image)


@pytest.fixture(scope="module", params=["podman", "docker"])
def each_place(request: pytest.FixtureRequest, probe: Path) -> Iterator[Place]:
    with placed(request.param, probe) as place:
        yield place


@pytest.fixture
def place(each_place: Place) -> Iterator[Place]:
    yield each_place
    each_place.clear()


@pytest.fixture
def devices(place: Place) -> Place:
    if not engines.knows_devices(place.command):
        pytest.skip("this Docker knows no CDI devices; make engines gets a newer one")
    return place


with_podman = pytest.mark.parametrize("each_place", ["podman"], indirect=True)


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=120)
    return process.returncode, out.strip(), error.strip()


def test_a_container_runs_in_a_vgpu_that_goes_with_it(place: Place) -> None:
    code, out, error = said(place.container("--rm", command=("/probe", "1024", "8192")))
    assert (code, out) == (0, "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"), error
    assert place.is_empty()


def test_the_exit_code_is_the_programs(place: Place) -> None:
    assert said(place.container("--rm", command=("/bin/sh", "-c", "exit 7")))[0] == 7


def test_an_engine_that_starts_no_container_leaves_no_vgpu(place: Place) -> None:
    code, _, error = said(place.container("--rm", "--no-such-option", command=("/probe",)))
    assert code == 125
    assert "no-such-option" in error
    assert place.is_empty()


def test_exec_and_an_empty_environment_stay_in_the_vgpu(place: Place) -> None:
    assert said(place.container("--name", "one", "--detach", command=("/bin/sleep", "1000")))[0] == 0
    (vgpu,) = place.vgpus()
    assert (vgpu.name, vgpu.claim and vgpu.claim.name, vgpu.attach) == ("one", "container/one", "mount")
    for words in (["/probe"], ["/bin/env", "-i", "/probe"], ["/bin/sh", "-lc", "/probe"]):
        assert "devices 1 total 8192" in place.engine("exec", "one", *words).stdout
    assert "devices 1 total 8192" in place.engine("exec", "--user", "1000", "one", "/probe").stdout
    place.remove("one")
    eventually(place.is_empty, "the vGPU goes with the container")


def test_a_container_that_starts_again_attaches_again(place: Place) -> None:
    shell = ("/bin/sh", "-c", "/probe; read line")
    said(place.container("--name", "one", "--detach", command=shell))
    eventually(lambda: "init 0" in place.engine("logs", "one").stdout, "it attaches")
    place.engine("wait", "one")
    place.engine("start", "one")
    eventually(lambda: place.engine("logs", "one").stdout.count("init 0") == 2, "it attaches again")
    assert [vgpu.name for vgpu in place.vgpus()] == ["one"]


def test_a_killed_command_leaves_the_vgpu_to_the_container(place: Place) -> None:
    """SIGKILL ends vgpuctl and the engine's command; podman's monitor keeps the container."""
    run = place.container("--name", "one", command=("/bin/sleep", "1000"))
    eventually(lambda: "one" in place.engine("ps", "--format", "{{.Names}}").stdout, "the container runs")
    run.kill()
    run.wait()
    assert "devices 1" in place.engine("exec", "one", "/probe").stdout
    place.remove("one")
    eventually(place.is_empty, "the vGPU goes with the container")


def test_ls_removes_the_vgpu_of_a_container_whose_keeper_died(place: Place) -> None:
    said(place.container("--name", "one", "--detach", command=("/bin/sleep", "1000")))
    (vgpu,) = place.vgpus()
    assert vgpu.claim is not None
    os.kill(int(vgpu.claim.labels["keeper"].partition(":")[0]), signal.SIGKILL)
    assert "one" in said(place.vgpuctl("container", "ls"))[1]
    place.remove("one")
    _, out, error = said(place.vgpuctl("container", "ls"))
    assert f"{vgpu.vgpu_id} is removed" in error
    assert vgpu.vgpu_id not in out
    assert place.is_empty()


# --- engines alone, with CDI devices


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--user", "1000"),
        ("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        ("--env", "LD_PRELOAD=", "--env", "VGPU_ID="),
    ],
    ids=" ".join,
)
def test_a_device_brings_the_vgpu(devices: Place, options: tuple[str, ...]) -> None:
    vgpu = devices.create(name="engines")
    for device in (vgpu.vgpu_id, "engines"):
        answer = devices.run("--device", f"vgpu.dev/vgpu={device}", *options, command=("/probe", "1024", "8192"))
        assert answer == "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


def test_two_containers_share_one_vgpu(devices: Place) -> None:
    vgpu = devices.create()
    device = ("--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}")
    holder = ["run", "--name", "holder", "--interactive", "--detach", *device, *devices.image]
    assert devices.engine(*holder, "/probe", "6144", "wait").returncode == 0
    eventually(lambda: "allocated 0" in devices.engine("logs", "holder").stdout, "it allocates")
    assert devices.run(*device, command=("/probe", "4096")).endswith("allocated 2")
    devices.engine("kill", "--signal", "KILL", "holder")
    eventually(lambda: devices.run(*device, command=("/probe", "4096")).endswith("allocated 0"), "the memory is back")


def test_a_removed_vgpu_is_no_device(devices: Place) -> None:
    vgpu = devices.create()
    with devices.node.link() as link:
        link.remove(vgpu.vgpu_id)
    assert "unresolvable CDI devices" in devices.run("--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}")


@with_podman
def test_a_device_works_in_a_read_only_container(devices: Place) -> None:
    """Docker makes the mounts of a device read-only there, and programs write to the file of a simulated GPU."""
    vgpu = devices.create()
    assert "total 8192" in devices.run("--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}", "--read-only")
