"""Gangs with hard limits beside others who fill their GPUs: they get what their limit promises."""

from __future__ import annotations

import pytest

from gpuserver.core.scheduler.account import Account, virtual
from gpuserver.core.scheduler.gang_rules import GangRules
from gpuserver.core.scheduler.leases import (
    Added,
    Drained,
    GangCalled,
    GangMemberStatus,
    GangWindow,
    LeaseStarted,
    Runnable,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.cluster import Cluster, Job
from tests.core.desk import GRANTED_ONLY
from tests.core.model import MS, US, S
from tests.core.planted import in_temporal, plant
from tests.tiers import slow
from vgpu.share import PPM, Share

LAPSE = DEFAULT_POLICY.gang_lapse_ns
HARD = Share(PPM // 2, PPM // 2)


def beside(ppm: int, gpus: tuple[int, ...], kind: type[TemporalScheduler] = TemporalScheduler) -> Cluster:
    """A gang with a hard limit on GPUs 0 and 1; on each of ``gpus``, somebody without a limit who always wants."""
    gang = Job(0, (0, 1), (Share(ppm, ppm),) * 2)
    rest = Share(PPM - ppm)
    others = [Job(1 + gpu, (gpu,), (rest,), gang=False, ranks=False) for gpu in gpus]
    return Cluster([gang, *others], delay_ns=100 * US, kind=kind).run(4 * S)


def part(cluster: Cluster) -> float:
    return cluster.progress[0].done * MS / cluster.now_ns


@pytest.mark.parametrize(
    "gpus",
    [*slow((0,), (1,)), (0, 1)],
    ids=["where it leads", "where it follows", "on both"],
)
@pytest.mark.parametrize("ppm", [330_000, 500_000])
def test_beside_who_fills_the_gpu_it_gets_its_share(ppm: int, gpus: tuple[int, ...]) -> None:
    cluster = beside(ppm, gpus)
    assert cluster.violations() == []
    assert part(cluster) > 0.93 * ppm / PPM
    for gpu in gpus:
        assert cluster.gpus[gpu].held_ns(1 + gpu, 0, cluster.now_ns) > 0.97 * (PPM - ppm) / PPM * cluster.now_ns


@in_temporal
class NothingAnnounced(GangRules):
    """Followers hear of the leader's lease when it begins; who holds there gives way a window later."""

    def _announced(self, account: Account) -> tuple[int, int]:
        return 0, 0


def test_planted_fault_nothing_announced() -> None:
    assert part(beside(330_000, (1,), NothingAnnounced)) < 0.15


def test_who_is_throttled_announces_when_it_will_hold_and_does() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    for event in (Added(0, HARD), GangCalled(0, GangWindow(lapses_ns=LAPSE)), Runnable(0), LeaseStarted(0, 1, 0)):
        scheduler.handle(event, 0)
    scheduler.handle(Drained(0, 1, 60 * MS, idle_ns=0, wants=True), 60 * MS)
    announced = scheduler.outlook(0)
    # The bucket had 40 ms, 30 ms were added, 60 ms used; it is full enough with 20 ms.
    assert announced == GangMemberStatus(True, 80 * MS, 100 * MS, ready=False)
    assert scheduler.next_deadline_ns() == 80 * MS
    scheduler.handle(GangCalled(0, GangWindow(binding=True, lapses_ns=LAPSE)), 61 * MS)
    assert scheduler.outlook(0) == announced, "what followers say changes nothing: they go by it"


def test_where_somebody_competes_nothing_is_announced() -> None:
    scheduler = TemporalScheduler(GRANTED_ONLY)
    for event in (
        Added(0, HARD),
        Added(1, HARD),
        GangCalled(0, GangWindow(lapses_ns=LAPSE)),
        Runnable(0),
        LeaseStarted(0, 1, 0),
    ):
        scheduler.handle(event, 0)
    scheduler.handle(Runnable(1), 59 * MS)
    scheduler.handle(Drained(0, 1, 60 * MS, idle_ns=0, wants=True), 60 * MS)
    assert scheduler.outlook(0) == GangMemberStatus(True, ready=False)


def test_an_urgent_turn_does_not_make_ready_who_is_penalised() -> None:
    """Its leader would begin another lease of its own because of each such turn, and both were ahead for ever."""
    scheduler = TemporalScheduler(GRANTED_ONLY)
    for event in (Added(0, HARD), GangCalled(0, GangWindow(lapses_ns=LAPSE)), Runnable(0), LeaseStarted(0, 1, 0)):
        scheduler.handle(event, 0)
    scheduler.handle(Drained(0, 1, 200 * MS, idle_ns=0, wants=True), 200 * MS)
    scheduler.handle(GangCalled(0, GangWindow(binding=True, urgent=True, lapses_ns=LAPSE)), 200 * MS)
    outlook = scheduler.outlook(0)
    assert outlook.end_ns == 200 * MS + DEFAULT_POLICY.gang_urgent_ns
    assert not outlook.ready


@pytest.mark.parametrize(
    ("ahead_ms", "called_ms", "first"),
    [(19, 12, 0), (21, 12, 1), (19, 12.1, 1), (4, 12.1, 0)],
    ids=["within a token", "by more", "called later", "as anybody"],
)
def test_who_is_called_may_be_ahead_by_a_token(ahead_ms: int, called_ms: float, first: int) -> None:
    """And is from 2 ms before on; others, and before that, by a quarter of one. A token is 20 ms."""
    scheduler = TemporalScheduler(GRANTED_ONLY)
    share = Share(PPM // 2)
    for key in (0, 1):
        scheduler.handle(Added(key, share), 0)
    for key in (0, 1):
        ahead = virtual((ahead_ms if key == 0 else -ahead_ms) * MS, share.guarantee_ppm)
        account = scheduler._accounts.all[key]
        account.wants = account.competing = True
        account.time, account.deadline = ahead, ahead + virtual((5 if key == 0 else 90) * MS, share.guarantee_ppm)
    follower = scheduler._accounts.all[0]
    follower.gang_window = GangWindow(
        round(called_ms * MS), 40 * MS, binding=called_ms == 12, lapses_ns=LAPSE, leader=0
    )
    scheduler._accounts.sort_in(follower)
    plant(scheduler, *scheduler._accounts.all.values())
    choice = scheduler._eevdf.pick(10 * MS, None)
    assert choice is not None
    assert choice.account.key == first
