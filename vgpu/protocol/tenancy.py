"""Requests about quotas and the queue, and their answers. Parts of ``messages``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vgpu.protocol.hello import Reading, Request
from vgpu.protocol.printed import Fields, Line
from vgpu.queueing.rules import DEFAULT_RULES, QueueRules
from vgpu.quotas.quota import Quotas
from vgpu.spec import VgpuSpec


def _without_unknown(spec: Any) -> Any:
    return {name: spec[name] for name in VgpuSpec.model_fields if name in spec} if isinstance(spec, dict) else spec


KnownSpec = Annotated[VgpuSpec, BeforeValidator(_without_unknown)]
"""What a node says of a specification: a newer one has more fields."""


class GetQueue(Request):
    """The requests that wait for room → ``QueueList``."""

    op: Literal["queue"] = "queue"


class GetQuota(Request):
    """What a user may have, and has → ``QuotaReading``. ``uid`` None: the asker. Only root may name another user."""

    op: Literal["quota"] = "quota"
    uid: int | None = Field(default=None, ge=0, lt=1 << 32)


class SetQuotas(Request):
    """Replace all quotas of the node, and the rules of its queue → ``QuotasSet``. Only root or the node's own user
    may."""

    op: Literal["set-quotas"] = "set-quotas"
    quotas: Quotas
    queue: QueueRules = DEFAULT_RULES


class QueueReading(Reading):
    """One request that waits. ``position``: from 1. ``kept_gpu``: the GPU that is kept for it. ``vgpu_id``: a preempted
    vGPU, which waits for its GPU, has no request."""

    request_id: str
    vgpu_id: str = ""
    position: int
    owner_uid: int
    spec: KnownSpec
    gpu: Line = "auto"
    since_unix_s: float
    kept_gpu: int | None = None
    reason: Line = ""


class QueueList(Reading):
    waiting: tuple[QueueReading, ...]


class QuotaHeld(Reading):
    """What a user's vGPUs take of the quota: promised percent of one GPU, memory, and their number."""

    sm_percent: float
    memory_bytes: int
    vgpus: int


class QuotaReading(Reading):
    """``quota``: by key of the configuration file, in plain units. ``sections``: by key, the section that has it."""

    uid: int
    user: Line = ""
    quota: Fields = Field(default_factory=dict)
    sections: dict[str, Line] = Field(default_factory=dict)
    held: QuotaHeld


class QuotasSet(Reading):
    """``over``: the vGPUs that are more than their user may have now. They stay."""

    sections: int
    over: tuple[str, ...] = ()
