"""Accounts and faults put into a scheduler behind its back, as no event and no code of ours would leave them."""

from __future__ import annotations

from collections.abc import Callable

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.base import SchedulerBase
from gpuserver.core.scheduler.spatial.scheduler import SpatialScheduler
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler


def plant(scheduler: SchedulerBase, *accounts: Account) -> None:
    """These are its accounts, and what it notes beside them is in order."""
    scheduler._accounts.all = {account.key: account for account in accounts}
    for name, counted in scheduler._accounts.counted().items():
        setattr(scheduler._accounts, name, counted)


def in_temporal(part: type) -> type[TemporalScheduler]:
    """Decorates a faulty kind of a part: the temporal scheduler that has this part."""

    class Faulty(TemporalScheduler):
        __init__ = _with(part, TemporalScheduler)

    Faulty.__name__, Faulty.__doc__ = part.__name__, part.__doc__
    return Faulty


def in_spatial(part: type) -> type[SpatialScheduler]:
    """The same for the spatial scheduler."""

    class Faulty(SpatialScheduler):
        __init__ = _with(part, SpatialScheduler)

    Faulty.__name__, Faulty.__doc__ = part.__name__, part.__doc__
    return Faulty


def _with(part: type, mode: type[SchedulerBase]) -> Callable[..., None]:
    def construct(self: SchedulerBase, *args: object, **kwargs: object) -> None:
        mode.__init__(self, *args, **kwargs)  # type: ignore[arg-type]
        (own,) = [own for own in vars(self).values() if type(own) is part.__base__]
        own.__class__ = part

    return construct
