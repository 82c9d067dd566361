"""What the driver writes into the status of a claim: which vGPU each of its devices is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vgpu.integrations.kubernetes.dra import DRIVER, Object, Wanted


def devices(node: str, made: Iterable[tuple[Wanted, Object]], now: str) -> list[dict[str, Any]]:
    """The entries of a claim whose vGPUs are ``made``. ``now``: as Kubernetes writes times."""
    return [_device(node, wanted, vgpu, now) for wanted, vgpu in made]


def _device(node: str, wanted: Wanted, vgpu: Object, now: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "reason": "Prepared", "message": "the vGPU is made"}
    share = {} if wanted.share_id is None else {"shareID": wanted.share_id}
    return {
        "driver": DRIVER,
        "pool": node,
        "device": wanted.device,
        **share,
        "conditions": [{**ready, "lastTransitionTime": now}],
        "data": {"vgpu": vgpu["vgpu_id"]},
    }


def is_said(claim: Object, node: str, entries: Iterable[Object]) -> bool:
    """Whether the claim has these entries of this driver and node, and no others. Their times do not count."""
    found = claim.get("status", {}).get("devices") or []
    ours = [one for one in found if (one["driver"], one["pool"]) == (DRIVER, node)]
    return sorted(map(_facts, ours)) == sorted(map(_facts, entries))


def _facts(entry: Object) -> tuple[str, ...]:
    ready = [one["status"] for one in entry.get("conditions") or [] if one["type"] == "Ready"]
    return entry["device"], entry.get("shareID") or "", (entry.get("data") or {}).get("vgpu", ""), *ready
