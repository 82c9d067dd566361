"""Accounts put into a scheduler behind its back, as no event would leave them."""

from __future__ import annotations

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.run_queue import RunQueue


def plant(scheduler: RunQueue, *accounts: Account) -> None:
    """These are its accounts, and what it notes beside them is in order."""
    scheduler._accounts = {account.key: account for account in accounts}
    for name, counted in scheduler._counted().items():
        setattr(scheduler, name, counted)
