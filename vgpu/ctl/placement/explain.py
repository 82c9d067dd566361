"""create --dry-run: which GPU a vGPU would get, and what led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.options import Wanted
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.placement.box import Rank
    from vgpu.spec import VgpuSpec


def explain(wanted: Wanted) -> Exit:
    """Print the GPUs in the order in which the node would try them. Exits with 4 if none has room."""
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink
    from vgpu.node.routing import serving
    from vgpu.placement.box import ranked

    with ControlLink() as node:
        policy, now = node.status().placement, node.look()
        allowed = node.quota().quota
    gpus = [gpu for gpu in now.gpus if gpu.state == "serving" and not gpu.draining]
    if wanted.gpu.lower() != "auto":
        gpus = [serving(wanted.gpu, now.gpus)]
    if not gpus:
        raise VgpuError(ErrorCode.NO_ROOM, "no GPU of this node takes vGPUs now", "see: vgpuctl gpu ls")
    ranks = ranked(policy, gpus, now.vgpus, wanted.spec)
    columns = (
        output.Column("TRY", right=True),
        output.Column("GPU"),
        output.Column("LEFT"),
        output.Column("SCORE", right=True),
        output.Column("BECAUSE", elastic=True),
    )
    output.print_table(columns, [_row(number, rank, wanted.spec) for number, rank in enumerate(ranks, 1)])
    print(f"policy {policy}; scores in GPUs, the higher the better")
    if allowed:
        print("The quota is checked when the vGPU is made: vgpuctl quota")
    return Exit.OK if any(rank.reasons for rank in ranks) else Exit.REFUSED


def _row(number: int, rank: Rank, spec: VgpuSpec) -> tuple[str, str, str, str, str]:
    from vgpu.placement.box import left, request
    from vgpu.share import PPM
    from vgpu.units import format_bytes

    room, asked = left(rank.gpu), request(spec, rank.gpu)
    has = f"{room.time_ppm / PPM * 100:.3g} %, {format_bytes(room.memory_bytes)}"
    if rank.reasons:
        because = ", ".join(f"{reason} {value:+.3g}" for reason, value in rank.reasons.items())
        return str(number), str(rank.gpu.index), has, f"{rank.value:.3f}", because
    lacks = []
    if asked.time_ppm > room.time_ppm:
        lacks.append(f"{(asked.time_ppm - room.time_ppm) / PPM * 100:.3g} % of its time")
    if asked.memory_bytes > room.memory_bytes:
        lacks.append(f"{format_bytes(asked.memory_bytes - room.memory_bytes)} of memory")
    return "", str(rank.gpu.index), has, "", f"no room: it lacks {' and '.join(lacks) or 'a place for these SMs'}"
