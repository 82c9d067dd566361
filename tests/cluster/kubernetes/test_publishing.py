"""What the driver writes to the API server, and what it removes from the node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_validate import validate
from lightkube import Client, KubeConfig
from lightkube.config import models

from tests.cluster.kubernetes.cluster import NODE, FakeCluster, FakeKubelet, Process, claim_of, ids_of
from tests.integration.node import SimulatedNode, eventually
from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes import wire
from vgpu.integrations.kubernetes.dra import GRACE_S
from vgpu.integrations.kubernetes.driver import Driver
from vgpu.integrations.kubernetes.objects import Cluster


def offered(cluster: FakeCluster) -> dict[str, str]:
    """Compute by device."""
    devices = [device for one in cluster.slices() for device in one["spec"]["devices"]]
    return {device["name"]: device["capacity"]["sm"]["value"] for device in devices}


def generation(cluster: FakeCluster) -> int:
    (one,) = cluster.slices()
    return int(one["spec"]["pool"]["generation"])


def test_the_nodes_gpus_are_published_and_kept_up_to_date(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    eventually(lambda: offered(cluster) == {"gpu-0": "100", "gpu-1": "100"}, "the GPUs are offered")
    (one,) = cluster.slices()
    assert (one["metadata"]["name"], one["spec"]["nodeName"]) == (f"{NODE}-vgpu.dev-0", NODE)
    assert [owner["kind"] for owner in one["metadata"]["ownerReferences"]] == ["Node"]
    before = generation(cluster)
    outside = node.create("1", sm_percent="30", memory_bytes="8G")
    eventually(lambda: offered(cluster) == {"gpu-0": "100", "gpu-1": "70"}, "less is offered")
    assert generation(cluster) > before
    with node.link() as link:
        link.remove(outside.vgpu_id)
    eventually(lambda: offered(cluster) == {"gpu-0": "100", "gpu-1": "100"}, "all is offered again")


def test_slices_that_the_kubelet_removed_come_back(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    eventually(lambda: offered(cluster), "the GPUs are offered")
    cluster.delete_slices()
    kubelet.register()
    eventually(lambda: offered(cluster), "the GPUs are offered again")


def test_a_new_driver_goes_on_with_the_generations(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet, driver: Process
) -> None:
    eventually(lambda: offered(cluster), "the GPUs are offered")
    before = generation(cluster)
    driver.kill()
    driver.start()
    eventually(lambda: generation(cluster) > before, "the new one has published")
    assert len(cluster.slices()) == 1


def test_profiles_are_published_with_their_counters(
    node: SimulatedNode, cluster: FakeCluster, kubelet: FakeKubelet
) -> None:
    with Process(node, kubelet, cluster, "--profiles", "50sm-8g"):
        kubelet.register()
        eventually(lambda: len(cluster.slices()) == 2, "both slices are there")
        counters, devices = (one["spec"] for one in sorted(cluster.slices(), key=lambda one: one["metadata"]["name"]))
        assert [one["name"] for one in counters["sharedCounters"]] == ["gpu-0", "gpu-1"]
        names = [device["name"] for device in devices["devices"]]
        assert names == ["gpu-0-50sm-8g-0", "gpu-0-50sm-8g-1", "gpu-1-50sm-8g-0", "gpu-1-50sm-8g-1"]
        claim = claim_of(("gpu-1-50sm-8g-0", "1", "1Gi"))
        cluster.add(claim)
        (vgpu_id,) = kubelet.vgpus(claim)
        made = node.reading(vgpu_id)
    assert made is not None
    assert (made.gpu_index, made.spec.sm_percent, made.spec.memory_bytes) == (1, 50, 8 << 30)


# --- reconcile


def client_of(url: str) -> Client:
    return Client(KubeConfig.from_one(cluster=models.Cluster(server=url), user=models.User()))


@pytest.fixture
def own(node: SimulatedNode, cluster: FakeCluster) -> Iterator[Driver]:
    """A driver in this process."""
    client = client_of(cluster.url)
    yield Driver(Cluster(NODE, client), Node(node.paths.control_socket))
    client.close()


def asked(claim: dict[str, Any]) -> Any:
    said = {key: claim["metadata"][key] for key in ("namespace", "uid", "name")}
    return wire.message("k8s.io.kubelet.pkg.apis.dra.v1.NodePrepareResourcesRequest")(claims=[said])


def later() -> float:
    return time.time() + GRACE_S + 1


def test_a_vgpu_whose_claim_is_gone_is_removed_once_no_program_is_in_it(
    node: SimulatedNode, cluster: FakeCluster, own: Driver
) -> None:
    kept, released, deleted = (claim_of(("gpu-0", "10", "1Gi"), name=name) for name in ("kept", "released", "deleted"))
    for claim in (kept, released, deleted):
        cluster.add(claim)
        assert own.prepare(asked(claim)).claims[claim["metadata"]["uid"]].error == ""
    cluster.release(released)
    cluster.delete(deleted)
    with node.link() as link:
        ids = {vgpu.claim.labels["claim"]: vgpu.vgpu_id for vgpu in link.list() if vgpu.claim is not None}
    program = node.attach(ids["deleted"], use=False)
    own.reconcile()
    assert node.reading(ids["released"]) is not None, "it is too young"
    own.reconcile(later)
    assert node.reading(ids["released"]) is None
    assert node.reading(ids["deleted"]) is not None, "a program runs in it"
    program.kill()
    eventually(lambda: node.reading(ids["deleted"]).processes == 0, "its end is known")  # type: ignore[union-attr]
    own.reconcile(later)
    assert node.reading(ids["deleted"]) is None
    assert node.reading(ids["kept"]) is not None


def statuses(cluster: FakeCluster, claim: dict[str, Any]) -> list[dict[str, Any]]:
    return list(cluster.claim(claim)["status"].get("devices") or [])


@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_the_status_of_a_claim_names_its_vgpus(
    node: SimulatedNode, cluster: FakeCluster, own: Driver, version: str
) -> None:
    claim = claim_of(("gpu-0", "10", "1Gi"), ("gpu-1", "10", "1Gi"))
    cluster.add(claim)
    answer = own.prepare(asked(claim)).claims[claim["metadata"]["uid"]]
    first = statuses(cluster, claim)
    results = claim["status"]["allocation"]["devices"]["results"]
    said = [(one["driver"], one["pool"], one["device"], one["shareID"], one["data"]["vgpu"]) for one in first]
    assert said == [
        ("vgpu.dev", NODE, result["device"], result["shareID"], vgpu_id)
        for result, vgpu_id in zip(results, ids_of(answer), strict=True)
    ]
    assert [one["conditions"][0]["type"] for one in first] == ["Ready", "Ready"]
    spec = {"devices": {"requests": [{"name": "vgpu-0", "exactly": {"deviceClassName": "vgpu.dev"}}]}}
    shown = cluster.claim(claim) | {"spec": spec}
    validate(shown, version, strict=True)
    (path, manager) = cluster.applied[-1]
    assert path.endswith("/namespaces/team-a/resourceclaims/train/status")
    assert manager == f"vgpu.dev-{NODE}", "each node's driver has entries of its own"
    own.prepare(asked(claim))
    own.reconcile()
    assert len(cluster.applied) == 1, "nothing has changed"
    own.unprepare(asked(claim))
    assert statuses(cluster, claim) == []


def test_a_status_that_could_not_be_written_comes_with_the_next_reconcile(
    node: SimulatedNode, cluster: FakeCluster, own: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise VgpuError(ErrorCode.UNREACHABLE, "the API server does not answer")

    claim = claim_of(("gpu-0", "10", "1Gi"))
    cluster.add(claim)
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "say", unreachable)
        answer = own.prepare(asked(claim)).claims[claim["metadata"]["uid"]]
        assert answer.error == ""
        assert statuses(cluster, claim) == []
    own.reconcile()
    assert [one["data"]["vgpu"] for one in statuses(cluster, claim)] == ids_of(answer)
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "say", unreachable)
        assert own.unprepare(asked(claim)).claims[claim["metadata"]["uid"]].error == ""
    with node.link() as link:
        assert not link.list()


def test_an_api_server_that_does_not_answer_costs_no_vgpu(
    node: SimulatedNode, cluster: FakeCluster, own: Driver
) -> None:
    claim = claim_of(("gpu-0", "10", "1Gi"))
    cluster.add(claim)
    own.prepare(asked(claim))
    silent = client_of("http://127.0.0.1:1")
    with pytest.raises(VgpuError, match="API server"):
        Driver(Cluster(NODE, silent), Node(node.paths.control_socket)).reconcile(later)
    silent.close()
    with node.link() as link:
        assert len(link.list()) == 1
