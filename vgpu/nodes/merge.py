"""The usage of several nodes in one report. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vgpu.protocol.usage import UsageReport, UsageRow

AMOUNTS = (
    "measured_hours",
    "promised_gpu_hours",
    "used_gpu_hours",
    "wasted_gpu_hours",
    "memory_promised_gib_hours",
    "memory_used_gib_hours",
)


def merged(reports: Mapping[str, UsageReport]) -> UsageReport:
    """One report of at least one node, by its name. Rows of the same user, or of the same claim and user, are summed: a
    user is the same on all nodes by name. A vGPU is ``NODE/ID``."""
    first = next(iter(reports.values()))
    rows: dict[tuple[str, ...], UsageRow] = {}
    for node, report in reports.items():
        for row in report.rows:
            user = row.user or str(row.owner_uid)
            key: tuple[str, ...] = (user,)
            if report.by == "vgpu":
                row = row.model_copy(update={"vgpu_id": f"{node}/{row.vgpu_id}"})
                key = (row.vgpu_id, user)
            elif report.by == "claim":
                key = (row.claim, user)
            before = rows.get(key)
            if before is None:
                rows[key] = row
            else:
                sums = {amount: getattr(before, amount) + getattr(row, amount) for amount in AMOUNTS}
                rows[key] = before.model_copy(update=sums)
    notes = tuple(f"node {node}: {note}" for node, report in reports.items() for note in report.notes)
    largest_first = sorted(rows.values(), key=lambda row: row.promised_gpu_hours, reverse=True)
    return first.model_copy(update={"rows": tuple(largest_first), "notes": notes})
