"""Readings of the node as rows of tables: which columns, in which words."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Final

from vgpu.ctl.commandlines import with_arguments
from vgpu.ctl.present.output import Cell, Column, Row
from vgpu.units import GIB, KIB, MIB, TIB, format_bytes, format_duration, range_text, three_digits

if TYPE_CHECKING:
    from vgpu.protocol.messages import GpuStatus, OutsideProcess, ProcessReading, VgpuStatus
    from vgpu.protocol.usage import UsageReport

VGPUS: Final = (
    Column("VGPU"),
    Column("NAME", elastic=True),
    Column("GPU"),
    Column("STATE"),
    Column("SHARE", right=True),
    Column("USED", right=True),
    Column("MEMORY", right=True),
    Column("OWNER", extra=True),
    Column("PROCS", right=True, extra=True),
    Column("TOKENS/S", right=True, extra=True),
    Column("NEEDS", right=True, extra=True),
    Column("SLO", right=True, extra=True),
    Column("PEAK", right=True, extra=True),
    Column("REFUSED", right=True, extra=True),
    Column("AGE", right=True, extra=True),
    Column("MODE", extra=True),
    Column("GROUP", extra=True),
    Column("RESUMES ON", extra=True),
)
PROCESSES: Final = (
    Column("PID", right=True),
    Column("VGPU"),
    Column("NAME"),
    Column("GPU", right=True),
    Column("STATE"),
    Column("MEMORY", right=True),
    Column("GPU TIME", right=True),
    Column("OWNER", extra=True),
    Column("POD", extra=True),
    Column("NEEDS", right=True, extra=True),
    Column("SMS", right=True, extra=True),
    Column("LAUNCHES", right=True, extra=True),
    Column("COPIED", right=True, extra=True),
    Column("WAITED", right=True, extra=True),
    Column("LONGEST", right=True, extra=True),
    Column("REFUSED", right=True, extra=True),
    Column("COMMAND", elastic=True),
)
GPUS: Final = (
    Column("GPU"),
    Column("NAME", elastic=True),
    Column("MODE"),
    Column("STATE"),
    Column("SHARES", right=True),
    Column("USED", right=True),
    Column("MEMORY", right=True),
    Column("VGPUS", right=True),
    Column("PROCS", right=True, extra=True),
    Column("PERIOD", right=True, extra=True),
    Column("WINDOW", right=True, extra=True),
    Column("RESTARTS", right=True, extra=True),
    Column("UUID", extra=True),
)
_STYLES: Final = {
    "running": "green",
    "serving": "green",
    "waiting": "yellow",
    "at limit": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "removing": "dim",
    "idle": "dim",
    "suspended": "yellow",
    "preempted": "yellow",
    "idle-suspended": "dim",
    "moving": "yellow",
    "swapped": "yellow",
    "died": "red",
    "failed": "bold red",
}


def token_rate(reading: VgpuStatus | GpuStatus) -> str:
    """Tokens a second; ``open`` while a token without an end is held."""
    return "open" if reading.open_ended else f"{reading.tokens_per_second:.1f}"


def vgpu_token_rate(vgpu: VgpuStatus) -> str:
    """``shared`` while other vGPUs compute beside its token, else ``token_rate``."""
    return "shared" if vgpu.shares else token_rate(vgpu)


def with_users(report: UsageReport) -> UsageReport:
    """The same with the names of the users, as this machine has them."""
    rows = (row.model_copy(update={"user": user_name(row.owner_uid)}) for row in report.rows)
    return report.model_copy(update={"rows": tuple(rows)})


def vgpu_row(vgpu: VgpuStatus, now_unix_s: float | None = None) -> Row:
    """A row of ``VGPUS``."""
    now = time.time() if now_unix_s is None else now_unix_s
    return (
        vgpu.vgpu_id,
        vgpu.name or "",
        gpu_label(vgpu.gpu_index, vgpu.simulated),
        state(shown_state(vgpu)),
        promised(vgpu),
        percent(vgpu.busy_ratio),
        used_of(vgpu.memory_used_bytes, vgpu.memory_limit_bytes),
        user_name(vgpu.owner_uid),
        str(vgpu.processes),
        vgpu_token_rate(vgpu),
        needs(vgpu.demand_ratio),
        attained(vgpu),
        format_bytes(vgpu.memory_peak_bytes),
        str(vgpu.memory_refusals),
        format_duration(whole_seconds_ns(now - vgpu.created_unix_s)),
        vgpu.mode,
        vgpu.spec.group or "",
        resumes_on(vgpu),
    )


def resumes_on(vgpu: VgpuStatus) -> str:
    """What a suspended vGPU waits for: ``call, tcp:8000, 2027-01-31 08:30:00``; "": a request."""
    from vgpu.ctl.time_options import clock_time

    at = [] if vgpu.resume_at_unix_s is None else [clock_time(vgpu.resume_at_unix_s)]
    return ", ".join([*vgpu.resume_on, *at])


def process_row(process: ProcessReading, vgpu: VgpuStatus | None) -> Row:
    """A row of ``PROCESSES``; ``vgpu``: the one that it is in, None if the node no longer lists that."""
    return (
        str(process.pid),
        process.vgpu_id,
        (vgpu and vgpu.name) or "",
        str(process.gpu_index),
        state(doing(process, vgpu.state if vgpu else "")),
        format_bytes(process.memory_bytes + process.memory_implicit_bytes),
        format_duration(rounded_ns(process.busy_ns)),
        user_name(vgpu.owner_uid) if vgpu else "",
        pod(vgpu),
        needs(process.demand_ratio),
        str(process.sm_count or ""),
        str(process.launches),
        format_bytes(process.copied_bytes),
        format_duration(rounded_ns(process.gate_wait_ns)),
        format_duration(rounded_ns(process.longest_kernel_ns)),
        str(process.memory_refusals),
        with_arguments(process.pid, process.command),
    )


def pod(vgpu: VgpuStatus | None) -> str:
    """``namespace/pod`` in Kubernetes; "": in none, or not known yet."""
    labels = vgpu.claim.labels if vgpu is not None and vgpu.claim is not None else {}
    return f"{labels.get('namespace', '')}/{labels['pod']}" if "pod" in labels else ""


def outside_row(process: OutsideProcess) -> Row:
    """A row of ``PROCESSES``, of one that is in no vGPU."""
    known: dict[str, str | Cell] = {
        "PID": str(process.pid),
        "VGPU": "none",
        "GPU": str(process.gpu_index),
        "STATE": Cell("outside", "red"),
        "MEMORY": format_bytes(process.memory_bytes),
        "COMMAND": process.command,
    }
    return tuple(known.get(column.title, "") for column in PROCESSES)


def gpu_row(gpu: GpuStatus) -> Row:
    """A row of ``GPUS``."""
    return (
        gpu_label(gpu.index, gpu.simulated),
        gpu.name,
        Cell("no MPS", "bold red") if gpu.mode == "spatial" and gpu.mps_reason else gpu.mode,
        state("drained" if gpu.draining and gpu.state == "serving" else gpu.state),
        percent(gpu.guaranteed_ratio),
        percent(gpu.busy_ratio),
        used_of(gpu.used_memory_bytes, gpu.total_memory_bytes),
        str(gpu.vgpus),
        str(gpu.processes),
        format_duration(gpu.period_ns),
        format_duration(gpu.window_ns),
        str(gpu.restarts),
        gpu.uuid,
    )


# --- words and numbers ----------------------------------------------------------------------------------------------


def gpu_label(index: int, simulated: bool) -> str:
    return f"{index} (sim)" if simulated else str(index)


def shown_state(vgpu: VgpuStatus) -> str:
    if vgpu.preempted is not None and vgpu.state == "suspended":
        return "preempted"
    return "at limit" if vgpu.throttled else vgpu.state


def at_once(held_ratio: float) -> str:
    """``2.0 vGPUs at once``, where vGPUs hold a GPU side by side; else empty."""
    return f"{held_ratio:.1f} vGPUs at once" if held_ratio > 1.05 else ""


def gpu_held(held_ratio: float) -> str:
    """The part of the time that a GPU was held, 100 % at most; with the vGPUs that held it side by side."""
    beside = at_once(held_ratio)
    return f"{percent(min(1.0, held_ratio))}, {beside}" if beside else percent(min(1.0, held_ratio))


@cache
def user_name(uid: int) -> str:
    """The user's name, or the uid where it has none on this machine."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def with_names(text: str) -> str:
    """An event's text with users' names: ``created by ada`` for ``created by uid 1000``."""
    import re

    return re.sub(r"\bby uid (\d{1,10})\b", lambda found: f"by {user_name(int(found[1]))}", text)


def doing(process: ProcessReading, vgpu_state: str) -> str:
    """What a program of a vGPU in ``vgpu_state`` does, in a word."""
    if not process.alive:
        return "died"
    if vgpu_state in {"suspended", "idle-suspended"}:
        return vgpu_state
    if process.has_work:
        return "running"
    return "waiting" if process.wants else "idle"


def state(word: str) -> Cell:
    return Cell(word, _STYLES.get(word, ""))


def needs(demand_ratio: float) -> str:
    """The part of its time in which it needs the GPU, by which a vGPU is light or heavy; empty: not measured yet."""
    return percent(demand_ratio) if demand_ratio else ""


def attained(vgpu: VgpuStatus) -> str:
    """``99.2 %``: the part of the decode steps and prefills that were in time; empty: it has no targets, or none was
    counted."""
    steps = vgpu.steps
    return part(steps.tpot_attained + steps.ttft_attained, missed(vgpu)) if vgpu.spec.slo else ""


def missed(vgpu: VgpuStatus) -> int:
    """How many decode steps and prefills were late; 0 without targets."""
    return vgpu.steps.tpot_missed + vgpu.steps.ttft_missed if vgpu.spec.slo else 0


def part(good: int, bad: int) -> str:
    """The part of ``good`` in both; empty where there are none."""
    return percent(good / (good + bad)) if good + bad else ""


def targets(vgpu: VgpuStatus) -> dict[str, str]:
    """The latency targets, and which part was in time."""
    if not vgpu.spec.slo:
        return {}
    steps, said = vgpu.steps, [vgpu.spec.slo]
    kinds = (
        ("decode steps", steps.tpot_attained, steps.tpot_missed, "mean of the last", steps.tpot_mean_ns),
        ("prefills", steps.ttft_attained, steps.ttft_missed, "the last", steps.ttft_last_ns),
    )
    for things, good, bad, which, lasted_ns in kinds:
        if good + bad:
            in_time = f"{part(good, bad)} of {good + bad} {things} in time"
            said.append(f"{in_time}, {which} {format_duration(rounded_ns(lasted_ns))}")
    return {"latency": "; ".join(said)}


def percent(ratio: float) -> str:
    """Three digits at most: ``5.2 %``, ``30 %``, ``69.7 %``, ``100 %``."""
    return f"{round(ratio * 100, 1):g} %"


def share(guarantee_ratio: float, limit_ratio: float) -> str:
    """``30 %`` where guarantee and limit are one, else ``12–40 %``."""
    if abs(guarantee_ratio - limit_ratio) < 0.0005:
        return percent(guarantee_ratio)
    return f"{round(guarantee_ratio * 100, 1):g}–{round(limit_ratio * 100, 1):g} %"


def promised(vgpu: VgpuStatus) -> str:
    """``30 %`` of the time, ``30 % of 20..60`` between two bounds; in spatial mode ``30.3 % SMs``, and of what time if
    not of all."""
    of_time = share(vgpu.guarantee_ratio, vgpu.limit_ratio)
    if vgpu.spec.sm_range_percent is not None:
        return f"{of_time} of {range_text(vgpu.spec.sm_range_percent, is_size=False)}"
    if vgpu.mode == "temporal":
        return of_time
    sms = f"{percent(vgpu.sm_percent_granted / 100)} SMs"
    return sms if of_time == "100 %" else f"{sms} × {of_time}"


def used_of(used_bytes: int, limit_bytes: int) -> str:
    """``1.5 / 8 GiB``: both in the unit of the limit; ``2 MiB / 8 GiB`` where less than a hundredth of one is used."""
    limit = format_bytes(limit_bytes)
    unit = limit.split()[-1]
    size = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}.get(unit, 1)
    if 0 < used_bytes < size / 100:
        return f"{format_bytes(used_bytes)} / {limit}"
    return f"{three_digits(used_bytes / size)} / {limit}"


def whole_seconds_ns(seconds: float) -> int:
    return max(0, int(seconds)) * 10**9


def rounded_ns(duration_ns: int) -> int:
    """To the unit that matters: whole seconds from ten seconds on, milliseconds from ten milliseconds on."""
    for threshold, unit in ((10**10, 10**9), (10**7, 10**6), (10**4, 10**3)):
        if duration_ns >= threshold:
            return duration_ns // unit * unit
    return duration_ns
