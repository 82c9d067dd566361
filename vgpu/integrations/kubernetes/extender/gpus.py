"""The GPUs of a node of Kubernetes, pure. The plugin of a node writes them at the Node, as JSON in an annotation.

A node without that annotation, as under aliyun's own plugin, says in its status how many GPUs it has and how many GiB
they have together. They count as equal then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes import dra
from vgpu.integrations.kubernetes.dra import DRIVER, Object, amount
from vgpu.integrations.kubernetes.profiles import GIB
from vgpu.integrations.kubernetes.resources import CARDS, KIND, MEMORY

ANNOTATION: Final = f"{DRIVER}/gpus"


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """``sm`` and ``offered_bytes``: percent of the time and memory, without what is promised outside of Kubernetes."""

    uuid: str
    index: int
    model: str
    memory_bytes: Annotated[int, Field(gt=0)]
    sm: Annotated[int, Field(ge=0, le=100)]
    offered_bytes: Annotated[int, Field(ge=0)]
    serving: bool = True

    @property
    def id(self) -> str:
        """Among the GPUs of its node."""
        return self.uuid or str(self.index)


_GPUS: Final = TypeAdapter(tuple[NodeGpu, ...])


def published(gpus: Iterable[Object], vgpus: Sequence[Object]) -> str:
    """The annotation, from what the node of vGPUs says."""
    found = []
    for gpu in gpus:
        sm, offered = dra.offered(gpu, vgpus, KIND)
        serving = gpu["state"] == "serving"
        found.append(
            NodeGpu(gpu["uuid"], gpu["index"], gpu["name"], gpu["total_memory_bytes"], sm, offered, serving=serving)
        )
    return _GPUS.dump_json(tuple(found)).decode()


def gpus_of(node: Object) -> tuple[NodeGpu, ...]:
    """Of an object Node; empty: it has none that the extender knows."""
    written = ((node.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION)
    if written is None:
        return tuple(_equal(node.get("status") or {}))
    try:
        return _GPUS.validate_json(written)
    except ValidationError:
        return ()


def _equal(status: Object) -> Iterable[NodeGpu]:
    allocatable = status.get("allocatable") or status.get("capacity") or {}
    try:
        count, gibibytes = amount(allocatable.get(CARDS, "0")), amount(allocatable.get(MEMORY, "0"))
    except VgpuError:
        return
    for index in range(count if gibibytes >= count else 0):
        yield NodeGpu("", index, "", gibibytes // count * GIB, 100, gibibytes // count * GIB)
