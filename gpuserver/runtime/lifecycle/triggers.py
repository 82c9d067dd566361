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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from gpuserver.core.observe.sockets import arrived
from gpuserver.core.states.standby import NO_STANDBY, Seen, Standby, cause_of, decide
from gpuserver.runtime.bell import Bell
from gpuserver.runtime.lifecycle.ports import (
    SocketOwners,
    Tables,
    check_heard,
    count_accepted,
    known_marks,
    read_tables,
    unheard,
)
from gpuserver.runtime.lifecycle.surveys import Surveys
from gpuserver.runtime.lifecycle.suspension import Suspension, reason_of
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.protocol.messages import Suspend
from vgpu.protocol.triggers import ports_of

LOOK_S: Final = 0.025
"""Between two checks of the ports; a CUDA call needs no check."""
NEWS_S: Final = 0.1
"""Without ports: how long until a vGPU that waits, or a start or an end of a program of one, is noticed."""
SCAN_RATIO: Final = 0.05
SURVEY_S: Final = 1.0
"""At least so long between two surveys of a vGPU's processes, and between two checks that a connection is there."""
UNHEARD_S: Final = 5.0
"""While no process listens on one of the ports: how long until the next survey. It reads of each process of the machine
whether that names the vGPU."""


@dataclass(slots=True)
class Watch:
    """Of a vGPU that waits for a trigger. ``known``: connections that are no trigger. ``doubted``: new ones, which were
    made to no socket of the last survey; if the next one has none either, they are another program's. ``unread``:
    namespaces whose tables are to be read, whatever their counters say."""

    standby: Standby
    known: frozenset[int]
    doubted: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    seen: SocketOwners | None = None
    surveys: bool = False
    surveyed_at: float = float("-inf")
    scanned_at: float = float("-inf")
    failure: str = ""
    """Of the last survey."""
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
        self._surveys = Surveys(state)
        self._watches: dict[Vgpu, Watch] = {}
        self._spaces: dict[int, Space] = {}
        self._changing: set[Vgpu] = set()
        self._calls = Bell()
        self._on_connection: Callable[[], None] = lambda: None

    def on_connection(self, call: Callable[[], None]) -> None:
        """``call`` is called when there is a new connection to a port of an idle-suspended vGPU."""
        self._on_connection = call

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
            seen, tables = await self._surveys.of(vgpu)
            check_heard(vgpu_id, seen, tables, ports)
            known = known_marks(tables, ports)
        return Standby(asked.resume_on, at_unix_s, known)

    async def when_idle(self, vgpu: Vgpu) -> Standby:
        """What an idle vGPU is to wait for, besides a CUDA call."""
        ports = ports_of(triggers := vgpu.record.spec.resume_on)
        if not ports:
            return NO_STANDBY
        _, tables = await self._surveys.of(vgpu)
        return Standby(triggers, known=known_marks(tables, ports))

    # --- looking

    def check_now(self) -> None:
        """There may be a CUDA call of a suspended vGPU."""
        self._calls.ring()

    async def run(self) -> None:
        while True:
            vgpus = list(self._state.vgpus.values())
            self._surveys.keep(vgpus)
            for vgpu in vgpus:
                if is_changed(vgpu) and vgpu not in self._changing:
                    self._changing.add(vgpu)
                    self._state.nursery.start_soon(self._change, vgpu)
            watched = [vgpu for vgpu in self._state.vgpus.values() if waits(vgpu)]
            self._watches = {vgpu: self._watch(vgpu) for vgpu in watched}
            with_ports = [vgpu for vgpu in watched if vgpu.standby.ports]
            await self._look_at_ports(with_ports)
            for vgpu in watched:
                self._check(vgpu)
            next_look = trio.current_time() + (LOOK_S if with_ports else self._pause_s(time.time()))
            while (left_s := next_look - trio.current_time()) > 0 and await self._calls.wait(left_s):
                if any(waits(vgpu) and vgpu not in self._watches for vgpu in self._state.vgpus.values()):
                    break  # it was suspended meanwhile
                for vgpu in watched:
                    self._check(vgpu)

    def _pause_s(self, now_unix_s: float) -> float:
        """Until the first of their times, and at most ``NEWS_S``. A call has rung already if its vGPU is just being
        suspended, or could not be resumed."""
        if any(watch.failures or vgpu.lifecycle_lock.locked() for vgpu, watch in self._watches.items()):
            return LOOK_S
        times = [vgpu.standby.at_unix_s for vgpu in self._watches if vgpu.standby.at_unix_s is not None]
        return min([NEWS_S, *(max(LOOK_S, at - now_unix_s) for at in times)])

    async def _change(self, vgpu: Vgpu) -> None:
        """To the triggers that an idle-suspended vGPU has by now. If a survey fails, the next round tries again."""
        before = vgpu.standby
        with suppress(VgpuError):
            standby = await self.when_idle(vgpu)
            if is_changed(vgpu) and vgpu.standby is before:  # a person may have suspended it meanwhile
                vgpu.standby = standby
        self._changing.discard(vgpu)

    def _holds(self, vgpu: Vgpu, watch: Watch) -> bool:
        """Whether the vGPU still waits for what the watch is about. It may have been resumed during an await."""
        return self._watches.get(vgpu) is watch and waits(vgpu) and vgpu.standby is watch.standby

    def _watch(self, vgpu: Vgpu) -> Watch:
        """As long as it waits for the same."""
        watch = self._watches.get(vgpu)
        if watch is None or watch.standby is not vgpu.standby:
            vgpu.connected_port, vgpu.unheard_ports = 0, ()
            return Watch(vgpu.standby, frozenset(vgpu.standby.known))
        return watch

    async def _look_at_ports(self, vgpus: list[Vgpu]) -> None:
        now = trio.current_time()
        for vgpu in vgpus:
            watch = self._watches[vgpu]
            pause_s = SURVEY_S if watch.seen is None else UNHEARD_S if vgpu.unheard_ports else math.inf
            if not watch.surveys and now >= watch.surveyed_at + pause_s:
                watch.surveys = True
                self._state.nursery.start_soon(self._look_anew, vgpu, watch)
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
            if self._holds(vgpu, self._watches[vgpu]):
                self._judge(vgpu, self._watches[vgpu], tables)
        used = {space for watch in self._watches.values() if watch.seen is not None for space in watch.seen.spaces}
        self._spaces = {space: known for space, known in self._spaces.items() if space in used}

    def _changed(self, vgpu: Vgpu, watch: Watch, counts: dict[int, int | None]) -> dict[int, int]:
        """The namespaces of a vGPU whose tables are to be read. ``counts``: of namespaces that were read already."""
        if watch.seen is None or watch.surveys:
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
            if again or space in watch.unread or count is None or count != known.accepted:
                found[space] = pid
        return found

    async def _look_anew(self, vgpu: Vgpu, watch: Watch) -> None:
        """In a task of its own, since a survey may take long. The tables are read again afterwards: what came during
        the survey is in none of its own."""
        found, failure = None, ""
        try:
            found = await self._surveys.of(vgpu)
        except VgpuError as error:
            failure = error.message
        watch.surveys, watch.surveyed_at = False, trio.current_time()
        if not self._holds(vgpu, watch):
            return
        if vgpu.suspend_error in {"", watch.failure}:
            vgpu.suspend_error = failure
        watch.failure = failure
        if found is not None:
            watch.seen = found[0]
        watch.unread = frozenset(watch.seen.spaces) if watch.seen is not None else frozenset()
        if found is None:
            return
        seen, tables = found
        vgpu.unheard_ports = () if seen.hidden else unheard(seen, tables, watch.standby.ports)
        self._note(vgpu, watch, seen, tables)
        if not vgpu.connected_port:
            watch.known |= watch.doubted & frozenset(known_marks(tables, watch.standby.ports))
        watch.doubted = frozenset()

    def _judge(self, vgpu: Vgpu, watch: Watch, tables: Tables) -> None:
        seen, ports = watch.seen, watch.standby.ports
        if seen is None or watch.surveys or not (seen.spaces.keys() & tables.keys()):
            return
        own = {space: sockets for space, sockets in tables.items() if space in seen.spaces}
        watch.unread -= own.keys()
        self._note(vgpu, watch, seen, tables)
        doubted = frozenset(known_marks(own, ports)) - watch.known
        if doubted and not vgpu.connected_port:  # a program may have begun to listen since
            watch.seen, watch.doubted = None, doubted

    def _note(self, vgpu: Vgpu, watch: Watch, seen: SocketOwners, tables: Tables) -> None:
        port, ports = self._arrived(watch, seen, tables), watch.standby.ports
        whole = seen.spaces.keys() <= tables.keys()
        if port is not None or whole:
            vgpu.connected_port = port or 0
        if vgpu.connected_port and vgpu.idle_suspended:
            self._on_connection()
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
        if not self._holds(vgpu, watch):
            return
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
            if not waits(vgpu) or vgpu.idle_suspended or vgpu.standby is not watch.standby:
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


def is_changed(vgpu: Vgpu) -> bool:
    """It is idle-suspended, and its triggers are no more those that it waits for."""
    asleep = bool(vgpu.idle_suspended) and not vgpu.lifecycle_lock.locked()
    return asleep and vgpu.standby.triggers != vgpu.record.spec.resume_on
