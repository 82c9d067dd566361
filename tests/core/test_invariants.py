"""Books that contradict each other are found, and books in order are not complained about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import InvariantError
from gpuserver.core.scheduler.active_lease import ActiveLease
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.leases import GangWindow, Lease
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.planted import plant
from vgpu.share import PPM, Priority, Share

HALF = Share(PPM // 2)
CAPPED = Share(PPM // 2, PPM // 2)
BOTH = pytest.mark.parametrize("kind", [TemporalScheduler, SpatialScheduler])


def waiting_account() -> Account:
    return Account(0, 0, CAPPED, wants=True, competing=True)


def hold(epoch: int = 1, vgpu: int = 0, start: int = 0, end: int | None = 10) -> ActiveLease:
    return ActiveLease(Lease(vgpu, epoch, start, end), 100_000)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kept_lag_ns": 0}, "competes though"),
        ({"penalised": True}, "competes though"),
        ({"competing": False}, "neither competing"),
        ({"kept_lag_ns": 0, "competing": False, "capped": False}, "without a limit"),
        ({"kept_lag_ns": 0, "competing": False, "wants": False}, "wants nothing"),
        ({"wants": False}, "wants nothing and holds nothing"),
        ({"holds": {2: hold(1)}}, "in the wrong account"),
        ({"holds": {1: hold(1, vgpu=4)}}, "in the wrong account"),
        ({"holds": {5: hold(5)}}, "in the wrong account"),
        ({"holds": {1: hold(1, start=11)}}, "ends before it starts"),
    ],
)
@BOTH
def test_contradictions_in_the_books_are_found(
    kind: type[SchedulerBase], changes: dict[str, object], complaint: str
) -> None:
    scheduler = kind(first_epoch=5)
    account = waiting_account()
    for name, value in changes.items():
        setattr(account, name, value)
    plant(scheduler, account)
    with pytest.raises(InvariantError, match=f"(vGPU 0|lease .*) .*{complaint}|{complaint}"):
        SchedulerBase.check(scheduler)


@BOTH
def test_books_in_order_are_not_complained_about(kind: type[SchedulerBase]) -> None:
    scheduler = kind(first_epoch=5)
    states: list[dict[str, object]] = [
        {}, {"competing": False, "penalised": True}, {"competing": False, "kept_lag_ns": 0},
        {"wants": False, "competing": False}, {"holds": {4: hold(4, end=0)}}, {"holds": {4: hold(4, end=None)}},
        {"wants": False, "holds": {4: hold(4)}},
    ]  # fmt: skip
    for changes in states:
        account = waiting_account()
        for name, value in changes.items():
            setattr(account, name, value)
        plant(scheduler, account)
        SchedulerBase.check(scheduler)


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"capped": False}, "capped"),
        ({"gang_window": GangWindow()}, "members"),
        ({"competing": False, "penalised": True}, "competing"),
        ({"holds": {4: hold(4)}}, "holding"),
        ({"penalised": True}, "penalised"),
        ({"wants": False}, "resting"),
        ({"guarantee": 3}, "weight"),
        ({"time": 5}, "moment"),
        ({"share": replace(CAPPED, priority=Priority.HIGH)}, "classes"),
    ],
)
@BOTH
def test_what_is_noted_beside_the_accounts_and_is_not_so_is_found(
    kind: type[SchedulerBase], changes: dict[str, object], noted: str
) -> None:
    scheduler = kind(first_epoch=5)
    account = waiting_account()
    plant(scheduler, account)
    SchedulerBase.check(scheduler)
    for name, value in changes.items():
        setattr(account, name, value)
    with pytest.raises(InvariantError, match=f"^{noted} is noted as"):
        SchedulerBase.check(scheduler)


@BOTH
def test_who_wants_or_holds_and_is_not_noted_is_found(kind: type[SchedulerBase]) -> None:
    scheduler = kind(first_epoch=5)
    plant(scheduler, waiting_account())
    scheduler._accounts.company.clear()
    with pytest.raises(InvariantError, match=r"^company is noted as"):
        SchedulerBase.check(scheduler)
