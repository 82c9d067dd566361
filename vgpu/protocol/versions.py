"""Versions of the protocol. This module does not import pydantic, so that a small client need not wait for that
import."""

from __future__ import annotations

from typing import Final

from vgpu.errors import ErrorCode, VgpuError

PROTOCOL_VERSION: Final = 7
"""It rises with every message that one end sends unasked, so that an end gets only messages that it knows.

2: ``Look``.
3: ``Noted``; ``Create`` carries ``request_id``, ``lifetime``, ``wait`` and ``owner_uid``; ``Await``, ``Confirm``.
4: ``Create`` carries ``claim`` and ``attach``.
5: ``Awaits``; a claim has ``pods``.
6: ``Create`` carries ``queue_ns``, ``SetGpu`` ``draining``, and ``Suspend`` ``preempted``; a specification has ranges,
``Set`` has ``scaling``; ``Usage``, ``Why``, ``GetQuota``, ``SetQuotas``, ``GetQueue``.
7: ``Suspend`` carries ``resume_on`` and ``resume_at_unix_s``; a specification has ``resume_on`` and ``slo``.
"""
OLDEST_VERSION: Final = 1
REQUEST_IDS_SINCE: Final = 3
LEASES_SINCE: Final = 3
"""The first version that has ``VgpuSpec.lease``."""
OWNERS_SINCE: Final = 3
"""The first version that has ``Create.owner_uid``."""
CLAIMS_SINCE: Final = 4
"""The first version that has ``Create.claim`` and ``Create.attach``."""
PODS_SINCE: Final = 5
"""The first version that has ``Claim.pods``."""
QUEUE_SINCE: Final = 6
"""The first version that has ``Create.queue_ns``, ``SetGpu.draining`` and ``Suspend.preempted``."""
USAGE_SINCE: Final = 6
"""The first version that has ``Usage`` and ``Why``."""
RANGES_SINCE: Final = 6
"""The first version that has ``VgpuSpec.sm_range_percent`` and ``memory_range_bytes``, and ``Set.scaling``."""
TRIGGERS_SINCE: Final = 7
"""The first version that has ``Suspend.resume_on``, ``Suspend.resume_at_unix_s`` and ``VgpuSpec.resume_on``."""
SLO_SINCE: Final = 7
"""The first version that has ``VgpuSpec.slo``."""


def refuse_older(is_older: bool, lacks: str) -> None:
    """``VgpuError`` (version) if the other end ``is_older`` than a request. ``lacks``: as in "has no --slo"."""
    if is_older:
        raise VgpuError(
            ErrorCode.VERSION,
            f"this node, or its GPU Server, is of an older release, which {lacks}",
            "restart the node, under which programs go on: vgpuctl stop, then vgpuctl serve",
        )
