"""containerd 2 and its own ``ctr``, unmodified: a CDI device brings the vGPU. ``make engines`` gets it.

Skipped where that is not there. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import containerd, engines
from tests.cluster.containerd import Containerd
from tests.integration.node import SimulatedNode
from vgpu.paths import CDI_DIR
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

pytestmark = pytest.mark.slow


@dataclass
class Place:
    """A node, containerd, and a root for containers."""

    node: SimulatedNode
    daemon: Containerd
    root: Path

    def create(self) -> VgpuStatus:
        with self.node.link() as link:
            return link.create(VgpuSpec.parse(sm_percent="10", memory_bytes="8G"), attach="mount")

    def run(self, name: str, *words: str, options: tuple[str, ...]) -> str:
        ran = self.daemon.ctr("run", "--rootfs", *options, str(self.root), name, *words)
        return (ran.stdout + ran.stderr).strip()


@pytest.fixture(scope="module")
def place(probe: Path) -> Iterator[Place]:
    if why := containerd.why_not():
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ctr-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VGPU_CDI_DIR", str(CDI_DIR))
        root = engines.make_root(Path(name), probe)
        with SimulatedNode(1) as node, Containerd(Path(name)) as daemon:
            yield Place(node, daemon, root)


@pytest.mark.parametrize("user", ["0", "1000"])
def test_a_device_brings_the_vgpu(place: Place, user: str) -> None:
    options = ("--rm", "--user", user, "--device", f"vgpu.dev/vgpu={place.create().vgpu_id}")
    said = place.run(f"one-{user}", "/probe", "1024", "8192", options=options)
    assert said == "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


def test_exec_stays_in_the_vgpu(place: Place) -> None:
    options = ("--detach", "--device", f"vgpu.dev/vgpu={place.create().vgpu_id}")
    assert place.run("two", "/bin/sleep", "1000", options=options) == ""
    ran = place.daemon.ctr("task", "exec", "--exec-id", "probe", "two", "/bin/env", "-i", "/probe")
    assert ran.stdout.startswith("init 0 context 0 devices 1 total 8192"), ran.stderr
