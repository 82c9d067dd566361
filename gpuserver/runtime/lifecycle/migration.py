"""Moving a vGPU to another GPU of the node: the shell of ``gpuserver.core.states.migration``.

Here it stands still as a suspended one does; its broker finds the other server by a link in the vGPU's directory, which
that one turns to itself; there the driver restores the programs on the other GPU. Between the servers goes one message,
``MigrateIn``, asked until it is answered.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

import trio
from pydantic import TypeAdapter

from gpuserver.core.admission.origin import Origin
from gpuserver.core.admission.registry import Owner, VgpuRecord
from gpuserver.core.scheduler.leases import AccountState
from gpuserver.core.states.migration import MigrationState
from gpuserver.core.states.standby import NO_STANDBY, Standby
from gpuserver.runtime.lifecycle.brokers import Brokers, find_broker
from gpuserver.runtime.lifecycle.creation import Creations
from gpuserver.runtime.lifecycle.removal import Removal
from gpuserver.runtime.lifecycle.suspension import Suspension, away
from gpuserver.runtime.state import GpuState, unwritten
from gpuserver.runtime.vgpus import NO_PROCESS, Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.protocol.messages import Arrival, Forward, Inspect, MigrateIn, MigrateOutcome, VgpuDetail
from vgpu.protocol.service import ask
from vgpu.share import Mode
from vgpu.units import counted

log = get_logger(__name__)

ARRIVE_S: Final = 20.0
"""A server that has taken a vGPU answers when it has its broker, or soon after it had to start another."""
BROKER_S: Final = 12.0
AGAIN_S: Final = 0.2
RELEASE_S: Final = 1.0
PATIENCE_S: Final = 30.0
"""How long the client waits for a server that does not answer. The vGPU moves once that server answers."""
_BOOK: Final = TypeAdapter(AccountState)
NO_ANSWER: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})


class Migration:
    """``leave`` runs on the source GPU, ``arrive`` on the target."""

    def __init__(
        self, state: GpuState, suspension: Suspension, brokers: Brokers, creations: Creations, removal: Removal
    ) -> None:
        self._state = state
        self._suspension = suspension
        self._brokers = brokers
        self._creations = creations
        self._removal = removal

    # --- where it is

    async def leave(self, vgpu: Vgpu, to: int) -> MigrateOutcome:
        """Returns once it is the other GPU's. Errors: those of ``suspend``; those of the other GPU, as for ``create``,
        and the vGPU goes on here; ``unavailable`` if the other does not answer."""
        if vgpu.swaps:
            raise VgpuError(
                ErrorCode.IN_USE,
                f"{vgpu.record.vgpu_id} has --oversubscribe swap, and such a vGPU stays on its GPU",
                "make another one there: vgpuctl create --gpu",
            )
        async with vgpu.lifecycle_lock:
            if vgpu.passage.leaving is None:
                await self._set_out(vgpu, to)
            elif vgpu.passage.leaving != to:
                raise away(vgpu)
        with trio.move_on_after(PATIENCE_S) as patience:
            await vgpu.settled.wait()
        if patience.cancelled_caught:
            raise VgpuError(
                ErrorCode.UNAVAILABLE,
                f"GPU {to} does not answer; {vgpu.record.vgpu_id} stands still, and moves when it does",
                "see: vgpuctl gpu ls",
            )
        if vgpu.refusal is not None:
            raise vgpu.refusal
        return MigrateOutcome(goes_on=vgpu.passage.goes_on)

    async def _set_out(self, vgpu: Vgpu, to: int) -> None:
        state = self._state
        self._suspension.check(vgpu)
        if vgpu.idle_suspended:  # it goes on there
            await self._suspension.bring_back(vgpu)
        await self.release(vgpu)
        programs = await self._suspension.processes(vgpu)
        try:
            await self._ask(to, self._request(vgpu, vgpu.passage, programs, trial=True))
        except VgpuError as error:
            raise self._stays(vgpu, to, error) from error
        vgpu.passage = vgpu.passage.begun(suspended=vgpu.record.suspended)
        await self._suspension.quiesce(vgpu)
        try:
            programs = await self._suspension.processes(vgpu)
            self._suspension.check(vgpu)
            vgpu.passage = vgpu.passage.left(to, state.facts.uuid, tuple(programs))
            if not await state.persist():
                raise unwritten(state)
        except VgpuError:
            vgpu.passage = vgpu.passage.stayed()
            if vgpu.passage.goes_on and not vgpu.removed.is_set():
                state.nursery.start_soon(self.go_on, vgpu)
            raise
        vgpu.settled, vgpu.refusal = trio.Event(), None
        self._brokers.release(vgpu)
        state.nursery.start_soon(self.settle, vgpu)

    async def settle(self, vgpu: Vgpu) -> None:
        """Ask the GPU that it is leaving for until that has answered."""
        state, to = self._state, vgpu.passage.leaving
        assert to is not None
        while True:
            try:
                await self._ask(to, self._request(vgpu, vgpu.passage, vgpu.passage.programs))
                break
            except VgpuError as error:
                if error.code not in NO_ANSWER:
                    await self._stay(vgpu, to, error)
                    return
                log.info("no answer yet", vgpu=vgpu.record.vgpu_id, to_gpu=to, reason=str(error))
            await trio.sleep(AGAIN_S)
        broker = vgpu.broker
        self._removal.forget(vgpu)
        await state.persist()
        vgpu.settled.set()
        if broker != NO_PROCESS:
            state.nursery.start_soon(self._brokers.reap, broker)

    async def _stay(self, vgpu: Vgpu, to: int, refusal: VgpuError) -> None:
        state = self._state
        vgpu.passage = vgpu.passage.stayed()
        vgpu.registered = trio.Event()
        self._brokers.claim(vgpu)
        state.nursery.start_soon(self._brokers.keep, vgpu)
        await state.persist()
        if vgpu.passage.goes_on:
            await self.go_on(vgpu)
        vgpu.refusal = self._stays(vgpu, to, refusal)
        vgpu.settled.set()

    def _stays(self, vgpu: Vgpu, to: int, refusal: VgpuError) -> VgpuError:
        text = f"{vgpu.record.vgpu_id} stays on GPU {self._state.facts.index}; GPU {to}: {refusal.message}"
        return VgpuError(refusal.code, text, refusal.hint)

    async def go_on(self, vgpu: Vgpu) -> None:
        """It stood still for the way only. Where its programs cannot be brought back it is suspended."""
        try:
            await self._suspension.resume(vgpu)
        except VgpuError as error:
            log.warning("not resumed", vgpu=vgpu.record.vgpu_id, reason=str(error))

    def _request(
        self, vgpu: Vgpu, passage: MigrationState, programs: tuple[Process, ...] | list[Process], *, trial: bool = False
    ) -> MigrateIn:
        state, record = self._state, vgpu.record
        book = vgpu.booked(state.tokens.books().get(record.key))
        return MigrateIn(
            vgpu=record.vgpu_id,
            spec=record.spec,
            owner_uid=record.owner.uid,
            share_gid=record.owner.share_gid,
            created_unix_ns=record.created_unix_ns,
            expires_unix_ns=record.expires_unix_ns,
            source=state.facts.index,
            gpu_name=state.facts.name,
            suspended=record.suspended,
            goes_on=passage.goes_on,
            home=passage.home,
            programs=tuple((process.pid, process.start_time) for process in programs),
            generation=vgpu.generation,
            next_epoch=state.tokens.next_epoch,
            book=None if book is None else asdict(book),
            owned_bytes=vgpu.used_bytes,
            excess_bytes=vgpu.excess_bytes,
            trial=trial,
            origin=asdict(vgpu.origin),
            preempted=vgpu.preempted,
            standby=asdict(vgpu.standby) if vgpu.standby != NO_STANDBY else None,
        )

    async def _ask(self, to: int, request: MigrateIn) -> None:
        socket = self._state.settings.paths.server_socket(to)
        await ask(socket, Forward(uid=request.owner_uid, request=request), Arrival, ARRIVE_S)

    # --- where it comes to be

    async def arrive(self, arriving: MigrateIn) -> Arrival:
        """Take a vGPU of another GPU. With the answer it belongs to this one. Errors: as for ``create``; ``mode``;
        ``in-use`` for programs that began on another kind of GPU; ``unavailable`` until the journal has it."""
        state = self._state
        if arriving.vgpu not in state.vgpus:
            self._check_kind(arriving)
            state.require_descriptors()
            if arriving.trial:
                self._admit(arriving, trial=True)
                return Arrival()
            await self._take(arriving)
        vgpu = state.vgpus.get(arriving.vgpu)
        with trio.move_on_after(BROKER_S):
            if vgpu is not None:
                await vgpu.admits.wait()  # then no broker writes into the other GPU's pages
        if vgpu is not None and not vgpu.written:  # an earlier request still writes it, or has undone it
            text = f"{arriving.vgpu} is not in the journal of GPU {state.facts.index} yet"
            raise VgpuError(ErrorCode.UNAVAILABLE, text, "try again in a moment")
        return Arrival()

    def _admit(self, arriving: MigrateIn, *, trial: bool) -> VgpuRecord:
        state = self._state
        state.count_occupied(besides=0 if arriving.suspended else arriving.excess_bytes)
        registry = state.registry.copy() if trial else state.registry
        return registry.adopt(
            arriving.vgpu,
            arriving.spec,
            Owner(arriving.owner_uid, arriving.share_gid),
            arriving.created_unix_ns,
            arriving.expires_unix_ns,
            suspended=arriving.suspended,
            owned_bytes=0 if arriving.suspended else arriving.owned_bytes,
            again=f"vgpuctl migrate {arriving.vgpu} --gpu {state.facts.index}",
        )

    def _check_kind(self, arriving: MigrateIn) -> None:
        facts = self._state.facts
        if arriving.programs and arriving.gpu_name != facts.name and self._state.mode is Mode.TEMPORAL:
            raise VgpuError(
                ErrorCode.IN_USE,
                f"GPU {facts.index} is a {facts.name}, GPU {arriving.source} a {arriving.gpu_name}, and programs move "
                "between GPUs of one kind",
                "end them first: vgpuctl ps",
            )

    async def _take(self, arriving: MigrateIn) -> None:
        state, vgpu_id = self._state, arriving.vgpu
        record = self._admit(arriving, trial=False)
        state.advance_past(arriving.generation, arriving.next_epoch)
        programs = tuple(Process(*program) for program in arriving.programs)
        passage = MigrationState(goes_on=arriving.goes_on, home=arriving.home, programs=programs).arrived(
            arriving.source
        )
        # What the other GPU owes it, or it owes there, is no matter of this one.
        book = None if arriving.book is None else replace(_BOOK.validate_python(arriving.book), lag_ns=0)
        vgpu = state.enlist(record, book, passage=passage, quiesced=arriving.goes_on or arriving.suspended)
        vgpu.preempted = arriving.preempted
        if arriving.standby is not None:
            vgpu.standby = TypeAdapter(Standby).validate_python(arriving.standby)
        if arriving.origin is not None:
            vgpu.origin = TypeAdapter(Origin).validate_python(arriving.origin).confirm()
        state.apply_shares()
        vgpu.broker = find_broker(state.settings.paths, vgpu_id) or NO_PROCESS
        if not await state.persist(vgpu):
            self._removal.forget(vgpu)
            raise unwritten(state)
        self._brokers.claim(vgpu)
        state.nursery.start_soon(self._brokers.keep, vgpu)
        state.nursery.start_soon(self.be_released, vgpu)
        self._creations.watch(vgpu)
        if arriving.goes_on:
            state.nursery.start_soon(self.go_on, vgpu)
        text = f"{vgpu_id} migrated from GPU {arriving.source} to GPU {state.facts.index}: "
        state.record_event(EventType.MIGRATED, vgpu, text + counted(len(programs), "program"), source=arriving.source)

    async def be_released(self, vgpu: Vgpu) -> None:
        """Ask the source GPU until it has forgotten the vGPU. Its server may end for good after that."""
        while vgpu.passage.came_from is not None and not vgpu.removed.is_set():
            await trio.sleep(RELEASE_S)
            with suppress(VgpuError):
                await self.release(vgpu)

    async def release(self, vgpu: Vgpu) -> None:
        """Make sure that the source GPU has forgotten the vGPU. ``unavailable``: its server does not answer."""
        source = vgpu.passage.came_from
        if source is None:
            return
        socket = self._state.settings.paths.server_socket(source)
        inspect = Forward(uid=vgpu.record.owner.uid, request=Inspect(vgpu=vgpu.record.vgpu_id))
        try:
            await ask(socket, inspect, VgpuDetail, ARRIVE_S)
        except VgpuError as error:
            if error.code is ErrorCode.NOT_FOUND:
                vgpu.passage = vgpu.passage.released()
                return
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"{vgpu.record.vgpu_id} has just come from GPU {source}, whose server does not say that it has let it go",
            "try again in a moment; vgpuctl gpu ls",
        )
