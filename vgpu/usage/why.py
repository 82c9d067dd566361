"""Why a vGPU is as fast as it is, and what to do: one to three findings from its figures. Pure.

``FINDERS`` are asked in order. Each is one situation: it has a sentence with figures, or it has none. A state in which
no program can run answers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from vgpu.enums import Oversubscribe
from vgpu.protocol.messages import GpuStatus
from vgpu.protocol.triggers import awaited
from vgpu.protocol.usage import Finding
from vgpu.units import GIB, MIB, counted, format_bytes, format_duration
from vgpu.usage.account import SECOND_NS
from vgpu.usage.facts import Facts, asked, free, free_memory

MOST_FINDINGS: Final = 3
LIMITED: Final = 0.3
ALWAYS: Final = 0.9
"""At its limit for so long, it might use any size."""
WAITING: Final = 0.2
OVERCOMMITTED: Final = 1.001
SHORT: Final = 0.9
"""A vGPU that waits had less than this part of its promise."""
HALF: Final = 0.5
"""A program that uses less than this part of the promise asks too little."""
IDLE_S: Final = 1800
SWAPS_PER_HOUR: Final = 60
STEP: Final = 1.5
"""How much larger a vGPU at its limit should be: beyond the limit, its demand is not measured."""


class Cause(StrEnum):
    """What a finding is about."""

    FAILED = "failed"
    RESTARTING = "restarting"
    SUSPENDED = "suspended"
    IDLE_SUSPENDED = "idle-suspended"
    MOVING = "moving"
    OUTSIDE = "outside"
    IDLE = "idle"
    NO_PROGRAM = "no-program"
    MEMORY_FULL = "memory-full"
    GROUP = "group"
    SWAPS = "swaps"
    OVERCOMMIT = "overcommit"
    NEIGHBOURS = "neighbours"
    AT_LIMIT = "at-limit"
    AT_LIMIT_HERE = "at-limit-here"
    AT_LIMIT_EVERYWHERE = "at-limit-everywhere"
    HOST_BOUND = "host-bound"
    AS_PROMISED = "as-promised"


def why(facts: Facts) -> tuple[Finding, ...]:
    """One to three findings, the most important first."""
    stopped = _stopped(facts)
    if stopped is not None:
        return (stopped,)
    found = [finding for find in FINDERS if (finding := find(facts)) is not None]
    return tuple(found[:MOST_FINDINGS]) or (_as_promised(facts),)


# --- no program can run


def _stopped(facts: Facts) -> Finding | None:
    vgpu, name = facts.vgpu, facts.name
    promise = f"{_percent(facts.promised)} of {facts.here} and {format_bytes(vgpu.memory_limit_bytes)} stay promised"
    match vgpu.state:
        case "failed":
            text = f"It failed: {vgpu.reason or 'the GPU Server gives no reason'}."
            return Finding(cause=Cause.FAILED, text=text, command=f"vgpuctl logs {name}")
        case "restarting":
            text = f"The GPU Server of {facts.here} does not answer, and its programs wait: {vgpu.reason}."
            return Finding(cause=Cause.RESTARTING, text=text, command=f"vgpuctl logs gpu {facts.gpu.index}")
        case "suspended" if vgpu.preempted is not None:
            text = f"It was {vgpu.preempted.reason}. Its programs stand still until then."
            return Finding(cause=Cause.SUSPENDED, text=text, command="vgpuctl queue")
        case "suspended" if until := awaited(vgpu.resume_on, vgpu.resume_at_unix_s):
            text = f"A user suspended it until {until}. Its programs stand still until then."
            return Finding(cause=Cause.SUSPENDED, text=text, command=f"vgpuctl resume {name}")
        case "suspended":
            size = f"{_percent(facts.promised)} of {facts.here} and {format_bytes(vgpu.memory_limit_bytes)}"
            text = f"A user suspended it: its programs stand still. Others may be promised its {size} meanwhile."
            return Finding(cause=Cause.SUSPENDED, text=text, command=f"vgpuctl resume {name}")
        case "idle-suspended":
            after = format_duration(vgpu.spec.idle_suspend_ns)
            text = f"It was idle for {after} (--idle-suspend), and comes back when one of its programs wants the GPU."
            return Finding(cause=Cause.IDLE_SUSPENDED, text=f"{text} {promise}.")
        case "moving" | "starting" | "removing":
            return Finding(cause=Cause.MOVING, text=f"It is {vgpu.state} just now: its programs wait until that ends.")
        case _:
            return None


# --- one situation each


def _outside(facts: Facts) -> Finding | None:
    if not facts.outside:
        return None
    pids = ", ".join(str(process.pid) for process in facts.outside[:3])
    several = counted(len(facts.outside), "program")
    text = f"{several} of its owner on {facts.here} run in no vGPU (pid {pids}): nothing limits them or counts them."
    return Finding(cause=Cause.OUTSIDE, text=text, command=f"vgpuctl exec {facts.name} COMMAND")


def _idle(facts: Facts) -> Finding | None:
    """Programs may be in it, as in an open notebook."""
    if facts.idle_s < IDLE_S or facts.vgpu.busy_ratio > 0:
        return None
    idle = format_duration(round(facts.idle_s) // 60 * 60 * SECOND_NS)
    promise = f"{_percent(facts.promised)} of {facts.here} and {format_bytes(facts.vgpu.memory_limit_bytes)}"
    text = f"No program has used it for {idle}, and {promise} are promised to it: rm gives them back."
    return Finding(cause=Cause.IDLE, text=text, command=f"vgpuctl rm {facts.name}")


def _no_program(facts: Facts) -> Finding | None:
    if facts.vgpu.processes or facts.idle_s >= IDLE_S or facts.outside:
        return None
    text = "No program is in it: a program joins it by exec, or with its VGPU_ID in the environment."
    return Finding(cause=Cause.NO_PROGRAM, text=text, command=f"vgpuctl exec {facts.name} COMMAND")


def _memory_full(facts: Facts) -> Finding | None:
    vgpu = facts.vgpu
    if not facts.refusals or not vgpu.processes:
        return None
    size = _rounded(max(vgpu.memory_used_bytes + vgpu.memory_refused_bytes, vgpu.memory_limit_bytes + MIB))
    have = f"{format_bytes(vgpu.memory_used_bytes)} of {format_bytes(vgpu.memory_limit_bytes)}"
    refused = f"{counted(facts.refusals, 'allocation')} {'was' if facts.refusals == 1 else 'were'} refused"
    text = f"{refused}, the last of {format_bytes(vgpu.memory_refused_bytes)}; it has {have}:"
    more = size - vgpu.memory_limit_bytes
    option = f"--mem {_size(size)}"
    if more <= free_memory(facts.gpu):
        text += f" {option} would do, and {format_bytes(free_memory(facts.gpu))} of {facts.here} are free."
        return Finding(cause=Cause.MEMORY_FULL, text=text, command=f"vgpuctl set {facts.name} {option}")
    other = _other(facts, facts.promised, size)
    if other is not None:
        text += f" {option} would do, and {facts.here} has no room, but GPU {other.index} has."
        move = f"vgpuctl migrate {facts.name} --gpu {other.index}"
        return Finding(cause=Cause.MEMORY_FULL, text=text, command=f"{move} && vgpuctl set {facts.name} {option}")
    text += " no GPU has room for more, and --oversubscribe swap needs none."
    return Finding(cause=Cause.MEMORY_FULL, text=text, command="vgpuctl create --oversubscribe swap …")


def _group(facts: Facts) -> Finding | None:
    vgpu = facts.vgpu
    waits = vgpu.state in {"swapped", "waiting"} and vgpu.preempted is None  # else the reason is another one
    if not (waits and vgpu.reason) or vgpu.spec.group is None or vgpu.spec.oversubscribe is not Oversubscribe.SWAP:
        return None
    text = f"Its programs wait: {vgpu.reason}. The vGPUs of a group are on their GPUs all or none."
    return Finding(cause=Cause.GROUP, text=text, command="vgpuctl ls")


def _swaps(facts: Facts) -> Finding | None:
    if facts.swaps_per_hour < SWAPS_PER_HOUR:
        return None
    swapped = [vgpu for vgpu in (facts.vgpu, *facts.neighbours) if vgpu.spec.oversubscribe is Oversubscribe.SWAP]
    have = format_bytes(sum(vgpu.memory_used_bytes for vgpu in swapped))
    text = f"Its memory came back to the card {facts.swaps_per_hour:.0f} times an hour: the vGPUs that swap have {have}"
    text += f", and {facts.here} has {format_bytes(facts.gpu.total_memory_bytes)}."
    other = _other(facts, facts.promised, facts.vgpu.memory_used_bytes)
    if other is not None:
        text += f" GPU {other.index} has room for it."
        return Finding(cause=Cause.SWAPS, text=text, command=f"vgpuctl migrate {facts.name} --gpu {other.index}")
    return Finding(cause=Cause.SWAPS, text=f"{text} Fewer of them at once would move less.", command="vgpuctl ls -w")


def _less_than_promised(facts: Facts) -> Finding | None:
    share = asked(facts.vgpu)
    if facts.waiting < WAITING or facts.used >= SHORT * share:
        return None
    had = f"It had {_percent(facts.used)} of {facts.here}, and {_percent(share)} were promised"
    other = _other(facts, share, facts.vgpu.memory_limit_bytes)
    command = "vgpuctl ls" if other is None else f"vgpuctl migrate {facts.name} --gpu {other.index}"
    place = "" if other is None else f" GPU {other.index} has room for it."
    whole = sum(asked(vgpu) for vgpu in (facts.vgpu, *facts.neighbours))
    if whole > OVERCOMMITTED:
        text = f"{had}: {facts.here} is overcommitted ({_percent(whole)} in sum), so the promise is a weight.{place}"
        return Finding(cause=Cause.OVERCOMMIT, text=text, command=command)
    bursting = [vgpu for vgpu in facts.neighbours if vgpu.spec.burst and vgpu.busy_ratio > 0]
    if bursting and facts.vgpu.mode == "spatial":
        names = ", ".join(vgpu.name or vgpu.vgpu_id for vgpu in bursting[:3])
        text = f"{had}: {names} may use all SMs (--burst), and MPS takes nothing back inside a kernel.{place}"
        return Finding(cause=Cause.NEIGHBOURS, text=text, command=f"vgpuctl set {bursting[0].vgpu_id} --no-burst")
    if facts.gpu.outside:
        outside = counted(len(facts.gpu.outside), "process")
        text = f"{had}: {outside} in no vGPU compute on {facts.here}, and nothing limits them.{place}"
        return Finding(cause=Cause.NEIGHBOURS, text=text, command="vgpuctl ps --all")
    if facts.vgpu.lag_ns < -SECOND_NS:
        text = f"{had}: it pays {format_duration(-facts.vgpu.lag_ns)} of GPU time back that its long kernels took."
        return Finding(cause=Cause.NEIGHBOURS, text=text, command=f"vgpuctl inspect {facts.name}")
    return None


def _at_limit(facts: Facts) -> Finding | None:
    vgpu = facts.vgpu
    if facts.limited < LIMITED or not vgpu.processes:
        return None
    part = f"{_percent(facts.limited)} of the time"
    option, value, factor = _larger(facts, free(facts.gpu))
    if factor > 1.0:
        enough = "would do" if facts.limited < ALWAYS else "is the next step"
        text = (
            f"At its limit {part}: {option} {value:g} {enough}; {_percent(free(facts.gpu))} of {facts.here} are free."
        )
        return Finding(cause=Cause.AT_LIMIT, text=text, command=f"vgpuctl set {facts.name} {option} {value:g}")
    other = _other(facts, facts.promised * STEP, vgpu.memory_limit_bytes)
    if other is not None and vgpu.mode == "temporal":
        option, value, _ = _larger(facts, free(other) - facts.promised)
        text = (
            f"At its limit {part}, and {facts.here} has no room: {_percent(free(other))} of GPU {other.index} are free."
        )
        move = f"vgpuctl migrate {facts.name} --gpu {other.index}"
        command = f"{move} && vgpuctl set {facts.name} {option} {value:g}"
        return Finding(cause=Cause.AT_LIMIT_HERE, text=text, command=command)
    text = f"At its limit {part}, and no GPU has room: with --burst it would use what others leave idle."
    return Finding(cause=Cause.AT_LIMIT_EVERYWHERE, text=text, command=f"vgpuctl set {facts.name} --burst")


def _larger(facts: Facts, room: float) -> tuple[str, float, float]:
    """The option that holds the vGPU back, a larger value, and by which factor the promise grows. 1: ``room`` allows
    nothing that is worth it."""
    spec = facts.vgpu.spec
    if spec.quota_limit_percent < 100:
        option, now, most = "--quota-limit", spec.quota_limit_percent, 100.0
    else:
        option, now, most = "--sm", facts.percent, 100.0
    if spec.quota_request_percent is None or option == "--sm":
        most = min(most, now * (1 + room / facts.promised) if facts.promised else most)
    value = min(math.ceil(now * STEP), math.floor(most + 1e-6))
    factor = value / now
    return option, value, factor if factor >= 1.1 else 1.0


def _host_bound(facts: Facts) -> Finding | None:
    if not facts.vgpu.processes or facts.live or facts.limited >= LIMITED or facts.waiting >= WAITING:
        return None
    if facts.used >= HALF * facts.promised or facts.idle_s >= IDLE_S:
        return None
    needed = facts.advised_percent or math.ceil(max(1.0, facts.used / facts.promised * facts.percent * STEP))
    text = f"Its programs used {_percent(facts.used)} of {facts.here}, and {_percent(facts.promised)} are promised"
    if needed >= facts.percent:
        return None
    return Finding(
        cause=Cause.HOST_BOUND,
        text=f"{text}: they wait for their host, not for the GPU. --sm {needed:g} would do.",
        command=f"vgpuctl set {facts.name} --sm {needed:g}",
    )


def _as_promised(facts: Facts) -> Finding:
    used, promised = _percent(facts.used), _percent(facts.promised)
    return Finding(
        cause=Cause.AS_PROMISED,
        text=f"All is as promised: it used {used} of {facts.here}, {promised} are promised, and nothing held it back.",
    )


FINDERS: Final[tuple[Callable[[Facts], Finding | None], ...]] = (
    _outside,
    _idle,
    _no_program,
    _memory_full,
    _group,
    _swaps,
    _less_than_promised,
    _at_limit,
    _host_bound,
)


def _other(facts: Facts, share: float, memory_bytes: int) -> GpuStatus | None:
    """Another GPU with room for so much, the one with most room."""
    fitting = [
        gpu
        for gpu in facts.gpus
        if gpu.index != facts.gpu.index
        and gpu.state == "serving"
        and not gpu.draining
        and gpu.mode == facts.gpu.mode
        and free(gpu) >= share - 1e-6
        and free_memory(gpu) >= memory_bytes
    ]
    return max(fitting, key=free, default=None)


def _percent(part: float) -> str:
    return f"{part * 100:.0f} %"


def _rounded(size: int) -> int:
    """Up to whole GiB; below 4 GiB, to 256 MiB."""
    step = GIB if size >= 4 * GIB else 256 * MIB
    return math.ceil(size / step) * step


def _size(size: int) -> str:
    return f"{size // GIB}G" if size % GIB == 0 else f"{size // MIB}M"
