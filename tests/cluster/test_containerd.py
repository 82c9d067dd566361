"""containerd 2 and its own ``ctr``, unmodified: a CDI device brings the vGPU. ``make engines`` gets it.

Skipped where that is not there. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import engines, roots
from tests.integration.node import SimulatedNode, eventually
from vgpu.paths import CDI_DIR
from vgpu.spec import VgpuSpec

pytestmark = pytest.mark.slow
ENVIRONMENT = os.environ | {"PATH": engines.docker_path()}


class Containerd:
    """Context manager: the daemon with everything below ``folder``, and a root."""

    def __init__(self, folder: Path, probe: Path) -> None:
        self._folder = folder
        self._root = engines.make_root(folder, probe)

    def __enter__(self) -> Containerd:
        places = [f"--{name}={self._folder / name}" for name in ("root", "state", "address")]
        with (self._folder / "log").open("wb") as log:
            self._daemon = subprocess.Popen(["containerd", *places], env=ENVIRONMENT, stdout=log, stderr=log)
        eventually(lambda: self.ctr("version").returncode == 0, "containerd answers")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.ctr("task", "ls", "-q").stdout.split():
            self.ctr("task", "rm", "--force", name)
        self._daemon.send_signal(signal.SIGTERM)
        self._daemon.wait(60)

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = ["ctr", "--address", str(self._folder / "address"), *words]
        return subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)

    def run(self, name: str, *words: str, options: tuple[str, ...]) -> str:
        ran = self.ctr("run", "--rootfs", *options, str(self._root), name, *words)
        return (ran.stdout + ran.stderr).strip()


@pytest.fixture(scope="module")
def containerd(probe: Path) -> Iterator[tuple[SimulatedNode, Containerd]]:
    missing = [name for name in ("containerd", "ctr") if shutil.which(name, path=engines.docker_path()) is None]
    if why := roots.is_possible() or (f"not installed: {', '.join(missing)}" if missing else ""):
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ctr-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VGPU_CDI_DIR", str(CDI_DIR))
        with SimulatedNode(1) as node, Containerd(Path(name), probe) as daemon:
            versions = re.findall(r"Version: +v?(\d+)", daemon.ctr("version").stdout)
            if not versions or int(versions[-1]) < 2:
                why = "containerd knows CDI devices from 2.0 on; make engines gets it"
                pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
            yield node, daemon


@pytest.mark.parametrize("user", ["0", "1000"])
def test_a_device_brings_the_vgpu(containerd: tuple[SimulatedNode, Containerd], user: str) -> None:
    node, daemon = containerd
    with node.link() as link:
        vgpu = link.create(VgpuSpec.parse(sm_percent="10", memory_bytes="8G"), attach="mount")
    options = ("--rm", "--user", user, "--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}")
    said = daemon.run(f"one-{user}", "/probe", "1024", "8192", options=options)
    assert said == "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


def test_exec_stays_in_the_vgpu(containerd: tuple[SimulatedNode, Containerd]) -> None:
    node, daemon = containerd
    with node.link() as link:
        vgpu = link.create(VgpuSpec.parse(sm_percent="10", memory_bytes="8G"), attach="mount")
    options = ("--detach", "--device", f"vgpu.dev/vgpu={vgpu.vgpu_id}")
    assert daemon.run("two", "/bin/sleep", "1000", options=options) == ""
    ran = daemon.ctr("task", "exec", "--exec-id", "probe", "two", "/bin/env", "-i", "/probe")
    assert ran.stdout.startswith("init 0 context 0 devices 1 total 8192"), ran.stderr
