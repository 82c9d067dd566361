"""The answer to ``Why``: the node brings the figures together, and ``vgpu.usage.why`` finds what they mean."""

from __future__ import annotations

import os
import time

from vgpu.node.usage import UsageKeeper
from vgpu.protocol.messages import Snapshot, VgpuDetail
from vgpu.protocol.usage import WhyReport
from vgpu.usage.facts import WINDOW_S, Facts, figures
from vgpu.usage.rows import Sums
from vgpu.usage.why import why


async def explained(detail: VgpuDetail, snapshot: Snapshot, usage: UsageKeeper, uid: int) -> WhyReport:
    """For user ``uid``: the history of another user's vGPU is not theirs, so the last second counts alone."""
    vgpu, now = detail.vgpu, time.time()
    recent, used_unix_s = Sums(), now if vgpu.processes else None
    if uid in {0, os.geteuid(), vgpu.owner_uid}:
        recent, used_unix_s = await usage.recent(vgpu.vgpu_id, now - WINDOW_S)
    neighbours = (other for other in snapshot.vgpus if other.gpu_index == vgpu.gpu_index)
    facts = Facts(
        vgpu=vgpu,
        gpu=detail.gpu,
        gpus=snapshot.gpus,
        neighbours=tuple(other for other in neighbours if other.vgpu_id != vgpu.vgpu_id),
        recent=recent,
        idle_s=max(0.0, now - max(used_unix_s or 0.0, vgpu.created_unix_s)),
        advised_percent=None if detail.advice is None else detail.advice.sm_percent,
    )
    return WhyReport(vgpu_id=vgpu.vgpu_id, name=vgpu.name or "", findings=why(facts), figures=figures(facts))
