"""What clients read of vGPUs and processes: from accounts, pages, and rates over the last second."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cython_ext.readings import MEMORY_KINDS, SlotReading, SlotState
from gpuserver.core.admission.registry import VgpuRecord
from gpuserver.core.observe.usage import Seen, TurnUse, Usage
from gpuserver.core.scheduler.leases import AccountSnapshot, AccountState, ServiceTotals
from gpuserver.core.states.migration import Step
from gpuserver.runtime.memory.outside import UnmanagedProcess
from gpuserver.runtime.memory.sharing import shared_bytes
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.rates import Rates
from gpuserver.runtime.vgpus import NO_PROCESS, Vgpu, away_of, bounded
from vgpu.enums import Oversubscribe, PriorityName
from vgpu.packing.partition import SM_STEP
from vgpu.protocol.messages import OutsideProcess, ProcessReading, Steps, VgpuStatus
from vgpu.protocol.triggers import CALL
from vgpu.share import PPM, Mode
from vgpu.units import counted, format_bytes, format_duration

_UNIX_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Where a vGPU is: what all readings of this server share."""

    gpu_index: int
    gpu_uuid: str
    simulated: bool
    environment: Mapping[str, str]


def statement_of(record: VgpuRecord, book: AccountState) -> AccountSnapshot:
    """Of a vGPU that does not compete now, or no more: it wants and holds nothing, and its account is what it was."""
    share = record.share
    return AccountSnapshot(
        vgpu=record.key,
        guarantee_ppm=share.guarantee_ppm,
        limit_ppm=share.limit_ppm,
        priority=share.priority,
        wants=False,
        holds=False,
        open_ended=False,
        throttled=False,
        penalised=False,
        waiting_since_ns=None,
        lag_ns=book.lag_ns,
        bucket_ns=book.bucket_ns,
        held_ns=book.held_ns,
        busy_ns=book.busy_ns,
        overuse_ns=book.overuse_ns,
        tokens=book.tokens,
    )


def owed_ns(statement: AccountSnapshot) -> int:
    """The GPU time that the vGPU is owed. A vGPU that wants nothing saves up no time; its debt stays
    (docs/explanation/scheduling.md)."""
    return statement.lag_ns if statement.wants else min(0, statement.lag_ns)


def vgpu_reading(
    vgpu: Vgpu, place: GpuPlace, statement: AccountSnapshot, rates: Rates, now_ns: int, warnings: tuple[str, ...] = ()
) -> VgpuStatus:
    """What the node reports of one vGPU now: its record, its place in the schedule, and what its processes claim."""
    record, slots, counts = vgpu.record, vgpu.slots, vgpu.show_counts()
    served = vgpu.show_served(ServiceTotals(statement.held_ns, statement.busy_ns, statement.tokens))
    implicit = vgpu.grants.implicit_bytes
    reserved = bounded(sum(slot.reserved_bytes for slot in slots))
    return VgpuStatus(
        vgpu_id=record.vgpu_id,
        name=record.spec.name,
        gpu_index=place.gpu_index,
        gpu_uuid=place.gpu_uuid,
        simulated=place.simulated,
        mode="temporal" if record.partition is None else "spatial",
        state=_state(vgpu, statement),
        reason=vgpu.failure or (vgpu.group_awaits if vgpu.preempted is None else vgpu.preempted.reason),
        preempted=vgpu.preempted,
        resume_on=_triggers(vgpu),
        resume_at_unix_s=vgpu.standby.at_unix_s if vgpu.quiesced else None,
        owner_uid=record.owner.uid,
        spec=record.spec,
        created_unix_s=record.created_unix_ns / _UNIX_NS,
        expires_unix_s=None if record.expires_unix_ns is None else record.expires_unix_ns / _UNIX_NS,
        guarantee_ratio=record.share.guarantee_ppm / PPM,
        limit_ratio=record.share.limit_ppm / PPM,
        sm_percent_granted=100.0 if record.partition is None else record.partition.percent,
        tokens_per_second=rates.tokens_per_second,
        held_ratio=rates.held_ratio,
        busy_ratio=rates.busy_ratio,
        tokens=served.tokens,
        held_ns=served.held_ns,
        busy_ns=served.busy_ns,
        overuse_ns=statement.overuse_ns,
        lag_ns=owed_ns(statement),
        throttled=statement.throttled,
        throttled_ratio=rates.throttled_ratio,
        wants=statement.wants,
        holds=statement.runs,
        open_ended=statement.open_ended and not rates.tokens_per_second,
        shares=statement.shared,
        light=statement.light,
        demand_ratio=statement.demand_ppm / PPM,
        burst_ns=statement.burst_ns,
        steps=Steps() if vgpu.activity is None else Steps(**vgpu.activity.steps._asdict()),
        memory_limit_bytes=record.memory_limit_bytes,
        memory_used_bytes=vgpu.used_bytes,
        memory_away_bytes=vgpu.away_bytes,
        memory_pinned_bytes=vgpu.pinned_bytes,
        memory_shared_bytes=bounded(shared_bytes(slots)),
        memory_imported_bytes=bounded(sum(slot.imported_bytes for slot in vgpu.alive)),
        memory_reserved_bytes=reserved,
        memory_implicit_bytes=implicit,
        memory_peak_bytes=peak_bytes(vgpu),
        memory_refusals=counts.refusals,
        memory_refused_bytes=vgpu.refused_bytes,
        processes=len(vgpu.alive),
        launches=counts.launches,
        broker_pid=None if vgpu.broker == NO_PROCESS else vgpu.broker.pid,
        leaving_to=vgpu.passage.leaving,
        request_id=vgpu.origin.request_id,
        lifetime="process" if vgpu.origin.of_process else "kept",
        asker_pid=vgpu.origin.asker.pid if vgpu.origin.of_process else None,
        claim=vgpu.origin.claim,
        attach=vgpu.origin.attach,
        awaited_pods=vgpu.awaited_pods,
        environment={"VGPU_ID": record.vgpu_id, **place.environment},
        warnings=warnings,
        window_ns=vgpu.grants.window_ns,
        waiting_ns=0 if statement.runs else max(0, now_ns - (statement.waiting_since_ns or now_ns)),
        swaps_out=vgpu.swaps_out,
        swaps_in=vgpu.swaps_in,
    )


def _triggers(vgpu: Vgpu) -> tuple[str, ...]:
    """What resumes it by itself, while it is suspended. A CUDA call resumes each idle-suspended vGPU."""
    if not vgpu.quiesced:
        return ()
    return (CALL, *vgpu.standby.triggers) if vgpu.idle_suspended else vgpu.standby.triggers


def _state(
    vgpu: Vgpu, statement: AccountSnapshot
) -> Literal[
    "starting", "idle", "waiting", "running", "swapped", "suspended", "idle-suspended", "moving", "removing", "failed"
]:
    if vgpu.removed.is_set():
        return "removing"
    if vgpu.passage.next_step is not Step.STAY:
        return "moving"
    if vgpu.quiesced:
        return "idle-suspended" if vgpu.idle_suspended else "suspended"
    if vgpu.swapped_out and vgpu.movable_bytes:
        return "swapped"
    if vgpu.failure:
        return "failed"
    if not vgpu.admits.is_set():
        return "starting"
    if statement.runs:
        return "running"
    return "waiting" if statement.wants or (vgpu.group_wants and vgpu.group_awaits) else "idle"


def peak_bytes(vgpu: Vgpu) -> int:
    """The most that its processes can have had together: each its own peak, of its allocations and what is implicit."""
    return vgpu.implicit_peak_bytes + bounded(sum(slot.peak_bytes for slot in vgpu.slots))


def seen_of(vgpu: Vgpu, usage: Usage, mode: Mode, gpu_index: int, turn_use: TurnUse) -> Seen:
    """The figures from which ``advise`` derives a size. The driver shows less memory for a suspended vGPU than the vGPU
    needs. After a restart of the server the difference is not known."""
    record = vgpu.record
    return Seen(
        vgpu=record.spec.name or record.vgpu_id,
        seconds=usage.seconds(record.key),
        busy_ratio=usage.busy_ratio(record.key),
        limit_ppm=record.share.limit_ppm,
        temporal=mode is Mode.TEMPORAL,
        memory_peak_bytes=0 if vgpu.quiesced else peak_bytes(vgpu),
        memory_limit_bytes=record.memory_limit_bytes,
        memory_refusals=vgpu.refusals,
        gpu_index=gpu_index,
        wasted=turn_use.wasted(),
    )


def process_reading(vgpu: Vgpu, slot: SlotReading, gpu_index: int, memory: MemoryWatch) -> ProcessReading:
    """What the node reports of one process."""
    name = vgpu.record.vgpu_id, slot.pid
    return ProcessReading(
        vgpu_id=vgpu.record.vgpu_id,
        gpu_index=gpu_index,
        slot=slot.index,
        pid=slot.pid,
        command=slot.command,
        alive=slot.state is not SlotState.DEAD,
        wants=slot.want,
        has_work=slot.undrained,
        memory_bytes=bounded(slot.charged_bytes),
        memory_by_kind_bytes=dict(zip(MEMORY_KINDS, slot.committed_bytes, strict=False)),
        memory_implicit_bytes=memory.implicit.get(name, 0),
        memory_driver_bytes=memory.latest.by_pid.get(slot.pid, 0),
        memory_drift_bytes=memory.drift.get(name, 0),
        memory_away_bytes=away_of(slot),
        memory_imported_bytes=0 if slot.state is SlotState.DEAD else slot.imported_bytes,
        memory_peak_bytes=slot.peak_bytes,
        memory_refusals=slot.refusals,
        busy_ns=slot.busy_ns,
        demand_ratio=slot.demand_ppm / PPM,
        burst_ns=slot.burst_us * 1_000,
        overrun_ns=slot.overrun_ns,
        launches=slot.launches,
        graph_launches=slot.graph_launches,
        copies=slot.copies,
        copied_bytes=bounded(slot.copied_bytes),
        gate_waits=slot.gate_waits,
        gate_wait_ns=slot.gate_wait_ns,
        longest_kernel_ns=slot.longest_kernel_ns,
        sm_planned=slot.sm_planned,
        sm_count=slot.sm_count,
    )


def outside_process(outsider: UnmanagedProcess, gpu_index: int) -> OutsideProcess:
    """What the node reports of a process that is in no vGPU."""
    return OutsideProcess(
        gpu_index=gpu_index,
        pid=outsider.process.pid,
        uid=outsider.uid,
        command=outsider.command,
        memory_bytes=outsider.memory_bytes,
    )


USUAL_CONTEXT_BYTES: Final = 480 << 20
"""Of one CUDA context on an H100, before its program has allocated anything."""
HAZARD: Final = (
    "Managed memory beyond what the card has free may hang a GPU; on a real one this was tried below that alone."
)
_LEVELS: Final = {"0": "normal", "1": "low"}


def warnings_on(
    vgpu: Vgpu,
    records: Iterable[VgpuRecord],
    mps_reason: str,
    client_priority: str,
    *,
    simulated: bool = True,
    least_context_bytes: int | None = None,
) -> tuple[str, ...]:
    """What does not hold for this vGPU just now, though it was asked for, and what is dangerous.

    ``records``: of all vGPUs of the GPU. ``mps_reason``: why there is no MPS daemon, "" if there is one.
    ``client_priority``: CUDA_MPS_CLIENT_PRIORITY of the vGPU's new processes.
    """
    record = vgpu.record
    memory = warnings_on_use(vgpu)
    if not memory and least_context_bytes is not None:
        memory = warnings_on_size(record.memory_limit_bytes, least_context_bytes)
    if record.partition is None:
        managed = record.spec.oversubscribe is Oversubscribe.MANAGED and not simulated
        hazards = (HAZARD,) if managed else ()
        return (*hazards, *memory, *warnings_on_swapping(vgpu), *warnings_when_idle(vgpu))
    warnings = [*memory]
    if record.spec.idle_suspend_ns:
        warnings.append("It is not suspended when it is idle (--idle-suspend): MPS does not allow that.")
    granted = record.partition.granted_sms
    fresh = record.partition.sm_count if record.spec.burst else granted
    for sms, count in sorted(Counter(vgpu.sms_of(slot) for slot in vgpu.alive).items()):
        if sms and abs(sms - fresh) >= SM_STEP:
            text = f"{counted(count, 'process')} started with {sms} SMs and will keep them for life (MPS)"
            warnings.append(f"{text}; new ones get {fresh}. Time shares, limits and priority hold for all at once.")
    for was, count in sorted(Counter(planned.client_priority for planned in vgpu.planned.values()).items()):
        if was not in {"", client_priority}:
            text = f"{counted(count, 'process')} started as MPS clients of {_LEVELS[was]} priority, for life"
            fresh_level = _LEVELS[client_priority]
            warnings.append(f"{text}; new ones are of {fresh_level} priority. The order of leases holds for all.")
    smaller = Counter(planned.memory_bytes for planned in vgpu.planned.values())
    for size, count in sorted(smaller.items()):
        if 0 < size < record.most_per_process_bytes:
            text = f"{counted(count, 'process')} started with {format_bytes(size)} and can never have more (MPS)"
            warnings.append(f"{text}; new ones can have {format_bytes(record.most_per_process_bytes)}.")
    others = [other for other in records if other.vgpu_id != record.vgpu_id]
    hard = [other.vgpu_id for other in others if not other.spec.burst]
    bursting = [other.vgpu_id for other in others if other.spec.burst]
    if record.spec.burst and hard:
        warnings.append(
            f"Its processes start with all SMs (--burst): while they run, {', '.join(hard)} may get fewer SMs than "
            "promised. MPS takes nothing back inside a kernel."
        )
    elif bursting:
        warnings.append(
            f"{', '.join(bursting)} on the same GPU may use all SMs (--burst): while it runs, this vGPU may get fewer "
            f"than its {granted}."
        )
    if mps_reason:
        warnings.append(f"There is no MPS daemon, and no process can start: {mps_reason}.")
    return tuple(warnings)


def warnings_on_size(limit: int, least_context_bytes: int) -> tuple[str, ...]:
    """That one CUDA context would fill it. ``least_context_bytes``: what one took on this card; 0: none was seen."""
    context = least_context_bytes or USUAL_CONTEXT_BYTES
    if limit > context:
        return ()
    took = f"took {format_bytes(context)} on this card"
    if not least_context_bytes:
        took = f"takes about {format_bytes(context)} (none was seen on this card yet)"
    text = f"One CUDA context {took}, and the limit is {format_bytes(limit)}: programs have no memory for data."
    return (text,)


def warnings_on_use(vgpu: Vgpu) -> tuple[str, ...]:
    """That it has more than it may: its limit was lowered, or its contexts and modules do not fit it."""
    used, limit = vgpu.used_bytes, vgpu.record.memory_limit_bytes
    if used <= limit:
        return ()
    text = f"Its programs have {format_bytes(used)} of {format_bytes(limit)}: they keep it, and are refused more."
    return (text,)


def warnings_on_swapping(vgpu: Vgpu) -> tuple[str, ...]:
    """What of it stays on the card while it is swapped out, and why; and whether it waits for its group."""
    if not vgpu.swaps:
        return ()
    found = []
    if vgpu.group_awaits:
        found.append(f"Its programs wait: {vgpu.group_awaits}.")
    if vgpu.coattached:
        programs = counted(len(vgpu.coattached), "program")
        found.append(f"The memory of {programs} that use several GPUs stays on the GPU: each GPU may reach into it.")
    kinds = vgpu.committed_by_kind()
    if parts := [f"{format_bytes(kinds[kind])} {name}" for kind, name in _STAYS.items() if kinds[kind]]:
        size = format_bytes(sum(kinds[kind] for kind in _STAYS))
        found.append(f"While it is swapped out, at most {size} stay on the GPU: {', '.join(parts)}.")
    return tuple(found)


_STAYS: Final = {
    "vmm": "of cuMemCreate that cannot move",
    "async": "of pools that can be shared or have a size limit",
    "array": "of arrays",
    "graph": "of graphs that allocate",
}
"""Memory that swap does not move, and how people know it."""


def warnings_when_idle(vgpu: Vgpu) -> tuple[str, ...]:
    """Why it cannot be suspended by itself, or brought back, as far as is known."""
    spec, owner, mine = vgpu.record.spec, vgpu.record.owner.uid, os.geteuid()
    if vgpu.suspend_error:
        what = "brought back" if vgpu.quiesced else "suspended when it is idle"
        return (f"It cannot be {what}: {vgpu.suspend_error}. It is tried again.",)
    if vgpu.unheard_ports:
        ports = ", ".join(map(str, vgpu.unheard_ports))
        return (f"None of its processes listens on port {ports}, so no connection to it resumes the vGPU.",)
    if spec.idle_suspend_ns and spec.oversubscribe is None and mine not in {0, owner}:
        return (f"The node runs as uid {mine}, and may not suspend programs of uid {owner} when they are idle.",)
    return ()


def notes_on(record: VgpuRecord, mode: Mode) -> tuple[str, ...]:
    """What holds for this vGPU and might surprise, in sentences."""
    notes = []
    if record.spec.process_memory_bytes is not None:
        each = format_bytes(record.spec.process_memory_bytes)
        notes.append(f"Each of its processes may allocate {each} of that, contexts and modules apart.")
    if record.spec.oversubscribe is Oversubscribe.SWAP:
        notes += [
            "Its plain allocations lie in the host's memory while others need the card and it does not, and come back "
            "to the same addresses. The card keeps nothing for it.",
            "Pools, arrays, graphs and cuMemCreate are not moved: the card itself may refuse them before the limit. "
            "Plain memory cannot be shared with other processes (cuIpcGetMemHandle).",
        ]
    elif record.spec.oversubscribe is Oversubscribe.MANAGED:
        notes += [
            "Its plain allocations are managed memory: what does not fit the card lies in the host's memory, and comes "
            "back page by page when a kernel touches it. The card keeps nothing for it.",
            "Pools, arrays, graphs and cuMemCreate are not managed: the card itself may refuse them before the limit. "
            "Such memory cannot be shared with other processes (cuIpcGetMemHandle).",
        ]
    if record.spec.idle_suspend_ns:
        idle = format_duration(record.spec.idle_suspend_ns)
        notes.append(
            f"When no program has used it for {idle} it is suspended, until one of its programs wants the GPU. "
            "What it was promised stays promised."
        )
    if mode is Mode.SPATIAL:
        assert record.partition is not None
        granted = record.partition
        notes += [
            f"Each of its processes sees {granted.granted_sms} of {granted.sm_count} SMs "
            f"({granted.percent:.1f} %; MPS grants steps of 2, at least 8), for its life.",
            "Several processes of this vGPU take turns of 10 ms: together they fill no more SMs than one.",
            "A fatal fault of one process ends every process that shares the GPU's MPS daemon.",
        ]
        if record.spec.priority is PriorityName.LOW:
            notes.append(
                "Of low priority: where its processes share SMs with others, MPS takes the others' blocks first. A "
                "process keeps for its life what it was started with; the order of leases changes at once."
            )
        if record.spec.burst:
            notes += [
                "With --burst its processes are not limited in SMs: what MPS gave them it does not take back.",
                "While only vGPUs that burst want, of one priority, all run together, and MPS divides the SMs.",
            ]
    elif record.spec.group is not None:
        notes.append(
            f"It holds at the same time as other vGPUs of uid {record.owner.uid} in group {record.spec.group}, "
            "and each of them gets what the one with the least gets."
        )
    if mode is Mode.SPATIAL and record.spec.group is not None:
        notes.append("Its group is ignored: only leases of temporal mode are given to a group together.")
    if record.spec.overcommit:
        notes.append("It was admitted beyond what can be guaranteed: its compute share is a weight.")
    return tuple(notes)
