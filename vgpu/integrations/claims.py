"""Claims: a request for a vGPU by an engine (Docker, Kubernetes, Slurm, Ray), with a name that outlives the request.

An engine asks again after each crash. The same claim therefore has the same vGPU for as long as the vGPU exists. The
GPU Server keeps the claim in its journal, so no front end needs a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from vgpu.spec import VgpuSpec

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
    any."""
    asked, made = wanted.model_dump(mode="json"), found.model_dump(mode="json")
    if wanted.name is None:
        made["name"] = None
    return {name: (asked[name], made[name]) for name in asked if asked[name] != made[name]}
