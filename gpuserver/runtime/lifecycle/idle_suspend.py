"""Suspends vGPUs that are idle, and brings them back (--idle-suspend): the shell of ``gpuserver.core.states.idle``.

The hook of an idle-suspended program reports that it wants the GPU (cython_ext/hook/gate/monitor_thread.pyx): a thread
waits for a lease, or for swapped memory, or is in the driver, which a checkpointed process does not leave. Calls that
need no lease, such as copies, show in the processes' counters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from gpuserver.core.states.idle import IdleState, Step, decide
from gpuserver.core.states.standby import Cause
from gpuserver.runtime.bell import Bell
from gpuserver.runtime.lifecycle.suspension import Suspension
from gpuserver.runtime.lifecycle.triggers import Triggers
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process

LOOK_S: Final = 0.05
"""Between two checks. A CUDA call of an idle-suspended vGPU, and a connection to a port of one, end the pause."""
NEWS_S: Final = 0.5
"""Without a vGPU that has --idle-suspend: how long until the first one is noticed."""
COUNT_NS: Final = 1_000_000_000
Counts = dict[Process, tuple[int, int, int]]


@dataclass(slots=True)
class Watch:
    """Of a vGPU. ``counts``: by process, launches, copies and bytes; None: not read yet."""

    used_ns: int
    dozed_ns: int
    counts: Counts | None = None
    counted_ns: int = 0
    failures: int = 0
    tried_ns: int = 0


class IdleSuspension:
    """All vGPUs with --idle-suspend."""

    def __init__(self, state: GpuState, suspension: Suspension, triggers: Triggers) -> None:
        self._state = state
        self._suspension = suspension
        self._triggers = triggers
        self._watches: dict[Vgpu, Watch] = {}
        self._bell = Bell()

    def check_now(self) -> None:
        """An idle-suspended vGPU may be wanted."""
        self._bell.ring()

    async def run(self) -> None:
        while True:
            for vgpu in list(self._state.vgpus.values()):
                self._check(vgpu)
            self._watches = {v: w for v, w in self._watches.items() if self._state.vgpus.get(v.record.vgpu_id) is v}
            await self._bell.wait(LOOK_S if self._watches else NEWS_S)

    def _check(self, vgpu: Vgpu) -> None:
        if vgpu.removed.is_set() or not (vgpu.idle_suspended or vgpu.record.spec.idle_suspend_ns):
            if self._watches.pop(vgpu, None) is not None:
                vgpu.suspend_error = ""
            return
        now_ns = time.monotonic_ns()
        watch = self._watches.setdefault(vgpu, Watch(used_ns=now_ns, dozed_ns=now_ns))
        self._note_use(vgpu, watch, now_ns)
        known = vgpu.link is not None and vgpu.activity is not None
        if (
            known
            and not vgpu.lifecycle_lock.locked()
            and decide(self._idle_state(vgpu, watch), now_ns) is not Step.STAY
        ):
            self._state.nursery.start_soon(self._move, vgpu, watch)

    def _idle_state(self, vgpu: Vgpu, watch: Watch) -> IdleState:
        return IdleState(
            patience_ns=vgpu.record.spec.idle_suspend_ns,
            used_ns=watch.used_ns,
            wants=self._wants(vgpu),
            programs=bool(vgpu.programs),
            suspended=bool(vgpu.idle_suspended),
            suspended_ns=watch.dozed_ns,
            quiesced=vgpu.quiesced or vgpu.passage.leaving is not None,
            failures=watch.failures,
            tried_ns=watch.tried_ns,
        )

    def _wants(self, vgpu: Vgpu) -> bool:
        """One that ends wants to be let: its last calls of the driver wait for ever where it stands still. One with a
        new connection to a port of --resume-on is about to want the GPU. A vGPU that is swapped with its group is not
        idle while the group wants its GPUs."""
        ends = vgpu.activity is not None and vgpu.activity.ends
        return self._state.tokens.wants(vgpu.record.key) or ends or bool(vgpu.connected_port) or vgpu.group_wants

    def _cause(self, vgpu: Vgpu) -> Cause:
        """Why it is resumed."""
        if vgpu.connected_port:
            return Cause.CONNECTION
        if not vgpu.record.spec.idle_suspend_ns:
            return Cause.REQUEST
        ends = vgpu.activity is not None and vgpu.activity.ends
        return Cause.END if ends or not vgpu.programs else Cause.CALL

    def _note_use(self, vgpu: Vgpu, watch: Watch, now_ns: int) -> None:
        tokens, key = self._state.tokens, vgpu.record.key
        watch.used_ns = max(watch.used_ns, now_ns if self._wants(vgpu) else tokens.last_event_ns(key))
        if now_ns >= watch.counted_ns + COUNT_NS:
            self._count(vgpu, watch, now_ns)

    def _count(self, vgpu: Vgpu, watch: Watch, now_ns: int) -> None:
        if vgpu.activity is None:
            return
        counts = {
            Process(slot.pid, slot.start_time): (slot.launches, slot.copies, slot.charged_bytes) for slot in vgpu.alive
        }
        if watch.counts is not None and any(watch.counts.get(process) != count for process, count in counts.items()):
            watch.used_ns = now_ns
        watch.counts, watch.counted_ns = counts, now_ns

    async def _move(self, vgpu: Vgpu, watch: Watch) -> None:
        async with vgpu.lifecycle_lock:
            try:
                step = self._step(vgpu, watch)
                if step is Step.SUSPEND:
                    standby = await self._triggers.when_idle(vgpu)
                    step = self._step(vgpu, watch)  # it may have been used since
                if step is Step.STAY:
                    return
                if step is Step.SUSPEND:
                    await self._suspension.suspend_idle(vgpu, standby)
                else:
                    await self._suspension.bring_back(vgpu, self._cause(vgpu))
            except VgpuError as error:
                self._record(vgpu, error.message)
                watch.failures += 1
                watch.tried_ns = time.monotonic_ns()
                return
            watch.failures, vgpu.suspend_error = 0, ""
            # The last report was the end of its work. A want that has come since is still set.
            watch.used_ns = watch.dozed_ns = time.monotonic_ns()

    def _step(self, vgpu: Vgpu, watch: Watch) -> Step:
        if vgpu.removed.is_set():
            return Step.STAY
        now_ns = time.monotonic_ns()
        self._count(vgpu, watch, now_ns)
        return decide(self._idle_state(vgpu, watch), now_ns)

    def _record(self, vgpu: Vgpu, reason: str) -> None:
        """Once for each reason: it is tried again and again."""
        if reason != vgpu.suspend_error:
            self._state.record_event(
                EventType.NOT_RESUMED if vgpu.idle_suspended else EventType.NOT_SUSPENDED, vgpu, reason
            )
        vgpu.suspend_error = reason
