"""``Usage`` and ``Why``: requests about what vGPUs were promised and used, and their answers. Parts of ``messages``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vgpu.protocol.hello import Reading, Request
from vgpu.protocol.printed import Line
from vgpu.protocol.versions import USAGE_SINCE, refuse_older

Grouping = Literal["user", "vgpu", "claim"]


class Usage(Request):
    """What was promised and used since then, also of vGPUs that are gone → ``UsageReport``. ``until_unix_s`` None: now.
    ``step_s``: the answer has rows for each step of so many seconds, from ``since_unix_s`` on; 0: one row in all. Root
    and the node's own user get the rows of all users, others their own."""

    op: Literal["usage"] = "usage"
    since_unix_s: float = Field(default=0.0, ge=0.0, le=1e11)
    until_unix_s: float | None = Field(default=None, ge=0.0, le=1e11)
    by: Grouping = "user"
    step_s: int = Field(default=0, ge=0, le=1_000_000_000)

    def said_to(self, version: int) -> dict[str, Any]:
        refuse_older(version < USAGE_SINCE, "has no usage")
        return super().said_to(version)


class Why(Request):
    """Why a vGPU is as fast as it is, and what to do → ``WhyReport``."""

    op: Literal["why"] = "why"
    vgpu: str

    def said_to(self, version: int) -> dict[str, Any]:
        refuse_older(version < USAGE_SINCE, "has no why")
        return super().said_to(version)


class UsageRow(Reading):
    """The sums of one user, vGPU or claim. GPU-hours are hours of one whole GPU, in time or in SMs. ``wasted``: what
    was promised and not used. ``used`` may be more than ``promised`` − ``wasted``, because a vGPU may use more than it
    was promised. ``vgpu_id`` "others": vGPUs that have no row of their own any more."""

    start_unix_s: float
    owner_uid: int
    user: Line = ""  # the owner's name, as vgpuctl and the HTTP API find it
    vgpu_id: Line = ""
    name: Line = ""
    claim: Line = ""
    measured_hours: float
    promised_gpu_hours: float
    used_gpu_hours: float
    wasted_gpu_hours: float
    memory_promised_gib_hours: float
    memory_used_gib_hours: float


class UsageReport(Reading):
    """``rows``: by step, and in each step the largest first. ``notes``: what of the history is not there, and why."""

    since_unix_s: float
    until_unix_s: float
    step_s: int
    by: Grouping
    rows: tuple[UsageRow, ...]
    notes: tuple[Line, ...] = ()


class Finding(Reading):
    """``cause``: a ``vgpu.usage.why.Cause``, or what another version of the node knows. ``command``: what to type."""

    cause: Line
    text: Line
    command: Line = ""


class WhyReport(Reading):
    """``findings``: one to three, the most important first. ``figures``: what they were found from."""

    vgpu_id: str
    name: Line = ""
    findings: tuple[Finding, ...]
    figures: dict[str, float] = Field(default_factory=dict)


class UserUsage(Reading):
    """What a user's vGPUs have summed to, by ``team``: the tenant of an engine's claim ("": no engine asked). It only
    grows, and outlives the node. Memory is in KiB · seconds."""

    owner_uid: int
    team: Line
    promised_ns: int
    used_ns: int
    wasted_ns: int
    memory_promised_kib_s: int
    memory_used_kib_s: int
