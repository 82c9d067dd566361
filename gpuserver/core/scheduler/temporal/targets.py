"""Latency targets (``--slo``) of vGPUs in turns: which step or request is due first, and how long others may take.

A program that decodes tokens waits for each step. A vGPU with an slo that wants the GPU has a deadline in real time:

    it wanted the GPU a moment ago    a step goes on: tpot after the vGPU began to wait
    it did not                        a request has come: ttft after the vGPU began to wait

Where one of the two targets is not given, the other counts. Of the eligible vGPUs of one class (``eevdf.py``), those
with an slo go first, the earliest deadline before all. Such a vGPU also ends the turn of another one of its class that
is due later, or has no slo. A vGPU that is ahead of its share by more than a quarter of a token is not eligible. So
targets order turns, as classes do, and add nothing to a share.

A vGPU with a tpot that uses more than its share has to let others run now and then. Its turns are a tpot long at most
then, and the others' turns are a part of that. So each step is late by a little, and none by a whole turn.

Source: earliest deadline first (Liu, Layland: Scheduling algorithms for multiprogramming in a hard-real-time
environment, 1973).

Pure: accounts and the time in, an order out. Times are CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.accounts import Accounts
from gpuserver.core.scheduler.policy import Policy
from gpuserver.core.scheduler.quanta import Quanta
from vgpu.share import PPM


class Targets:
    """Deadlines of vGPUs with an slo. Changes nothing."""

    def __init__(self, accounts: Accounts, quanta: Quanta, policy: Policy) -> None:
        self.policy = policy
        self._accounts = accounts
        self._quanta = quanta

    def due_ns(self, account: Account, at_ns: int) -> int:
        """When the step or request of ``account`` is due. A holder whose deadline has passed is in a later step, of
        which no more is known than that it has begun."""
        share = account.share
        tpot_ns, ttft_ns = share.tpot_ns or share.ttft_ns, share.ttft_ns or share.tpot_ns
        asked_ns = at_ns if account.waiting_since_ns is None else account.waiting_since_ns
        goes_on = asked_ns - account.served_ns <= self.policy.slo_pause_ns
        due_ns = asked_ns + (tpot_ns if goes_on else ttft_ns)
        return due_ns if due_ns > at_ns or not account.undrained else at_ns + tpot_ns

    def due_first(self, paced: Sequence[Account], at_ns: int) -> list[Account]:
        """Those of ``paced``, which have an slo, with the earliest deadline. Deadlines are equal within ``tie_ns``."""
        due = [(self.due_ns(account, at_ns), account) for account in paced]
        latest_ns = min((at for at, _ in due), default=0) + self.policy.tie_ns
        return [account for at, account in due if at <= latest_ns]

    def precedes(self, account: Account, holder: Account, now_ns: int) -> bool:
        """Whether ``account`` is due so early that the turn of ``holder``, of the same class, ends for it."""
        if account.share.priority != holder.share.priority or not account.share.has_slo:
            return False
        if not holder.share.has_slo:
            return True
        return self.due_ns(account, now_ns) + self.policy.tie_ns < self.due_ns(holder, now_ns)

    def turn_ns(self, account: Account, length_ns: int, owed_ns: int) -> int:
        """``length_ns`` of a turn, or less. A turn of a vGPU with a tpot is a tpot long at most, or what it is owed.
        Reason: so it is never ahead of its share by more, and the others' turns until it is eligible again are short.
        Those are short, too, while it wants the GPU, in its class and in lower ones. No turn becomes shorter than half
        a shortest token: hand-overs would take too much of it."""
        own_ns, least_ns = account.share.tpot_ns, self._quanta.shortest(account) // 2
        if own_ns:
            return min(length_ns, max(own_ns, owed_ns, least_ns))
        if account.share.has_slo:
            return length_ns
        targets = [
            other.share.tpot_ns
            for other in self._accounts.paced.values()
            if other.wants and other.share.tpot_ns and other.share.priority >= account.share.priority
        ]
        if not targets:
            return length_ns
        return min(length_ns, max(min(targets) * self.policy.slo_turn_ppm // PPM, least_ns))
