"""The records of a recording (``vgpuctl trace``). A GPU Server sends them in ``TraceChunk`` messages, each within a
``Notice``. All times are nanoseconds of CLOCK_MONOTONIC, which the servers of a node have in common.

The processes themselves report a GPU's work (``BusyRecord``, ``LaunchRecord``, ``DrainRecord``), and no other source
confirms it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vgpu.protocol.hello import Reading


class TracedGpu(Reading):
    """The GPU that is recorded. ``generation``: how many servers it has had."""

    index: int
    uuid: str
    name: str
    simulated: bool
    mode: Literal["temporal", "spatial"]
    period_ns: int
    generation: int


class TracedVgpu(Reading):
    """A vGPU as it was when it was first seen; the ratios are of the GPU's time."""

    vgpu_id: str
    name: str | None
    guarantee_ratio: float
    limit_ratio: float
    sm_percent: float


class LeaseRecord(Reading):
    """One lease, from GO until it drained.

    ``granted_ns``: the longest it was to be, ``end_ns``: its end as it was last; None: open-ended. ``drained_ns``
    None: it had not when the recording ended (``in-force``). ``charged_ns``: the token time that its vGPU paid;
    ``busy_ns``: of this, with work on the GPU, as far as observed. ``ended``: *ended* at its end; *returned* early by a
    vGPU that had become idle; *revoked*: its end was moved to an earlier time; *removed* with its vGPU.
    """

    kind: Literal["lease"] = "lease"
    vgpu_id: str
    epoch: int
    go_ns: int
    granted_ns: int | None
    end_ns: int | None
    drained_ns: int | None
    charged_ns: int
    busy_ns: int
    window_ns: int
    ended: Literal["ended", "returned", "revoked", "removed", "in-force"]
    shared: bool = False  # for a part of it or the whole: others computed at the same time


class WaitRecord(Reading):
    """A vGPU wanted a token, and had no lease. ``ended``: by a *lease*; the vGPU *gave-up*; it *still-waits* at the
    end."""

    kind: Literal["wait"] = "wait"
    vgpu_id: str
    begin_ns: int
    end_ns: int
    ended: Literal["lease", "gave-up", "still-waits"]


class BusyRecord(Reading):
    """The GPU had work of this process: from a submission into an empty queue to the completion that was observed to
    empty it, or a part of that."""

    kind: Literal["busy"] = "busy"
    vgpu_id: str
    slot: int
    pid: int
    begin_ns: int
    end_ns: int


class LaunchRecord(Reading):
    """A launch that was timed by device events. ``seen_ns``: when it was found complete. ``key``: the same for launches
    of the same kernel, grid and block."""

    kind: Literal["launch"] = "launch"
    vgpu_id: str
    slot: int
    pid: int
    seen_ns: int
    lasted_ns: int
    key: int
    graph: bool


class DrainRecord(Reading):
    """A process has drained a lease. ``window_ns``: its in-flight window from then on."""

    kind: Literal["drain"] = "drain"
    vgpu_id: str
    slot: int
    pid: int
    epoch: int
    drained_ns: int
    window_ns: int


class LevelRecord(Reading):
    """A figure at one moment. *lag*: GPU time that the vGPU is owed (below 0: its debt); *backlog*: GPU time that it is
    predicted to have queued."""

    kind: Literal["level"] = "level"
    vgpu_id: str
    name: Literal["lag", "backlog"]
    at_ns: int
    value_ns: int


TraceRecord = LeaseRecord | WaitRecord | BusyRecord | LaunchRecord | DrainRecord | LevelRecord


class TraceChunk(Reading):
    """A part of a recording. ``vgpus``: those that no earlier chunk had. ``until_ns``: the chunks up to this one have
    everything that the server saw up to then. ``under_way``: leases and waits that are not over then, for a reader that
    gets no further chunk. ``lost``: events since the last chunk that did not fit, or were overwritten. The recording
    is over, at ``until_ns``, with the chunk that is ``done``.
    """

    gpu: TracedGpu
    begin_ns: int
    until_ns: int
    vgpus: tuple[TracedVgpu, ...] = ()
    records: tuple[Annotated[TraceRecord, Field(discriminator="kind")], ...] = ()
    under_way: tuple[Annotated[LeaseRecord | WaitRecord, Field(discriminator="kind")], ...] = ()
    lost: int = 0
    done: bool = False
