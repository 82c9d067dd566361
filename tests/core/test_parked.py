"""What a vGPU on the bench is charged for leases that had not drained as it went: nothing twice, nothing to nobody."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuserver.core.scheduler.leases import FAR_NS, AccountState
from gpuserver.core.states.parked import ParkedAccounts

MS = 1_000_000
NOTHING = AccountState(lag_ns=0, bucket_ns=0, held_ns=0, busy_ns=0, overuse_ns=0, tokens=0)


def parked_account(*epochs: int) -> ParkedAccounts:
    park = ParkedAccounts()
    park.park(1, NOTHING, 0, 0)
    for epoch in epochs:
        park.leave(1, epoch, 0)
    return park


def test_what_it_had_queued_is_charged_until_it_has_drained() -> None:
    park = parked_account(5)
    park.drained(1, 6, MS)  # another
    park.drained(1, 5, 3 * MS)
    assert park.books(4 * MS) == {1: NOTHING.overrun(3 * MS)}
    assert not park.leaving


def test_or_until_another_lease_is_charged_its_own_next_one_too() -> None:
    for other in ((2, 9), (1, 6)):
        park = parked_account(5)
        park.went(1, 5, MS)  # told again of itself
        park.went(*other, 2 * MS)
        park.drained(1, 5, 3 * MS)
        assert park.books(4 * MS) == {1: NOTHING.overrun(2 * MS)}


def test_one_that_comes_back_before_has_paid_until_then() -> None:
    park = parked_account(5)
    assert park.unpark(1, MS) == NOTHING.overrun(MS)
    assert 1 not in park
    park.drained(1, 5, 2 * MS)
    assert park.books(2 * MS) == {}


def test_where_reports_were_lost_the_time_until_now_is_charged() -> None:
    park = parked_account(5, 6)
    park.reconcile(lambda lease: lease == (1, 6), 2 * MS)
    assert park.leaving == {(1, 6): 2 * MS}
    assert park.books(2 * MS) == {1: NOTHING.overrun(2 * MS)}


@pytest.mark.parametrize("change", [False, True])
def test_the_limit_fills_the_bucket_meanwhile(change: bool) -> None:
    park = ParkedAccounts()
    park.park(1, NOTHING, 500_000, 0)
    if change:
        park.change(1, 250_000, 2 * MS)
    assert park.books(4 * MS)[1].bucket_ns == (3 * MS // 2 if change else 2 * MS)


def test_one_that_is_removed_is_charged_for_nothing_more() -> None:
    park = parked_account(5)
    park.park(2, NOTHING, 0, 0)
    park.leave(2, 7, 0)
    assert list(park) == [1, 2]
    assert park.forget(1)
    assert not park.forget(1), "it is not there any more"
    park.drained(1, 5, MS)
    park.drained(2, 7, 3 * MS)
    assert park.book(2, 4 * MS) == NOTHING.overrun(3 * MS)
    park.clear()
    assert list(park) == []


class Charged(RuleBasedStateMachine):
    """One vGPU, with any number of leases that leave, against a line of time of which each instant is charged once."""

    def __init__(self) -> None:
        super().__init__()
        self.park = ParkedAccounts()
        self.park.park(1, NOTHING, 0, 0)
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
        self.park.leave(1, self.epoch, FAR_NS if charged else self.now_ns)
        if not charged:
            self.running.add(self.epoch)

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        if self.park.leaving:
            _, epoch = data.draw(st.sampled_from(sorted(self.park.leaving)))
            self.park.drained(1, epoch, self.now_ns)
            self.running.discard(epoch)

    @rule()
    def other_goes(self) -> None:
        self.park.went(2, 77, self.now_ns)
        self.running.clear()

    @precondition(lambda self: not self.running)
    @invariant()
    def each_instant_is_charged_once(self) -> None:
        assert self.park.books(self.now_ns)[1].held_ns == self.owed_ns


TestCharged = Charged.TestCase
