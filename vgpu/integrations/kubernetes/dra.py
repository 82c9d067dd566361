"""Dynamic resource allocation, pure: what the node offers, and which vGPUs a claim that was allocated here has.

The scheduler of Kubernetes divides the devices that the node's ResourceSlices offer, in one of two ways:

============  ==================================================================================================
capacity      a device for each GPU, of which each claim takes an amount of ``sm`` and ``memory``
profiles      a device for each vGPU of a fixed size that may be made; those of a GPU use the same counters
============  ==================================================================================================

Objects of the API are dictionaries here, as JSON has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightkube.utils.quantity import parse_quantity

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.claims import Claim
from vgpu.integrations.kubernetes.profiles import Profile
from vgpu.spec import SMALLEST_MEMORY_BYTES, VgpuSpec
from vgpu.units import MIB

DRIVER: Final = "vgpu.dev"
KIND: Final = "dra"
CONFIG: Final = {"apiVersion": "vgpu.dev/v1", "kind": "VgpuConfig"}
MOST_DEVICES: Final = 64
"""In one slice whose devices have taints or use counters."""
MOST_COUNTER_SETS: Final = 8
"""In one slice."""
GRACE_S: Final = 300.0
"""The reconcile leaves younger vGPUs alone."""
_DEVICE: Final = re.compile(r"gpu-(\d+)(?:-(\d+sm-\d+g)-\d+)?")
_FIELDS: Final = {
    "priority": "priority",
    "burst": "burst",
    "quotaRequest": "quota_request_percent",
    "quotaLimit": "quota_limit_percent",
    "memoryLimit": "memory_limit_bytes",
    "oversubscribe": "oversubscribe",
    "onServerLoss": "on_server_loss",
    "idleSuspend": "idle_suspend_ns",
    "slo": "slo",
}
_SUSPENDED: Final = frozenset({"suspended", "idle-suspended"})
Object = Mapping[str, Any]


# --- a claim


@dataclass(frozen=True, slots=True)
class Wanted:
    """One vGPU of a claim, and the device by which the scheduler knows it."""

    claim: Claim
    spec: VgpuSpec
    gpu: int
    request: str
    device: str
    share_id: str | None


def results_of(claim: Object, node: str) -> list[Object]:
    """The devices of this driver and node that were allocated to the claim."""
    allocation = claim.get("status", {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or []
    return [one for one in results if (one["driver"], one["pool"]) == (DRIVER, node)]


def is_reserved(claim: Object) -> bool:
    """Whether a pod may use it now. The kubelet prepares no other claim, except by a request that came late."""
    return bool(claim.get("status", {}).get("reservedFor"))


def pods_of(claim: Object) -> tuple[str, ...] | None:
    """The uids of the pods that may use it now; None: it is also reserved for something that is no pod."""
    reserved = claim["status"].get("reservedFor") or []
    if any(one.get("resource") != "pods" or not one.get("uid") for one in reserved):
        return None
    return tuple(sorted(one["uid"] for one in reserved))


def uid_of(claim_uid: str, position: int) -> str:
    """A claim may have several devices, each of which is a vGPU. The order of an allocation never changes."""
    return f"{claim_uid}.{position}"


def wanted_of(claim: Object, node: str, gpus: Iterable[Object]) -> list[Wanted]:
    """The vGPUs of a claim on this node. ``VgpuError``: the claim asks for what no vGPU can be."""
    results = results_of(claim, node)
    by_index = {gpu["index"]: gpu for gpu in gpus}
    devices = [_device_of(result, by_index) for result in results]
    indices = [gpu["index"] for gpu, _ in devices]
    pods = pods_of(claim)
    alone = len(set(indices)) == len(indices) > 1
    return [
        Wanted(
            Claim(KIND, uid_of(claim["metadata"]["uid"], at), claim["metadata"]["namespace"], _labels(claim), pods),
            VgpuSpec.parse(
                **_amounts(result, gpu, profile),
                **configuration(claim, result["request"]),
                group=claim["metadata"]["uid"] if alone else None,
            ),
            gpu["index"],
            result["request"],
            result["device"],
            result.get("shareID"),
        )
        for at, (result, (gpu, profile)) in enumerate(zip(results, devices, strict=True))
    ]


def _device_of(result: Object, gpus: Mapping[int, Object]) -> tuple[Object, Profile | None]:
    found = _DEVICE.fullmatch(result["device"])
    if result.get("adminAccess"):
        raise VgpuError(ErrorCode.INVALID, f"request {result['request']}: a vGPU has no administrative access")
    if found is None or int(found[1]) not in gpus:
        raise VgpuError(ErrorCode.NOT_FOUND, f"the node serves no device {result['device']}", "vgpuctl gpu ls")
    return gpus[int(found[1])], Profile.parse(found[2]) if found[2] else None


def _amounts(result: Object, gpu: Object, profile: Profile | None) -> dict[str, Any]:
    """A device that says no amounts was allocated whole."""
    if profile is not None:
        return {"sm_percent": float(profile.sm), "memory_bytes": profile.memory_bytes}
    consumed = {
        name.removeprefix(f"{DRIVER}/"): value for name, value in (result.get("consumedCapacity") or {}).items()
    }
    memory = amount(consumed["memory"]) if "memory" in consumed else gpu["total_memory_bytes"] // MIB * MIB
    return {"sm_percent": float(amount(consumed.get("sm", "100"))), "memory_bytes": memory}


def amount(quantity: object) -> int:
    """A quantity of Kubernetes, rounded up. ``VgpuError`` (invalid)."""
    try:
        parsed = parse_quantity(str(quantity))
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"{quantity!r} is no quantity: {error}") from error
    assert parsed is not None
    return math.ceil(parsed)


def configuration(claim: Object, request: str) -> dict[str, Any]:
    """The fields of a ``VgpuSpec`` that the class of the request and the claim set; the claim's come last, and win."""
    fields: dict[str, Any] = {}
    entries = claim["status"]["allocation"]["devices"].get("config") or []
    for entry in sorted(entries, key=lambda entry: entry.get("source") != "FromClass"):
        opaque, requests = entry.get("opaque") or {}, entry.get("requests") or []
        if opaque.get("driver") != DRIVER or (requests and not {request, request.split("/")[0]} & set(requests)):
            continue
        parameters = dict(opaque.get("parameters") or {})
        found = {name: parameters.pop(name, None) for name in CONFIG}
        if found != CONFIG:
            raise VgpuError(ErrorCode.INVALID, f"the claim's configuration is no VgpuConfig of vgpu.dev/v1: {found}")
        if unknown := sorted(parameters.keys() - _FIELDS.keys()):
            known = ", ".join(_FIELDS)
            raise VgpuError(ErrorCode.INVALID, f"a VgpuConfig has no field {unknown[0]!r}", f"it has {known}")
        fields |= {_FIELDS[name]: value for name, value in parameters.items()}
    if "memory_limit_bytes" in fields:
        fields["memory_limit_bytes"] = amount(fields["memory_limit_bytes"])
    return fields


def _labels(claim: Object) -> dict[str, str]:
    """Facts for people. Several pods may share a claim; the first one is named."""
    pods = [one["name"] for one in claim["status"].get("reservedFor") or [] if one.get("resource") == "pods"]
    labels = {"namespace": claim["metadata"]["namespace"], "claim": claim["metadata"]["name"]}
    return labels | ({"pod": pods[0]} if pods else {})


# --- what is and what should be


@dataclass(frozen=True, slots=True)
class Made:
    """A vGPU of a claim. ``uid``: of its claim; ``namespace`` and ``name``: of the object in the API server."""

    vgpu_id: str
    uid: str
    processes: int
    created_unix_s: float
    namespace: str = ""
    name: str = ""

    @property
    def claim_uid(self) -> str:
        """That of the object, which may have several vGPUs."""
        return self.uid.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Remove:
    vgpu: Made


@dataclass(frozen=True, slots=True)
class Report:
    """Programs run in a vGPU whose claim is gone."""

    vgpu: Made


def own(vgpus: Iterable[Object], uid: int) -> list[Object]:
    """The node's vGPUs, where a claim of another user than ``uid`` is none: any user may name a claim as they like."""
    return [vgpu if vgpu["owner_uid"] == uid else {**vgpu, "claim": None} for vgpu in vgpus]


def made_of(vgpus: Iterable[Object], kind: str = KIND) -> list[Made]:
    return [
        Made(
            vgpu["vgpu_id"],
            claim["uid"],
            vgpu["processes"],
            vgpu["created_unix_s"],
            claim["tenant"],
            claim["labels"].get("claim", ""),
        )
        for vgpu in vgpus
        if (claim := vgpu.get("claim") or {}).get("kind") == kind
    ]


def reconcile(wanted: Iterable[str], made: Iterable[Made], now_unix_s: float) -> list[Remove | Report]:
    """What to do about vGPUs that no claim wants. ``wanted``: the uids of vGPUs that have a claim, read after ``made``.

    A claim without a vGPU needs no action: the kubelet asks for each claim of a pod until it has an answer.
    """
    keep = frozenset(wanted)
    return [
        Report(vgpu) if vgpu.processes else Remove(vgpu)
        for vgpu in made
        if vgpu.uid not in keep and now_unix_s - vgpu.created_unix_s >= GRACE_S
    ]


# --- what the node offers


def slices(
    node: str, gpus: Sequence[Object], vgpus: Sequence[Object], profiles: Sequence[Profile] = ()
) -> list[dict[str, Any]]:
    """The specs of the node's ResourceSlices, but for the generation of their pool. What is promised to vGPUs outside
    of Kubernetes is not offered."""
    free = {gpu["index"]: offered(gpu, vgpus) for gpu in gpus}
    parts: list[dict[str, Any]] = []
    if profiles:
        sets = [_counters(index, *room) for index, room in free.items()]
        parts += [{"sharedCounters": part} for part in _portions(sets, MOST_COUNTER_SETS)]
        devices = [device for gpu in gpus for device in _partitions(gpu, *free[gpu["index"]], profiles)]
    else:
        devices = [_whole(gpu, *free[gpu["index"]]) for gpu in gpus if _is_enough(*free[gpu["index"]])]
    parts += [{"devices": part} for part in _portions(devices, MOST_DEVICES)]
    parts = parts or [{"devices": []}]
    pool = {"name": node, "resourceSliceCount": len(parts)}
    return [{"driver": DRIVER, "nodeName": node, "pool": dict(pool), **part} for part in parts]


def _portions(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])


def offered(gpu: Object, vgpus: Iterable[Object], kind: str = KIND) -> tuple[int, int]:
    """Compute in percent and memory in bytes: of the GPU, less what is promised to vGPUs whose claims are of no such
    kind."""
    ours = [
        vgpu
        for vgpu in vgpus
        if vgpu["gpu_index"] == gpu["index"]
        and (vgpu.get("claim") or {}).get("kind") == kind
        and vgpu.get("state") not in _SUSPENDED  # the GPU's sums leave it out
    ]
    compute = sum(vgpu["guarantee_ratio"] * vgpu["sm_percent_granted"] / 100 for vgpu in ours)
    memory = sum(vgpu["spec"]["memory_bytes"] for vgpu in ours if not vgpu["spec"].get("oversubscribe"))
    others = max(0.0, gpu["guaranteed_ratio"] - compute), max(0, gpu["guaranteed_memory_bytes"] - memory)
    sm = 100 - math.ceil(round(others[0] * 100, 3))
    return max(0, sm), max(0, gpu["total_memory_bytes"] - others[1]) // MIB * MIB


def _is_enough(sm: int, memory_bytes: int) -> bool:
    return sm >= 1 and memory_bytes >= SMALLEST_MEMORY_BYTES


def _mebibytes(memory_bytes: int) -> str:
    return f"{memory_bytes // MIB}Mi"


def _attributes(gpu: Object) -> dict[str, Any]:
    return {
        "uuid": {"string": gpu["uuid"][:64]},
        "productName": {"string": gpu["name"][:64]},
        "mode": {"string": gpu["mode"]},
        "index": {"int": gpu["index"]},
    }


def _taints(gpu: Object) -> dict[str, Any]:
    """No new pod comes to a GPU whose server is down; those that are there go on."""
    down = [{"key": f"{DRIVER}/server-down", "effect": "NoSchedule"}]
    return {} if gpu["state"] == "serving" else {"taints": down}


def _whole(gpu: Object, sm: int, memory_bytes: int) -> dict[str, Any]:
    most, memory = str(sm), _mebibytes(memory_bytes)
    return {
        "name": f"gpu-{gpu['index']}",
        "allowMultipleAllocations": True,
        "attributes": {"type": {"string": "gpu"}} | _attributes(gpu),
        "capacity": {
            "sm": {
                "value": most,
                "requestPolicy": {"default": most, "validRange": {"min": "1", "max": most, "step": "1"}},
            },
            "memory": {
                "value": memory,
                "requestPolicy": {
                    "default": memory,
                    "validRange": {"min": _mebibytes(SMALLEST_MEMORY_BYTES), "max": memory, "step": "1Mi"},
                },
            },
        },
    } | _taints(gpu)


def _counters(index: int, sm: int, memory_bytes: int) -> dict[str, Any]:
    return {"name": f"gpu-{index}", "counters": _counted(sm, memory_bytes)}


def _counted(sm: int, memory_bytes: int) -> dict[str, Any]:
    return {"sm": {"value": str(sm)}, "memory": {"value": _mebibytes(memory_bytes)}}


def _partitions(gpu: Object, sm: int, memory_bytes: int, profiles: Iterable[Profile]) -> Iterator[dict[str, Any]]:
    for profile in profiles:
        for number in range(profile.count(sm, memory_bytes)):
            yield {
                "name": f"gpu-{gpu['index']}-{profile.name}-{number}",
                "attributes": {"type": {"string": "vgpu"}, "profile": {"string": profile.name}} | _attributes(gpu),
                "capacity": {
                    "sm": {"value": str(profile.sm)},
                    "memory": {"value": _mebibytes(profile.memory_bytes)},
                },
                "consumesCounters": [
                    {"counterSet": f"gpu-{gpu['index']}", "counters": _counted(profile.sm, profile.memory_bytes)}
                ],
            } | _taints(gpu)
