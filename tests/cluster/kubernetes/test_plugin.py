"""``vgpuctl kubelet --plugin`` between a kubelet and a simulated node."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_hook import interpreter
from tests.cluster.kubernetes.cluster import FakeCluster, FakeKubelet, PluginKubelet, Process
from tests.cluster.kubernetes.test_dra import CARD, gpu
from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from vgpu.api.node import Node
from vgpu.ctl.present import tables
from vgpu.errors import VgpuError
from vgpu.integrations.claims import Claim
from vgpu.integrations.kubernetes import dra, plugin, podfacts, resources, wire
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
        resources.compatible(text)


def test_a_share_of_another_project_may_use_what_is_idle() -> None:
    (resource,) = resources.compatible("nvshare.com/gpu=4")
    spec = resource.spec(gpu())
    assert (spec.quota_request_ratio, spec.quota_limit_percent, spec.memory_on(CARD)) == (0.25, 100, CARD)
    assert resources.ids_of(gpu(), resource) == [f"GPU-0--nvshare4--{number}" for number in range(4)]


@given(st.integers(1, 100), st.integers(1, 80))
def test_the_devices_of_an_empty_gpu_fit_it(sm: int, memory_gib: int) -> None:
    profile = Profile(sm, memory_gib)
    found = resources.health([gpu()], [], resources.of_profile(profile))
    assert set(found.values()) <= {True}
    assert len(found) * sm <= 100
    assert len(found) * profile.memory_bytes <= CARD
    assert (len(found) + 1) * sm > 100 or (len(found) + 1) * profile.memory_bytes > CARD


def test_a_device_that_does_not_fit_any_more_is_not_offered() -> None:
    """Its vGPU exists: it is offered, since its pod may start again."""
    made = {"claim": {"kind": "plugin", "uid": "GPU-0--50sm-8g--1"}}
    busy = gpu(guaranteed_ratio=0.8, guaranteed_memory_bytes=1 << 30)
    found = resources.health([busy], [made], resources.of_profile(Profile(50, 8)))
    assert found == {"GPU-0--50sm-8g--0": False, "GPU-0--50sm-8g--1": True}


def test_a_gpu_whose_server_is_down_offers_none() -> None:
    assert set(resources.health([gpu(state="failed")], [], resources.of_profile(Profile(50, 8))).values()) == {False}


def test_several_devices_are_on_several_gpus_and_one_is_on_the_fullest() -> None:
    gpus = [gpu(0), gpu(1, guaranteed_ratio=0.5)]
    ids = [f"GPU-{card}--30sm-8g--{number}" for card in range(2) for number in range(3)]
    assert resources.preferred(ids, [], 1, gpus, frozenset()) == ["GPU-1--30sm-8g--0"]
    assert resources.preferred(ids, [], 1, gpus, frozenset({"GPU-0--30sm-8g--2"})) == ["GPU-0--30sm-8g--2"]
    assert {resources.gpu_of(one) for one in resources.preferred(ids, [], 2, gpus, frozenset())} == {"GPU-0", "GPU-1"}
    assert resources.preferred(ids, [ids[0]], 2, gpus, frozenset()) == [ids[0], "GPU-1--30sm-8g--0"]


MEMORY, CARDS = resources.compatible("aliyun.com/gpu-mem")
GIB = 1 << 30


def gibibytes(*numbers: int, card: int = 0) -> list[str]:
    return [f"GPU-{card}--mem--{number}" for number in numbers]


def vgpu_of(devices: Sequence[str]) -> dict[str, Any]:
    """The vGPU of a container with these devices, as the node lists it."""
    (piece,) = MEMORY.pieces(devices)
    claim = {"kind": "plugin", "uid": piece.uid, "tenant": "", "labels": piece.labels}
    return {"vgpu_id": f"vgpu-{piece.uid}", "claim": claim, "processes": 0, "created_unix_s": 0.0}


def test_each_gibibyte_of_a_gpu_is_a_device() -> None:
    here = gpu(total_memory_bytes=CARD + GIB - 1)
    assert resources.ids_of(here, MEMORY) == gibibytes(*range(80))
    assert resources.ids_of(here, CARDS) == ["GPU-0--card--0"]


def test_devices_of_the_largest_machine_fit_a_message() -> None:
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    gpus = [gpu(index, uuid=f"{uuid[:-2]}{index:02}", total_memory_bytes=288 * GIB) for index in range(16)]
    devices = [{"ID": device, "health": "Unhealthy"} for one in gpus for device in resources.ids_of(one, MEMORY)]
    assert len(devices) == 16 * 288
    assert (
        wire.message("v1beta1.ListAndWatchResponse")(devices=devices).ByteSize() < 1 << 20
    )  # gRPC takes four times that
    (piece,) = MEMORY.pieces([one["ID"] for one in devices[:288]])
    Claim("plugin", piece.uid, "", dict(piece.labels))
    assert len(piece.uid) <= resources.LONGEST_ID
    assert max(map(len, piece.labels.values())) <= 253


@given(st.lists(st.integers(1, 96), min_size=1), st.integers(96, 300))
def test_memory_brings_its_part_of_the_time_and_all_parts_fit_a_gpu(sizes: list[int], card: int) -> None:
    here, left, sum_of_parts = gpu(total_memory_bytes=card * GIB), card, 0.0
    for size in sizes:
        if size > left:
            break
        spec, left = MEMORY.spec(here, size), left - size
        assert (spec.memory_bytes, spec.quota_limit_percent) == (size * GIB, 100)
        assert spec.quota_request_percent == pytest.approx(max(1, 100 * size / card))
        sum_of_parts += spec.quota_request_percent or 0
    ones = sum(size == 1 for size in sizes)
    assert sum_of_parts <= 100 + ones + 1e-6, "the least share is one percent, and only a vGPU of 1 or 2 GiB has less"


def test_gibibytes_of_a_gpu_are_one_vgpu_and_those_of_several_are_refused() -> None:
    (piece,) = MEMORY.pieces(gibibytes(7, 2, 3))
    assert (piece.uid, piece.gpu, piece.labels) == ("GPU-0--mem-3g--2", "GPU-0", {"devices": "8c"})
    assert resources.uids([*gibibytes(7, 2, 3), "GPU-1--30sm-8g--0"]) == {piece.uid, "GPU-1--30sm-8g--0"}
    assert sorted(resources.devices_of(vgpu_of(gibibytes(7, 2, 3))["claim"])) == gibibytes(2, 3, 7)
    with pytest.raises(VgpuError, match="is a vGPU of one GPU, and the kubelet chose 2 GPUs"):
        MEMORY.pieces([*gibibytes(1), *gibibytes(1, card=1)])
    with pytest.raises(VgpuError, match="says how many GPUs the machine has"):
        CARDS.pieces(["GPU-0--card--0"])


def test_the_devices_of_a_vgpu_stay_healthy_and_as_many_others_as_fit() -> None:
    busy = gpu(guaranteed_ratio=0.05, guaranteed_memory_bytes=70 * GIB)
    found = resources.health([busy], [vgpu_of(gibibytes(70, 71, 73, 79))], MEMORY)
    assert [device for device, fits in found.items() if fits] == gibibytes(*range(10), 70, 71, 73, 79)
    loaded = gpu(guaranteed_ratio=0.875, guaranteed_memory_bytes=GIB)
    assert sum(resources.health([loaded], [], MEMORY).values()) == 10, "an eighth of the time is left"
    assert set(resources.health([busy], [], CARDS).values()) == {True}


def test_a_container_gets_memory_of_the_fullest_gpu_that_has_enough() -> None:
    available = [*gibibytes(10, 9, 2, 3), *gibibytes(0, 1, card=1)]
    assert MEMORY.choose(available, [], 2, [], frozenset()) == gibibytes(0, 1, card=1)
    assert MEMORY.choose(available, [], 3, [], frozenset()) == gibibytes(2, 3, 9)
    assert MEMORY.choose(available, gibibytes(10), 2, [], frozenset()) == gibibytes(10, 2)
    assert len(MEMORY.choose(available, [], 5, [], frozenset())) == 5


def test_a_vgpu_whose_devices_another_container_has_now_is_left_over() -> None:
    old = [vgpu_of(gibibytes(0, 1)), vgpu_of(gibibytes(2, 3)), vgpu_of(gibibytes(4, 5))]
    (piece,) = MEMORY.pieces(gibibytes(1, 2))
    assert [one.uid for one in resources.replaced(piece, old)] == ["GPU-0--mem-2g--0", "GPU-0--mem-2g--2"]
    (again,) = MEMORY.pieces(gibibytes(0, 1))
    assert resources.replaced(again, old) == []


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


def test_memory_of_one_gpu_is_a_vgpu_under_aliyuns_name(
    node: SimulatedNode, kubelet: FakeKubelet, kubelets: PluginKubelet, cluster: FakeCluster
) -> None:
    name = "aliyun.com/gpu-mem"
    with Process(node, kubelet, cluster, "--plugin", "--compatible", name):
        devices = kubelets.devices(name)
        with node.link() as link:
            cards = link.gpus()
        assert len(kubelets.devices("aliyun.com/gpu-count")) == len(cards)
        total = cards[0].total_memory_bytes >> 30
        assert len(devices) == len(cards) * total
        mine = kubelets.prefer(name, list(devices), 8)
        assert len({resources.gpu_of(device) for device in mine}) == 1
        (made,) = kubelets.allocate(name, *mine)
        assert kubelets.allocate(name, *reversed(mine)) == [made], "it is the same container"
        reading = node.reading(made.removeprefix("vgpu.dev/vgpu="))
        assert reading is not None
        assert (reading.spec.memory_bytes, reading.limit_ratio) == (8 << 30, 1.0)
        assert reading.guarantee_ratio == pytest.approx(8 / total, abs=1e-5)
        kubelets.held["train-0"] = mine
        eventually(lambda: tables.pod(node.reading(reading.vgpu_id)) == "team-a/train-0", "the vGPU has its pod's name")
        with pytest.raises(grpc.RpcError, match="the kubelet chose 2 GPUs"):
            kubelets.allocate(name, *(f"{card.uuid}--mem--{total - 1}" for card in cards))
        with pytest.raises(grpc.RpcError, match="says how many GPUs the machine has"):
            kubelets.allocate("aliyun.com/gpu-count", *kubelets.devices("aliyun.com/gpu-count"))
        # An init container of a pod: the kubelet gives its devices to the next container, before either runs.
        three = [f"{reading.gpu_uuid}--mem--{number}" for number in (20, 21, 22)]
        (first,), (second,) = (kubelets.allocate(name, *some) for some in (three[:2], three))
        with node.link() as link:
            assert {first, second} <= {f"vgpu.dev/vgpu={one.vgpu_id}" for one in link.list()}
        # The container has ended: the kubelet gives its devices to one that wants the whole card.
        whole = [device for device in devices if resources.gpu_of(device) == reading.gpu_uuid]
        (other,) = kubelets.allocate(name, *whole)
    with node.link() as link:
        assert [f"vgpu.dev/vgpu={one.vgpu_id}" for one in link.list()] == [other]


@pytest.mark.parametrize(
    "options",
    [
        ("--profiles", "50sm-8g", "--compatible", "aliyun.com/gpu-mem"),
        ("--compatible", "nvshare.com/gpu=4", "--compatible", "aliyun.com/gpu-mem"),
    ],
)
def test_no_gpu_is_served_under_two_names(
    node: SimulatedNode, kubelet: FakeKubelet, cluster: FakeCluster, options: tuple[str, ...]
) -> None:
    with Process(node, kubelet, cluster, "--plugin", *options) as process:
        assert process.process.wait(PATIENCE_S) != 0
        assert "would promise them twice" in process.logs()


@pytest.fixture
def own(node: SimulatedNode, kubelets: PluginKubelet) -> Plugin:
    """A plugin in this process."""
    path = kubelets.folder / "pod-resources/kubelet.sock"
    made = Plugin(
        resources.of_profile(Profile(50, 8)),
        Node(node.paths.control_socket),
        lambda: podfacts.claims_of(podfacts.holders(path)),
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
