"""Claims: a request for a vGPU by an engine (Docker, Kubernetes, Slurm, Ray), with a name that outlives the request.

An engine asks again after each crash. The same claim therefore has the same vGPU for as long as the vGPU exists. The
GPU Server keeps the claim in its journal, so no front end needs a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from vgpu.errors import ErrorCode, VgpuError
from vgpu.spec import RANGES, VgpuChanges, VgpuSpec
from vgpu.units import format_bytes

Kind = Literal["container", "dra", "plugin", "slurm", "ray", "dask", "api"]
Attach = Literal["owner", "mount"]
"""Which processes a vGPU admits. "owner": those of its owner, of root, and of its share group. "mount": also each
process that reaches the vGPU's socket through a mount, whatever its user."""

UID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
MOST_LABELS: Final = 16
MOST_PODS: Final = 256
_Uid = Annotated[str, Field(min_length=1, max_length=63, pattern=UID_PATTERN)]
_Label = Annotated[str, Field(max_length=253)]


@dataclass(frozen=True, slots=True)
class Claim:
    """``kind`` and ``uid`` name the claim among all claims of one owner. ``tenant``: for whom the engine asks, as in a
    Kubernetes namespace. ``labels``: facts for people, such as ``pod``, ``container`` or ``job``. ``pods``: the uids of
    the Kubernetes pods whose processes the vGPU admits through a mount; None: they are not known, and it admits all."""

    kind: Kind
    uid: _Uid
    tenant: _Label = ""
    labels: Annotated[dict[Annotated[str, Field(min_length=1, max_length=63)], _Label], Field(max_length=16)] = field(
        default_factory=dict
    )
    pods: Annotated[tuple[_Uid, ...], Field(max_length=MOST_PODS)] | None = None

    @property
    def name(self) -> str:
        """``kind/uid``, as people read it."""
        return f"{self.kind}/{self.uid}"

    def is_same(self, other: Claim | None) -> bool:
        """Whether both are one claim; tenant, labels and pods may differ."""
        return other is not None and (self.kind, self.uid) == (other.kind, other.uid)


def differences(wanted: VgpuSpec, found: VgpuSpec) -> Mapping[str, tuple[Any, Any]]:
    """Where ``found`` is not as ``wanted``: name of the field → both values. A name that ``wanted`` leaves open may be
    any, and a size between two bounds any of these."""
    asked, made = wanted.model_dump(mode="json"), found.model_dump(mode="json")
    for size, both in RANGES.items():
        if asked.get(both) is not None and asked[both] == made.get(both):
            made[size] = asked[size]  # the node changes it between the bounds
    if wanted.name is None:
        made["name"] = None
    names = [*asked, *(name for name in made if name not in asked)]
    return {name: (asked.get(name), made.get(name)) for name in names if asked.get(name) != made.get(name)}


ALLOTTED: Final = frozenset({"dra", "plugin", "slurm", "ray", "dask"})
"""Kinds of claims whose engine counts what it has given away."""


def check_allotted(claim: Claim | None, spec: VgpuSpec, changes: VgpuChanges) -> None:
    """``VgpuError`` (invalid): bounds that go beyond what the claim's engine gave. The engine would give it away a
    second time."""
    if claim is None or claim.kind not in ALLOTTED:
        return
    sm, memory = changes.sm_range_percent, changes.memory_range_bytes
    most_sm = spec.sm_range_percent[1] if spec.sm_range_percent is not None else spec.compute_ratio * 100
    most_memory = spec.memory_range_bytes[1] if spec.memory_range_bytes is not None else spec.memory_bytes
    if sm is not None and sm[1] > most_sm:
        reason, hint = f"--sm {sm[0]:g}..{sm[1]:g}: the claim {claim.name} has {most_sm:g} percent", f"..{most_sm:g}"
        raise VgpuError(ErrorCode.INVALID, reason, f"--sm {min(sm[0], most_sm):g}{hint}")
    if memory is not None and most_memory is not None and memory[1] > most_memory:
        size = format_bytes(most_memory)
        raise VgpuError(ErrorCode.INVALID, f"--mem: the claim {claim.name} has {size}", f"an upper bound of {size}")
