"""A GPU with its dispatcher and its applications, as discrete events: what the schedulers are tested against.

The dispatcher follows the contract of ``gpuserver.core.scheduler.leases`` to the letter; messages take time both ways.
Applications run serial kernels with jitter, pay a refill gap at the first launch of a lease, may pause, stop for ever,
or run kernels far longer than their lease. ``Run.records`` is what an outside observer sees: who held the GPU when.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cython_ext.testing.bindings_logic import EARLY_NS
from gpuserver.core.scheduler.leases import (
    AccountState,
    Added,
    Allow,
    Changed,
    Command,
    Drained,
    Event,
    Idle,
    Lease,
    LeaseStarted,
    Measured,
    Observed,
    Publish,
    Removed,
    Runnable,
    Tick,
    Withdraw,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from tests.core.timeline import Timeline, Watch
from vgpu.share import Share

US = 1_000
TAIL_NS = 150_000
CLOSE_NS = 1_000_000
HUSH_NS = 5_000_000
MS = 1_000_000
S = 1_000_000_000


@dataclass(frozen=True)
class Work:
    """What an application does: ``burst`` kernels, then a pause, for ever. burst None: it never pauses."""

    kernel_ns: int = MS
    jitter: float = 0.05
    refill_ns: int = 100 * US
    burst: int | None = None
    pause_ns: int = 0
    start_ns: int = 0
    stop_ns: int | None = None
    """When the process is stopped: what it submitted finishes, and nobody hears of it."""
    resume_ns: int | None = None
    teaches: bool = True
    """Whether its hook reports kernel lengths and refill gaps."""
    demands_ppm: tuple[int, ...] = (0,)
    """What its hook measures of its demand, for ``demand_ns`` each, over and over; 0: nothing yet."""
    demand_ns: int = S
    tails: bool = False
    """Whether its hook says that the last kernel of a lease is about to end; the next holder then has GO."""

    def demand_at(self, now_ns: int) -> int:
        return self.demands_ppm[now_ns // self.demand_ns % len(self.demands_ppm)]


@dataclass
class Record:
    """One lease as seen from outside."""

    key: int
    epoch: int
    go_ns: int
    drained_ns: int | None = None
    busy_ns: int = 0
    planned_end_ns: int | None = None
    tail_ns: int | None = None
    """From here on it takes no more work, and others may have GO."""
    beyond_ns: int = 0
    """How far a kernel went beyond what it was allowed under a lease without an end."""
    shares_overlap: bool = False
    """It went at the tails of others: they divide the overlap."""

    def overrun_ns(self) -> int:
        if self.drained_ns is None or self.planned_end_ns is None:
            return self.beyond_ns
        return max(self.beyond_ns, self.drained_ns - max(self.planned_end_ns, self.go_ns))


@dataclass
class Published:
    lease: Lease
    went_ns: int | None = None
    record: Record | None = None
    stood_ns: int | None = None
    """It is a standing one since then, or was before it was granted."""


@dataclass
class App:
    key: int
    work: Work
    wants: bool = False
    left: int = 0
    held: Published | None = None
    first: bool = True
    busy_until_ns: int = 0
    running: bool = False
    begun: int = 0
    """When its kernel was."""
    stopped: bool = False
    generation: int = 0
    allowed: tuple[int, int] | None = None
    """Under its open-ended lease with that epoch it may use so much GPU time."""
    finished: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of every kernel."""


def opens_ns(lease: Lease) -> int:
    """From when on it may have GO, if nobody is in its way."""
    if lease.early:
        return 0
    return lease.start_ns - (EARLY_NS if lease.after else 0)


def command_name(command: Command) -> tuple[int, int]:
    """Of which lease it speaks: key and epoch."""
    about = command.lease if isinstance(command, Publish) else command
    return about.vgpu, about.epoch


class Run(Timeline):
    """One simulated GPU. ``scheduler`` decides, ``shares[i]`` and ``works[i]`` describe vGPU i."""

    def __init__(
        self,
        scheduler: Any,
        shares: list[Share],
        works: list[Work],
        *,
        seed: int = 0,
        up_ns: int = 100 * US,
        down_ns: int = 50 * US,
        keys: list[int] | None = None,
        watch: Watch | None = None,
        together: bool = False,
        taking: bool = False,
    ) -> None:
        super().__init__(scheduler, up_ns=up_ns, down_ns=down_ns, watch=watch, together=together)
        self.random = random.Random(seed)
        self.taking = random.Random(seed) if taking else None
        self.keys = keys if keys is not None else list(range(len(shares)))
        self.published: dict[int, dict[int, Published]] = {k: {} for k in self.keys}
        self.drained: set[tuple[int, int]] = set()
        self.tails: set[tuple[int, int]] = set()
        self.unheard: set[int] = set()
        """The vGPUs that hold a standby lease which the scheduler has not published again."""
        self.first_epochs: dict[int, int] = {}
        """By key: what was said of older leases was of one that is gone."""
        self.records: list[Record] = []
        self.apps = {k: App(k, w) for k, w in zip(self.keys, works, strict=True)}
        self.wanting: dict[int, list[tuple[int, int | None]]] = {k: [] for k in self.keys}
        self.broken: list[str] = []
        """Where the scheduler broke the contract with its dispatcher."""
        self.shares = dict(zip(self.keys, shares, strict=True))
        self.spans: tuple[int, list[tuple[int, int, int]]] | None = None
        self.measured_ns = -S
        self.over = False
        """Nobody arrives any more."""
        for key, share in self.shares.items():
            self._deliver(Added(key, share))
        for app in self.apps.values():
            self._begin(app)

    def add(self, key: int, share: Share, work: Work, book: AccountState | None = None) -> None:
        self.keys.append(key)
        self.shares[key] = share
        self.published[key], self.wanting[key] = {}, []
        self.apps[key] = App(key, work)
        self._deliver(Added(key, share, book))
        self._begin(self.apps[key])

    def change(self, key: int, share: Share) -> None:
        self.shares[key] = share
        self._deliver(Changed(key, share))

    def remove(self, key: int) -> None:
        """The vGPU is gone with its processes; what they had on the GPU is gone too."""
        app = self.apps[key]
        app.wants, app.stopped, app.held = False, True, None
        for held in self.published[key].values():
            if held.record is not None:
                held.record.drained_ns, held.record.planned_end_ns = self.now_ns, held.lease.end_ns
        self.published[key] = {}
        self.unheard.discard(key)
        self._deliver(Removed(key))
        self.first_epochs[key] = self.scheduler.next_epoch
        self.keys.remove(key)
        del self.shares[key]
        self._give_go()

    def _begin(self, app: App) -> None:
        work = app.work
        self.at(max(self.now_ns, work.start_ns), lambda: self._arrive(app))
        if work.stop_ns is not None:
            self.at(work.stop_ns, lambda: self.stop(app.key))
        if work.resume_ns is not None:
            self.at(work.resume_ns, lambda: self.resume(app.key))

    # --- dispatcher

    def _knows(self, event: Event) -> bool:
        return isinstance(event, Added | Tick) or event.vgpu in self.shares

    def _execute(self, command: Command) -> None:
        key, epoch = command_name(command)
        if key not in self.shares or epoch < self.first_epochs.get(key, 0):
            return
        if isinstance(command, Withdraw):
            held = self.published[command.vgpu].get(command.epoch)
            if held is None:
                return
            if held.went_ns is None:
                del self.published[command.vgpu][command.epoch]
                self._give_go()
            else:
                self._cut(held, replace(held.lease, end_ns=self.now_ns))
                self._lease_moved(self.apps[command.vgpu])
            return
        if isinstance(command, Allow):
            app = self.apps[key]
            app.allowed = None if command.allowance_ns is None else (epoch, command.allowance_ns)
            if app.held is not None:
                self._launch(app, app.held)
            return
        assert isinstance(command, Publish)
        lease = command.lease
        if (lease.vgpu, lease.epoch) in self.drained:
            return
        known = self.published[lease.vgpu].get(lease.epoch)
        if known is None:
            stood_ns = lease.start_ns if lease.standby else None
            self.published[lease.vgpu][lease.epoch] = Published(lease, stood_ns=stood_ns)
        elif known.went_ns is None:
            known.lease = lease
        else:
            self.unheard.discard(lease.vgpu)
            self._cut(known, replace(known.lease, end_ns=lease.end_ns, window_ns=lease.window_ns))
            self._lease_moved(self.apps[lease.vgpu])
        self._give_go()
        for when in {opens_ns(lease), lease.start_ns, lease.go_by_ns}:
            if when > self.now_ns:
                self.at(when, self._give_go)

    def _cut(self, held: Published, lease: Lease) -> None:
        assert held.record is not None
        held.lease, held.record.planned_end_ns = lease, lease.end_ns

    def _give_go(self) -> None:
        for key, leases in self.published.items():
            for held in list(leases.values()):
                lease = held.lease
                if held.went_ns is not None:
                    continue
                if lease.standby and not (self.apps[key].wants and self._nobody_but(key)):
                    continue
                clear = not any(e in self.published.get(k, {}) and (k, e) not in self.tails for k, e in lease.after)
                clear = clear and not (self.unheard - {key})
                opened, patient = self.now_ns >= opens_ns(lease), self.now_ns < lease.go_by_ns
                if (clear and opened) or (self.now_ns >= lease.start_ns and not patient):
                    self._go(key, held)

    def _nobody_but(self, key: int) -> bool:
        """No lease is in force, none that is not standing waits, and nobody else wants."""
        if any(app.wants for other, app in self.apps.items() if other != key):
            return False
        published = (held for leases in self.published.values() for held in leases.values())
        return all(held.went_ns is None and held.lease.standby for held in published)

    def _taken_ns(self, held: Published) -> int:
        """A standby lease may have been taken before the dispatcher heard of it, while the GPU was free."""
        in_force = any(other.went_ns is not None for leases in self.published.values() for other in leases.values())
        if held.stood_ns is None or in_force:
            return self.now_ns
        over_ns = max((r.drained_ns for r in self.records if r.drained_ns is not None), default=0)
        ago_ns = self.taking.choice([0, 100 * US, 1000 * US]) if self.taking is not None else 0
        return max(self.now_ns - ago_ns, min(over_ns, self.now_ns), held.stood_ns)

    def _go(self, key: int, held: Published) -> None:
        lease, first_ns = held.lease, self._taken_ns(held)
        went_ns = first_ns if lease.standby else self.now_ns
        held.lease = lease.begun(went_ns)
        end = held.lease.end_ns
        held.went_ns = went_ns
        if lease.standby:
            self.unheard.add(key)
        held.record = Record(key, lease.epoch, first_ns, planned_end_ns=end)
        held.record.shares_overlap = lease.standby or self.now_ns < lease.go_by_ns
        self.records.append(held.record)
        at_tail = any((k, e) in self.tails for k in self.keys for e in self.published[k])
        hush_ns = HUSH_NS if end is None else min(HUSH_NS, (end - went_ns) // 2)
        self.tell(LeaseStarted(key, lease.epoch, went_ns, went_ns - first_ns), hush_ns if at_tail else 0)
        app = self.apps[key]
        app.held, app.first = held, True
        self.at(self.now_ns + app.work.refill_ns, lambda: self._launch(app, held))
        self._lease_moved(app)

    # --- applications

    def _arrive(self, app: App) -> None:
        if self.over or self.apps.get(app.key) is not app or app.key not in self.shares:
            return
        app.left = app.work.burst or 0
        if not app.wants:
            app.wants = True
            self.wanting[app.key].append((self.now_ns, None))
            self.tell(Runnable(app.key))
            self._give_go()
        if app.held is not None:
            self._launch(app, app.held)

    def _length(self, app: App) -> int:
        return max(1, round(app.work.kernel_ns * (1 + app.work.jitter * self.random.uniform(-1, 1))))

    def _launch(self, app: App, held: Published) -> None:
        """The gate: start the next kernel if the lease allows it; drain if it does not."""
        if app.held is not held or app.running or not app.wants:
            return
        if app.stopped or not self._affords(app, held):
            return
        length = self._length(app)
        end = held.lease.end_ns
        closed = (app.key, held.lease.epoch) in self.tails
        if closed or (end is not None and (self.now_ns >= end or (not app.first and self.now_ns + length // 2 > end))):
            self._drain(app)
            return
        app.running, app.first = True, False
        begun = app.begun = self.now_ns
        if app.allowed is not None and end is None and app.allowed[0] == held.lease.epoch:
            assert held.record is not None
            held.record.beyond_ns = max(held.record.beyond_ns, held.record.busy_ns + length - app.allowed[1])
        if app.work.teaches and length > 5 * MS:
            self.tell(Observed(app.key, held.lease.epoch, 0, longest_kernel_ns=length, drains_by_ns=begun + length))
        if app.work.tails:
            self._close(app, held, begun, length)
        self._compute(app, held, begun, length)

    def _compute(self, app: App, held: Published, begun: int, length: int) -> None:
        """A kernel of ``length`` is on the GPU. Kernels of several vGPUs run side by side at full speed."""
        self.at(begun + length, lambda: self._complete(app, held, begun))

    def _worked_ns(self, app: App) -> int:
        """GPU time that the kernel under way has used."""
        return self.now_ns - app.begun

    def _affords(self, app: App, held: Published) -> bool:
        """Its hook's meter counts a kernel when it is launched."""
        if app.allowed is None or held.lease.end_ns is not None or app.allowed[0] != held.lease.epoch:
            return True
        assert held.record is not None
        return held.record.busy_ns < app.allowed[1]

    def used_ns(self, app: App) -> int:
        """What its hook's meter says of the lease that it has."""
        assert app.held is not None
        assert app.held.record is not None
        return app.held.record.busy_ns + (self._worked_ns(app) if app.running else 0)

    def _tick(self) -> None:
        if self.tick_ns == self.now_ns:
            self._measure(self.scheduler.comparable())
            for app in [self.apps[key] for key in self.scheduler.metered() if key in self.apps]:
                if app.held is not None:
                    epoch = app.held.lease.epoch
                    self._deliver(Observed(app.key, epoch, idle_ns=0, used_ns=self.used_ns(app)))
            self.tick_ns = self.now_ns  # readings decide nothing: it is due still
        super()._tick()

    def _measure(self, keys: Iterable[int]) -> None:
        for key in [key for key in keys if key in self.shares]:
            self._deliver(self._measured(key))

    def _measured(self, key: int) -> Measured:
        return Measured(key, self.apps[key].work.demand_at(self.now_ns))

    def _deliver(self, event: Event) -> None:
        self._measure_with([event])
        super()._deliver(event)

    def _deliver_all(self) -> None:
        self._measure_with(self.reports)
        super()._deliver_all()

    def _measure_with(self, events: Sequence[Event]) -> None:
        if any(isinstance(event, Runnable) for event in events) and self.now_ns - self.measured_ns > 25 * MS:
            self.measured_ns = self.now_ns
            for key in self.keys:
                measured = self._measured(key)
                self._heard([measured], self.scheduler.handle(measured, self.now_ns))

    def _close(self, app: App, held: Published, begun: int, length: int) -> None:
        """Within its last millisecond a lease into which no other kernel fits behind this one takes no more."""
        end = held.lease.end_ns
        if app.held is not held or not app.running or app.begun != begun or end is None:
            return
        if self.now_ns < end - CLOSE_NS:
            self.at(end - CLOSE_NS, lambda: self._close(app, held, begun, length))
        elif begun + length + length // 2 >= end:
            self.at(begun + length - TAIL_NS, lambda: self._comes_to_its_tail(app, held, begun))

    def _comes_to_its_tail(self, app: App, held: Published, begun: int) -> None:
        if app.held is held and app.running and app.begun == begun:
            assert held.record is not None
            held.record.tail_ns = self.now_ns
            self.tails.add((app.key, held.lease.epoch))
            self._give_go()

    def _complete(self, app: App, held: Published, begun: int) -> None:
        app.running = False
        if app.held is not held:
            return
        assert held.record is not None
        held.record.busy_ns += self._worked_ns(app)
        app.finished.append((begun, self.now_ns))
        if app.work.burst is not None:
            app.left -= 1
            if app.left <= 0:
                self._pause(app)
        if not app.stopped:
            if app.wants:
                self._launch(app, held)
            elif held.lease.end_ns is not None:
                self._drain(app)

    def _pause(self, app: App) -> None:
        app.wants = False
        since, _ = self.wanting[app.key][-1]
        self.wanting[app.key][-1] = (since, self.now_ns)
        self.at(self.now_ns + app.work.pause_ns, lambda: self._arrive(app))

    def _lease_moved(self, app: App) -> None:
        """The end of its lease is known or has changed: be there when it passes, idle or not."""
        held = app.held
        if held is None or held.lease.end_ns is None:
            return
        if not app.running and not app.wants:
            self._drain(app)
            return
        self.at(held.lease.end_ns, lambda: self._expired(app, held))

    def _expired(self, app: App, held: Published) -> None:
        end = held.lease.end_ns
        if app.held is held and not app.running and not app.stopped and end is not None and self.now_ns >= end:
            self._drain(app)

    def _drain(self, app: App) -> None:
        held = app.held
        if held is None or app.stopped:
            return
        record = held.record
        assert record is not None
        app.held = None
        self.unheard.discard(app.key)
        record.drained_ns, record.planned_end_ns = self.now_ns, held.lease.end_ns
        del self.published[app.key][held.lease.epoch]
        self.drained.add((app.key, held.lease.epoch))
        for epoch in [e for e, p in self.published[app.key].items() if p.went_ns is not None and e < held.lease.epoch]:
            older = self.published[app.key].pop(epoch)
            assert older.record is not None
            older.record.drained_ns, older.record.planned_end_ns = self.now_ns, older.lease.end_ns
            self.drained.add((app.key, epoch))
        work = app.work
        self.tell(
            Drained(
                app.key,
                held.lease.epoch,
                self.now_ns,
                idle_ns=self.now_ns - record.go_ns - record.busy_ns,
                wants=app.wants,
                longest_kernel_ns=work.kernel_ns if work.teaches else 0,
                handover_cost_ns=work.refill_ns if work.teaches else 0,
                used_ns=record.busy_ns,
            )
        )
        self._give_go()

    def stop(self, key: int) -> None:
        self.apps[key].stopped = True

    def resume(self, key: int) -> None:
        app = self.apps[key]
        app.stopped = False
        if app.held is not None and not app.running:
            if app.wants:
                self._launch(app, app.held)
            elif app.held.lease.end_ns is not None:
                self._drain(app)

    # --- what an outside observer can compute

    def observe(self, key: int, epoch: int, **what: int) -> None:
        self._deliver(Observed(key, epoch, **{"idle_ns": 0, **what}))

    def give_up(self, key: int) -> None:
        """A waiting process dies."""
        app = self.apps[key]
        app.wants = False
        since, _ = self.wanting[key][-1]
        self.wanting[key][-1] = (since, self.now_ns)
        self.tell(Idle(key))
        if app.held is not None and app.held.lease.end_ns is not None and not app.running:
            self._drain(app)

    def quiet(self) -> Run:
        """Nobody wants any more, everything on the way has arrived, and the scheduler has looked once more."""
        self.over = True
        for key in self.keys:
            if self.apps[key].wants:
                self.give_up(key)
        self.run(self.now_ns + 200 * MS)
        self._deliver(Tick())
        self.spans = None
        return self

    def usable_spans(self, grace_ns: int = 100 * MS) -> list[tuple[int, int, int]]:
        """(key, from, to) of every lease; whoever overran into its successor's time pays for the overlap alone, unless
        it overran the grace or was passed by before. For one holder at a time."""
        if self.spans is not None and self.spans[0] == self.now_ns:
            return self.spans[1]
        begins: list[tuple[Record, int]] = []
        active: list[Record] = []
        passed: set[int] = set()
        ends = {r.epoch: self.now_ns if r.drained_ns is None else r.drained_ns for r in self.records}
        for record in self.records:
            go = record.go_ns
            active = [o for o in active if o.drained_ns is None or o.drained_ns > go]
            begin = go
            for other in active:
                if other.epoch in passed:
                    continue
                if record.shares_overlap:
                    overlap = min(ends[other.epoch], ends[record.epoch]) - go
                    begin = max(begin, go + min(overlap, max(DEFAULT_POLICY.tail_ns, overlap // 2)))
                    if ends[other.epoch] <= ends[record.epoch]:
                        ends[other.epoch] = begin
                else:
                    begin = max(begin, min(other.drained_ns or self.now_ns, go + grace_ns))
                    passed.add(other.epoch)
            active.append(record)
            begins.append((record, begin))
        spans = [(r.key, min(begin, ends[r.epoch]), ends[r.epoch]) for r, begin in begins]
        self.spans = (self.now_ns, spans)
        return spans

    def held_ns(self, key: int, begin_ns: int, end_ns: int) -> int:
        return sum(max(0, min(b, end_ns) - max(a, begin_ns)) for k, a, b in self.usable_spans() if k == key)

    def busy_ns(self, key: int, begin_ns: int, end_ns: int) -> int:
        return sum(max(0, min(b, end_ns) - max(a, begin_ns)) for a, b in self.apps[key].finished)
