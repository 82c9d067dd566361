"""The messages about gangs between GPU Servers of one node. After ``Hello`` (role "server") both ends send ``Outlooks``
whenever something changed, and at least every ``BEAT_S``. Each message is the whole state."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import ConfigDict

from vgpu.bounds import Bounded

BEAT_S: Final = 0.1


class Residence(Bounded):
    """Where the memory of a swapped member is; the fields of ``MemberResidence``
    (``gpuserver.core.states.together``)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    granted: bool
    there: bool
    wants: bool
    suspended: bool = False
    able: bool = True
    ready: bool = False
    move_ns: int = 0


class MemberOutlook(Bounded):
    """One gang's member on the sender's GPU; the fields of ``GangMemberStatus`` (``gpuserver.core.scheduler.leases``).
    Times are CLOCK_MONOTONIC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gang: str
    bound: bool
    start_ns: int
    end_ns: int
    late: bool
    ready: bool
    residence: Residence | None = None  # None: it is not swapped, or its server does not know yet where its memory is


class Outlooks(Bounded):
    """All members on GPU ``gpu_index``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    op: Literal["outlooks"] = "outlooks"
    gpu_index: int
    members: tuple[MemberOutlook, ...]
