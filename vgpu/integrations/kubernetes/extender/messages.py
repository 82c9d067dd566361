"""What the scheduler sends and gets: the extender's API of kube-scheduler. Schedulers write its names in two ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vgpu.integrations.kubernetes.extender.reservations import Fits, Reservations
from vgpu.units import MIB


class Message(BaseModel):
    """The case of names does not count."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _in_lower_case(cls, said: Any) -> Any:
        return {str(name).lower(): value for name, value in said.items()} if isinstance(said, dict) else said


class Arguments(Message):
    """Of ``filter`` and ``prioritize``. The scheduler sends whole nodes, or, with ``nodeCacheCapable``, names."""

    pod: dict[str, Any]
    nodes: dict[str, Any] | None = None
    nodenames: list[str] | None = None

    @property
    def names(self) -> list[str]:
        if self.nodenames is not None:
            return self.nodenames
        return [one["metadata"]["name"] for one in self.items]

    @property
    def items(self) -> list[dict[str, Any]]:
        return (self.nodes or {}).get("items") or []

    @model_validator(mode="after")
    def _has_metadata(self) -> Self:
        for one in (self.pod, *self.items):
            if not isinstance(one, dict) or not isinstance(one.get("metadata"), dict):
                raise ValueError("a pod or a node has no metadata")
        if any("name" not in one["metadata"] for one in self.items):
            raise ValueError("a node has no name")
        return self


class Binding(Message):
    """Of ``bind``."""

    name: str = Field(alias="podname")
    namespace: str = Field(alias="podnamespace")
    uid: str = Field("", alias="poduid")
    node: str


def filtered(arguments: Arguments, found: Mapping[str, Fits | str]) -> dict[str, Any]:
    """In the form in which the scheduler asked."""
    failed = {node: one for node, one in found.items() if isinstance(one, str)}
    fitting = [node for node in found if node not in failed]
    answer: dict[str, Any] = {"FailedNodes": failed, "Error": "", "Nodes": None, "NodeNames": None}
    if arguments.nodenames is not None:
        return answer | {"NodeNames": fitting}
    items = [one for one in arguments.items if one["metadata"]["name"] not in failed]
    return answer | {"Nodes": {**(arguments.nodes or {}), "items": items}}


def prioritized(scores: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"Host": node, "Score": score} for node, score in scores.items()]


def inspected(reservations: Reservations, nodes: list[str]) -> dict[str, Any]:
    """What the pods hold of each GPU, in MiB and percent of the time."""
    return {"nodes": [_node(reservations, name) for name in nodes]}


def _node(reservations: Reservations, name: str) -> dict[str, Any]:
    gpus = [
        {
            "id": gpu.index,
            "uuid": gpu.uuid,
            "serving": gpu.serving,
            "totalMiB": gpu.offered_bytes // MIB,
            "usedMiB": (gpu.offered_bytes - left.memory_bytes) // MIB,
            "usedPercent": round(gpu.sm - left.time_ppm / 10_000, 4),
            "pods": [
                {
                    "namespace": held.namespace,
                    "name": held.name,
                    "uid": held.uid,
                    "container": part.container,
                    "usedMiB": part.memory_bytes // MIB,
                    "percent": round(part.sm, 4),
                    "assigned": held.assigned,
                }
                for held in sorted(reservations.held(name), key=str)
                for part in held.parts
                if part.gpu in (gpu.id, str(gpu.index))
            ],
        }
        for gpu, left in reservations.left(name)
    ]
    return {
        "name": name,
        "totalMiB": sum(gpu["totalMiB"] for gpu in gpus),
        "usedMiB": sum(gpu["usedMiB"] for gpu in gpus),
        "gpus": gpus,
    }
