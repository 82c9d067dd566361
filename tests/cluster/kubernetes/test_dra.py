"""Claims, slices and the reconcile, without a process."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_validate import validate

from tests.cluster.kubernetes.cluster import NODE, claim_of
from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes import dra, health
from vgpu.integrations.kubernetes.dra import GRACE_S, Made, Remove, Report
from vgpu.integrations.kubernetes.profiles import Profile, parse_all

GIB = 1 << 30
CARD = 80 * GIB
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
BASIS = {"apiVersion": "vgpu.dev/v1", "kind": "VgpuConfig"}


def gpu(index: int = 0, **fields: Any) -> dict[str, Any]:
    facts = {"index": index, "uuid": f"GPU-{index}", "name": "H100", "mode": "temporal", "state": "serving"}
    amounts = {"total_memory_bytes": CARD, "guaranteed_ratio": 0.0, "guaranteed_memory_bytes": 0}
    return {**facts, **amounts, **fields}


def vgpu(ratio: float, memory: int, kind: str | None = "dra", index: int = 0) -> dict[str, Any]:
    claim = None if kind is None else {"kind": kind, "uid": "u.0", "tenant": "", "labels": {}}
    shares = {"guarantee_ratio": ratio, "sm_percent_granted": 100.0, "spec": {"memory_bytes": memory}}
    return {"gpu_index": index, "claim": claim, **shares}


def config(source: str = "FromClaim", requests: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    opaque = {"driver": "vgpu.dev", "parameters": BASIS | parameters}
    return {"source": source, "requests": list(requests), "opaque": opaque}


def spec_of(claim: dict[str, Any]) -> Any:
    (wanted,) = dra.wanted_of(claim, NODE, [gpu()])
    return wanted.spec


# --- claims


def test_a_claim_says_what_its_vgpu_is() -> None:
    (wanted,) = dra.wanted_of(claim_of(("gpu-0", "30", "8Gi"), uid="u"), NODE, [gpu()])
    assert (wanted.claim.name, wanted.claim.tenant, wanted.gpu) == ("dra/u.0", "team-a", 0)
    assert (wanted.spec.sm_percent, wanted.spec.memory_bytes) == (30, 8 * GIB)


def test_a_claim_names_its_pods_if_nothing_else_has_reserved_it() -> None:
    claim = claim_of(("gpu-0", "30", "8Gi"))
    claim["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": f"uid-{name}"} for name in "ba"]
    (wanted,) = dra.wanted_of(claim, NODE, [gpu()])
    assert wanted.claim.pods == ("uid-a", "uid-b")
    claim["status"]["reservedFor"].append(
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "c", "uid": "c"}
    )
    (wanted,) = dra.wanted_of(claim, NODE, [gpu()])
    assert wanted.claim.pods is None


def test_a_device_without_amounts_is_the_whole_gpu() -> None:
    claim = claim_of(("gpu-0", "1", "1Gi"))
    del claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]
    assert (spec_of(claim).sm_percent, spec_of(claim).memory_bytes) == (100, CARD)


def test_a_profile_says_what_its_vgpu_is() -> None:
    claim = claim_of(("gpu-0-30sm-8g-2", "1", "1Gi"))
    assert (spec_of(claim).sm_percent, spec_of(claim).memory_bytes) == (30, 8 * GIB)


def test_results_of_other_drivers_and_nodes_are_not_ours() -> None:
    claim = claim_of(("gpu-0", "30", "8Gi"), node="worker-2")
    assert dra.wanted_of(claim, NODE, [gpu()]) == []
    claim = claim_of(("gpu-0", "30", "8Gi"))
    claim["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.nvidia.com"
    assert dra.wanted_of(claim, NODE, [gpu()]) == []
    assert dra.wanted_of({"metadata": claim["metadata"], "status": {}}, NODE, [gpu()]) == []


@pytest.mark.parametrize(("devices", "grouped"), [(("gpu-0", "gpu-1"), True), (("gpu-0", "gpu-0"), False)])
def test_vgpus_of_a_claim_hold_together_if_each_has_a_gpu(devices: tuple[str, str], grouped: bool) -> None:
    claim = claim_of(*((device, "30", "8Gi") for device in devices), uid="u")
    wanted = dra.wanted_of(claim, NODE, [gpu(0), gpu(1)])
    assert [one.spec.group for one in wanted] == (["u", "u"] if grouped else [None, None])
    assert [one.claim.uid for one in wanted] == ["u.0", "u.1"]


def test_the_claims_configuration_wins_over_its_class() -> None:
    entries = [config(priority="low", burst=True), config("FromClass", priority="high", memoryLimit="16Gi")]
    spec = spec_of(claim_of(("gpu-0", "30", "8Gi"), config=entries))
    assert (spec.priority, spec.burst, spec.memory_limit_bytes) == ("low", True, 16 * GIB)


@pytest.mark.parametrize(
    ("requests", "priority"),
    [((), "high"), (("vgpu-0",), "high"), (("other",), "normal"), (("other", "vgpu-0"), "high")],
)
def test_a_configuration_may_be_for_some_requests(requests: tuple[str, ...], priority: str) -> None:
    claim = claim_of(("gpu-0", "30", "8Gi"), config=[config(requests=requests, priority="high")])
    assert spec_of(claim).priority == priority


def test_the_configuration_of_another_driver_is_not_read() -> None:
    entry = {"opaque": {"driver": "gpu.nvidia.com", "parameters": {"sharing": 1}}}
    assert spec_of(claim_of(("gpu-0", "30", "8Gi"), config=[entry])).sm_percent == 30


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"speed": 1}, "no field 'speed'"),
        ({"kind": "GpuConfig"}, "is no VgpuConfig"),
        ({"priority": "highest"}, "priority"),
        ({"memoryLimit": "much"}, "is no quantity"),
        ({"memoryLimit": "4Gi"}, "less than"),
    ],
)
def test_a_configuration_that_is_not_known_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(VgpuError, match=said):
        spec_of(claim_of(("gpu-0", "30", "8Gi"), config=[config(**parameters)]))


@pytest.mark.parametrize("device", ["gpu-7", "gpu-0-huge-1", "card0"])
def test_a_device_that_the_node_lacks_is_refused(device: str) -> None:
    with pytest.raises(VgpuError, match=f"no device {device}"):
        spec_of(claim_of((device, "30", "8Gi")))


@given(st.integers(1, 100), st.integers(64, 80 * 1024))
def test_what_a_claim_consumes_is_what_its_vgpu_has(sm: int, mebibytes: int) -> None:
    spec = spec_of(claim_of(("gpu-0", str(sm), f"{mebibytes}Mi")))
    assert (spec.sm_percent, spec.memory_bytes) == (sm, mebibytes << 20)


# --- slices


def objects(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{NODE}-{number}"},
            "spec": {**spec, "pool": {**spec["pool"], "generation": 1}},
        }
        for number, spec in enumerate(specs)
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("profiles", ["", "30sm-8g,50sm-40g"])
def test_slices_pass_the_strict_schemas(version: str, profiles: str) -> None:
    for one in objects(dra.slices(NODE, [gpu(0), gpu(1, state="restarting")], [], parse_all(profiles))):
        validate(one, version, strict=True)


def test_a_whole_gpu_is_offered() -> None:
    ((device,),) = [one["devices"] for one in dra.slices(NODE, [gpu()], [])]
    assert (device["name"], device["allowMultipleAllocations"]) == ("gpu-0", True)
    assert device["capacity"]["sm"]["value"] == "100"
    assert device["capacity"]["memory"]["value"] == "81920Mi"


def test_what_others_were_promised_is_not_offered() -> None:
    """The claims of Kubernetes are counted by its scheduler."""
    here = gpu(guaranteed_ratio=0.655, guaranteed_memory_bytes=28 * GIB)
    vgpus = [vgpu(0.4, 8 * GIB), vgpu(0.255, 20 * GIB, None)]
    ((device,),) = [one["devices"] for one in dra.slices(NODE, [here], vgpus)]
    assert device["capacity"]["sm"]["value"] == "74"
    assert device["capacity"]["memory"]["value"] == f"{60 * 1024}Mi"


@pytest.mark.parametrize(
    ("ours", "memory"),
    [({"spec": {"memory_bytes": 40 * GIB, "oversubscribe": "swap"}}, 40), ({"state": "idle-suspended"}, 40)],
    ids=["oversubscribed", "suspended"],
)
def test_what_the_gpus_sums_leave_out_is_taken_off_once(ours: dict[str, Any], memory: int) -> None:
    here = gpu(guaranteed_ratio=0.3, guaranteed_memory_bytes=40 * GIB)  # another vGPU's
    ratio = 0.0 if "spec" in ours else 0.5
    vgpus = [vgpu(ratio, 40 * GIB) | ours, vgpu(0.3, 40 * GIB, None)]
    ((device,),) = [one["devices"] for one in dra.slices(NODE, [here], vgpus)]
    assert device["capacity"]["memory"]["value"] == f"{memory * 1024}Mi"
    assert device["capacity"]["sm"]["value"] == "70"


def test_a_claim_of_another_user_is_none() -> None:
    """Any user may make a vGPU whose claim names an object of the cluster."""
    mine, other = ({**vgpu(0.5, GIB), "owner_uid": uid, "vgpu_id": f"vgpu-{uid}"} for uid in (0, 1000))
    own = dra.own([mine, other], 0)
    assert [one["claim"] for one in own] == [mine["claim"], None]
    assert mine["claim"] is not None


def test_a_gpu_without_room_is_no_device() -> None:
    full = gpu(guaranteed_ratio=1.0)
    assert [one["devices"] for one in dra.slices(NODE, [full], [vgpu(1.0, GIB, None)])] == [[]]


def test_a_gpu_whose_server_is_down_gets_no_new_pod() -> None:
    ((device,),) = [one["devices"] for one in dra.slices(NODE, [gpu(state="failed")], [])]
    assert device["taints"] == [{"key": "vgpu.dev/server-down", "effect": "NoSchedule"}]


@given(st.integers(0, 100), st.integers(64, 80 * 1024))
def test_bounds_of_an_amount_are_as_the_scheduler_needs_them(sm: int, mebibytes: int) -> None:
    """min ≤ default ≤ max ≤ value, in whole steps from min (KEP-5075)."""
    here = gpu(guaranteed_ratio=1 - sm / 100, guaranteed_memory_bytes=CARD - (mebibytes << 20))
    for device in dra.slices(NODE, [here], [])[0]["devices"]:
        for capacity in device["capacity"].values():
            policy = capacity["requestPolicy"]
            least, most, step = (dra.amount(policy["validRange"][name]) for name in ("min", "max", "step"))
            value, default = dra.amount(capacity["value"]), dra.amount(policy["default"])
            assert least <= default <= most <= value
            assert (most - least) % step == (default - least) % step == 0


@given(
    st.integers(1, 12), st.lists(st.builds(Profile, st.integers(1, 100), st.integers(1, 80)), min_size=1, max_size=4)
)
def test_partitions_of_many_gpus_fit_the_limits_of_a_slice(gpus: int, profiles: list[Profile]) -> None:
    specs = dra.slices(NODE, [gpu(index) for index in range(gpus)], [], tuple(dict.fromkeys(profiles)))
    assert {one["pool"]["resourceSliceCount"] for one in specs} == {len(specs)}
    assert all(len(one.get("devices", [])) <= 64 and len(one.get("sharedCounters", [])) <= 8 for one in specs)
    assert not any("devices" in one and "sharedCounters" in one for one in specs)
    names = [device["name"] for one in specs for device in one.get("devices", [])]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names)
    for name in names:
        claim = claim_of((name, "1", "1Gi"))
        assert dra.wanted_of(claim, NODE, [gpu(index) for index in range(gpus)])[0].spec.sm_percent


# --- health


def test_a_gpu_without_its_server_is_unhealthy_under_all_its_devices() -> None:
    gpus = [gpu(0), gpu(1, state="restarting")]
    assert health.health_of(gpus, ()) == {
        "gpu-0": ("HEALTHY", ""),
        "gpu-1": ("UNHEALTHY", "the GPU Server of GPU 1 is restarting"),
    }
    sizes = parse_all("50sm-8g,100sm-80g")
    found = health.health_of([gpu(0, guaranteed_ratio=1.0)], sizes)
    offered = [device["name"] for device in dra.slices(NODE, [gpu(0)], [], sizes)[1]["devices"]]
    assert list(found) == offered, "those that do not fit now may have pods"


# --- reconcile


class Machine:
    """A node, an API server and a kubelet, in which any process may end between two steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reserved: set[str] = set()
        self.vgpus: dict[str, Made] = {}

    def reserve(self, uid: str) -> None:
        self.reserved.add(uid)

    def prepare(self, uid: str) -> None:
        """The driver may end before its answer: the kubelet asks again."""
        if uid in self.reserved:
            self.vgpus.setdefault(uid, Made(f"vgpu-{uid}", uid, 0, self.now))

    def start(self, uid: str) -> None:
        if uid in self.vgpus and uid in self.reserved:
            self.vgpus[uid] = replace(self.vgpus[uid], processes=1)

    def end(self, uid: str) -> None:
        if uid in self.vgpus:
            self.vgpus[uid] = replace(self.vgpus[uid], processes=0)

    def unprepare(self, uid: str) -> None:
        """Once its programs have ended. The driver or the node may end before it: then there is no such step."""
        if uid in self.vgpus and not self.vgpus[uid].processes:
            del self.vgpus[uid]

    def release(self, uid: str) -> None:
        """Also by force, under running programs, and without an ``unprepare``."""
        self.reserved.discard(uid)

    def wait(self, _: str) -> None:
        self.now += GRACE_S / 2

    def reconcile(self, _: str = "") -> None:
        for action in dra.reconcile(self.reserved, self.vgpus.values(), self.now):
            assert action.vgpu.uid not in self.reserved
            assert self.now - action.vgpu.created_unix_s >= GRACE_S
            match action:
                case Remove(one):
                    assert not one.processes, "a program lost its vGPU"
                    del self.vgpus[one.uid]
                case Report(one):
                    assert one.processes


STEPS = ("reserve", "prepare", "start", "end", "unprepare", "release", "wait", "reconcile")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abc")), max_size=60))
def test_after_any_order_of_crashes_what_is_wanted_is_what_is_made(steps: list[tuple[str, str]]) -> None:
    machine = Machine()
    for step, uid in steps:
        getattr(machine, step)(uid)
    for uid in "abc":
        if uid not in machine.reserved:
            machine.end(uid)
        machine.prepare(uid)
    machine.now += GRACE_S
    machine.reconcile()
    assert set(machine.vgpus) == machine.reserved
