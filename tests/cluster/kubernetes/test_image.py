"""The image of deploy/Containerfile: podman builds it, and runs it as the DaemonSet does.

Skipped where podman or mmdebstrap is not installed, or Debian's mirror or pip's index does not answer.
``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cluster import engines
from tests.cluster.kubernetes.cluster import NODE, FakeCluster, FakeKubelet, claim_of, ids_of, kubeconfig
from tests.cluster.kubernetes.image import DaemonPod, Image, Missing
from tests.cluster.kubernetes.test_driver import THIRD, prepared
from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from tests.wheel.test_wheel import wheel
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes.kubelet import FOLDER
from vgpu.node.link import ControlLink

__all__ = ["wheel"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # downloads, on a machine that may be busy


def made(folder: Path, wheel: Path, probe: Path) -> Image:
    if why := engines.why_no_podman(folder, probe):
        raise Missing(why)
    image = Image(engines.podman(folder))
    image.build(wheel, folder)
    return image


@pytest.fixture(scope="module")
def image(wheel: Path, probe: Path) -> Iterator[Image]:
    # podman's own folder has 50 characters at most
    with tempfile.TemporaryDirectory(prefix="image-", dir="/tmp", ignore_cleanup_errors=True) as name:
        try:
            image = made(Path(name), wheel, probe)
        except Missing as why:
            pytest.fail(str(why)) if engines.REQUIRED else pytest.skip(str(why))
        yield image


@pytest.fixture
def kubelet(kubelet: FakeKubelet) -> FakeKubelet:
    return FakeKubelet(kubelet.folder, seen_as=FOLDER)


@pytest.fixture
def host(kubelet: FakeKubelet) -> dict[str, Path]:
    folders = ("plugins", "plugins_registry", "pod-resources")
    return {str(FOLDER / name): kubelet.folder / name for name in folders}


@pytest.fixture
def fields() -> dict[str, str]:
    return {"spec.nodeName": NODE, "metadata.uid": str(uuid4())}


def test_the_image_has_the_command(image: Image, wheel: Path) -> None:
    assert f"vgpuctl {wheel.name.split('-')[1]}" in image.run("vgpuctl", "--version")
    assert "Serve this machine's vGPUs to its kubelet." in image.run("vgpuctl", "kubelet", "--help")


def test_it_is_the_driver_of_the_daemon_set(
    image: Image,
    node: SimulatedNode,
    cluster: FakeCluster,
    kubelet: FakeKubelet,
    host: dict[str, Path],
    fields: dict[str, str],
) -> None:
    """The node of vGPUs is on the host."""
    host["/run/vgpu"] = node.paths.runtime
    with DaemonPod(image, host, fields, kubeconfig(kubelet, cluster)) as pod:
        assert kubelet.register().endpoint == str(FOLDER / f"plugins/vgpu.dev/dra-{fields['metadata.uid']}.sock")
        eventually(lambda: len(cluster.slices()) == 1, "the node's slice is published")
        claim = claim_of(THIRD)
        cluster.add(claim)
        [vgpu_id] = ids_of(prepared(kubelet, claim))
        vgpu = node.reading(vgpu_id)
        assert vgpu is not None
        assert (vgpu.gpu_index, vgpu.spec.sm_percent, vgpu.spec.memory_bytes) == (1, 30, 8 << 30)
        assert kubelet.unprepare(claim)[claim["metadata"]["uid"]].error == ""
        assert node.reading(vgpu_id) is None
        assert pod.stop("vgpu-kubelet") == 0
    assert [path for path in kubelet.folder.rglob("*") if path.is_socket()] == []


def test_it_is_the_node_of_the_overlay_simulated(
    image: Image,
    cluster: FakeCluster,
    kubelet: FakeKubelet,
    host: dict[str, Path],
    fields: dict[str, str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="host-", dir="/tmp") as name:
        for number, path in enumerate(("/run/vgpu", "/var/lib/vgpu", "/var/run/cdi")):
            host[path] = Path(name, str(number))
            host[path].mkdir()
        overlay = "overlays/simulated/node.yaml"
        with DaemonPod(image, host, fields, kubeconfig(kubelet, cluster), overlay) as pod:
            claim = claim_of(THIRD)
            cluster.add(claim)
            kubelet.vgpus(claim)
            [vgpu_id] = ids_of(prepared(kubelet, claim))
            assert cdi.file_of(host["/var/run/cdi"], vgpu_id).exists()
            with ControlLink(host["/run/vgpu"] / "control.sock", timeout_s=PATIENCE_S) as link:
                assert [(vgpu.gpu_index, vgpu.spec.memory_bytes) for vgpu in link.list()] == [(1, 8 << 30)]
            assert kubelet.unprepare(claim)[claim["metadata"]["uid"]].error == ""
            assert not cdi.file_of(host["/var/run/cdi"], vgpu_id).exists()
            assert [pod.stop(name) for name in ("vgpu-kubelet", "vgpu-node")] == [0, 0]
