"""``vgpuctl kubelet --dra`` between a kubelet, an API server and a simulated node. Each is killed between two calls."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import pods
from tests.cluster.conftest import Run
from tests.cluster.kubernetes.cluster import NODE, FakeCluster, FakeKubelet, Process, claim_of, ids_of
from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import VgpuError
from vgpu.integrations import cdi

THIRD = ("gpu-1", "30", "8Gi")


def prepared(kubelet: FakeKubelet, claim: dict[str, Any]) -> Any:
    answer = kubelet.prepare(claim)[claim["metadata"]["uid"]]
    assert answer.error == ""
    return answer


def error_of(kubelet: FakeKubelet, claim: dict[str, Any]) -> str:
    answer = kubelet.prepare(claim)[claim["metadata"]["uid"]]
    assert list(answer.devices) == []
    return str(answer.error)


def count(node: SimulatedNode) -> int:
    with node.link() as link:
        return len(link.list())


def test_the_driver_registers_with_the_kubelet(driver: Process, kubelet: FakeKubelet) -> None:
    info = kubelet.register()
    assert (info.type, info.name) == ("DRAPlugin", "vgpu.dev")
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1.DRAResourceHealth"]
    assert stat.S_ISSOCK(Path(info.endpoint).stat().st_mode)
    assert driver.stop() == 0
    assert [path for path in kubelet.folder.rglob("*") if path.is_socket()] == []


def test_a_claim_is_a_vgpu_and_each_answer_is_the_same(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, cdi_folder: Path
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    first = prepared(kubelet, claim)
    assert [prepared(kubelet, claim) for _ in range(2)] == [first] * 2
    (device,) = first.devices
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert (device.pool_name, device.device_name, device.share_id) == (NODE, "gpu-1", result["shareID"])
    assert list(device.request_names) == ["vgpu-0"]
    (vgpu_id,) = ids_of(first)
    assert list(device.cdi_device_ids) == [f"vgpu.dev/vgpu={vgpu_id}"]
    assert cdi.file_of(cdi_folder, vgpu_id).exists()
    made = node.reading(vgpu_id)
    assert made is not None
    assert made.claim is not None
    assert (made.gpu_index, made.spec.sm_percent, made.spec.memory_bytes) == (1, 30, 8 << 30)
    assert (made.attach, made.claim.kind, made.claim.uid) == ("mount", "dra", f"{claim['metadata']['uid']}.0")
    assert made.claim.labels == {"namespace": "team-a", "claim": "train", "pod": "train-pod"}


def test_unprepare_frees_the_vgpu_and_knows_every_claim(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, cdi_folder: Path
) -> None:
    claim, unknown = claim_of(THIRD), claim_of(THIRD, name="unknown")
    cluster.add(claim)
    (vgpu_id,) = ids_of(prepared(kubelet, claim))
    for _ in range(2):
        answers = kubelet.unprepare(claim, unknown)
        assert {uid: answer.error for uid, answer in answers.items()} == {
            claim["metadata"]["uid"]: "",
            unknown["metadata"]["uid"]: "",
        }
    assert count(node) == 0
    assert not cdi.file_of(cdi_folder, vgpu_id).exists()
    assert ids_of(prepared(kubelet, claim)) != [vgpu_id], "another pod may reserve the claim later"


def test_a_claim_that_fails_fails_alone(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    large, fits = claim_of(("gpu-0", "30", "900Gi"), name="large"), claim_of(THIRD)
    for claim in (large, fits):
        cluster.add(claim)
    answers = kubelet.prepare(large, fits)
    assert "memory" in answers[large["metadata"]["uid"]].error
    assert len(ids_of(answers[fits["metadata"]["uid"]])) == 1
    assert count(node) == 1


def test_what_is_no_claim_of_a_pod_here_is_refused(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    absent, other = claim_of(THIRD, name="absent"), claim_of(THIRD, name="other")
    assert "has no claim team-a/absent" in error_of(kubelet, absent)
    cluster.add(other)
    again = claim_of(THIRD, name="other")
    assert "with the uid" in error_of(kubelet, again)
    cluster.release(other)
    assert "no pod has reserved the claim team-a/other" in error_of(kubelet, other)
    missing = claim_of(("gpu-7", "30", "8Gi"), name="missing")
    cluster.add(missing)
    assert "the node serves no device gpu-7" in error_of(kubelet, missing)
    assert count(node) == 0


def test_the_devices_of_a_claim_are_vgpus_of_a_group(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    claim = claim_of(("gpu-0", "20", "2Gi"), ("gpu-1", "30", "3Gi"))
    cluster.add(claim)
    made = [node.reading(vgpu_id) for vgpu_id in ids_of(prepared(kubelet, claim))]
    assert [(one.gpu_index, one.spec.sm_percent, one.spec.group) for one in made if one is not None] == [
        (0, 20, claim["metadata"]["uid"]),
        (1, 30, claim["metadata"]["uid"]),
    ]
    assert kubelet.unprepare(claim)[claim["metadata"]["uid"]].error == ""
    assert count(node) == 0


def test_the_kubelet_reads_which_gpu_has_lost_its_server(
    node: SimulatedNode, kubelet: FakeKubelet, driver: Process
) -> None:
    """The server is killed until the driver has seen it down: the node starts the next one within a second."""
    with kubelet.health() as states:

        def said(device: str, health: str) -> bool:
            return states.get((NODE, device)) == health

        eventually(lambda: said("gpu-0", "HEALTHY") and said("gpu-1", "HEALTHY"), "both GPUs work")

        def is_down() -> bool:
            with suppress(OSError, VgpuError):
                os.kill(node.server_pid(1), signal.SIGKILL)
            return said("gpu-1", "UNHEALTHY")

        eventually(is_down, "the GPU whose server is killed is unhealthy")
        assert said("gpu-0", "HEALTHY")
        eventually(lambda: said("gpu-1", "HEALTHY"), "its next server serves")


def boot(node: SimulatedNode, cdi_folder: Path, vgpu_id: str) -> None:
    """Every process of the node is gone, and so are the files of ``/var/run``."""
    vgpu = node.reading(vgpu_id)
    assert vgpu is not None
    assert vgpu.broker_pid is not None
    pids = [node.server_pid(0), node.server_pid(1), vgpu.broker_pid]
    node.kill_node()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for path in cdi_folder.iterdir():
        path.unlink()
    node.start()


@pytest.mark.parametrize("killed", ["driver", "kubelet", "GPU Server", "node", "boot"])
def test_a_claim_keeps_its_vgpu_whatever_restarts(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, cdi_folder: Path, killed: str
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    vgpus = kubelet.vgpus(claim)
    match killed:
        case "driver":
            driver.kill()
            driver.start()
        case "kubelet":
            kubelet = FakeKubelet(kubelet.folder)
        case "GPU Server":
            os.kill(node.server_pid(1), signal.SIGKILL)
        case "node":
            node.kill_node()
            node.start()
        case "boot":
            boot(node, cdi_folder, vgpus[0])
    assert kubelet.vgpus(claim) == vgpus
    assert eventually(lambda: cdi.file_of(cdi_folder, vgpus[0]).exists(), "the device is written")
    assert count(node) == 1
    assert kubelet.unprepare(claim)[claim["metadata"]["uid"]].error == ""
    assert count(node) == 0


def test_two_versions_of_the_driver_answer_alike(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    claim = claim_of(THIRD)
    cluster.add(claim)
    vgpus = kubelet.vgpus(claim)
    with Process(node, kubelet, cluster, "--instance", "second") as second:
        eventually(lambda: (kubelet.folder / "plugins_registry/vgpu.dev-second-reg.sock").exists(), "it listens")
        assert driver.stop() == 0
        assert kubelet.vgpus(claim) == vgpus
        second.kill()
        driver.start()  # the second one's sockets are stale
        assert kubelet.vgpus(claim) == vgpus
        assert not (kubelet.folder / "plugins_registry/vgpu.dev-second-reg.sock").exists()


def test_a_program_in_the_container_has_the_claims_memory(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process, start: Run
) -> None:
    """The engine is ours; it reads the device that the kubelet names from the node's CDI file, and makes the cgroup of
    the pod."""
    top = pods.hierarchy()
    if top is None:
        pytest.skip("no cgroup can be made here")
    claim = claim_of(THIRD)
    cluster.add(claim)
    (vgpu_id,) = kubelet.vgpus(claim)
    with node.link() as link:
        volumes = list(link.inspect(vgpu_id).mounts)
    with pods.cgroup_of(top, claim["status"]["reservedFor"][0]["uid"]) as cgroup:
        program = start(volumes, "/probe", "1024", "8192", uid=1000, cgroup=cgroup)
        said, error = program.communicate(timeout=60)
    assert (said + error).strip() == "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


def test_the_first_call_of_a_driver_may_have_many_claims(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    """After a boot the kubelet asks for all of them."""
    claims = [claim_of((f"gpu-{number % 2}", "5", "256Mi"), name=f"train-{number}") for number in range(8)]
    for claim in claims:
        cluster.add(claim)
    answers = kubelet.prepare(*claims)
    assert {answer.error for answer in answers.values()} == {""}
    assert len({vgpu_id for answer in answers.values() for vgpu_id in ids_of(answer)}) == 8


@pytest.mark.slow
def test_fifty_claims_at_once(node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process) -> None:
    claims = [claim_of((f"gpu-{number % 2}", "2", "256Mi"), name=f"train-{number}") for number in range(50)]
    for claim in claims:
        cluster.add(claim)
    first = {uid: ids_of(answer) for uid, answer in kubelet.prepare(*claims).items()}
    assert len({vgpu_id for (vgpu_id,) in first.values()}) == 50
    assert {uid: ids_of(answer) for uid, answer in kubelet.prepare(*claims).items()} == first
    assert {answer.error for answer in kubelet.unprepare(*claims).values()} == {""}
    assert count(node) == 0
