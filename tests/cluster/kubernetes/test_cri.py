"""containerd 2 as the kubelet drives it, with the devices that the driver has answered. ``make engines`` gets it.

Skipped where that is not there. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import containerd, engines
from tests.cluster.kubernetes.cluster import FakeCluster, FakeKubelet, PluginKubelet, Process, claim_of, pod_of
from tests.cluster.kubernetes.cri import Runtime
from tests.cluster.kubernetes.test_driver import THIRD, boot, count, prepared
from tests.integration.node import SimulatedNode, eventually
from vgpu.integrations import cdi

pytestmark = pytest.mark.slow
WHOLE = "init 0 context 0 devices 1 total 8192"


@pytest.fixture(scope="module")
def shared_runtime(cdi_folder: Path, probe: Path) -> Iterator[Runtime]:
    if why := containerd.why_not():
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="cri-", dir="/tmp") as name, Runtime(Path(name), cdi_folder, probe) as made:
        yield made


@pytest.fixture
def runtime(shared_runtime: Runtime, node: SimulatedNode) -> Iterator[Runtime]:
    """Its pods end before the node's vGPUs."""
    yield shared_runtime
    shared_runtime.clear()


def devices_of(kubelet: FakeKubelet, claim: dict[str, object]) -> list[str]:
    """What the kubelet puts into the container's ``CDI_devices``."""
    return [name for device in prepared(kubelet, claim).devices for name in device.cdi_device_ids]


@pytest.mark.parametrize("user", [0, 1000])
def test_a_container_has_the_memory_of_its_claim(
    cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime, user: int
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    devices, pod = devices_of(kubelet, claim), runtime.pod(pod_of(claim))
    container = pod.start("train", devices, "/probe", "1024", "8192", user=user)
    assert container.line() == f"{WHOLE} allocated 0 allocated 2"
    assert pod.start("eight", devices, "/probe", "9216", user=user).line() == f"{WHOLE} allocated 2"


def test_the_vgpu_of_a_claim_refuses_another_pod(
    cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    container = runtime.pod().start("train", devices_of(kubelet, claim), "/bin/sleep", "1000")
    assert container.execute("/probe", "64").startswith("init 100")


@pytest.mark.parametrize("user", [0, 1000])
def test_exec_stays_in_the_vgpu(
    cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime, user: int
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    container = runtime.pod(pod_of(claim)).start("train", devices_of(kubelet, claim), "/bin/sleep", "1000", user=user)
    assert container.execute("/probe", "9216") == f"{WHOLE} allocated 2"
    assert container.execute("/bin/env", "-i", "/probe", "9216") == f"{WHOLE} allocated 2"
    assert container.execute("/bin/sh", "-c", "/bin/env -i /probe 9216") == f"{WHOLE} allocated 2"


def test_the_containers_of_a_pod_share_the_claims_vgpu(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    devices, pod = devices_of(kubelet, claim), runtime.pod(pod_of(claim))
    assert pod.start("first", devices, "/probe", "5120", "wait").line() == f"{WHOLE} allocated 0"
    assert pod.start("second", devices, "/probe", "4096", "2048").line() == f"{WHOLE} allocated 2 allocated 0"
    assert count(node) == 1


def test_a_claim_of_two_devices_gives_a_container_both(
    cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime
) -> None:
    claim = claim_of(("gpu-0", "20", "2Gi"), THIRD)
    cluster.add(claim)
    devices, pod = devices_of(kubelet, claim), runtime.pod(pod_of(claim))
    container = pod.start("train", devices, "/probe", "1024", "2048", user=1000)
    assert container.line() == "init 0 context 0 devices 2 total 2048 allocated 0 allocated 2"


def test_a_device_of_the_device_plugin_brings_its_vgpu(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, runtime: Runtime
) -> None:
    options = ("--plugin", "--profiles", "30sm-8g")
    with PluginKubelet(kubelet.folder) as kubelets, Process(node, kubelet, cluster, *options):
        resource = "vgpu.dev/30sm-8g"
        devices = kubelets.allocate(resource, min(kubelets.devices(resource)))
        container = runtime.pod().start("train", devices, "/probe", "1024", "8192", user=1000)
        assert container.line() == f"{WHOLE} allocated 0 allocated 2"


def test_a_pod_that_ends_leaves_nothing(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime, cdi_folder: Path
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    devices, pod = devices_of(kubelet, claim), runtime.pod(pod_of(claim))
    container = pod.start("train", devices, "/probe", "1024", "wait")
    assert container.line() == f"{WHOLE} allocated 0"
    [vgpu_id] = [name.partition("=")[2] for name in devices]

    def processes() -> int:
        vgpu = node.reading(vgpu_id)
        return 0 if vgpu is None else vgpu.processes

    assert processes() == 1
    container.stop()
    assert container.state() == "CONTAINER_EXITED"
    eventually(lambda: processes() == 0, "the vGPU has no process")
    pod.remove()
    assert kubelet.unprepare(claim)[claim["metadata"]["uid"]].error == ""
    assert count(node) == 0
    assert not cdi.file_of(cdi_folder, vgpu_id).exists()
    assert [path for path in node.paths.runtime.rglob(f"*{vgpu_id}*") if "log" not in path.parts] == []


@pytest.mark.parametrize(("gpu", "kind"), [("gpu-0", "unmanaged"), ("gpu-1", "outside")])
def test_an_event_names_the_pod_of_a_program_past_the_hook(
    node: SimulatedNode,
    cluster: FakeCluster,
    kubelet: FakeKubelet,
    driver: Process,
    runtime: Runtime,
    gpu: str,
    kind: str,
) -> None:
    """It uses GPU 0. The vGPU of its container is there, or on the other GPU."""
    claim = claim_of((gpu, "30", "8Gi"))
    cluster.add(claim)
    devices, pod = devices_of(kubelet, claim), runtime.pod(pod_of(claim))
    container = pod.start("train", devices, "/probe", "64", "wait")
    assert container.line() == f"{WHOLE} allocated 0"
    past = "/bin/env LD_LIBRARY_PATH=/run/vgpu/lib VGPU_SIM_DIR=/run/vgpu/here/sim /own-loader /probe 128 wait"
    assert container.execute("/bin/sh", "-c", f"(/bin/sleep 1000 | {past}) >/dev/null 2>&1 &") == ""

    def told() -> list[str]:
        with node.link() as link:
            return [event.text for event in link.events(kinds=(kind,)) if pod.uid in event.text]

    [text] = eventually(told, "an event names it")
    vgpu = devices[0].replace("vgpu.dev/vgpu=", " of ") if kind == "unmanaged" else ""
    assert f"uid 0, container {container.id[:12]} of pod {pod.uid}){vgpu} uses " in text


@pytest.mark.parametrize("killed", ["driver", "node", "boot", "containerd"])
def test_a_prepared_claim_has_its_container_whatever_restarts(
    node: SimulatedNode,
    cluster: FakeCluster,
    kubelet: FakeKubelet,
    driver: Process,
    runtime: Runtime,
    cdi_folder: Path,
    killed: str,
) -> None:
    """Between the preparation and the start of the container."""
    claim = claim_of(THIRD)
    cluster.add(claim)
    devices = devices_of(kubelet, claim)
    match killed:
        case "driver":
            driver.kill()
            driver.start()
        case "node":
            node.kill_node()
            node.start()
        case "boot":
            boot(node, cdi_folder, devices[0].partition("=")[2])
            kubelet.vgpus(claim)  # it asks again for each claim of its pods
        case "containerd":
            runtime.restart()
    container = runtime.pod(pod_of(claim)).start("train", devices, "/probe", "1024", "8192")
    assert container.line() == f"{WHOLE} allocated 0 allocated 2"
    assert count(node) == 1


def test_a_running_container_keeps_its_vgpu_when_containerd_is_killed(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, runtime: Runtime
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    container = runtime.pod(pod_of(claim)).start("train", devices_of(kubelet, claim), "/probe", "5120", "wait")
    assert container.line() == f"{WHOLE} allocated 0"
    runtime.restart()
    assert container.state() == "CONTAINER_RUNNING"
    assert container.execute("/bin/env", "-i", "/probe", "4096") == f"{WHOLE} allocated 2"
