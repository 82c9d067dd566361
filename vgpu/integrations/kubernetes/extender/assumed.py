"""What is written at a pod, pure: the GPUs that the extender chose, and whether the kubelet has allocated them.

``vgpu.dev/assumed`` has all of it. The names of aliyun say the same to tools that read them; a pod that has only those
was placed by aliyun's own extender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.dra import DRIVER, Object
from vgpu.integrations.kubernetes.extender.asks import Size, asks_of
from vgpu.integrations.kubernetes.profiles import GIB
from vgpu.integrations.kubernetes.resources import MEMORY
from vgpu.spec import VgpuSpec

ASSUMED: Final = f"{DRIVER}/assumed"
INDEX: Final = "ALIYUN_COM_GPU_MEM_IDX"
OF_POD: Final = "ALIYUN_COM_GPU_MEM_POD"
OF_GPU: Final = "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED: Final = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ASSUME_TIME: Final = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ALL: Final = (ASSUMED, INDEX, OF_POD, OF_GPU, ASSIGNED, ASSUME_TIME)
OVER: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Part:
    """One vGPU of a pod. ``resource`` and ``count``: the size that the kubelet allocates to its container. ``gpu``: as
    ``NodeGpu.id``."""

    container: str
    resource: str
    count: int
    gpu: str
    index: int
    sm: Annotated[float, Field(gt=0, le=100)]
    memory_bytes: Annotated[int, Field(gt=0, lt=1 << 50)]
    limited: bool = False

    @property
    def size(self) -> Size:
        return self.resource, self.count

    def spec(self) -> VgpuSpec:
        if self.limited:
            return VgpuSpec.parse(sm_percent=self.sm, memory_bytes=self.memory_bytes)
        return VgpuSpec.parse(sm_percent=100.0, quota_request_percent=self.sm, memory_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True)
class _Written:
    """As JSON in the annotation."""

    node: str
    vgpus: tuple[Part, ...]


_WRITTEN: Final = TypeAdapter(_Written)


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that holds parts of GPUs of ``node``. ``version``: of the object from which this was read."""

    uid: str
    namespace: str
    name: str
    node: str
    parts: tuple[Part, ...]
    assigned: bool
    assumed_s: float
    version: str = ""

    @property
    def sizes(self) -> frozenset[Size]:
        return frozenset(part.size for part in self.parts)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def written(held: Held) -> dict[str, str]:
    """What makes the pod assumed."""
    vgpus = _WRITTEN.dump_json(_Written(held.node, held.parts)).decode()
    found = {ASSUMED: vgpus, ASSIGNED: "false", ASSUME_TIME: str(int(held.assumed_s * 1e9))}
    theirs = [part for part in held.parts if part.resource == MEMORY]
    if theirs:
        found |= {INDEX: str(theirs[0].index), OF_POD: str(sum(part.count for part in theirs))}
    return found


def of_gpu(held: Held, memory_bytes: int) -> dict[str, str]:
    """What aliyun's tools read beside that: the GiB of the GPU."""
    return {OF_GPU: str(memory_bytes // GIB)} if any(part.resource == MEMORY for part in held.parts) else {}


def taken_back() -> dict[str, None]:
    """What makes the pod one that has no GPU."""
    return dict.fromkeys(ALL)


def held_of(pod: Object) -> Held | None:
    """None: it holds nothing, or it is over."""
    metadata = pod["metadata"]
    said: Mapping[str, str] = metadata.get("annotations") or {}
    node = (pod.get("spec") or {}).get("nodeName") or ""
    if ASSUME_TIME not in said or (pod.get("status") or {}).get("phase") in OVER:
        return None
    try:
        place, parts = _parts(pod, said)
        assumed_s = int(said[ASSUME_TIME]) / 1e9
    except (ValueError, KeyError, OverflowError, VgpuError):
        return None  # not in our words, nor in aliyun's
    if node and place and node != place:
        return None  # another scheduler has bound it elsewhere
    return Held(
        metadata["uid"],
        metadata.get("namespace", ""),
        metadata["name"],
        node or place,
        parts,
        said.get(ASSIGNED) == "true" and bool(node),
        assumed_s,
        str(metadata.get("resourceVersion", "")),
    )


def is_waiting(pod: Object) -> bool:
    """Whether it is assumed, in whatever words, and not assigned."""
    held = held_of(pod)
    return ASSUME_TIME in (pod["metadata"].get("annotations") or {}) and not (held and held.assigned)


def _parts(pod: Object, said: Mapping[str, str]) -> tuple[str, tuple[Part, ...]]:
    """The node, and the vGPUs there."""
    if ASSUMED in said:
        written = _WRITTEN.validate_json(said[ASSUMED])
        return written.node, written.vgpus
    index = int(said[INDEX])
    total = int(said[OF_GPU]) * GIB
    asked = [(ask, ask.on(total)) for ask in asks_of(pod) if ask.size[0] == MEMORY]
    return "", tuple(
        Part(ask.container, *ask.size, str(index), index, each.sm, each.memory_bytes) for ask, each in asked
    )


# --- what the kubelet's question means


@dataclass(frozen=True, slots=True)
class Answer:
    """The container that the kubelet asks for, and its vGPUs by their position in the pod. ``last``: with it the pod
    has all its devices."""

    held: Held
    container: str
    parts: Mapping[int, Part]
    last: bool


def claim_uid(held: Held, position: int) -> str:
    return f"{held.uid}.{position}"


def answer(pods: Sequence[Object], node: str, size: Size, made: frozenset[str]) -> Answer:
    """The kubelet says a size and no pod. ``made``: the claims of vGPUs that exist. ``VgpuError``: no pod here waits
    for this size, or several do, so that one could get the other's GPU."""
    waiting: list[tuple[Held, str]] = []
    for pod in pods:
        held = held_of(pod)
        if held is None or held.assigned or (pod.get("spec") or {}).get("nodeName") != node:
            continue
        if pod["metadata"].get("deletionTimestamp"):
            continue
        container = next((part.container for at, part in _open(held, made) if part.size == size), None)
        if container is not None:
            waiting.append((held, container))
    what = f"{size[1]} of {size[0]}"
    stray = next((pod for pod in pods if _is_stray(pod, node, size)), None)
    if stray is not None:
        name = f"{stray['metadata']['namespace']}/{stray['metadata']['name']}"
        text = f"{name} asks for {what} on {node}, and no extender placed it: the kubelet may ask for that pod"
        raise VgpuError(ErrorCode.AMBIGUOUS, text, "delete it; pods that name their node themselves get no GPU here")
    if not waiting:
        text = f"no pod that the extender assumed for {node} waits for {what}"
        hint = "is the extender in the scheduler's configuration? it takes a GPU back from a pod that is allocated late"
        raise VgpuError(ErrorCode.NOT_FOUND, text, hint)
    if len(waiting) > 1:
        names = " and ".join(str(held) for held, _ in waiting[:2])
        text = f"{names} both wait for {what} on {node}, and the kubelet does not say for which it asks"
        raise VgpuError(ErrorCode.AMBIGUOUS, text, "delete one of them; one extender at a time lets one of them wait")
    held, container = waiting[0]
    left = _open(held, made)
    parts = {at: part for at, part in left if part.container == container}
    return Answer(held, container, parts, last=len(parts) == len(left))


def _is_stray(pod: Object, node: str, size: Size) -> bool:
    """Whether the kubelet may ask for a pod that no extender placed: one that begins, and names its node itself, or one
    whose GPU was taken back."""
    if (pod.get("spec") or {}).get("nodeName") != node or pod["metadata"].get("deletionTimestamp"):
        return False
    if (pod.get("status") or {}).get("phase", "Pending") != "Pending" or held_of(pod) is not None:
        return False
    try:
        return any(ask.size == size for ask in asks_of(pod))
    except VgpuError:
        return False


def _open(held: Held, made: frozenset[str]) -> list[tuple[int, Part]]:
    """The vGPUs of containers that have none yet. A container that has some, and not all, was cut short."""
    missing = {part.container for at, part in enumerate(held.parts) if claim_uid(held, at) not in made}
    return [(at, part) for at, part in enumerate(held.parts) if part.container in missing]
