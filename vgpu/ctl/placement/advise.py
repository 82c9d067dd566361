"""vgpuctl advise: which size each vGPU needs, by what was observed of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vgpu.ctl import completion
from vgpu.ctl.exit_codes import report
from vgpu.ctl.options import Output, OutputOption
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.autoscale.advise import Advised, Observed
    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import VgpuDetail, VgpuStatus


@dataclass(slots=True)
class Row:
    """A vGPU, its memory, and the advice for it."""

    vgpu: VgpuStatus
    memory_bytes: int
    advised: Advised
    applied: bool = False

    @property
    def present(self) -> tuple[float, int]:
        return self.vgpu.spec.compute_ratio * 100, self.memory_bytes

    @property
    def then(self) -> tuple[float, int]:
        """The sizes by the advice."""
        sm, memory = self.present
        return self.advised.sm_percent or sm, self.advised.memory_bytes or memory

    @property
    def frees(self) -> tuple[float, int]:
        """What others could have; below 0: what it takes from them."""
        return self.present[0] - self.then[0], self.present[1] - self.then[1]

    @property
    def changes(self) -> bool:
        return self.advised.sm_percent is not None or self.advised.memory_bytes is not None


def advise(
    vgpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VGPU]...", help="These alone: ids, prefixes, or names.", autocompletion=completion.vgpus
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Set the advised sizes. Without a VGPU: those of your own vGPUs.")
    ] = False,
    form: OutputOption = Output.TABLE,
) -> int:
    """Which size each vGPU needs, by what it used."""
    from vgpu.node.link import ControlLink

    worst = 0
    with ControlLink() as node:
        rows = [_row(node.inspect(one)) for one in vgpus] if vgpus else _all(node)
        for row in rows if apply else ():
            if row.changes and (vgpus or row.vgpu.owner_uid == os.getuid()):
                try:
                    _apply(node, row)
                except VgpuError as error:
                    worst = max(worst, report(error))
    _show(rows, form)
    return worst


def _all(node: ControlLink) -> list[Row]:
    """Those of the node. One that is removed meanwhile is left out."""
    rows = []
    for vgpu in node.list():
        try:
            rows.append(_row(node.inspect(vgpu.vgpu_id)))
        except VgpuError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
    return rows


def _row(detail: VgpuDetail) -> Row:
    from vgpu.autoscale.advise import advised

    memory = detail.vgpu.spec.memory_on(detail.gpu.total_memory_bytes)
    return Row(detail.vgpu, memory, advised(_observed(detail, memory)))


def _observed(detail: VgpuDetail, memory_bytes: int) -> Observed:
    from vgpu.autoscale.advise import Observed

    vgpu, seen, spec = detail.vgpu, detail.advice, detail.vgpu.spec
    own_sm = vgpu.mode == "temporal" and spec.sm_range_percent is None
    own_memory = spec.memory_range_bytes is None and spec.oversubscribe is None
    return Observed(
        seconds=0 if seen is None else seen.observed_ns // 10**9,
        busy_percent=0.0 if seen is None else 100 * seen.busy_ratio,
        limit_percent=100 * vgpu.limit_ratio,
        sm_percent=spec.compute_ratio * 100 if own_sm else None,
        memory_bytes=memory_bytes if own_memory else None,
        memory_peak_bytes=0 if seen is None else seen.memory_peak_bytes,
        refusals=vgpu.memory_refusals,
        refused_bytes=vgpu.memory_refused_bytes,
    )


def _apply(node: ControlLink, row: Row) -> None:
    from vgpu.spec import VgpuChanges

    changes = VgpuChanges(sm_percent=row.advised.sm_percent, memory_bytes=row.advised.memory_bytes)
    node.set(row.vgpu.vgpu_id, changes)
    row.applied = True


def _show(rows: Sequence[Row], form: Output) -> None:
    from vgpu.ctl.present import output
    from vgpu.ctl.present.output import Column

    if form is Output.JSON:
        output.print_json({"vgpus": [_record(row) for row in rows]})
        return
    columns = (
        Column("VGPU"),
        Column("NAME", elastic=True),
        Column("PRESENT", right=True),
        Column("ADVISED", right=True),
        Column("FREES", right=True),
        Column("WHY", elastic=True),
    )
    output.print_table(columns, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    advised = _size(*row.then) if row.changes else "as it is"
    return (
        row.vgpu.vgpu_id,
        row.vgpu.name or "",
        _size(*row.present),
        f"{advised}, set" if row.applied else advised,
        _size(*row.frees) if row.changes else "",
        row.advised.why,
    )


def _size(percent: float, size: int) -> str:
    from vgpu.units import format_bytes

    return f"{percent:g} %, {format_bytes(size)}"


def _record(row: Row) -> dict[str, Any]:
    def sizes(pair: tuple[float, int]) -> dict[str, float]:
        return {"sm_percent": pair[0], "memory_bytes": pair[1]}

    return {
        "vgpu_id": row.vgpu.vgpu_id,
        "name": row.vgpu.name,
        "gpu_index": row.vgpu.gpu_index,
        "present": sizes(row.present),
        "advised": sizes(row.then),
        "frees": sizes(row.frees),
        "why": row.advised.why,
        "applied": row.applied,
    }


def register(app: typer.Typer) -> None:
    app.command("advise")(advise)
