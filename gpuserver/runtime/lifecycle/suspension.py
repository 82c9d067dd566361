"""Suspending a vGPU: its programs stand still, and their GPU memory goes to the host, until the vGPU is resumed. The
driver checkpoints whole processes (gpuserver/device/nvidia/checkpoint.py), in temporal mode.

Suspending has four steps: the leases end, the broker refuses new programs, the journal is written, the driver acts.
Resuming takes them in reverse. A crash leaves at worst a suspended vGPU whose programs run, and each step can repeat.
The broker lists the processes, as the kernel reported them; without a broker the journal does. The page that the
processes share is a tenant's word. The server reaches each process through a pidfd, after it has compared start time
and user (gpuserver/device/pidfd.py).

The server itself suspends an idle vGPU (gpuserver/runtime/lifecycle/idle_suspend.py). The vGPU keeps its promises, its
broker admits new programs, and the vGPU comes back as soon as one of its programs wants the GPU. A vGPU that a person
has suspended with triggers comes back by the first of them (gpuserver/runtime/lifecycle/triggers.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from gpuserver.core.states.standby import NO_STANDBY, Cause, Standby
from gpuserver.device.base import CheckpointAction, CheckpointOutcome, Onto
from gpuserver.device.pidfd import Target, opened
from gpuserver.runtime.lifecycle.brokers import Brokers
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.protocol.triggers import awaited
from vgpu.queueing.preempted import Preempted
from vgpu.share import Mode
from vgpu.units import counted, format_bytes, format_duration

BROKER_S: Final = 10.0
ROUNDS: Final = 3
"""The next round finds a program that the broker admitted just before it got the message."""


class Suspension:
    """``suspend`` and ``resume`` one vGPU. The vGPU's ``lifecycle_lock`` orders the two."""

    def __init__(self, state: GpuState, swapping: Swapping, brokers: Brokers, memory: MemoryWatch) -> None:
        self._state = state
        self._swapping = swapping
        self._brokers = brokers
        self._memory = memory

    async def suspend(self, vgpu: Vgpu, preempted: Preempted | None = None, standby: Standby = NO_STANDBY) -> None:
        """``preempted``: for that request, until the node resumes it. ``standby``: what resumes it by itself. Errors:
        ``mode`` (spatial), ``in-use`` for programs of several vGPUs, ``unavailable`` with the driver's reason; the vGPU
        goes on then."""
        state, vgpu_id = self._state, vgpu.record.vgpu_id
        async with vgpu.lifecycle_lock:
            self.check(vgpu)
            if vgpu.record.suspended:
                await self._keep_suspended(vgpu, preempted, standby)
                return
            before = vgpu.standby
            vgpu.preempted, vgpu.standby = preempted, standby  # the journal has it before the programs stop
            try:
                await self._quiesce_for_good(vgpu)
            except BaseException:
                vgpu.preempted = None
                vgpu.standby = before if vgpu.idle_suspended else NO_STANDBY
                raise
            if not vgpu.removed.is_set():
                vgpu.passage = vgpu.passage.given_up()
                state.registry.suspend(vgpu_id)  # others may have its place from now on
                state.apply_shares()
                await state.persist()
                if preempted is not None:
                    text = f"{vgpu_id} {preempted.reason}"
                    state.record_event(EventType.PREEMPTED, vgpu, text, by_uid=preempted.by_uid)

    async def _keep_suspended(self, vgpu: Vgpu, preempted: Preempted | None, standby: Standby) -> None:
        """A person suspends a preempted vGPU: the node does not resume it any more. A vGPU that a person has suspended
        is not the node's to resume. What the person says last is what the vGPU waits for."""
        if preempted is not None or (vgpu.preempted is None and vgpu.standby == standby):
            return
        vgpu.preempted, vgpu.standby, vgpu.suspend_error = None, standby, ""
        await self._publish(vgpu)
        text = f"{vgpu.record.vgpu_id} stays suspended until {awaits(standby) or 'it is resumed'}"
        self._state.record_event(EventType.SUSPENDED, vgpu, text)

    async def _quiesce_for_good(self, vgpu: Vgpu) -> None:
        """As ``quiesce``. An idle-suspended vGPU does not come back by itself any more, and no program is let in."""
        idle_suspended, vgpu.idle_suspended, vgpu.lends_memory = vgpu.idle_suspended, (), False
        if not idle_suspended:
            await self.quiesce(vgpu)
            return
        await self._publish(vgpu)
        try:
            await self.quiesce(vgpu)
        except VgpuError:
            vgpu.idle_suspended = idle_suspended
            await self._publish(vgpu)
            raise
        until = awaits(vgpu.standby) or "it is resumed"
        text = f"{vgpu.record.vgpu_id} was idle-suspended, and stays suspended until {until}"
        self._state.record_event(EventType.SUSPENDED, vgpu, text)

    async def suspend_idle(self, vgpu: Vgpu, standby: Standby) -> None:
        """As ``suspend``, until one of its programs wants the GPU, or a trigger of ``standby`` is so. The caller holds
        ``lifecycle_lock``."""
        self.check(vgpu)
        vgpu.idle_suspended = tuple(await self.processes(vgpu))
        if vgpu.idle_suspended:
            vgpu.standby = standby
            await self.quiesce(vgpu)
            vgpu.lends_memory = not vgpu.removed.is_set()

    async def probe(self, vgpu: Vgpu) -> None:
        """Whether the driver could suspend it when it is idle: if not, its readings say so from now on."""
        if vgpu.record.spec.idle_suspend_ns and not vgpu.swaps:
            vgpu.suspend_error = (await self._ask_driver("probe", vgpu, ())).reason

    async def quiesce(self, vgpu: Vgpu) -> None:
        """Suspend the programs; the vGPU keeps its promises. One that is suspended is suspended again: the server that
        resumed it may have died half-way. The caller holds ``lifecycle_lock``. Errors as ``suspend``."""
        state, vgpu_id = self._state, vgpu.record.vgpu_id
        if vgpu.quiesced:
            if not vgpu.swaps:
                await self._suspend_all(vgpu)
            return
        used = vgpu.used_bytes
        vgpu.expected = False
        vgpu.stand_still()
        state.tokens.park(vgpu.record.key)
        try:
            await self._publish(vgpu)
            moved, seconds = await (self._swap_out(vgpu) if vgpu.swaps else self._suspend_all(vgpu))
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._resume_after(vgpu)
            raise
        text = f"{vgpu_id} suspended: {counted(moved, 'program')}, {format_bytes(used)} in {seconds:.1f} s"
        if waits_for := awaits(vgpu.standby):
            text += f", until {waits_for}"
        if vgpu.idle_suspended:
            text += f"; no program used it for {format_duration(vgpu.record.spec.idle_suspend_ns)}"
        state.record_event(EventType.SUSPENDED, vgpu, text, memory_bytes=used, seconds=seconds)

    async def resume(self, vgpu: Vgpu) -> None:
        """Errors: ``no-room`` where others were promised its share or memory meanwhile, ``unavailable`` with the
        driver's reason; it stays suspended then."""
        async with vgpu.lifecycle_lock:
            await self.bring_back(vgpu)

    async def bring_back(self, vgpu: Vgpu, cause: Cause = Cause.REQUEST) -> None:
        """As ``resume``; the caller holds ``lifecycle_lock``. After an error, an idle-suspended vGPU stays so."""
        state, vgpu_id, why = self._state, vgpu.record.vgpu_id, reason_of(vgpu, cause)
        self._check_present(vgpu)
        if not vgpu.quiesced:
            return
        if vgpu.record.suspended:
            state.count_occupied(but=vgpu, besides=vgpu.excess_bytes)
            state.registry.resume(vgpu_id, vgpu.used_bytes)  # promised, and counted, before anything moves
            state.apply_shares()
        if vgpu.lends_memory:
            vgpu.lends_memory = False
            await self._swapping.make_room()
        processes = vgpu.idle_suspended or await self.processes(vgpu)
        # What was swapped comes when it is wanted, as ever.
        answer = CheckpointOutcome("", (), 0) if vgpu.swaps else await self._ask_driver("resume", vgpu, processes)
        if answer.reason:
            if not vgpu.removed.is_set() and not vgpu.idle_suspended:
                vgpu.passage = vgpu.passage.given_up()
                state.registry.suspend(vgpu_id)
                state.apply_shares()
                await state.persist()
            raise refused(vgpu, answer)
        await self._resume_after(vgpu, expected=cause in {Cause.CONNECTION, Cause.TIME})
        vgpu.suspend_error = ""
        stuck = f"; {_given_up(answer.stuck)}" if answer.stuck else ""
        told = f"; {why}{stuck}" if why else stuck
        text = f"{vgpu_id} resumed: {counted(len(processes), 'program')} in {answer.seconds:.1f} s{told}"
        state.record_event(EventType.RESUMED, vgpu, text, seconds=answer.seconds, cause=cause.value)
        self._swapping.step_now()  # once the caller has released the lock: it waits for nothing in between

    async def _swap_out(self, vgpu: Vgpu) -> tuple[int, float]:
        began = time.monotonic()
        reason = await self._swapping.put_away(vgpu)
        if reason:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"{vgpu.record.vgpu_id} is as it was: {reason}", "try again")
        return len(vgpu.present), time.monotonic() - began

    async def release(self, vgpu: Vgpu) -> None:
        """Resume the programs of a vGPU that is being removed, so that they see the error. Programs that cannot resume
        are killed: they would stand still for ever. The caller holds ``lifecycle_lock``."""
        if vgpu.swaps:  # their gates fail, and wait for no memory
            vgpu.quiesced = False
            return
        processes = list(vgpu.idle_suspended or vgpu.programs)
        try:
            answer = await self._ask_driver("resume", vgpu, processes)
        except VgpuError as error:
            answer = CheckpointOutcome(str(error), tuple(process.pid for process in processes), 0)
        lost = [process for process in processes if answer.reason or process.pid in answer.stuck]
        for process in lost:
            with suppress(OSError), opened(self._target(vgpu, process)) as pidfd:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        vgpu.quiesced = False
        if lost:
            text = f"{counted(len(lost), 'program')} of {vgpu.record.vgpu_id} killed"
            self._state.record_event(
                EventType.KILLED_ON_RESUME, vgpu, f"{text}, which could not be brought back: {answer.reason}"
            )

    def _check_present(self, vgpu: Vgpu) -> None:
        vgpu_id = vgpu.record.vgpu_id
        if vgpu.passage.leaving is not None or self._state.vgpus.get(vgpu_id) is not vgpu:
            raise away(vgpu)
        if vgpu.removed.is_set():
            raise VgpuError(ErrorCode.REMOVED, f"{vgpu_id} is being removed")

    def check(self, vgpu: Vgpu) -> None:
        """Whether it can stand still at all."""
        vgpu_id = vgpu.record.vgpu_id
        self._check_present(vgpu)
        if self._state.mode is Mode.SPATIAL:
            raise VgpuError(
                ErrorCode.MODE,
                f"{vgpu_id} is on a GPU in spatial mode, and processes under MPS cannot be suspended",
                f"end the GPU's programs, then: vgpuctl gpu set {self._state.facts.index} --mode temporal",
            )
        if vgpu.coattached:
            others = sorted({other for company in vgpu.coattached.values() for other in company} - {vgpu_id})
            raise VgpuError(
                ErrorCode.IN_USE,
                f"programs of {vgpu_id} are in {', '.join(others)}, too, and cannot stand still in one of them",
                "end them first: vgpuctl ps",
            )

    async def _suspend_all(self, vgpu: Vgpu) -> tuple[int, float]:
        """The number of suspended processes, and the seconds that the driver took."""
        seconds = 0.0
        moved: set[Process] = set()
        for _ in range(ROUNDS):
            # A program that attaches meanwhile is admitted, and wakes an idle vGPU.
            processes = list(vgpu.idle_suspended) or await self.processes(vgpu)
            if moved and set(processes) <= moved:
                break
            self.check(vgpu)
            answer = await self._ask_driver("suspend", vgpu, processes)
            if answer.reason:
                await self._ask_driver("resume", vgpu, [process for process in processes if process in moved])
                raise refused(vgpu, answer)
            seconds += answer.seconds
            moved |= set(processes)
            if not processes:
                break
        return len(moved), seconds

    async def _publish(self, vgpu: Vgpu) -> None:
        """Pass the new state to the scheduler, the gangs, the broker and the journal."""
        self._state.refresh_gangs()
        self._state.apply_shares()
        await self._brokers.changed(vgpu)
        await self._state.persist()

    async def _resume_after(self, vgpu: Vgpu, *, expected: bool = False) -> None:
        """Give the vGPU leases again, unless it was removed meanwhile. ``expected``: a call is about to come."""
        if vgpu.removed.is_set():
            return
        vgpu.passage = vgpu.passage.brought_back()
        vgpu.idle_suspended, vgpu.lends_memory, vgpu.preempted = (), False, None
        vgpu.standby, vgpu.connected_port, vgpu.unheard_ports = NO_STANDBY, 0, ()
        vgpu.expected = expected
        vgpu.stand_still(False)
        await self._publish(vgpu)
        if vgpu.removed.is_set() or vgpu.swapped_out:
            return
        if vgpu.swaps:
            self._swapping.give_leases(vgpu)
        else:
            self._state.tokens.unpark(vgpu.record.key, vgpu.share)
        self._memory.expect_growth()  # its contexts are back

    async def processes(self, vgpu: Vgpu) -> list[Process]:
        """Those that are in it, once its broker is there to say."""
        with trio.move_on_after(BROKER_S):
            await vgpu.registered.wait()
            # A broker of an older release reports one after the other, and does not say which is the last one.
            while vgpu.link is None or not (vgpu.lists or self._all_informed(vgpu)):  # noqa: ASYNC110
                await trio.sleep(0.01)
        if vgpu.link is None:
            raise VgpuError(ErrorCode.UNAVAILABLE, f"the broker of {vgpu.record.vgpu_id} is not back yet", "try again")
        return list(vgpu.programs)

    @staticmethod
    def _all_informed(vgpu: Vgpu) -> bool:
        """As far as the page says, which can only delay."""
        return vgpu.activity is not None and len(vgpu.members) >= vgpu.activity.processes

    @staticmethod
    def _target(vgpu: Vgpu, process: Process) -> Target:
        owner = vgpu.record.owner
        return Target.of(process, owner.uid, owner.share_gid, vgpu.uid_of(process))

    async def _ask_driver(
        self, action: CheckpointAction, vgpu: Vgpu, processes: Sequence[Process]
    ) -> CheckpointOutcome:
        targets = [self._target(vgpu, process) for process in processes]
        home = vgpu.passage.home
        onto = Onto(home, self._state.facts.uuid) if home else None
        # One thread from start to end: the checkpointer's process is killed with the thread that started it.
        with trio.CancelScope(shield=True):  # half done is worse than late
            outcome = await trio.to_thread.run_sync(partial(self._state.checkpointer.run, action, targets, onto))
        return outcome  # noqa: RET504  mypy cannot know that the scope ends no call


def awaits(standby: Standby) -> str:
    """For people, what it waits for besides a request."""
    return awaited(standby.triggers, standby.at_unix_s)


def reason_of(vgpu: Vgpu, cause: Cause) -> str:
    """For people; "": a request, which is no news."""
    match cause:
        case Cause.CALL:
            return "a program made a CUDA call"
        case Cause.CONNECTION:
            return f"a connection to port {vgpu.connected_port}"
        case Cause.TIME:
            return "its time has come"
        case Cause.START:
            return "a program starts"
        case Cause.END:
            return "a program ends"
        case Cause.REQUEST:
            return ""


def away(vgpu: Vgpu) -> VgpuError:
    to = "another GPU" if vgpu.passage.leaving is None else f"GPU {vgpu.passage.leaving}"
    return VgpuError(ErrorCode.UNAVAILABLE, f"{vgpu.record.vgpu_id} is on its way to {to}", "try again in a moment")


def refused(vgpu: Vgpu, answer: CheckpointOutcome) -> VgpuError:
    hint = _given_up(answer.stuck) if answer.stuck else ""
    return VgpuError(ErrorCode.UNAVAILABLE, f"{vgpu.record.vgpu_id} is as it was: {answer.reason}", hint)


def _given_up(pids: Sequence[int]) -> str:
    return f"the driver has given up on: kill {' '.join(map(str, pids))}"
