"""The token loop: the native dispatcher's reports go into the scheduler, and the scheduler's commands go back.

Python takes part in no hand-over. The scheduler publishes decisions a token ahead, and the dispatcher carries them out
in microseconds. A decision may be a millisecond late here, and no vGPU waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import trio

from cython_ext import readings
from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.readings import EventKind, GrantsFlag
from gpuserver.core.observe.meters import Meters
from gpuserver.core.observe.trace import Recorder
from gpuserver.core.scheduler.interface import Scheduler
from gpuserver.core.scheduler.leases import (
    FAR_NS,
    AccountSnapshot,
    AccountState,
    Added,
    Allow,
    Changed,
    Command,
    Drained,
    Event,
    GangCalled,
    GangMemberStatus,
    Idle,
    Lease,
    LeaseStarted,
    Measured,
    Observed,
    Publish,
    Removed,
    Report,
    Runnable,
    ServiceTotals,
    Tick,
    VgpuIndex,
)
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.states.parked import ParkedAccounts
from gpuserver.runtime.leases.epochs import epoch_of, word_of
from vgpu.loggers import get_logger
from vgpu.share import PPM, Share

log = get_logger(__name__)

SECOND_NS: Final = 1_000_000_000
WISH_NS: Final = SECOND_NS
"""A vGPU that has wanted a token in that time is likely to want one again."""
COMPANY_NS: Final = 100_000_000
"""Hooks see the part that sharers used of that time."""


class TokenLoop:
    """One scheduler, one dispatcher, and the vGPUs between them.

    Resource handling: owns neither; the server closes the dispatcher after ``run`` was cancelled.
    """

    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self.meters = Meters()
        self.events_drained = 0
        """Events of the dispatcher since the server began."""
        self._grants: dict[VgpuIndex, GrantsPage] = {}
        self._published: dict[VgpuIndex, set[int]] = {}
        self._parked = ParkedAccounts()
        self._wanting: set[VgpuIndex] = set()
        self._wanted_ns: dict[VgpuIndex, int] = {}
        """Until when each vGPU has wanted, for those that want or have wanted in the last second."""
        self._last_event_ns: dict[VgpuIndex, int] = {}
        self._recorders: tuple[Recorder, ...] = ()
        self._activity_recorders: set[Recorder] = set()
        """The recorders for which hooks record what they see."""
        self._measured_ns = 0
        self._used: tuple[int, dict[VgpuIndex, int]] = (0, {})
        """When ``_show_company`` last read what sharers had used, and these figures."""
        self._sharing: frozenset[VgpuIndex] = frozenset()
        """Those whose pages mark their lease as a shared one."""
        self._alarm: trio.CancelScope | None = None
        self._alarm_ns: int | None = None
        """The scheduler's deadline for which the alarm is set."""
        self._on_decision: Callable[[], None] = lambda: None
        self._on_parked_want: list[Callable[[], None]] = []

    def on_decision(self, call: Callable[[], None]) -> None:
        """``call`` is called after every decision."""
        self._on_decision = call

    def on_parked_want(self, call: Callable[[], None]) -> None:
        """``call`` is called when programs of a parked vGPU begin to want the GPU."""
        self._on_parked_want.append(call)

    # --- vGPUs arrive, change and leave

    def add(self, key: VgpuIndex, grants: GrantsPage, share: Share, book: AccountState | None = None) -> None:
        self.drain_events()  # earlier reports first: here, and at every other change
        self._grants[key] = grants
        self._published[key] = set()
        self._dispatcher.add(key, grants)
        self.meters.enter(key)
        if self._activity_recorders:
            grants.flags = grants.flags | GrantsFlag.TRACED
        for recorder in self._recorders:
            recorder.enter(
                key, grants.vgpu_id, time.monotonic_ns(), booked=(book.held_ns, book.busy_ns) if book else (0, 0)
            )
        self._handle(Added(key, share, book))
        self._show_contention()

    def park(self, key: VgpuIndex) -> None:
        """Park the vGPU: it has no leases any more, and keeps its account. A lease that it holds ends now."""
        self.drain_events()
        if key in self._parked:
            return
        now_ns = time.monotonic_ns()
        (limit_ppm,) = (s.limit_ppm for s in self._scheduler.snapshot(now_ns) if s.vgpu == key)
        self._parked.park(key, self._scheduler.books(now_ns)[key], limit_ppm, now_ns)
        self.meters.rest(key)
        epochs = self._published.pop(key)
        others = any(went for other in self._published for _, went in self._scheduler.published(other))
        for epoch in epochs:
            if not self._dispatcher.withdraw(key, word_of(epoch)):
                self._parked.leave(key, epoch, FAR_NS if others else now_ns)
        self._wanting.discard(key)
        self._wanted_ns.pop(key, None)
        self._handle(Removed(key))
        self._show_contention()

    def unpark(self, key: VgpuIndex, share: Share) -> None:
        """Unpark the vGPU: it competes again, with the account that it had."""
        self.drain_events()
        if key not in self._parked:
            return
        book = self._parked.unpark(key, time.monotonic_ns())
        self._published[key] = set()
        self._dispatcher.allow(key, 0, None)
        for recorder in self._recorders:
            page = self._grants[key]
            recorder.enter(key, page.vgpu_id, time.monotonic_ns(), booked=(book.held_ns, book.busy_ns))
        self._handle(Added(key, share, book))
        if self._dispatcher.wants(key):
            self._wanting.add(key)
            self._wanted_ns[key] = time.monotonic_ns()
            self.meters.wants(key, self._wanted_ns[key])
            self._handle(Runnable(key))
        self._show_contention()

    def wants(self, key: VgpuIndex) -> bool:
        """Whether its programs want the GPU, as far as the dispatcher knows; also while it has no leases."""
        return self._dispatcher.wants(key)

    def last_event_ns(self, key: VgpuIndex) -> int:
        """When its programs last began to want the GPU, had it, or ceased to want it; 0: never. This includes short
        wants, which a caller that polls ``wants`` may miss."""
        return self._last_event_ns.get(key, 0)

    def change(self, key: VgpuIndex, share: Share) -> None:
        if key in self._parked:
            self._parked.change(key, share.limit_ppm, time.monotonic_ns())
            return
        self.drain_events()
        self._handle(Changed(key, share))
        self._show_contention()

    def remove(self, key: VgpuIndex) -> AccountState:
        """Remove the vGPU. Returns its account at the end."""
        self.drain_events()
        closed = self.books()[key]
        if not self._parked.forget(key):
            self._handle(Removed(key))
        self._dispatcher.remove(key)
        self._wanting.discard(key)
        self._wanted_ns.pop(key, None)
        self._last_event_ns.pop(key, None)
        self.meters.forget(key)
        del self._grants[key]
        self._published.pop(key, None)
        self._show_contention()
        return closed

    def replace_scheduler(self, scheduler: Scheduler, shares: dict[VgpuIndex, Share]) -> None:
        """Another mode: every vGPU keeps its account. Only while no process is attached, so that no lease is in
        force."""
        books, parked = self.books(), tuple(self._parked)
        self._parked.clear()
        pages, self._grants = self._grants, {}
        for key in pages:
            self._dispatcher.remove(key)
        self._scheduler = scheduler
        self._published.clear()
        self._wanting.clear()
        self._wanted_ns.clear()
        for key, page in pages.items():
            self.add(key, page, shares[key], books.get(key))
        for key in parked:
            self.park(key)

    def set_policy(self, policy: Policy) -> None:
        """Effective with the next decision."""
        self._scheduler.adopt(policy)

    def gang_window(self, event: GangCalled) -> None:
        """The vGPU's gang is called, or is called no longer."""
        self.drain_events()
        if event.vgpu in self._published:
            self._handle(event)

    # --- recordings

    def record(self, recorder: Recorder, *, work: bool = True) -> None:
        """From now on ``recorder`` gets the scheduler's events and commands; ``work``: hooks also record GPU work."""
        self.drain_events()
        now_ns = time.monotonic_ns()
        for key, page in self._grants.items():
            if key in self._parked:
                recorder.enter(key, page.vgpu_id, now_ns)
            else:
                recorder.enter(
                    key,
                    page.vgpu_id,
                    now_ns,
                    leases=self._scheduler.published(key),
                    wants=self._dispatcher.wants(key),
                    booked=self._scheduler.booked(key),
                )
            if key in self._sharing:
                recorder.shares(key)
            if work and not self._activity_recorders:
                page.flags = page.flags | GrantsFlag.TRACED
        self._recorders = (*self._recorders, recorder)
        if work:
            self._activity_recorders.add(recorder)

    def forget_recorder(self, recorder: Recorder) -> None:
        """``recorder`` gets nothing more. Hooks stop recording once it was the last."""
        self.drain_events()
        self._recorders = tuple(other for other in self._recorders if other is not recorder)
        was_recording = recorder in self._activity_recorders
        self._activity_recorders.discard(recorder)
        if was_recording and not self._activity_recorders:
            for page in self._grants.values():
                page.flags = page.flags & ~GrantsFlag.TRACED

    def _record_decision(self, events: Sequence[Event], commands: list[Command], now_ns: int) -> None:
        """Pass events and commands on. Of two leases of a vGPU that drained meanwhile, the last shows both charges."""
        last = {event.vgpu: event for event in events if isinstance(event, Drained)}
        booked: dict[Event, tuple[int, int]] = {event: self._scheduler.booked(key) for key, event in last.items()}
        for recorder in self._recorders:
            for event in events:
                recorder.on_event(event, now_ns, booked.get(event))
            for command in commands:
                recorder.on_command(command)

    # --- readings

    def snapshot(self) -> list[AccountSnapshot]:
        """Every vGPU as of the last events, without a new reading of holders."""
        return self._scheduler.snapshot(time.monotonic_ns())

    def outlook(self, key: VgpuIndex) -> GangMemberStatus:
        """The vGPU's status, for the other members of its gang."""
        return self._scheduler.outlook(key) if key in self._published else GangMemberStatus()

    def books(self) -> dict[VgpuIndex, AccountState]:
        now_ns = time.monotonic_ns()
        return self._scheduler.books(now_ns) | self._parked.books(now_ns)

    def parked_account(self, key: VgpuIndex) -> AccountState | None:
        """The account of a parked vGPU; None for one that competes."""
        return self._parked.book(key, time.monotonic_ns()) if key in self._parked else None

    @property
    def period_ns(self) -> int:
        """The length of one round, adapted to the cost of hand-overs."""
        return self._scheduler.period_ns

    @property
    def next_epoch(self) -> int:
        return self._scheduler.next_epoch

    def skip_to(self, epoch: int) -> None:
        """Called before a vGPU is added that has had leases of another GPU: epochs only grow, for its hooks too."""
        self._scheduler.skip_to(epoch)

    def statements(self) -> dict[VgpuIndex, AccountSnapshot]:
        """Every vGPU that is not parked, settled up to now."""
        self._observe()
        self._take([Measured(key, *self._dispatcher.demand(key)) for key in self._wanting if key in self._published])
        return {statement.vgpu: statement for statement in self._scheduler.snapshot(time.monotonic_ns())}

    def served(self) -> dict[VgpuIndex, ServiceTotals]:
        """The totals of every vGPU up to now."""
        self._observe()
        return self._scheduler.served(time.monotonic_ns())

    def at_limit(self) -> frozenset[VgpuIndex]:
        """The vGPUs that their limits keep waiting now."""
        return self._scheduler.at_limit(time.monotonic_ns())

    def _measures(self, keys: Collection[VgpuIndex]) -> list[Report]:
        """The demand of those vGPUs, by which the scheduler decides which share; nothing if it was read a moment
        ago."""
        now_ns = time.monotonic_ns()
        if len(keys) < 2 or now_ns - self._measured_ns < self._scheduler.policy.measure_ns // 2:
            return []
        self._show_company(now_ns)
        self._measured_ns = now_ns
        return [Measured(key, *self._dispatcher.demand(key)) for key in keys if key in self._published]

    def _observe(self, holders: Iterable[VgpuIndex] | None = None) -> None:
        """Take a reading of holders before their accounts are read: their idle gaps must not count as busy."""
        if holders is None:
            holders = [key for key, epochs in self._published.items() if epochs]
        observed = [seen for key in holders if (seen := self._dispatcher.observe(key)) is not None]
        self._take([_report(self._known(seen)) for seen in observed])

    # --- the loop

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_time)
            while True:
                await trio.lowlevel.wait_readable(self._dispatcher.fileno())
                self.drain_events()

    async def _keep_time(self) -> None:
        """Tick at the scheduler's deadline, wherever it is moved meanwhile."""
        while True:
            with trio.CancelScope(deadline=self._deadline_s()) as self._alarm:
                await trio.sleep_forever()
            self.drain_events()  # earlier reports first
            deadline = self._scheduler.next_deadline_ns()
            if deadline is not None and deadline <= time.monotonic_ns():
                self._observe(self._scheduler.metered())
                self._take(self._measures(self._scheduler.comparable()))
                self._handle(Tick())

    def _deadline_s(self) -> float:
        """The scheduler's deadline, on trio's clock."""
        self._alarm_ns = deadline = self._scheduler.next_deadline_ns()
        if deadline is None:
            return math.inf
        return trio.current_time() + max(0, deadline - time.monotonic_ns()) / SECOND_NS

    def drain_events(self) -> None:
        """Take in the dispatcher's reports since the last call; the scheduler decides once for all of them."""
        reports: list[Report] = []
        lost = 0
        parked_want = False
        for seen in self._dispatcher.events():
            self.events_drained += 1
            if seen.kind is EventKind.LOST:
                lost = seen.epoch
                continue
            if seen.vgpu in self._grants:  # else it was removed while the report was on its way
                self._last_event_ns[seen.vgpu] = seen.at_ns
            known = self._known(seen)
            if self._parked.leaving and known.kind is EventKind.WENT:
                self._parked.went(known.vgpu, known.epoch, known.at_ns)
            elif self._parked.leaving and known.kind is EventKind.DRAINED:
                self._parked.drained(known.vgpu, known.epoch, known.at_ns)
            if seen.vgpu in self._published:
                if known.kind is not EventKind.OBSERVED:  # a reading changes neither wants nor holds
                    self._note(known)
                    self.meters.saw(known)
                reports.append(_report(known))
            elif seen.kind is EventKind.WANTS:
                parked_want |= seen.vgpu in self._parked
        if any(isinstance(report, Runnable) for report in reports):
            # Two vGPUs may want alternately, and never both at a tick: without this, they would not be measured.
            reports = self._measures(self._wanted_ns) + reports
        self._take(reports)
        if lost:
            log.warning("dispatcher events lost", count=lost)
            self.meters.miss()
            for recorder in self._recorders:
                recorder.miss(lost)
            self._reconcile()
        for call in self._on_parked_want if parked_want else ():
            call()

    def _known(self, seen: readings.Event) -> readings.Event:
        """The event with the epoch that the scheduler knows."""
        epoch = epoch_of(seen.epoch, self.next_epoch)
        return seen if epoch == seen.epoch else seen._replace(epoch=epoch)

    def _live(self, lease: Lease) -> list[tuple[VgpuIndex, int]]:
        """The lease's predecessors, without those that are over or were taken back, of which there may be any number.
        The undrained leases of parked vGPUs count as well."""
        live = [
            (key, word_of(epoch))
            for key, epoch in lease.after
            if key not in self._published or epoch in self._published[key]
        ]
        if not lease.standby:
            live += [(key, word_of(epoch)) for key, epoch in self._parked.leaving if key != lease.vgpu]
        return live

    def _note(self, seen: readings.Event) -> None:
        """Keep the set of vGPUs that want, for GRANTS_CONTENDED. The flag asks an idle holder to give back early only
        if that helps another vGPU. The dispatcher may then give that vGPU GO without a command from here."""
        if seen.kind is EventKind.WENT:
            return
        wants = seen.kind is EventKind.WANTS
        if seen.kind is EventKind.DRAINED:
            wants = seen.wants
            self._published[seen.vgpu].discard(seen.epoch)
        if wants and seen.vgpu not in self._wanting:
            self._wanting.add(seen.vgpu)
            if seen.vgpu not in self._wanted_ns:
                self._wanted_ns[seen.vgpu] = seen.at_ns
                self._show_contention()
        elif not wants and seen.vgpu in self._wanting:
            self._wanting.remove(seen.vgpu)
            self._wanted_ns[seen.vgpu] = seen.at_ns

    def forget_wishes(self) -> None:
        """A vGPU that has wanted nothing for a second is no reason any more for others to give back early."""
        recent_ns = time.monotonic_ns() - WISH_NS
        gone = [k for k, at_ns in self._wanted_ns.items() if at_ns < recent_ns and k not in self._wanting]
        for key in gone:
            del self._wanted_ns[key]
        if gone:
            self._show_contention()

    def _show_contention(self) -> None:
        """Set the flags by the vGPUs that have wanted the GPU lately, so that short requests change no flag of
        others."""
        turns, sharing = self._scheduler.turns(self._wanted_ns), self._scheduler.sharing(self._wanted_ns)
        for key, page in self._grants.items():
            shares = key in sharing
            flags = page.flags & ~(GrantsFlag.CONTENDED | GrantsFlag.COMPANY)
            if not shares and len(turns) > (key in turns):
                flags |= GrantsFlag.CONTENDED
            if len(sharing) > shares or (shares and turns):
                flags |= GrantsFlag.COMPANY
            if flags != page.flags:
                page.flags = flags

    def _show_company(self, now_ns: int) -> None:
        """Publish the sharers' part of the time: hooks of vGPUs in turns subtract it from samples of long kernels."""
        since_ns, before = self._used
        if not self._sharing and not before:
            return
        if self._sharing and now_ns - since_ns < COMPANY_NS:
            return
        served = self._scheduler.served(now_ns)
        used = {key: served[key].busy_ns for key in self._sharing}
        self._used = (now_ns, used)
        both = used.keys() & before.keys()
        taken_ns = sum(used[key] - before[key] for key in both)
        part_ppm = min(max(0, taken_ns) * PPM // max(1, now_ns - since_ns), PPM) if both else 0
        for key, page in self._grants.items():
            page.company_ppm = 0 if key in self._sharing else part_ppm

    def _show_sharing(self) -> None:
        """Mark the sharers: they give nothing back early for each other, and their hooks measure demand in another
        way."""
        sharing = frozenset(self._scheduler.shared())
        if sharing == self._sharing:
            return
        for key in sharing ^ self._sharing:
            page = self._grants.get(key)
            if page is not None and (key in sharing) != bool(page.flags & GrantsFlag.SHARED):
                page.flags = page.flags ^ GrantsFlag.SHARED
        for recorder in self._recorders:
            for key in sharing - self._sharing:
                recorder.shares(key)
        self._sharing = sharing
        self._show_contention()

    def _reconcile(self) -> None:
        """Reports were lost: settle by the dispatcher's present state."""
        now_ns = time.monotonic_ns()
        on_gpu = {(key, e) for key, _ in self._parked.leaving for e, _ in self._dispatcher.outstanding(key)}
        self._parked.reconcile(lambda lease: (lease[0], word_of(lease[1])) in on_gpu, now_ns)
        for key, published in self._published.items():
            outstanding = {epoch_of(e, self.next_epoch): went for e, went in self._dispatcher.outstanding(key)}
            wants = self._dispatcher.wants(key)
            for epoch in sorted(published - outstanding.keys()):
                published.discard(epoch)
                self._handle(Drained(key, epoch, now_ns, idle_ns=0, wants=wants))
            for epoch, went in outstanding.items():
                if went:
                    self._handle(LeaseStarted(key, epoch, now_ns))
            self._handle(Runnable(key) if wants else Idle(key))

    def _take(self, reports: Sequence[Report]) -> None:
        if reports:
            now_ns = time.monotonic_ns()
            self._apply(self._scheduler.handle_all(reports, now_ns), reports, now_ns)

    def _handle(self, event: Event) -> None:
        now_ns = time.monotonic_ns()
        self._apply(self._scheduler.handle(event, now_ns), [event], now_ns)

    def _apply(self, commands: list[Command], events: Sequence[Event], now_ns: int) -> None:
        """Execute the scheduler's commands after ``events``."""
        if self._recorders:
            self._record_decision(events, commands, now_ns)
        self._execute(commands)
        self._show_sharing()
        if self._alarm is not None and self._alarm_ns != self._scheduler.next_deadline_ns():
            self._alarm.deadline = self._deadline_s()
        self._on_decision()

    def _execute(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Publish):
                lease = command.lease
                self._published[lease.vgpu].add(lease.epoch)
                self.meters.published(lease)
                self._dispatcher.publish(
                    lease.vgpu,
                    word_of(lease.epoch),
                    lease.start_ns,
                    lease.end_ns,
                    self._live(lease),
                    lease.go_by_ns,
                    early=lease.early,
                    on_want=lease.standby,
                    alone=lease.standby,
                    window_ns=lease.window_ns,
                )
            elif isinstance(command, Allow):
                self._dispatcher.allow(command.vgpu, word_of(command.epoch), command.allowance_ns)
            elif self._dispatcher.withdraw(command.vgpu, word_of(command.epoch)):
                self._published[command.vgpu].discard(command.epoch)
                self.meters.withdrawn(command.vgpu, command.epoch)


def _report(seen: readings.Event) -> Report:
    """The dispatcher's report as a report to the scheduler."""
    match seen.kind:
        case EventKind.WANTS:
            return Runnable(seen.vgpu)
        case EventKind.IDLE:
            return Idle(seen.vgpu)
        case EventKind.WENT:
            return LeaseStarted(seen.vgpu, seen.epoch, seen.at_ns, seen.taken_ns)
        case EventKind.DRAINED:
            return Drained(
                seen.vgpu,
                seen.epoch,
                seen.at_ns,
                idle_ns=seen.idle_ns,
                wants=seen.wants,
                longest_kernel_ns=seen.longest_kernel_ns,
                handover_cost_ns=seen.handover_cost_ns,
                used_ns=seen.used_ns,
            )
        case _:
            return Observed(
                seen.vgpu,
                seen.epoch,
                idle_ns=seen.idle_ns,
                longest_kernel_ns=seen.longest_kernel_ns,
                handover_cost_ns=seen.handover_cost_ns,
                drains_by_ns=seen.drains_by_ns,
                used_ns=seen.used_ns,
            )
