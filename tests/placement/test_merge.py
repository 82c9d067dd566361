"""The usage of several nodes in one report."""

from __future__ import annotations

from typing import Any

from vgpu.nodes.merge import merged
from vgpu.protocol.usage import UsageReport, UsageRow


def row(user: str, promised: float, **fields: Any) -> UsageRow:
    amounts = {
        "measured_hours": promised,
        "promised_gpu_hours": promised,
        "used_gpu_hours": promised / 2,
        "wasted_gpu_hours": promised / 2,
        "memory_promised_gib_hours": 1.0,
        "memory_used_gib_hours": 0.5,
    }
    return UsageRow(start_unix_s=0, owner_uid=len(user), user=user, **(amounts | fields))


def report(by: Any, *rows: UsageRow, notes: tuple[str, ...] = ()) -> UsageReport:
    return UsageReport(since_unix_s=0, until_unix_s=9, step_s=0, by=by, rows=rows, notes=notes)


def test_a_user_is_the_same_on_all_nodes_and_the_largest_comes_first() -> None:
    found = merged(
        {"a": report("user", row("ann", 2), row("bo", 3)), "b": report("user", row("ann", 4), notes=("a gap",))}
    )
    assert [(one.user, one.promised_gpu_hours, one.used_gpu_hours) for one in found.rows] == [
        ("ann", 6, 3),
        ("bo", 3, 1.5),
    ]
    assert found.notes == ("node b: a gap",)


def test_a_vgpu_has_its_nodes_name_and_claims_are_summed_by_user() -> None:
    one = row("ann", 1, vgpu_id="vgpu-1")
    found = merged({"a": report("vgpu", one), "b": report("vgpu", one)})
    assert sorted(each.vgpu_id for each in found.rows) == ["a/vgpu-1", "b/vgpu-1"]
    claims = merged({name: report("claim", row("ann", 1, claim="dra/x"), row("bo", 1, claim="dra/x")) for name in "ab"})
    assert [(each.claim, each.promised_gpu_hours) for each in claims.rows] == [("dra/x", 2), ("dra/x", 2)]
