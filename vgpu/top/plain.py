"""``vgpuctl top`` as text: the node's GPUs and vGPUs, once."""

from __future__ import annotations

import time
from typing import Final

from vgpu.ctl.present import tables
from vgpu.ctl.present.output import Column, Row, print_table
from vgpu.protocol.messages import GpuStatus, Snapshot, VgpuStatus
from vgpu.top.columns import lag_text, short_duration
from vgpu.top.model import state_word
from vgpu.units import counted

GPUS: Final = (
    Column("GPU"),
    Column("NAME", elastic=True),
    Column("MODE"),
    Column("STATE"),
    Column("HELD", right=True),
    Column("BUSY", right=True, extra=True),
    Column("TOKENS/S", right=True),
    Column("MEMORY", right=True),
    Column("VGPUS", right=True, extra=True),
    Column("PROCS", right=True, extra=True),
    Column("UTILISED", right=True, extra=True),
    Column("POWER", right=True, extra=True),
    Column("TEMPERATURE", right=True, extra=True),
)
VGPUS: Final = (
    Column("VGPU"),
    Column("NAME", elastic=True),
    Column("GPU", extra=True),
    Column("STATE"),
    Column("SHARE", right=True, elastic=True),
    Column("HELD", right=True),
    Column("BUSY", right=True, extra=True),
    Column("TOKENS/S", right=True),
    Column("MEMORY", right=True),
    Column("PROCS", right=True, extra=True),
    Column("WAITING", right=True, extra=True),
    Column("LAG", right=True, extra=True),
    Column("SLO", right=True, extra=True),
    Column("REFUSED", right=True, extra=True),
)


def print_snapshot(snapshot: Snapshot, host: str) -> None:
    """A line with the time and the node, a table of GPUs, and one of vGPUs."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.at_unix_s))
    kind = "simulated GPU" if any(gpu.simulated for gpu in snapshot.gpus) else "GPU"
    programs = sum(vgpu.processes for vgpu in snapshot.vgpus)
    gpus, vgpus = counted(len(snapshot.gpus), kind), counted(len(snapshot.vgpus), "vGPU")
    print(f"{at}  {host}: {gpus}, {vgpus}, {counted(programs, 'program')}")
    print()
    print_table(GPUS, map(gpu_row, snapshot.gpus))
    print()
    print_table(VGPUS, map(vgpu_row, snapshot.vgpus))


def gpu_row(gpu: GpuStatus) -> Row:
    """A row of ``GPUS``. A cell is empty if the card does not report its value."""
    return (
        tables.gpu_label(gpu.index, gpu.simulated),
        gpu.name,
        gpu.mode,
        tables.state(gpu.state),
        tables.gpu_held(gpu.held_ratio),
        tables.percent(gpu.busy_ratio),
        tables.token_rate(gpu),
        tables.used_of(gpu.used_memory_bytes, gpu.total_memory_bytes),
        str(gpu.vgpus),
        str(gpu.processes),
        "" if gpu.utilization_ratio is None else tables.percent(gpu.utilization_ratio),
        "" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
        "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C",
    )


def vgpu_row(vgpu: VgpuStatus) -> Row:
    """A row of ``VGPUS``."""
    return (
        vgpu.vgpu_id,
        vgpu.name or "",
        tables.gpu_label(vgpu.gpu_index, vgpu.simulated),
        tables.state(state_word(vgpu)),
        tables.promised(vgpu),
        tables.percent(vgpu.held_ratio),
        tables.percent(vgpu.busy_ratio),
        tables.vgpu_token_rate(vgpu),
        tables.used_of(vgpu.memory_used_bytes, vgpu.memory_limit_bytes),
        str(vgpu.processes),
        short_duration(vgpu.waiting_ns) if vgpu.waiting_ns else "",
        lag_text(vgpu.lag_ns),
        tables.attained(vgpu),
        str(vgpu.memory_refusals),
    )
