"""``vgpuctl kubelet --plugin`` between a kubelet and a simulated node."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_hook import interpreter
from tests.cluster.kubernetes.cluster import FakeCluster, FakeKubelet, PluginKubelet, Process
from tests.cluster.kubernetes.test_dra import CARD, gpu
from tests.integration.node import SimulatedNode, eventually
from vgpu.api.node import Node
from vgpu.ctl.present import tables
from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes import dra, plugin, podfacts, wire
from vgpu.integrations.kubernetes.plugin import Plugin
from vgpu.integrations.kubernetes.profiles import Profile, parse_all

HALF = "vgpu.dev/50sm-8g"
OPTIONS = ("--plugin", "--profiles", "50sm-8g,30sm-4g")

# --- pure


@pytest.mark.parametrize("text", ["30sm", "0sm-8g", "101sm-8g", "30sm-0g", "30sm-8G", "x30sm-8g"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(VgpuError, match="is no profile"):
        parse_all(f"50sm-8g,{text}")


@pytest.mark.parametrize("text", ["nvidia.com/gpu=4", "nvshare.com/gpu", "nvshare.com/gpu=0", "nvshare.com/gpu=65"])
def test_what_is_no_resource_of_another_project_is_refused(text: str) -> None:
    with pytest.raises(VgpuError, match="is no resource of another project"):
        plugin.compatible(text)


def test_a_share_of_another_project_may_use_what_is_idle() -> None:
    resource = plugin.compatible("nvshare.com/gpu=4")
    spec = resource.spec()
    assert (spec.quota_request_ratio, spec.quota_limit_percent, spec.memory_on(CARD)) == (0.25, 100, CARD)
    assert plugin.ids_of(gpu(), resource) == [f"GPU-0--nvshare4--{number}" for number in range(4)]


@given(st.integers(1, 100), st.integers(1, 80))
def test_the_devices_of_an_empty_gpu_fit_it(sm: int, memory_gib: int) -> None:
    profile = Profile(sm, memory_gib)
    found = plugin.health([gpu()], [], plugin.of_profile(profile))
    assert set(found.values()) <= {True}
    assert len(found) * sm <= 100
    assert len(found) * profile.memory_bytes <= CARD
    assert (len(found) + 1) * sm > 100 or (len(found) + 1) * profile.memory_bytes > CARD


def test_a_device_that_does_not_fit_any_more_is_not_offered() -> None:
    """Its vGPU exists: it is offered, since its pod may start again."""
    made = {"claim": {"kind": "plugin", "uid": "GPU-0--50sm-8g--1"}}
    busy = gpu(guaranteed_ratio=0.8, guaranteed_memory_bytes=1 << 30)
    found = plugin.health([busy], [made], plugin.of_profile(Profile(50, 8)))
    assert found == {"GPU-0--50sm-8g--0": False, "GPU-0--50sm-8g--1": True}


def test_a_gpu_whose_server_is_down_offers_none() -> None:
    assert set(plugin.health([gpu(state="failed")], [], plugin.of_profile(Profile(50, 8))).values()) == {False}


def test_several_devices_are_on_several_gpus_and_one_is_on_the_fullest() -> None:
    gpus = [gpu(0), gpu(1, guaranteed_ratio=0.5)]
    ids = [f"GPU-{card}--30sm-8g--{number}" for card in range(2) for number in range(3)]
    assert plugin.preferred(ids, [], 1, gpus, frozenset()) == ["GPU-1--30sm-8g--0"]
    assert plugin.preferred(ids, [], 1, gpus, frozenset({"GPU-0--30sm-8g--2"})) == ["GPU-0--30sm-8g--2"]
    assert {plugin.gpu_of(one) for one in plugin.preferred(ids, [], 2, gpus, frozenset())} == {"GPU-0", "GPU-1"}
    assert plugin.preferred(ids, [ids[0]], 2, gpus, frozenset()) == [ids[0], "GPU-1--30sm-8g--0"]


# --- with a node


@pytest.fixture
def kubelets(kubelet: FakeKubelet) -> Iterator[PluginKubelet]:
    with PluginKubelet(kubelet.folder) as kubelets:
        yield kubelets


@pytest.fixture
def process(
    node: SimulatedNode, kubelet: FakeKubelet, kubelets: PluginKubelet, cluster: FakeCluster
) -> Iterator[Process]:
    with Process(node, kubelet, cluster, *OPTIONS) as process:
        yield process


def first_on(gpu_index: int, node: SimulatedNode, word: str = "50sm-8g") -> str:
    with node.link() as link:
        return f"{link.gpus()[gpu_index].uuid}--{word}--0"


def test_a_device_is_a_vgpu_and_each_answer_is_the_same(
    node: SimulatedNode, kubelets: PluginKubelet, process: Process
) -> None:
    devices = kubelets.devices(HALF)
    assert len(devices) == 4
    assert set(devices.values()) == {"Healthy"}
    device = first_on(1, node)
    (name,) = kubelets.allocate(HALF, device)
    assert kubelets.allocate(HALF, device) == [name]
    made = node.reading(name.removeprefix("vgpu.dev/vgpu="))
    assert made is not None
    assert made.claim is not None
    assert (made.gpu_index, made.spec.sm_percent, made.spec.memory_bytes) == (1, 50, 8 << 30)
    assert (made.claim.name, made.attach) == (f"plugin/{device}", "mount")
    assert kubelets.prefer(HALF, list(devices), 1) == [device]


@pytest.mark.parametrize("killed", ["plugin", "kubelet", "GPU Server", "node"])
def test_devices_and_their_vgpus_stay_the_same_whatever_restarts(
    node: SimulatedNode, kubelets: PluginKubelet, process: Process, killed: str
) -> None:
    devices, device = kubelets.devices(HALF), first_on(0, node)
    kubelets.held["a"] = [device]
    before = kubelets.allocate(HALF, device)
    match killed:
        case "plugin":
            process.kill()
            kubelets.registered.clear()
            process.start()
        case "kubelet":
            kubelets.stop()
            kubelets.start()
        case "GPU Server":
            os.kill(node.server_pid(0), signal.SIGKILL)
        case "node":
            node.kill_node()
            node.start()
    eventually(lambda: kubelets.devices(HALF) == devices, "the devices are as they were")
    assert eventually(lambda: _allocated(kubelets, device), "the device is allocated") == before


def _allocated(kubelets: PluginKubelet, device: str) -> list[str] | None:
    try:
        return kubelets.allocate(HALF, device)
    except grpc.RpcError:
        return None


def test_devices_of_other_sizes_are_withdrawn_while_a_gpu_is_full(
    node: SimulatedNode, kubelets: PluginKubelet, process: Process
) -> None:
    kubelets.allocate(HALF, first_on(0, node))
    with node.link() as link:
        uuid = link.gpus()[0].uuid

    def healthy() -> list[str]:
        found = kubelets.devices("vgpu.dev/30sm-4g")
        return [device for device, health in found.items() if health == "Healthy" and device.startswith(uuid)]

    eventually(lambda: len(healthy()) == 1, "30 percent fit once beside 50 percent")


def test_a_device_that_there_is_not_fails_with_its_reason(kubelets: PluginKubelet, process: Process) -> None:
    kubelets.devices(HALF)
    with pytest.raises(grpc.RpcError, match="has no device GPU-9"):
        kubelets.allocate(HALF, "GPU-9--50sm-8g--0")


def test_the_pod_of_a_device_is_in_ps_and_in_a_metric(
    node: SimulatedNode, kubelets: PluginKubelet, process: Process
) -> None:
    device = first_on(1, node)
    (name,) = kubelets.allocate(HALF, device)
    vgpu_id = name.removeprefix("vgpu.dev/vgpu=")
    kubelets.held["train-0"] = [device]

    def pod() -> str:
        return tables.pod(node.reading(vgpu_id))

    eventually(lambda: pod() == "team-a/train-0", "the claim has the name of the pod")
    program = node.attach(vgpu_id, use=False)
    words = [*interpreter.command("vgpu.ctl"), "ps"]
    listed = subprocess.run(
        words, env=node.environment | {"COLUMNS": "200"}, capture_output=True, text=True, check=True
    )
    assert "team-a/train-0" in listed.stdout
    program.kill()
    words = [*interpreter.command("vgpu.ctl"), "metrics"]
    metrics = subprocess.run(words, env=node.environment, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in metrics.splitlines() if line.startswith("vgpu_claim_info{"))
    labels = 'kind="plugin",namespace="team-a",pod="train-0",container="train"'
    assert all(label in line for label in [f'vgpu="{vgpu_id}"', *labels.split(",")])


def test_the_name_of_a_pod_is_written_once() -> None:
    holder = podfacts.Holder("team-a", "a", "c", frozenset({"device"}), frozenset({"vgpu-2"}))
    later = podfacts.Holder("team-a", "b", "c", frozenset({"device"}), frozenset())
    unnamed = {"vgpu_id": "vgpu-1", "claim": {"uid": "device", "labels": {"claim": "x"}}}
    labels = {"claim": "x", "namespace": "team-a", "pod": "a", "container": "c"}
    assert podfacts.names(unnamed, [later, holder]) == labels
    assert podfacts.names({"vgpu_id": "vgpu-1", "claim": {"uid": "device", "labels": labels}}, [holder]) is None
    assert podfacts.names({"vgpu_id": "vgpu-2", "claim": {"uid": "u.0", "labels": {}}}, [holder]) is not None
    assert podfacts.names({"vgpu_id": "vgpu-3", "claim": {"uid": "u.0", "labels": {}}}, [holder]) is None
    assert podfacts.names({"vgpu_id": "vgpu-2", "claim": None}, [holder]) is None


def test_four_shares_of_another_projects_name_fit_a_gpu(
    node: SimulatedNode, kubelet: FakeKubelet, kubelets: PluginKubelet, cluster: FakeCluster
) -> None:
    name = "nvshare.com/gpu"
    with Process(node, kubelet, cluster, "--plugin", "--compatible", f"{name}=4"):
        devices = kubelets.devices(name)
        assert len(devices) == 8
        with node.link() as link:
            card = link.gpus()[0]
        mine = [device for device in devices if device.startswith(card.uuid)]
        assert len(kubelets.allocate(name, *mine)) == 4
    with node.link() as link:
        made = link.list()
    assert {(one.gpu_uuid, one.guarantee_ratio, one.limit_ratio) for one in made} == {(card.uuid, 0.25, 1.0)}
    assert {one.memory_limit_bytes for one in made} == {card.total_memory_bytes >> 20 << 20}


@pytest.fixture
def own(node: SimulatedNode, kubelets: PluginKubelet) -> Plugin:
    """A plugin in this process."""
    path = kubelets.folder / "pod-resources/kubelet.sock"
    made = Plugin(
        plugin.of_profile(Profile(50, 8)),
        Node(node.paths.control_socket),
        lambda: podfacts.devices_of(podfacts.holders(path)),
    )
    made.refresh()
    return made


def allocated(own: Plugin, device: str) -> Any:
    return own.allocate(wire.message("v1beta1.AllocateRequest")(container_requests=[{"devices_ids": [device]}]))


def test_the_vgpu_of_a_device_that_no_container_has_is_removed(
    node: SimulatedNode, kubelets: PluginKubelet, own: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, left = first_on(0, node), first_on(1, node)
    allocated(own, kept)
    allocated(own, left)
    kubelets.held["a"] = [kept]
    own.remove_unused()
    with node.link() as link:
        assert len(link.list()) == 2, "they are too young"
    clock, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: clock() + dra.GRACE_S + 1)
    monkeypatch.setattr(plugin.time, "monotonic", lambda: monotonic() + dra.GRACE_S + 1)
    own.remove_unused()
    monkeypatch.undo()
    with node.link() as link:
        assert [vgpu.claim.uid for vgpu in link.list() if vgpu.claim is not None] == [kept]


def test_a_kubelet_that_does_not_answer_costs_no_vgpu(
    node: SimulatedNode, kubelets: PluginKubelet, own: Plugin
) -> None:
    allocated(own, first_on(0, node))
    kubelets.stop()
    with pytest.raises(VgpuError, match="does not say which container"):
        own.remove_unused()
    with node.link() as link:
        assert len(link.list()) == 1
    kubelets.start()
