"""The health of a node: what is wrong in its readings, and in what earlier nodes have left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from client_hook.doctor import Finding, Verdict
from vgpu.enums import Oversubscribe
from vgpu.protocol.messages import GpuStatus, NodeStatus, OutsideProcess, ProcessReading, VgpuStatus
from vgpu.protocol.meters import GpuMeters, Histogram
from vgpu.units import counted, format_bytes, format_duration

LATE_NS: Final = 50_000_000
"""An event loop lacks CPU if it is later than this for one due task in a hundred."""
ENOUGH: Final = 100
LONG_WAIT_NS: Final = 1_000_000_000
STORE_SLACK_BYTES: Final = 192 << 20
"""What a user's host memory for swap has beside what is swapped out (gpuserver.core.states.residency)."""
SHORT_OF: Final = 0.8
"""A vGPU that waits and holds less than this part of its guarantee is short of it."""


@dataclass(frozen=True, slots=True)
class Health:
    """The readings of a node that answers. ``software``: of the asking end; ``meters``: empty if the node has none;
    ``folders``: the vGPUs that have a directory of sockets; ``vgpu_id``: this shell's ``VGPU_ID``."""

    status: NodeStatus
    software: str
    vgpus: tuple[VgpuStatus, ...] = ()
    processes: tuple[ProcessReading, ...] = ()
    meters: tuple[GpuMeters, ...] = ()
    folders: tuple[str, ...] = ()
    vgpu_id: str = ""
    lost: tuple[str, ...] = ()
    """Directories of the node that were removed while it runs."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No node answers. ``servers``: GPUs with a server that still answers; ``sockets``: of servers that do not;
    ``folders``: of vGPUs; ``locked``: a process holds the node's lock."""

    message: str
    hint: str
    servers: tuple[int, ...] = ()
    sockets: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    locked: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """``vgpu.service`` in systemd; ``manager``: "" or "--user". The states are those of ``systemctl show``."""

    active: str
    sub: str
    enabled: str
    result: str = "success"
    manager: str = ""


# --- a node that answers --------------------------------------------------------------------------------------------


def diagnose(health: Health) -> Iterator[Finding]:
    status = health.status
    simulated = "simulated GPU" if status.simulated else "GPU"
    serves = f"{counted(len(status.gpus), simulated)}, {counted(status.vgpus, 'vGPU')}"
    yield Finding("node", Verdict.OK, f"running, pid {status.pid}, {serves}")
    for directory in health.lost:
        found = f"{directory} was removed while the node runs: what is written there since, logs and events, is lost"
        yield Finding("state", Verdict.MISSING, found, "vgpuctl stop && vgpuctl serve --detach")
    if status.software != health.software:
        found = f"the node runs {status.software}, vgpuctl is {health.software}"
        yield Finding("version", Verdict.NOTE, found, "vgpuctl stop && vgpuctl serve --detach")
    for gpu in status.gpus:
        yield from _gpu(gpu)
        yield from _outside(gpu)
        yield from _swap(gpu, [vgpu for vgpu in health.vgpus if vgpu.gpu_index == gpu.index], len(status.gpus))
    for meters in health.meters:
        yield from _loop(meters)
    for vgpu in health.vgpus:
        yield from _vgpu(vgpu)
    for process in health.processes:
        if process.memory_drift_bytes:
            drift = format_bytes(process.memory_drift_bytes)
            found = f"process {process.pid}'s ledger has {drift} more than the driver shows"
            yield Finding(process.vgpu_id, Verdict.NOTE, found, f"vgpuctl events {process.vgpu_id} --kind drift")
    yield from _leftovers(health)


def _gpu(gpu: GpuStatus) -> Iterator[Finding]:
    check = f"GPU {gpu.index}"
    if gpu.state != "serving":
        fix = f"vgpuctl logs gpu {gpu.index}"
        yield Finding(check, Verdict.MISSING, f"{gpu.state}: {gpu.reason}", fix)
    if gpu.restarts:
        found = f"its server was started again {counted(gpu.restarts, 'time')} since the node runs"
        yield Finding(check, Verdict.NOTE, found, f"vgpuctl logs gpu {gpu.index} --level warning")
    if gpu.mode == "spatial" and gpu.mps_pid is None and gpu.state == "serving":
        found = f"spatial mode without an MPS daemon: {gpu.mps_reason or 'it is being started'}"
        yield Finding(check, Verdict.MISSING, found, f"vgpuctl gpu set {gpu.index} --mode temporal, or put that right")
    if gpu.mps_restarts:
        found = f"its MPS daemon died {counted(gpu.mps_restarts, 'time')}, with the programs that it served"
        yield Finding(check, Verdict.NOTE, found, "vgpuctl events --kind mps-lost --kind mps-restarted")


def _outside(gpu: GpuStatus) -> Iterator[Finding]:
    if gpu.outside and gpu.vgpus:
        used = format_bytes(sum(process.memory_bytes for process in gpu.outside))
        several = counted(len(gpu.outside), "process")
        found = f"{several} in no vGPU ({_names(gpu.outside)}) on it: {used}, limited by nothing here"
        yield Finding(f"GPU {gpu.index}", Verdict.NOTE, found, "vgpuctl ps --all; start them with vgpuctl run")


def _swap(gpu: GpuStatus, vgpus: Collection[VgpuStatus], gpus: int) -> Iterator[Finding]:
    """How much of the vGPUs' memory fits into the host's. ``gpus``: as many share ``--host-memory``."""
    swapped = [vgpu for vgpu in vgpus if vgpu.spec.oversubscribe is Oversubscribe.SWAP]
    may_own = sum(vgpu.memory_limit_bytes for vgpu in swapped)
    if not may_own:
        return
    card = max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes)
    owners, lacking = {vgpu.owner_uid for vgpu in swapped}, may_own - card
    if len(owners) > 1 and lacking > 0:  # no user's host memory serves another
        lacking = may_own + len(owners) * STORE_SLACK_BYTES
    host, ready = gpu.host_memory_limit_bytes, format_bytes(gpu.host_memory_bytes)
    found = f"vGPUs that are swapped may own {format_bytes(may_own)}; for them the host has {format_bytes(host)}, "
    found += f"of which {ready} are ready, and the GPU {format_bytes(card)}"
    if lacking > host:
        fix = f"vgpuctl serve --host-memory {-(-lacking * gpus >> 30)}G, or smaller vGPUs"
        yield Finding(f"GPU {gpu.index}", Verdict.NOTE, f"{found}: not all of it fits", fix)
    else:
        yield Finding(f"GPU {gpu.index}", Verdict.OK, found)


def _names(outside: Collection[OutsideProcess]) -> str:
    names = [f"pid {one.pid} {one.command}".rstrip() for one in outside]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _loop(meters: GpuMeters) -> Iterator[Finding]:
    late_ns = quantile_ns(meters.loop_lag, 0.99)
    if late_ns is None or late_ns <= LATE_NS or sum(meters.loop_lag.counts) < ENOUGH:
        return
    found = f"its server's loop is late by more than {format_duration(LATE_NS)} once in a hundred times"
    fix = "top: this machine has too little CPU left, or a disk that hangs; leases are not affected, answers are"
    yield Finding(f"GPU {meters.gpu_index}", Verdict.NOTE, found, fix)


def quantile_ns(histogram: Histogram, part: float) -> int | None:
    """The smallest bound that ``part`` of all values do not exceed; a very large number if there is none; None for an
    empty histogram."""
    total = sum(histogram.counts)
    if total == 0:
        return None
    for bound_ns, count in zip(histogram.bounds_ns, accumulate(histogram.counts), strict=False):
        if count >= part * total:
            return bound_ns
    return 1 << 62


def _vgpu(vgpu: VgpuStatus) -> Iterator[Finding]:
    name = vgpu.vgpu_id + (f" ({vgpu.name})" if vgpu.name else "")
    if vgpu.state == "failed":
        yield Finding(name, Verdict.MISSING, f"failed: {vgpu.reason}", f"vgpuctl inspect {vgpu.vgpu_id}")
    short = vgpu.held_ratio < SHORT_OF * vgpu.guarantee_ratio
    if vgpu.waiting_ns >= LONG_WAIT_NS and short and not vgpu.throttled and vgpu.state == "waiting":
        waited, held = format_duration(vgpu.waiting_ns // 10**8 * 10**8), round(100 * vgpu.held_ratio, 1)
        found = f"has waited {waited} for a token, with {held:g} % of the time instead of the"
        found += f" {round(100 * vgpu.guarantee_ratio, 1):g} % it is guaranteed"
        fix = "vgpuctl trace --seconds 2 shows which vGPU has it; one kernel that lasts that long may be why"
        yield Finding(name, Verdict.NOTE, found, fix)
    for warning in vgpu.warnings:
        yield Finding(name, Verdict.NOTE, warning, f"vgpuctl inspect {vgpu.vgpu_id}")


def _leftovers(health: Health) -> Iterator[Finding]:
    known = {vgpu.vgpu_id for vgpu in health.vgpus}
    left = sorted(set(health.folders) - known)
    # A server that restarts will know its vGPUs in a moment.
    if left and all(gpu.state == "serving" for gpu in health.status.gpus):
        where = Path(health.status.runtime_dir, "vgpus")
        found = f"{counted(len(left), 'folder')} of vGPUs that are gone: {_some(left)}"
        yield Finding("leftovers", Verdict.NOTE, found, f"rm -r {where / left[0]}")
    missing = [one for one in health.vgpu_id.split(",") if one.strip() and one.strip() not in known]
    if missing:
        found = f"VGPU_ID names {_some(missing)}, which this node does not have: CUDA programs of this shell will fail"
        yield Finding("VGPU_ID", Verdict.NOTE, found, "unset VGPU_ID, or export one of: vgpuctl ls")


def _some(names: Collection[str]) -> str:
    return ", ".join(list(names)[:3]) + (" …" if len(names) > 3 else "")


# --- and one that does not ------------------------------------------------------------------------------------------


def silent(silence: NoAnswer) -> Iterator[Finding]:
    yield Finding("node", Verdict.NOTE, silence.message, silence.hint)
    if silence.locked and not silence.servers:
        found = "a node holds its lock and does not answer: it starts just now, or hangs"
        yield Finding("node", Verdict.MISSING, found, "vgpuctl logs node")
    if silence.servers:
        gpus = ", ".join(map(str, silence.servers))
        found = f"the servers of GPU {gpus} go on without a node; programs notice nothing"
        yield Finding("leftovers", Verdict.NOTE, found, "vgpuctl serve --detach takes them over")
    elif silence.sockets or silence.folders:
        left = counted(len(silence.sockets), "socket") + f" of servers, {len(silence.folders)} of vGPUs"
        found = f"of the node that ran here last: {left}; no process answers there, and they do no harm"
        yield Finding("leftovers", Verdict.NOTE, found, "vgpuctl serve --detach, which uses them again")


def service(unit: Unit | None, *, answers: bool) -> Iterator[Finding]:
    """Findings about the node's systemd unit; None: it is not installed as a service."""
    if unit is None:
        return
    command = f"systemctl {unit.manager} ".replace("  ", " ")
    sudo = "" if unit.manager else "sudo "
    state = f"vgpu.service is {unit.active} ({unit.sub}), {unit.enabled}"
    if unit.active == "failed":
        journal = f"journalctl {unit.manager} -u vgpu".replace("  ", " ")
        fix = f"{journal}, then {sudo}{command}restart vgpu"
        yield Finding("service", Verdict.MISSING, f"{state}: {unit.result}", fix)
    elif unit.active == "active":
        yield Finding("service", Verdict.OK, state)
    elif answers:
        found = f"{state}: the node that runs is another one"
        yield Finding("service", Verdict.NOTE, found, f"vgpuctl stop, then {sudo}{command}start vgpu")
    else:
        yield Finding("service", Verdict.NOTE, state, f"{sudo}{command}enable --now vgpu")
