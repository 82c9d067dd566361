"""Readings of the node as rows of tables: which columns, in which words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from vgpu.ctl.output import Column
from vgpu.units import format_bytes, format_duration

if TYPE_CHECKING:
    from vgpu.protocol.messages import GpuReading, ProcessReading, VgpuReading

VGPUS: Final = (
    Column("VGPU"),
    Column("NAME", elastic=True),
    Column("GPU", right=True),
    Column("STATE"),
    Column("SHARE", right=True),
    Column("USED", right=True),
    Column("TOKENS/S", right=True, wide=True),
    Column("MEMORY", right=True),
    Column("PEAK", right=True, wide=True),
    Column("REFUSED", right=True, wide=True),
    Column("PROCS", right=True),
    Column("AGE", right=True, wide=True),
    Column("MODE", wide=True),
)
PROCESSES: Final = (
    Column("PID", right=True),
    Column("VGPU"),
    Column("GPU", right=True),
    Column("STATE"),
    Column("MEMORY", right=True),
    Column("GPU TIME", right=True),
    Column("LAUNCHES", right=True),
    Column("WAITED", right=True, wide=True),
    Column("LONGEST", right=True, wide=True),
    Column("REFUSED", right=True, wide=True),
    Column("COMMAND", elastic=True),
)
GPUS: Final = (
    Column("GPU", right=True),
    Column("NAME", elastic=True),
    Column("MODE"),
    Column("STATE"),
    Column("SHARES", right=True),
    Column("USED", right=True),
    Column("MEMORY", right=True),
    Column("VGPUS", right=True),
    Column("PROCS", right=True),
    Column("ROUND", right=True, wide=True),
    Column("RESTARTS", right=True, wide=True),
    Column("UUID", wide=True),
)
_COLOURS: Final = {
    "running": "green",
    "serving": "green",
    "waiting": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "removing": "dim",
    "idle": "dim",
    "failed": "bold red",
}


def vgpu_row(vgpu: VgpuReading, now_unix_s: float | None = None) -> tuple[str, ...]:
    now = time.time() if now_unix_s is None else now_unix_s
    return (
        vgpu.vgpu_id,
        text(vgpu.name or ""),
        str(vgpu.gpu_index),
        state("limit" if vgpu.throttled else vgpu.state, vgpu.state),
        share(vgpu.guarantee_ratio, vgpu.limit_ratio),
        percent(vgpu.busy_ratio),
        f"{vgpu.tokens_per_second:.1f}",
        f"{format_bytes(vgpu.memory_used_bytes)} / {format_bytes(vgpu.memory_limit_bytes)}",
        format_bytes(vgpu.memory_peak_bytes),
        str(vgpu.memory_refusals),
        str(vgpu.processes),
        format_duration(whole_seconds_ns(now - vgpu.created_unix_s)),
        mode(vgpu.mode, vgpu.simulated),
    )


def process_row(process: ProcessReading) -> tuple[str, ...]:
    return (
        str(process.pid),
        process.vgpu_id,
        str(process.gpu_index),
        state("waiting" if process.wants else "idle") if process.alive else state("died", "failed"),
        format_bytes(process.memory_bytes + process.memory_implicit_bytes),
        format_duration(rounded_ns(process.busy_ns)),
        str(process.launches + process.graph_launches),
        format_duration(rounded_ns(process.gate_wait_ns)),
        format_duration(rounded_ns(process.longest_kernel_ns)),
        str(process.memory_refusals),
        text(process.command),
    )


def gpu_row(gpu: GpuReading) -> tuple[str, ...]:
    return (
        str(gpu.index),
        text(gpu.name),
        mode(gpu.mode, gpu.simulated),
        state(gpu.state),
        percent(gpu.guaranteed_ratio),
        percent(gpu.busy_ratio),
        f"{format_bytes(gpu.used_memory_bytes)} / {format_bytes(gpu.total_memory_bytes)}",
        str(gpu.vgpus),
        str(gpu.processes),
        format_duration(gpu.period_ns),
        str(gpu.restarts),
        gpu.uuid,
    )


# --- words and numbers ----------------------------------------------------------------------------------------------


def text(words: str) -> str:
    """Somebody else's words, safe inside rich markup."""
    return words.replace("[", r"\[")


def state(word: str, colour_of: str = "") -> str:
    colour = _COLOURS.get(colour_of or word)
    return f"[{colour}]{word}[/]" if colour else word


def mode(name: str, simulated: bool) -> str:
    return f"{name}, simulated" if simulated else name


def percent(ratio: float) -> str:
    """Three digits at most: ``5.2 %``, ``30 %``, ``69.7 %``, ``100 %``."""
    return f"{round(ratio * 100, 1):g} %"


def share(guarantee_ratio: float, limit_ratio: float) -> str:
    """``30 %`` where guarantee and limit are one, else ``12–40 %``."""
    if abs(guarantee_ratio - limit_ratio) < 0.0005:
        return percent(guarantee_ratio)
    return f"{round(guarantee_ratio * 100, 1):g}–{round(limit_ratio * 100, 1):g} %"


def whole_seconds_ns(seconds: float) -> int:
    return max(0, int(seconds)) * 10**9


def rounded_ns(duration_ns: int) -> int:
    """To the unit that matters: whole seconds from ten seconds on, milliseconds from ten milliseconds on."""
    for threshold, unit in ((10**10, 10**9), (10**7, 10**6), (10**4, 10**3)):
        if duration_ns >= threshold:
            return duration_ns // unit * unit
    return duration_ns
