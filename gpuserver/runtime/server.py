"""One GPU Server: the wiring of its services, and its lifetime. ``api/control.py`` answers requests.

The server makes, in this order: the lock of its directory, NVML, the journal, the relay page, the dispatcher's thread,
the vGPUs with their pages, and the socket. It gives them up in the reverse order. Brokers and processes outlive the
server, and find the next one.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.relaypage import RelayPage
from gpuserver.core.admission.registry import GpuCapacity, PerUser, Registry
from gpuserver.core.scheduler.interface import make_scheduler
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy, with_period
from gpuserver.core.states.migration import Step
from gpuserver.device.base import Checkpointer, Device, Partitioner
from gpuserver.runtime.api.control import Control
from gpuserver.runtime.housekeeping import Housekeeping
from gpuserver.runtime.journal import Journal, ServerRow
from gpuserver.runtime.leases.gangs import GangLinks
from gpuserver.runtime.leases.tokens import TokenLoop
from gpuserver.runtime.lifecycle.brokers import Brokers, find_broker
from gpuserver.runtime.lifecycle.creation import Creations
from gpuserver.runtime.lifecycle.idle_suspend import IdleSuspension
from gpuserver.runtime.lifecycle.migration import Migration
from gpuserver.runtime.lifecycle.removal import Removal
from gpuserver.runtime.lifecycle.reports import BrokerReports
from gpuserver.runtime.lifecycle.suspension import Suspension
from gpuserver.runtime.lifecycle.triggers import Triggers
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.memory.unmanaged import UnmanagedWatch
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.mps import MpsWatch, enter_mode
from gpuserver.runtime.state import GpuState, Settings, require_descriptors
from gpuserver.runtime.vgpus import NO_PROCESS, Vgpu
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.pacing import Pace, and_more
from vgpu.protocol.peer import is_running
from vgpu.protocol.stream import serve_links, until_replaced
from vgpu.share import Mode

log = get_logger(__name__)

_SHUTDOWN_S: Final = 5.0


class GpuServer:
    """One GPU's vGPUs, their tokens and their memory. ``run`` until SIGTERM."""

    def __init__(
        self, settings: Settings, gpu: Device, partitioner: Partitioner, checkpointer: Checkpointer, journal: Journal
    ) -> None:
        """Read the journal, find the brokers of the last server, and choose the mode. ``VgpuError``: why this server
        cannot serve."""
        self._settings = settings
        self._gpu = gpu
        self._partitioner = partitioner
        self._checkpointer = checkpointer
        self._journal = journal
        self._row, self._remembered = journal.begin()
        require_descriptors(settings, len(self._remembered))
        found = ((row.vgpu_id, find_broker(settings.paths, row.vgpu_id)) for row in self._remembered)
        self._found = {vgpu_id: broker for vgpu_id, broker in found if broker is not None}
        self._policy = policy_of(settings, self._row)
        self._mode, self._mode_reason = self._choose_mode()

    def _choose_mode(self) -> tuple[Mode, str]:
        """The mode to begin in. Processes or brokers that the last server left keep the mode that they have."""
        if self._row.mode and (self._found or any(is_running(p) for r in self._remembered for p in r.passage.programs)):
            kept = Mode(self._row.mode)
            if kept is Mode.SPATIAL:
                self._partitioner.start()
            return kept, "kept over a restart, for the processes that are attached"
        mode, reason = enter_mode(self._partitioner, self._gpu.facts, self._gpu.capabilities, self._settings.mode)
        return mode, "the default" if self._settings.mode == "temporal" else reason

    # --- life

    async def run(self, listener: trio.socket.SocketType) -> None:
        """Serve until SIGTERM or SIGINT."""
        with ExitStack() as owned:
            relay_page = RelayPage.create()
            owned.callback(relay_page.close)
            dispatcher = owned.enter_context(Dispatcher(relay_page))
            async with trio.open_nursery() as nursery:
                self._make_state(nursery, relay_page, dispatcher)
                owned.callback(self._state.close)
                self._make_services()
                owned.callback(self._brokers.template.end)
                self._restore()
                self._start(listener)
            dispatcher.close()

    def _make_state(self, nursery: trio.Nursery, relay_page: RelayPage, dispatcher: Dispatcher) -> None:
        settings, facts, limits = self._settings, self._gpu.facts, self._settings.limits
        scheduler = make_scheduler(self._mode, self._policy, first_epoch=self._row.next_epoch)
        tokens = TokenLoop(scheduler, dispatcher)
        per_user = PerUser(limits.vgpus_per_user, limits.vgpus_kept, frozenset({0, os.geteuid()}))
        self._state = GpuState(
            settings=settings,
            facts=facts,
            capabilities=self._gpu.capabilities,
            partitioner=self._partitioner,
            checkpointer=self._checkpointer,
            nursery=nursery,
            relay_page=relay_page,
            tokens=tokens,
            gangs=GangLinks(settings.paths, facts.index, tokens),
            registry=Registry(GpuCapacity(facts.total_memory_bytes, facts.sm_count), self._mode, per_user),
            journal=self._journal,
            row=self._row,
            policy=self._policy,
            mode=self._mode,
            mode_reason=self._mode_reason,
        )

    def _make_services(self) -> None:
        """Each service gets the state and the services that it calls, which are therefore made before it."""
        state = self._state
        self._mps = MpsWatch(
            state.partitioner, lambda: state.attached_count, lambda kind, text: state.record_event(kind, None, text)
        )
        self._memory = MemoryWatch(
            self._gpu,
            lambda: list(state.vgpus.values()),
            self._release,
            self._notice,
            lambda: self._mps.pid,
            UnmanagedWatch(state).judge,
        )
        state.left_bytes = lambda: self._memory.left_bytes
        self._swapping = Swapping(state, self._memory)
        reports = BrokerReports(state, self._memory, self._swapping.stores)
        self._brokers = Brokers(state, self._swapping.stores, reports, self._memory)
        self._suspension = Suspension(state, self._swapping, self._brokers, self._memory)
        removal = Removal(state, self._suspension, self._brokers, self._memory)
        self._creations = Creations(state, self._memory, self._brokers, self._swapping, self._suspension, removal)
        self._migration = Migration(state, self._suspension, self._brokers, self._creations, removal)
        self._triggers = Triggers(state, self._suspension)
        self._dozing = IdleSuspension(state, self._suspension, self._triggers)
        for call in (self._swapping.step_now, self._triggers.check_now, self._dozing.check_now):
            state.tokens.on_parked_want(call)
        state.gangs.on_residents(self._swapping.step_now)
        self._triggers.on_connection(self._dozing.check_now)
        self._housekeeping = Housekeeping(state, self._gpu, self._swapping, self._memory, self._migration, removal)
        self._control = Control(
            state,
            memory=self._memory,
            brokers=self._brokers,
            swapping=self._swapping,
            suspension=self._suspension,
            triggers=self._triggers,
            removal=removal,
            creations=self._creations,
            migration=self._migration,
            mps=self._mps,
        )

    async def _release(self, vgpu: Vgpu, slot: int, process: Process, keeps_shared: bool) -> bool:
        """``Brokers`` gets the memory watch when it is made, so the memory watch reaches it through this method."""
        return await self._brokers.gone(vgpu, slot, process, keeps_shared)

    def _notice(self, kind: EventType, vgpu: Vgpu | None, text: str, pid: int) -> None:
        self._state.record_event(kind, vgpu, text, pid=pid)

    def _start(self, listener: trio.socket.SocketType) -> None:
        """Start the endless tasks."""
        state = self._state
        most = state.settings.limits.links
        for task in (
            self._end_on_signal,
            self._end_when_replaced,
            state.tokens.run,
            state.gangs.run,
            self._memory.run,
            self._swapping.run,
            self._swapping.grow_ahead,
            self._dozing.run,
            self._triggers.run,
            partial(self._mps.run, lambda: state.mode is Mode.SPATIAL),
            self._housekeeping.run,
            self._brokers.template.keep,
            partial(serve_links, listener, self._control.serve, _complain, most=most),
        ):
            state.nursery.start_soon(task)
        log.info("serving", gpu=state.facts.uuid, mode=state.mode.value, why=state.mode_reason, vgpus=len(state.vgpus))

    async def _end_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                await self._end()

    async def _end_when_replaced(self) -> None:
        """End once no client reaches this server any more. The next node starts another server of this GPU."""
        await until_replaced(self._settings.paths.server_socket(self._settings.index))
        log.error("the server's socket was removed or replaced: it ends", gpu=self._state.facts.uuid)
        await self._end()

    async def _end(self) -> None:
        state = self._state
        with trio.move_on_after(_SHUTDOWN_S, shield=True):
            await self._brokers.stop(tuple(state.vgpus.values()))
            await state.persist()
            if state.mode is Mode.SPATIAL and not state.attached_count:
                await self._mps.stop()
        log.info("stopped", gpu=state.facts.uuid)
        state.nursery.cancel_scope.cancel()

    def _restore(self) -> None:
        """Enlist the vGPUs of the journal, each under a grants page of this server's generation."""
        state, rows = self._state, self._remembered
        start_soon = state.nursery.start_soon
        state.registry.draining = state.row.draining
        state.registry.restore(
            (
                *(r.vgpu_id, r.key, r.spec, r.owner, r.created_unix_ns, r.expires_unix_ns),
                r.suspended and not (r.passage.goes_on or r.idle_suspended),  # otherwise its place is kept for it
            )
            for r in rows
        )
        for row in rows:
            vgpu = state.enlist(state.registry[row.vgpu_id], row.book, passage=row.passage, quiesced=row.suspended)
            vgpu.idle_suspended, vgpu.written, vgpu.origin = row.idle_suspended, True, row.origin
            vgpu.returning, vgpu.preempted, vgpu.standby = row.members, row.preempted, row.standby
            vgpu.broker = self._found.get(row.vgpu_id, NO_PROCESS)
            if row.passage.next_step is Step.ASK:
                start_soon(self._migration.settle, vgpu)
                continue
            self._brokers.claim(vgpu)
            start_soon(self._brokers.keep, vgpu)
            start_soon(self._migration.be_released, vgpu)
            self._creations.watch(vgpu)
            if row.passage.next_step is Step.GO_ON:
                start_soon(self._migration.go_on, vgpu)
        self._remembered = []


def policy_of(settings: Settings, row: ServerRow) -> Policy:
    """The default policy, with period and window of the settings, else those of the last ``gpu set``."""
    policy = DEFAULT_POLICY
    if period_ns := settings.period_ns or row.period_ns:
        policy = with_period(policy, period_ns)
    if window_ns := settings.window_ns or row.window_ns:
        policy = replace(policy, window_ns=window_ns)
    return policy


_complaints: Final[Pace[str]] = Pace(1.0)


def _complain(error: OSError) -> None:
    missed = _complaints.due("", time.monotonic())
    if missed is not None:
        log.warning("cannot accept a link", reason=str(error) + and_more(missed))
