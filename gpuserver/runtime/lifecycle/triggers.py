"""Resumes suspended vGPUs by their triggers: the shell of ``gpuserver.core.states.standby``.

A connection to a port of a vGPU is found in the kernel's tables, and stays the program's: the server accepts nothing.
To read the tables takes milliseconds, so the server reads them only after the number of connections that the network
namespace has accepted has changed. It spends at most ``SCAN_RATIO`` of its time on a namespace whose number changes all
the time. An idle-suspended vGPU with --resume-on has its connections noticed here, and is resumed by
gpuserver/runtime/lifecycle/idle_suspend.py.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import trio

from gpuserver.core.observe.sockets import arrived, connections
from gpuserver.core.states.standby import NO_STANDBY, Seen, Standby, cause_of, decide
from gpuserver.runtime.lifecycle.ports import (
    SocketOwners,
    Tables,
    check_heard,
    count_accepted,
    known_marks,
    read_tables,
    survey,
    unheard,
)
from gpuserver.runtime.lifecycle.suspension import Suspension, reason_of
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.protocol.messages import Suspend
from vgpu.protocol.triggers import ports_of

LOOK_S: Final = 0.025
NEWS_S: Final = 0.1
"""Without a vGPU that waits for a trigger: how long until the first one is noticed."""
SCAN_RATIO: Final = 0.05
SURVEY_S: Final = 1.0
"""At least so long between two surveys of a vGPU's processes, and between two checks that a connection is there."""
UNHEARD_S: Final = 5.0
"""While no process listens on one of the ports: how long until the next survey. It reads of each process of the machine
whether that names the vGPU."""


@dataclass(slots=True)
class Watch:
    """Of a vGPU that waits for a trigger."""

    standby: Standby
    known: frozenset[int]
    seen: SocketOwners | None = None
    surveyed_at: float = float("-inf")
    scanned_at: float = float("-inf")
    failures: int = 0
    tried_ns: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """A network namespace: how many connections it had accepted at its last scan, and when the next one may be."""

    accepted: int | None = None
    free_at: float = float("-inf")


NOT_SCANNED: Final = Space()


class Triggers:
    """The triggers of all suspended vGPUs."""

    def __init__(self, state: GpuState, suspension: Suspension) -> None:
        self._state = state
        self._suspension = suspension
        self._watches: dict[Vgpu, Watch] = {}
        self._spaces: dict[int, Space] = {}

    # --- a request

    async def prepare(self, vgpu: Vgpu, asked: Suspend) -> Standby:
        """What the vGPU is to wait for. ``VgpuError`` (invalid): a trigger that can never be."""
        at_unix_s, vgpu_id = asked.resume_at_unix_s, vgpu.record.vgpu_id
        if not asked.resume_on and at_unix_s is None:
            return NO_STANDBY
        self._suspension.check(vgpu)
        if at_unix_s is not None and at_unix_s <= time.time():
            raise VgpuError(ErrorCode.INVALID, "the time of --resume-at is past", "write a time to come, or: 90m")
        known: tuple[int, ...] = ()
        if ports := ports_of(asked.resume_on):
            seen, tables = await self._survey(vgpu)
            check_heard(vgpu_id, seen, tables, ports)
            known = known_marks(tables, ports)
        return Standby(asked.resume_on, at_unix_s, known)

    async def when_idle(self, vgpu: Vgpu) -> Standby:
        """What an idle vGPU is to wait for, besides a CUDA call."""
        ports = ports_of(triggers := vgpu.record.spec.resume_on)
        if not ports:
            return NO_STANDBY
        _, tables = await self._survey(vgpu)
        return Standby(triggers, known=known_marks(tables, ports))

    async def _survey(self, vgpu: Vgpu) -> tuple[SocketOwners, Tables]:
        record = vgpu.record
        owners = {record.vgpu_id: record.owner.uid} if record.owner.share_gid < 0 and not vgpu.mountable else {}
        paths, programs = self._state.settings.paths, vgpu.programs

        def read() -> tuple[SocketOwners, Tables]:
            found = survey(record.vgpu_id, programs, paths, owners)
            return found, read_tables(found.spaces)

        return await trio.to_thread.run_sync(read)

    # --- looking

    async def run(self) -> None:
        while True:
            for vgpu in list(self._state.vgpus.values()):
                if vgpu.idle_suspended and vgpu.standby.triggers != vgpu.record.spec.resume_on:  # it was changed
                    vgpu.standby = await self.when_idle(vgpu)
            watched = [vgpu for vgpu in self._state.vgpus.values() if waits(vgpu)]
            self._watches = {vgpu: self._watch(vgpu) for vgpu in watched}
            with_ports = [vgpu for vgpu in watched if vgpu.standby.ports]
            await self._look_at_ports(with_ports)
            for vgpu in watched:
                self._check(vgpu)
            await trio.sleep(LOOK_S if watched else NEWS_S)

    def _watch(self, vgpu: Vgpu) -> Watch:
        """As long as it waits for the same."""
        watch = self._watches.get(vgpu)
        if watch is None or watch.standby != vgpu.standby:
            vgpu.connected_port, vgpu.unheard_ports = 0, ()
            return Watch(vgpu.standby, frozenset(vgpu.standby.known))
        return watch

    async def _look_at_ports(self, vgpus: list[Vgpu]) -> None:
        now = trio.current_time()
        for vgpu in vgpus:
            watch = self._watches[vgpu]
            pause_s = SURVEY_S if watch.seen is None else UNHEARD_S if vgpu.unheard_ports else math.inf
            if now >= watch.surveyed_at + pause_s:
                await self._look_anew(vgpu, watch)
        counts: dict[int, int | None] = {}
        spaces: dict[int, int] = {}
        for vgpu in vgpus:
            spaces |= self._changed(vgpu, self._watches[vgpu], counts)
        if not spaces:
            return
        ports = frozenset(port for vgpu in vgpus for port in vgpu.standby.ports)
        began = trio.current_time()
        tables = await trio.to_thread.run_sync(read_tables, spaces, ports)
        took = trio.current_time() - began
        for space in spaces:
            self._spaces[space] = Space(counts[space], began + took / SCAN_RATIO)
        for vgpu in vgpus:
            self._judge(vgpu, self._watches[vgpu], tables)
        used = {space for watch in self._watches.values() if watch.seen is not None for space in watch.seen.spaces}
        self._spaces = {space: known for space, known in self._spaces.items() if space in used}

    def _changed(self, vgpu: Vgpu, watch: Watch, counts: dict[int, int | None]) -> dict[int, int]:
        """The namespaces of a vGPU whose tables are to be read. ``counts``: of namespaces that were read already."""
        if watch.seen is None:
            return {}
        now, found = trio.current_time(), {}
        again = vgpu.connected_port and now >= watch.scanned_at + SURVEY_S
        for space, pid in watch.seen.spaces.items():
            known = self._spaces.get(space, NOT_SCANNED)
            if now < known.free_at:
                continue
            try:
                if space not in counts:
                    counts[space] = count_accepted(pid)
            except OSError:
                watch.seen = None
                return {}
            count = counts[space]
            if again or count is None or count != known.accepted:
                found[space] = pid
        return found

    async def _look_anew(self, vgpu: Vgpu, watch: Watch) -> None:
        watch.surveyed_at = trio.current_time()
        watch.seen, tables = await self._survey(vgpu)
        vgpu.unheard_ports = () if watch.seen.hidden else unheard(watch.seen, tables, watch.standby.ports)
        self._note(vgpu, watch, watch.seen, tables)
        if not vgpu.connected_port:  # what is new was made to a socket of another program
            watch.known = frozenset(known_marks(tables, watch.standby.ports))

    def _judge(self, vgpu: Vgpu, watch: Watch, tables: Tables) -> None:
        seen, ports = watch.seen, watch.standby.ports
        if seen is None or not (seen.spaces.keys() & tables.keys()):
            return
        own = [sockets for space, sockets in tables.items() if space in seen.spaces]
        fresh = any(one.mark not in watch.known for sockets in own for one in connections(sockets, ports))
        self._note(vgpu, watch, seen, tables)
        if fresh and not vgpu.connected_port:  # a program may have begun to listen since
            watch.seen = None

    def _note(self, vgpu: Vgpu, watch: Watch, seen: SocketOwners, tables: Tables) -> None:
        port, ports = self._arrived(watch, seen, tables), watch.standby.ports
        whole = seen.spaces.keys() <= tables.keys()
        if port is not None or whole:
            vgpu.connected_port = port or 0
        if whole:  # the ends of a connection that is over may be those of another one
            watch.known &= frozenset(known_marks(tables, ports))
            watch.scanned_at = trio.current_time()

    @staticmethod
    def _arrived(watch: Watch, seen: SocketOwners, tables: Tables) -> int | None:
        ports = watch.standby.ports
        own = (sockets for space, sockets in tables.items() if space in seen.spaces)
        found = (arrived(sockets, ports, watch.known, seen.inodes) for sockets in own)
        return next((one.port for one in found if one is not None), None)

    # --- deciding

    def _seen(self, vgpu: Vgpu, watch: Watch) -> Seen:
        return Seen(
            now_unix_s=time.time(),
            calls=self._state.tokens.wants(vgpu.record.key),
            starts=vgpu.starting > 0,
            ends=vgpu.activity is not None and vgpu.activity.ends,
            port=vgpu.connected_port,
            failures=watch.failures,
            tried_ns=watch.tried_ns,
        )

    def _check(self, vgpu: Vgpu) -> None:
        watch = self._watches[vgpu]
        known = vgpu.link is not None and vgpu.activity is not None
        if not known or vgpu.idle_suspended or vgpu.lifecycle_lock.locked():
            return
        seen = self._seen(vgpu, watch)
        if decide(vgpu.standby, seen, time.monotonic_ns()) is not None:
            self._state.nursery.start_soon(self._resume, vgpu, watch)
        elif watch.failures and cause_of(vgpu.standby, seen) is None:  # a client that has given up
            watch.failures, vgpu.suspend_error = 0, ""

    async def _resume(self, vgpu: Vgpu, watch: Watch) -> None:
        async with vgpu.lifecycle_lock:
            if not waits(vgpu) or vgpu.idle_suspended or vgpu.standby != watch.standby:
                return
            cause = decide(vgpu.standby, self._seen(vgpu, watch), time.monotonic_ns())
            if cause is None:
                return
            try:
                await self._suspension.bring_back(vgpu, cause)
            except VgpuError as error:
                if error.message != vgpu.suspend_error:  # once for each reason: it is tried again and again
                    text = f"{error.message}; {reason_of(vgpu, cause)}"
                    self._state.record_event(EventType.NOT_RESUMED, vgpu, text, cause=cause.value)
                vgpu.suspend_error = error.message
                watch.failures += 1
                watch.tried_ns = time.monotonic_ns()


def waits(vgpu: Vgpu) -> bool:
    """It is suspended, and has triggers that this server sees to."""
    gone = vgpu.removed.is_set() or vgpu.passage.leaving is not None
    return vgpu.quiesced and vgpu.standby != NO_STANDBY and not gone
