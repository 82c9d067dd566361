"""Schedulers with a fault planted in them: the checks that pass for the real ones must find every fault.

Each case is a situation, the check that is to speak, and the faulty scheduler. The same situation and check are run
with the real scheduler, which has to pass, so that no check can be satisfied by complaining about everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from gpuserver.core.scheduler.account import Account, virtual
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.events import Events
from gpuserver.core.scheduler.kinds import LIGHT_PPM
from gpuserver.core.scheduler.leases import Allow, Drained, Lease, Measured, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.publisher import Publisher
from gpuserver.core.scheduler.quanta import TurnQuanta
from gpuserver.core.scheduler.run_queue import RunQueue
from gpuserver.core.scheduler.spatial.card import Card
from gpuserver.core.scheduler.spatial.round_choice import RoundChoice
from gpuserver.core.scheduler.spatial.round_time import RoundTime
from gpuserver.core.scheduler.spatial.rounds import Rounds
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.allowances import Allowances
from gpuserver.core.scheduler.temporal.eevdf import Decision
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from gpuserver.core.scheduler.temporal.shared_leases import SharedLeases
from gpuserver.core.scheduler.temporal.sharing import Guard, Relief
from gpuserver.core.scheduler.temporal.turns import Turns
from gpuserver.core.scheduler.temporal.virtual_time import FairTime
from tests.core import oracle
from tests.core.model import MS, US, Run, S, Work
from tests.core.planted import in_spatial, in_temporal
from tests.core.slices import Slices
from tests.tiers import slow
from vgpu.share import PPM, Share


@in_temporal
class NoSettle(FairTime):
    """A newcomer is placed on books that do not show what the holder has used."""

    def clock(self, now_ns: int) -> int:
        return max((a.time for a in self._accounts.competing.values()), default=self._last)


@in_temporal
class OveruseUncharged(FairTime):
    def settle(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        super().settle(account, hold, at_ns - hold.overuse(at_ns))
        hold.settled_ns = max(hold.settled_ns, at_ns)


@in_temporal
class OverlapPaidTwice(Events):
    """Who goes beside a predecessor that has not drained pays for the overlap as well."""

    def undrained(self, key: VgpuIndex, epoch: int) -> bool:
        return False


@in_temporal
class OverlapNotComputed(Events):
    """What it computes while others pay for the overlap does not count for its limit."""

    def apply(self, event: Any, now_ns: int) -> None:
        account, free = self._accounts.all.get(event.vgpu), 0
        if account is not None and isinstance(event, Drained) and event.epoch in account.holds:
            hold = account.holds[event.epoch]
            free = max(0, hold.busy(event.at_ns) - hold.held(event.at_ns))
        super().apply(event, now_ns)
        if account is not None:
            account.bucket += free * PPM


@in_temporal
class DebtForgivenOnWake(RunQueue):
    def place(self, account: Account, now_ns: int) -> None:
        account.time = min(account.time, self._time.clock(now_ns))
        super().place(account, now_ns)


@in_temporal
class UnlimitedCredit(RunQueue):
    def place(self, account: Account, now_ns: int) -> None:
        time = account.time
        super().place(account, now_ns)
        account.deadline += time - account.time
        self._accounts.moment += account.guarantee * (time - account.time)
        account.time = time


@in_temporal
class ClampBeforeCharge(RunQueue):
    def refill_all(self, now_ns: int) -> None:
        super().refill_all(now_ns)
        for a in self._accounts.all.values():
            a.bucket = min(a.bucket, 2 * self._limits.fill_line(a) * PPM)


@in_temporal
class DebtKeptWhileThrottled(FairTime):
    """Who has run over waits for its bucket, and only then begins to wait for the others."""

    def lag(self, account: Account, clock: int, now_ns: int) -> int:
        kept_ns = account.kept_lag_ns
        return super().lag(account, clock, now_ns) if kept_ns is None else kept_ns


@in_temporal
class SpeaksOfTheDrained(Publisher):
    """Of a lease that drained before it was heard that it went it says what it would have said before."""

    def drop_commands(self, vgpu: VgpuIndex, epoch: int) -> None:
        pass


@in_temporal
class HandsOverByTheClock(Publisher):
    """What is given back early nobody has before the time that was planned."""

    def publish(self, account: Account, lease: Lease) -> ActiveLease:
        return super().publish(account, replace(lease, early=False))


@in_temporal
class LongTokens(TurnQuanta):
    """Six times as long as a period allows: everybody gets its share, and waits for it."""

    def quantum(self, account: Account) -> int:
        return 6 * super().quantum(account)


@in_temporal
class GoesAtOnce(Publisher):
    """Nobody waits for the drain of the lease before."""

    def publish(self, account: Account, lease: Lease) -> ActiveLease:
        return super().publish(account, replace(lease, after=()))


class NothingRefillsByItself(TemporalScheduler):
    """Whoever waits for its bucket is seen to again when something else happens."""

    def next_deadline_ns(self) -> int | None:
        throttled = any(a.throttled for a in self._accounts.capped.values())
        return None if throttled else super().next_deadline_ns()


@in_temporal
class NothingIsRenewed(Allowances):
    """A vGPU with a limit that holds a lease without an end is allowed what it has at the beginning."""

    def due(self, now_ns: int) -> list[tuple[Account, ActiveLease]]:
        return []

    def next_due_ns(self) -> list[int]:
        return []


@in_temporal
class AllowsWithoutLimit(Allowances):
    """All that anybody could use until the scheduler looks again."""

    def allow(self, account: Account, hold: ActiveLease) -> Allow:
        account.allowance_at_ns = now_ns = self._accounts.now_ns
        return Allow(account.key, hold.lease.epoch, hold.busy(now_ns) + self.policy.allowance_ahead_ns)


@in_temporal
class NeverLeaves(Events):
    """A light vGPU that turns heavy keeps its shared lease."""

    def measure(self, event: Measured, now_ns: int) -> bool:
        return event.demand_ppm <= LIGHT_PPM and super().measure(event, now_ns)


@in_temporal
class LeavesAtOnce(Events):
    """Each measurement of a light vGPU makes it heavy."""

    def measure(self, event: Measured, now_ns: int) -> bool:
        kind = self._accounts.all[event.vgpu].kind
        if kind.light:
            kind.turn_heavy(now_ns)
            return True
        return super().measure(event, now_ns)


@in_temporal
class Flaps(Events):
    """A vGPU that turns heavy is light again with the next low measurement."""

    def measure(self, event: Measured, now_ns: int) -> bool:
        self._accounts.all[event.vgpu].kind.heavy_until_ns = 0
        return super().measure(event, now_ns)


@in_temporal
class ChargedByHeldTime(FairTime):
    """A sharer pays for the time of its lease, whatever it uses of it."""

    def charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        if hold.shared and hold.went_ns is not None:
            account.charge(max(0, at_ns - max(hold.settled_ns, hold.usable_from(at_ns))))
        else:
            super().charge(account, hold, at_ns)


@in_temporal
class PaysTwice(FairTime):
    """A sharer beside turns pays for what it uses, and for what the turns beside it hold."""

    def charge(self, account: Account, hold: ActiveLease, at_ns: int) -> None:
        if hold.shared and hold.went_ns is not None and not all(h.shared for h in self._accounts.active_leases()):
            account.charge(max(0, at_ns - max(hold.settled_ns, hold.usable_from(at_ns))))
        super().charge(account, hold, at_ns)


@in_temporal
class CreditAtAChangeOfKind(SharedLeases):
    """A sharer that turns heavy is owed the turns that it did not have."""

    def end_sharing(self, but: Collection[VgpuIndex], now_ns: int) -> None:
        leave = [self._accounts.all[key] for key in self._holders.shared if key not in but]
        super().end_sharing(but, now_ns)
        for account in leave:
            self._accounts.shift(account, account.time - virtual(300 * MS, account.guarantee))


@in_temporal
class TurnsWaitForSharers(Turns):
    """A shared lease is a predecessor of each turn like any other lease."""

    def _grant(self, choice: Decision, start_ns: int) -> ActiveLease:
        for hold in self._holders.shared.values():
            hold.shared = False
        granted = super()._grant(choice, start_ns)
        for hold in self._holders.shared.values():
            hold.shared = True
        return granted


@in_temporal
class WaitsForOneThatShares(Publisher):
    """A turn waits for the lease before it to drain, although that has become a shared one."""

    def revise(self, hold: ActiveLease, now_ns: int, **changes: Any) -> None:
        if changes.keys() != {"after"}:
            super().revise(hold, now_ns, **changes)


@in_temporal
class MostBehindIsCurbed(Relief):
    """Of the sharers the one waits that got least of its guarantee."""

    def _judge(self, accounts: list[Account], got: dict[VgpuIndex, int], passed_ns: int, now_ns: int) -> None:
        super()._judge(accounts, got, passed_ns, now_ns)
        if self.curbed is not None:
            self.curbed = min(accounts, key=lambda a: got[a.key] / a.guarantee).key


@in_temporal
class SwitchesAreFree(Guard):
    """A sharer may use its guarantee, whatever its switches take from turns."""

    def _judge(self, sharing: Collection[Account], turns: Collection[Account], passed_ns: int, now_ns: int) -> None:
        self._cost_ppm = 0
        super()._judge(sharing, turns, passed_ns, now_ns)

    @property
    def _cost_ppm(self) -> int:
        return PPM

    @_cost_ppm.setter
    def _cost_ppm(self, cost_ppm: int) -> None:
        pass


@in_temporal
class ForgivesTheLastKernel(Allowances):
    """A curbed sharer is allowed its part anew each time, whatever its last kernel used beyond that."""

    def allow(self, account: Account, hold: ActiveLease) -> Allow | None:
        hold.curbed_ns = None
        return super().allow(account, hold)


@in_temporal
class NeverFreed(Guard):
    """A sharer that was curbed once stays so."""

    def update(self, sharing: Collection[Account], turns: Collection[Account], now_ns: int) -> None:
        curbed = self.curbed
        super().update(sharing, turns, now_ns)
        self.curbed = {**curbed, **self.curbed}


def side_by_side(run: Run) -> list[str]:
    """Leases of two vGPUs in force at the same time, from the third second on."""
    late = [r for r in run.records if r.drained_ns is None or r.drained_ns > 3 * S]
    spans = sorted((max(r.go_ns, 3 * S), r.drained_ns or run.now_ns, r.key) for r in late)
    return [
        f"{after[2]} held from {after[0]} on, {before[2]} until {before[1]}"
        for before, after in pairwise(spans)
        if after[0] < before[1] - MS
    ]


@in_temporal
class AllowsAnew(Allowances):
    """What the bucket has, whatever was used of it under this lease."""

    def allow(self, account: Account, hold: ActiveLease) -> Allow | None:
        allow = super().allow(account, hold)
        if allow is None or allow.allowance_ns is None:
            return allow
        return replace(allow, allowance_ns=allow.allowance_ns + hold.busy(self._accounts.now_ns))


@in_spatial
class NothingIsOwed(RoundTime):
    def owed(self, account: Account, at_ns: int, clock: int) -> int:
        return 0


class ChosenByWidth(NothingIsOwed):
    """Whatever is owed, and however long somebody waits: what fills most SMs."""

    def __init__(self) -> None:
        super().__init__(replace(DEFAULT_POLICY, forced_rounds=PPM))


@in_spatial
class FillWithoutKernelTest(Rounds):
    def _fill(self, now_ns: int, boundary: int) -> None:
        lengths = {a.key: a.longest_kernel_ns for a in self._accounts.all.values()}
        for a in self._accounts.all.values():
            a.longest_kernel_ns = 0
        super()._fill(now_ns, boundary)
        for a in self._accounts.all.values():
            a.longest_kernel_ns = lengths[a.key]


@in_spatial
class LongOnesWaitForBoundaries(RoundChoice):
    """Who drains its long kernel within a round idles until the next one."""

    def choose(self, now_ns: int, boundary: int, early_ns: int | None = None) -> list[Account]:
        return [] if early_ns is not None else super().choose(now_ns, boundary)


@in_spatial
class LongOnesTakeTurns(RoundChoice):
    """Beside a late one everybody who fits begins a long kernel, and is late in turn."""

    def choose(self, now_ns: int, boundary: int, early_ns: int | None = None) -> list[Account]:
        late = [a for a in self._accounts.all.values() if not a.penalised and self._card.late(a, now_ns, boundary)]
        rest = [a for a in self._accounts.all.values() if a.competing and a.wants and a not in late]
        return self.best(rest, boundary, 100_000 - sum(a.width for a in late))


@in_spatial
class OwedWhatItCannotUse(RoundTime):
    def limit_credit(self) -> None:
        pass


@in_spatial
class LateNotCounted(Card):
    def late(self, account: Account, now_ns: int, boundary: int) -> bool:
        return False


@in_spatial
class ChargedByWidth(RoundTime):
    """t·s charged, with r as the weight: wide partitions get less time."""

    def charged(self, account: Account, hold: ActiveLease, time: int, at_ns: int) -> int:
        charged = super().charged(account, hold, time, at_ns)
        return time + (charged - time) * account.share.sm_mpercent // 33_000


def temporal(*percents: float) -> list[Share]:
    return [Share(round(p * PPM / 100)) for p in percents]


def spatial(*pairs: tuple[float, int]) -> list[Share]:
    return [Share(round(r * PPM), sm_mpercent=1000 * s) for r, s in pairs]


def shortfall(bound_rounds: float) -> Callable[[Run], list[str]]:
    def check(run: Run) -> list[str]:
        return oracle.guarantees(run, round(bound_rounds * oracle.POLICY.round_ns))

    return check


def behind_long_ones(run: Run) -> list[str]:
    return oracle.behind_long_ones(run, begin=1 * S)


def heavy_from(begin: int) -> Callable[[Run], list[str]]:
    return lambda run: oracle.fairness(run, begin)


def sliced(check: Callable[[Slices], list[str]]) -> Callable[[Run], list[str]]:
    def checked(run: Run) -> list[str]:
        assert isinstance(run, Slices)
        return check(run)

    return checked


def watched(run: Run) -> list[str]:
    """9, 10, 11, and the kinds of vGPUs."""
    assert isinstance(run.watch, oracle.Watch)
    return run.watch.found


def a_kernel_short(run: Run) -> list[str]:
    """Of its guarantee in each ten seconds."""
    lacks = [
        (key, begin, share.guarantee_ppm * 10 * S // PPM - run.held_ns(key, begin, begin + 10 * S))
        for key, share in run.shares.items()
        for begin in range(2 * S, run.now_ns - 10 * S + 1, S)
    ]
    longest_ns = max(app.work.kernel_ns for app in run.apps.values())
    return [
        f"{key} lacks {lack / MS:.1f} ms from {begin / S:g} s on" for key, begin, lack in lacks if lack > longest_ns
    ]


@in_spatial
class BurstsFit(Card):
    def fit_together(self, accounts: Iterable[Account]) -> bool:
        accounts = list(accounts)
        return super().fit_together(accounts) or any(a.share.bursts for a in accounts)


class BurstsBesideAHardOne(BurstsFit):
    """Bursting vGPUs run together although somebody who wants does not burst."""

    def check(self) -> None:
        """Its books would find it at once; what an observer sees is asked for."""


@dataclass(frozen=True)
class Case:
    fault: type[SchedulerBase]
    shares: list[Share]
    works: list[Work]
    check: Callable[[Run], list[str]]
    seconds: int = 6
    fee: float | None = None
    """Time slices run kernels side by side, and switches take so much of the time. None: all run at full speed."""


def light_and_heavy(*percents: float) -> list[Share]:
    return [replace(share, shareable=True) for share in temporal(*percents)]


TRAINER = Work(demands_ppm=(950_000,))
SERVICE = Work(burst=1, pause_ns=4 * MS, demands_ppm=(200_000,))
QUIET = Work(burst=1, pause_ns=50 * MS, demands_ppm=(20_000,))
BUSY = Work(demands_ppm=(400_000,))

CASES = [
    Case(NoSettle, temporal(50, 50), [Work(), Work(start_ns=2 * S)], oracle.fairness),
    Case(OveruseUncharged, temporal(30, 70), [Work(30 * MS), Work()], oracle.fairness, 10),
    Case(
        OverlapPaidTwice,
        temporal(30, 70),
        [Work(60 * MS, teaches=False), Work()],
        lambda run: oracle.books_agree(run.quiet()),
    ),
    Case(
        OverlapNotComputed,
        [Share(100_000, 100_000), *temporal(90)],
        [Work(), Work(60 * MS, teaches=False)],
        oracle.limits,
    ),
    Case(DebtForgivenOnWake, temporal(30, 70), [Work(30 * MS, burst=1, pause_ns=5 * MS), Work()], oracle.fairness, 10),
    Case(UnlimitedCredit, temporal(50, 50), [Work(start_ns=2 * S), Work()], oracle.fairness),
    Case(
        ClampBeforeCharge,
        [Share(700_000, 700_000)],
        [Work(100 * MS)],
        lambda run: oracle.limit_used(run, 0),
        20,
    ),
    Case(
        DebtKeptWhileThrottled,
        [Share(100_000, 100_000), Share(900_000)],
        [Work(60 * MS), Work()],
        a_kernel_short,
        22,
    ),
    Case(HandsOverByTheClock, temporal(50, 50), [Work(burst=3, pause_ns=5 * MS), Work()], oracle.idle_gpu),
    Case(LongTokens, temporal(40, *[6] * 10), [Work()] * 11, oracle.waits),
    Case(GoesAtOnce, temporal(30, 70), [Work()] * 2, oracle.one_holder),
    Case(NothingRefillsByItself, [Share(300_000, 300_000), *temporal(50)], [Work(), Work(stop_ns=S)], watched),
    Case(NothingIsRenewed, [Share(300_000, 300_000)], [Work()], lambda run: oracle.limit_used(run, 0)),
    Case(AllowsWithoutLimit, [Share(300_000, 300_000)], [Work()], oracle.limits),
    Case(AllowsAnew, [Share(300_000, 300_000)], [Work()], oracle.limits),
    Case(
        NeverLeaves,
        [replace(share, shareable=True) for share in temporal(50, 50)],
        [Work(demands_ppm=(200_000, 200_000, *[900_000] * 8))] * 2,
        side_by_side,
    ),
    Case(LeavesAtOnce, light_and_heavy(50, 50), [BUSY] * 2, watched),
    Case(Flaps, light_and_heavy(50, 50), [Work(demands_ppm=(200_000, 900_000), demand_ns=100 * MS)] * 2, watched),
    Case(
        CreditAtAChangeOfKind,
        light_and_heavy(50, 50),
        [Work(demands_ppm=(200_000, 200_000, *[900_000] * 8)), TRAINER],
        heavy_from(2 * S + 60 * MS),
    ),
    Case(TurnsWaitForSharers, light_and_heavy(10, 40, 40), [SERVICE, TRAINER, TRAINER], watched),
    Case(WaitsForOneThatShares, light_and_heavy(48, 42), [Work(demands_ppm=(900_000, 200_000)), Work()], watched),
    Case(ChargedByHeldTime, light_and_heavy(20, 80), [QUIET, BUSY], sliced(oracle.debts_of_sharers), fee=0),
    Case(PaysTwice, light_and_heavy(20, 80), [QUIET, TRAINER], sliced(oracle.debts_of_sharers), fee=0),
    Case(MostBehindIsCurbed, light_and_heavy(70, 20), [BUSY] * 2, sliced(oracle.shared_guarantees), fee=0),
    Case(
        SwitchesAreFree,
        light_and_heavy(70, 10, 10, 10),
        [TRAINER, *[SERVICE] * 3],
        sliced(oracle.shared_guarantees),
        fee=0.4,
    ),
    Case(
        ForgivesTheLastKernel,
        light_and_heavy(70, 10, 10, 10),
        [TRAINER, *[SERVICE] * 3],
        sliced(oracle.shared_guarantees),
        fee=0.4,
    ),
    Case(
        NeverFreed,
        light_and_heavy(70, 20, 10),
        [replace(TRAINER, burst=1500, pause_ns=60 * S), BUSY, replace(QUIET, pause_ns=60 * S)],
        sliced(oracle.curbed_for_another),
        fee=0.2,
    ),
    Case(ChosenByWidth, spatial((0.4, 80), (0.2, 60), (0.3, 30)), [Work()] * 3, oracle.round_waits),
    Case(
        FillWithoutKernelTest,
        spatial((0.45, 60), (0.45, 60)),
        [Work(9 * MS), Work(MS, burst=7, pause_ns=2 * MS)],
        lambda run: oracle.overruns(run, 5500 * US, begin=1 * S),
    ),
    Case(
        LongOnesWaitForBoundaries,
        spatial((0.83, 50), (0.056, 60), (0.015, 80), (0.88, 30), (0.83, 20)),
        [Work(30 * MS), *[Work()] * 4],
        lambda run: oracle.guarantees(run, 8 * oracle.POLICY.round_ns, begin=1 * S),
    ),
    Case(
        LongOnesTakeTurns,
        spatial((0.4, 40), (0.4, 40), (0.4, 100)),
        [Work(35 * MS), Work(25 * MS), Work()],
        behind_long_ones,
    ),
    Case(
        OwedWhatItCannotUse,
        spatial((0.76, 40), (0.76, 24), (0.76, 24), (0.135, 80)),
        [Work(30 * MS), *[Work()] * 3],
        behind_long_ones,
        20,
    ),
    Case(
        LateNotCounted,
        spatial((0.2, 60), (0.3, 40), (0.45, 100)),
        [Work(30 * MS), Work(), Work()],
        lambda run: oracle.left_out(run, 4 * MS, 1 * S),
    ),
    Case(
        BurstsBesideAHardOne,
        [replace(share, bursts=i < 2) for i, share in enumerate(spatial((0.3, 60), (0.3, 60), (0.3, 60)))],
        [Work()] * 3,
        oracle.packed,
    ),
    Case(ChargedByWidth, spatial((0.45, 80), *[(0.45, 30)] * 3), [Work()] * 4, shortfall(4)),
]


def run_case(case: Case, kind: type[SchedulerBase], together: bool) -> list[str]:
    scheduler = kind()
    watch = oracle.Watch(scheduler)
    if case.fee is None:
        run = Run(scheduler, case.shares, case.works, watch=watch, together=together)
    else:
        run = Slices(scheduler, case.shares, case.works, watch=watch, together=together, fee=case.fee)
    return case.check(run.run(case.seconds * S))


@pytest.mark.parametrize("together", [False, *slow(True)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.fault.__name__)
def test_the_fault_is_found(case: Case, together: bool) -> None:
    assert run_case(case, case.fault, together)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.fault.__name__)
def test_without_the_fault_nothing_is_found(case: Case, together: bool) -> None:
    honest = SpatialScheduler if issubclass(case.fault, SpatialScheduler) else TemporalScheduler
    assert run_case(case, honest, together) == []


@pytest.mark.parametrize("kind", [SpeaksOfTheDrained, TemporalScheduler])
def test_what_is_said_of_a_lease_that_has_drained_is_found(kind: type[TemporalScheduler]) -> None:
    scheduler = kind()
    watch = oracle.Watch(scheduler)
    work = Work(20 * US, refill_ns=0, burst=1, pause_ns=5 * MS)
    Run(scheduler, [Share(PPM // 2, PPM // 2)] * 2, [work] * 2, watch=watch, together=True).run(S)
    assert bool(watch.found) == (kind is SpeaksOfTheDrained)
