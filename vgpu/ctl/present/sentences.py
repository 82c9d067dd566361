"""What a command changed, as a sentence for a person at a terminal, and what is free for others from then on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vgpu.ctl.present import tables
from vgpu.errors import VgpuError
from vgpu.printable import printable
from vgpu.protocol.triggers import awaited
from vgpu.units import format_bytes

if TYPE_CHECKING:
    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import GpuStatus, VgpuStatus


def changed(how: str, vgpu: VgpuStatus) -> str:
    """``how``: the command. The vGPU is as the command left it."""
    shown = named(vgpu)
    match how:
        case "rm":
            return f"{shown} is removed."
        case "suspend":
            until = awaited(vgpu.resume_on, vgpu.resume_at_unix_s)
            return f"{shown} is suspended. Its programs wait until {until + ', or ' if until else ''}vgpuctl resume."
        case "resume":
            return f"{shown} is back on GPU {vgpu.gpu_index}."
        case "migrate":
            return f"{shown} is on GPU {vgpu.gpu_index} now."
    return f"{shown} has {tables.promised(vgpu)} of GPU {vgpu.gpu_index} and {format_bytes(vgpu.memory_limit_bytes)}."


def named(vgpu: VgpuStatus) -> str:
    return printable(f"{vgpu.name} ({vgpu.vgpu_id})" if vgpu.name else vgpu.vgpu_id)


def free(gpus: Iterable[GpuStatus]) -> list[str]:
    """For each GPU, what new vGPUs can have of it."""
    return [
        f"GPU {gpu.index} has {tables.percent(max(0.0, 1 - gpu.guaranteed_ratio))} of its compute and "
        f"{format_bytes(max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes))} free for other vGPUs."
        for gpu in gpus
    ]


def print_changed(node: ControlLink, how: str, vgpus: Sequence[VgpuStatus]) -> None:
    """The sentences on stdout. Without the GPUs' readings, those about free room are left out."""
    for vgpu in vgpus:
        print(changed(how, vgpu))
    with suppress(VgpuError):
        touched = {vgpu.gpu_uuid for vgpu in vgpus}
        print(*free(gpu for gpu in node.gpus() if gpu.uuid in touched), sep="\n")
