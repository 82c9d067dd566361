"""What a vGPU on the bench is charged for leases that had not drained as it went: nothing twice, nothing to nobody."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuserver.core.scheduler.leases import FAR_NS, AccountState
from gpuserver.core.states.parked import ParkedAccounts

MS = 1_000_000
NOTHING = AccountState(lag_ns=0, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)


def benched(*epochs: int) -> ParkedAccounts:
    bench = ParkedAccounts()
    bench.sit(1, NOTHING, 0, 0)
    for epoch in epochs:
        bench.leave(1, epoch, 0)
    return bench


def test_what_it_had_queued_is_charged_until_it_has_drained() -> None:
    bench = benched(5)
    bench.drained(1, 6, MS)  # another
    bench.drained(1, 5, 3 * MS)
    assert bench.books(4 * MS) == {1: NOTHING.overrun(3 * MS)}
    assert not bench.leaving


def test_or_until_another_lease_is_charged_its_own_next_one_too() -> None:
    for other in ((2, 9), (1, 6)):
        bench = benched(5)
        bench.went(1, 5, MS)  # told again of itself
        bench.went(*other, 2 * MS)
        bench.drained(1, 5, 3 * MS)
        assert bench.books(4 * MS) == {1: NOTHING.overrun(2 * MS)}


def test_one_that_comes_back_before_has_paid_until_then() -> None:
    bench = benched(5)
    assert bench.rise(1, MS) == NOTHING.overrun(MS)
    assert 1 not in bench
    bench.drained(1, 5, 2 * MS)
    assert bench.books(2 * MS) == {}


def test_where_reports_were_lost_the_time_until_now_is_charged() -> None:
    bench = benched(5, 6)
    bench.reconcile(lambda lease: lease == (1, 6), 2 * MS)
    assert bench.leaving == {(1, 6): 2 * MS}
    assert bench.books(2 * MS) == {1: NOTHING.overrun(2 * MS)}


@pytest.mark.parametrize("change", [False, True])
def test_the_limit_fills_the_bucket_meanwhile(change: bool) -> None:
    bench = ParkedAccounts()
    bench.sit(1, NOTHING, 500_000, 0)
    if change:
        bench.change(1, 250_000, 2 * MS)
    assert bench.books(4 * MS)[1].bucket_ns == (3 * MS // 2 if change else 2 * MS)


def test_one_that_is_removed_is_charged_for_nothing_more() -> None:
    bench = benched(5)
    bench.sit(2, NOTHING, 0, 0)
    bench.leave(2, 7, 0)
    assert list(bench) == [1, 2]
    assert bench.forget(1)
    assert not bench.forget(1), "it is not there any more"
    bench.drained(1, 5, MS)
    bench.drained(2, 7, 3 * MS)
    assert bench.book(2, 4 * MS) == NOTHING.overrun(3 * MS)
    bench.clear()
    assert list(bench) == []


class Charged(RuleBasedStateMachine):
    """One vGPU, with any number of leases that leave, against a line of time of which each instant is charged once."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = ParkedAccounts()
        self.bench.sit(1, NOTHING, 0, 0)
        self.now_ns = self.epoch = self.owed_ns = 0
        self.running: set[int] = set()  # of those that leave, beside which none has had GO

    @rule(ns=st.integers(0, MS))
    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        self.owed_ns += ns if self.running else 0

    @rule(charged=st.booleans())
    def leave(self, charged: bool) -> None:
        """``charged``: another one already is, beside it."""
        self.epoch += 1
        self.bench.leave(1, self.epoch, FAR_NS if charged else self.now_ns)
        if not charged:
            self.running.add(self.epoch)

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        if self.bench.leaving:
            _, epoch = data.draw(st.sampled_from(sorted(self.bench.leaving)))
            self.bench.drained(1, epoch, self.now_ns)
            self.running.discard(epoch)

    @rule()
    def other_goes(self) -> None:
        self.bench.went(2, 77, self.now_ns)
        self.running.clear()

    @precondition(lambda self: not self.running)
    @invariant()
    def each_instant_is_charged_once(self) -> None:
        assert self.bench.books(self.now_ns)[1].held_ns == self.owed_ns


TestCharged = Charged.TestCase
