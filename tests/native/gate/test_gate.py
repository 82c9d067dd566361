"""Properties of the gate's decision, each stated without the gate's own code."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import (
    FOREVER_NS,
    LEASE_ON_GO,
    LEASE_OPEN,
    UNKNOWN_NS,
    GateVerdict,
    LeaseRecord,
    PlanRecord,
)

SUBMIT, WAIT_BACKLOG, WAIT_LEASE = native.GATE_SUBMIT, native.GATE_WAIT_BACKLOG, native.GATE_WAIT_LEASE
MS = 1_000_000
UNKNOWN_LOOK_NS, KNOWN_LOOK_NS = 50_000, 250_000


@dataclass(frozen=True, slots=True)
class Situation:
    plan: PlanRecord
    now_ns: int = 0
    window_ns: int = MS
    backlog_ns: int = 0
    predicted_ns: int = UNKNOWN_NS
    unknown_in_flight: int = 0
    go_epoch: int = 0
    returned_epoch: int = 0
    drained_epoch: int = 0
    last_epoch: int = 0
    contended: bool = False
    free_epoch: int = 0
    take_most_ns: int = MS
    taken_ns: int = 0
    doubted_ns: int = 0
    excess_ns: int = 0
    queued_excess_ns: int = 0

    def decide(self) -> GateVerdict:
        return native.gate_decide(
            self.plan,
            now_ns=self.now_ns,
            window_ns=self.window_ns,
            backlog_ns=self.backlog_ns,
            predicted_ns=self.predicted_ns,
            unknown_in_flight=self.unknown_in_flight,
            go_epoch=self.go_epoch,
            returned_epoch=self.returned_epoch,
            drained_epoch=self.drained_epoch,
            last_epoch=self.last_epoch,
            contended=self.contended,
            free_epoch=self.free_epoch,
            take_most_ns=self.take_most_ns,
            taken_ns=self.taken_ns,
            doubted_ns=self.doubted_ns,
            excess_ns=self.excess_ns,
            queued_excess_ns=self.queued_excess_ns,
        )

    def usable(self, lease: LeaseRecord) -> bool:
        """The contract's sentence, on epochs that are small numbers."""
        if (
            lease.epoch == 0
            or max(self.returned_epoch, self.drained_epoch) >= lease.epoch
            or self.now_ns >= lease.end_ns
        ):
            return False
        if lease.flags & LEASE_ON_GO:
            return self.go_epoch >= lease.epoch or self.now_ns >= lease.go_by_ns
        return self.now_ns >= lease.start_ns


offsets = st.sampled_from([0, -1, 1, MS // 10, MS, 3 * MS, -2 * MS, 10 * MS])
lengths = st.one_of(st.integers(0, MS // 4), st.integers(0, 3 * MS), st.integers(0, 60 * MS))


@st.composite
def leases(draw: st.DrawFn, epoch: int, start_ns: int) -> LeaseRecord:
    is_open = draw(st.integers(0, 3)) == 0
    end_ns = FOREVER_NS if is_open else start_ns + draw(st.integers(1, 30 * MS))
    flags = (LEASE_OPEN if is_open else 0) | (LEASE_ON_GO if draw(st.booleans()) else 0)
    return LeaseRecord(epoch, flags, start_ns, end_ns, start_ns + draw(st.integers(0, 20 * MS)))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Mostly around the current lease, where the decisions are; any order of epochs and instants can occur."""
    none = LeaseRecord()
    current = draw(leases(5, 20 * MS)) if draw(st.integers(0, 5)) else none
    around = min(current.end_ns, 60 * MS)
    following = (
        draw(leases(7, draw(st.sampled_from([around, around + 5 * MS, 10 * MS])))) if draw(st.booleans()) else none
    )
    moments = [
        at for lease in (current, following) for at in (lease.start_ns, lease.go_by_ns, min(lease.end_ns, 90 * MS))
    ]
    epochs_left = st.sampled_from([0, 0, 0, 0, 0, 3, 4, 4, 4, 4, 5, 7])
    return Situation(
        PlanRecord(current, following),
        now_ns=max(draw(st.sampled_from(moments)) + draw(offsets), 0),
        window_ns=draw(st.sampled_from([0, MS // 4, MS, 5 * MS])),
        backlog_ns=draw(lengths),
        predicted_ns=draw(st.one_of(st.just(UNKNOWN_NS), lengths)),
        unknown_in_flight=draw(st.sampled_from([0, 0, 1, 2])),
        go_epoch=draw(st.sampled_from([0, 4, 5, 5, 5, 6, 7, 7, 7, 8])),
        returned_epoch=draw(epochs_left),
        drained_epoch=draw(epochs_left),
        last_epoch=draw(st.sampled_from([0, 4, 5, 5, 7])),
        contended=draw(st.booleans()),
        free_epoch=draw(st.sampled_from([0, 0, 0, 4, 5, 5, 7])),
        take_most_ns=draw(st.sampled_from([MS, MS, MS // 4])),
        taken_ns=draw(st.sampled_from([0, 0, MS // 2, MS - 1, MS])),
        doubted_ns=draw(st.sampled_from([0, 0, MS // 2, 2 * MS])),
        excess_ns=draw(st.sampled_from([0, 0, MS, 9 * MS])),
        queued_excess_ns=draw(st.sampled_from([0, 0, MS, 9 * MS, 18 * MS])),
    )


def lease_of(situation: Situation, verdict: GateVerdict) -> LeaseRecord:
    [lease] = [lease for lease in situation.plan if lease.epoch == verdict.epoch]
    return lease


RUNNING = PlanRecord(LeaseRecord(5, 0, 0, 20 * MS, 0), LeaseRecord())
OPEN = PlanRecord(LeaseRecord(5, LEASE_OPEN, 0, FOREVER_NS, 0), LeaseRecord())
MIDDLE = Situation(RUNNING, now_ns=10 * MS, last_epoch=5)
NEAR_END = Situation(RUNNING, now_ns=18 * MS, last_epoch=5, window_ns=8 * MS)


@pytest.mark.parametrize("drained", [0, 4, 2**31 + 4, 2**31 + 5, 2**31 + 6, 2**32 - 1, 3 * 2**30, 2**20 + 5])
def test_a_lease_is_usable_by_who_drained_its_last_one_however_long_ago(drained: int) -> None:
    """Others may have had any number of leases since: also half a circle of them, or more."""
    assert replace(MIDDLE, last_epoch=drained, drained_epoch=drained, predicted_ns=MS).decide().action == SUBMIT
    assert not replace(MIDDLE, drained_epoch=drained, predicted_ns=MS).decide().closed


@pytest.mark.parametrize("newer", [0, 1, 2, 1000])
def test_a_lease_is_not_used_by_who_has_drained_it_or_one_of_its_next(newer: int) -> None:
    assert replace(MIDDLE, drained_epoch=5 + newer, predicted_ns=MS).decide().action == WAIT_LEASE


@pytest.mark.parametrize(
    ("situation", "action"),
    [
        # the window: 1 ms; small is 250 µs
        (replace(MIDDLE, backlog_ns=MS // 2, predicted_ns=MS // 2), SUBMIT),
        (replace(MIDDLE, backlog_ns=MS // 2, predicted_ns=MS // 2 + 1), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=5 * MS), SUBMIT),
        (replace(MIDDLE, backlog_ns=MS // 4 + 1, predicted_ns=5 * MS), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=MS // 4 + 1, last_epoch=4, predicted_ns=5 * MS), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=MS // 4), SUBMIT),
        (replace(MIDDLE, backlog_ns=MS // 4 + 1), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=0, unknown_in_flight=1), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=0, unknown_in_flight=1, predicted_ns=MS), SUBMIT),
        # what may be longer than predicted: a window more in all, or two of a kind
        (replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=MS // 4, queued_excess_ns=MS, excess_ns=1), SUBMIT),
        (replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=MS // 4, queued_excess_ns=MS + 1, excess_ns=1), WAIT_BACKLOG),
        (replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=MS // 4, queued_excess_ns=9 * MS, excess_ns=9 * MS), SUBMIT),
        (
            replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=MS // 4, queued_excess_ns=18 * MS, excess_ns=9 * MS),
            WAIT_BACKLOG,
        ),
        (replace(MIDDLE, backlog_ns=MS // 4, predicted_ns=MS // 4, queued_excess_ns=18 * MS), SUBMIT),
        # the end is 2 ms away
        (replace(NEAR_END, predicted_ns=4 * MS), SUBMIT),
        (replace(NEAR_END, predicted_ns=4 * MS + 2), WAIT_LEASE),
        (replace(NEAR_END, predicted_ns=2 * MS, backlog_ns=MS), SUBMIT),
        (replace(NEAR_END, predicted_ns=2 * MS, backlog_ns=MS + 1), WAIT_BACKLOG),
        (replace(NEAR_END, predicted_ns=4 * MS + 2, backlog_ns=MS), WAIT_LEASE),
        (replace(NEAR_END, predicted_ns=60 * MS, last_epoch=4), SUBMIT),
        (replace(NEAR_END, window_ns=4 * MS), SUBMIT),
        (replace(NEAR_END, window_ns=4 * MS + 2), SUBMIT),
        (replace(NEAR_END, now_ns=20 * MS - MS // 2), SUBMIT),
        (replace(NEAR_END, now_ns=20 * MS - MS // 2 + 1), WAIT_LEASE),
        # open-ended
        (Situation(OPEN, backlog_ns=10**12, unknown_in_flight=9, last_epoch=5), SUBMIT),
        (Situation(OPEN, predicted_ns=MS, excess_ns=MS, queued_excess_ns=10**12, last_epoch=5), SUBMIT),
        (Situation(OPEN, backlog_ns=10**12, unknown_in_flight=9, last_epoch=5, contended=True), WAIT_BACKLOG),
        (Situation(OPEN, predicted_ns=60 * MS, last_epoch=5, contended=True), SUBMIT),
    ],
)
def test_where_the_lines_are_drawn(situation: Situation, action: int) -> None:
    assert situation.decide().action == action


@given(situations())
def test_submits_only_under_a_usable_lease_and_waits_for_backlog_only_there(situation: Situation) -> None:
    verdict = situation.decide()
    if verdict.action == WAIT_LEASE:
        assert verdict.epoch == 0
    elif not verdict.takes:
        assert situation.usable(lease_of(situation, verdict))


@given(situations())
def test_takes_the_lease_that_waits_on_a_free_gpu_for_a_bounded_amount_of_work(situation: Situation) -> None:
    verdict = situation.decide()
    without = replace(situation, free_epoch=0).decide()
    free = (
        situation.free_epoch != 0
        and situation.free_epoch == situation.plan.current.epoch
        and max(situation.returned_epoch, situation.drained_epoch) < situation.free_epoch
    )
    counts_ns = situation.predicted_ns
    if situation.predicted_ns == UNKNOWN_NS:
        counts_ns = max(situation.take_most_ns // 4, situation.doubted_ns)
    bounded = situation.taken_ns + counts_ns <= situation.take_most_ns
    known = situation.predicted_ns != UNKNOWN_NS or situation.unknown_in_flight == 0
    assert verdict.takes == (not any(map(situation.usable, situation.plan)) and free and bounded and known)
    if verdict.takes:
        assert (verdict.action, verdict.epoch, verdict.until_ns) == (SUBMIT, situation.free_epoch, 0)
    else:
        assert verdict == without


def length_ns(situation: Situation) -> int:
    """The launch's predicted length, or what an unknown one counts for."""
    return min(situation.window_ns, MS) if situation.predicted_ns == UNKNOWN_NS else situation.predicted_ns


def fits(situation: Situation, lease: LeaseRecord) -> bool:
    """Whether half of the launch fits into the lease behind what is queued."""
    return situation.now_ns + situation.backlog_ns + length_ns(situation) // 2 <= lease.end_ns


ENDS_TOO_SOON = Situation(
    PlanRecord(
        LeaseRecord(5, 0, 20 * MS, 20 * MS + 1, 20 * MS), LeaseRecord(7, LEASE_OPEN, 10 * MS, FOREVER_NS, 10 * MS)
    ),
    now_ns=20 * MS,
    window_ns=0,
    backlog_ns=2,
    predicted_ns=UNKNOWN_NS,
    unknown_in_flight=0,
    go_epoch=0,
    returned_epoch=0,
    drained_epoch=0,
    last_epoch=5,
    contended=False,
)
"""Behind what is queued the launch does not fit the current lease, and the next is there already."""


@given(situations())
@example(ENDS_TOO_SOON)
def test_a_current_lease_goes_before_the_next(situation: Situation) -> None:
    """Unless it cannot take the launch at all: then no queue within it need be waited for."""
    verdict = situation.decide()
    if verdict.epoch == 0 or verdict.epoch != situation.plan.next.epoch:
        return
    alone = replace(situation, plan=PlanRecord(situation.plan.current, LeaseRecord()), free_epoch=0).decide()
    assert alone.action == WAIT_LEASE or (alone.action == WAIT_BACKLOG and not fits(situation, situation.plan.current))


@given(situations())
def test_the_queue_stays_within_the_window_unless_it_was_small(situation: Situation) -> None:
    verdict = situation.decide()
    assume(verdict.action == SUBMIT and not verdict.takes)
    lease = lease_of(situation, verdict)
    if lease.flags & LEASE_OPEN and not situation.contended:
        return
    small = situation.backlog_ns <= situation.window_ns // 4
    if situation.predicted_ns == UNKNOWN_NS:
        assert small
        assert situation.unknown_in_flight == 0
    else:
        assert small or situation.backlog_ns + situation.predicted_ns <= situation.window_ns


@given(situations())
def test_at_worst_the_queue_is_a_window_longer_than_predicted_or_two_such_launches(situation: Situation) -> None:
    verdict = situation.decide()
    assume(verdict.action == SUBMIT and not verdict.takes and situation.excess_ns > 0)
    if lease_of(situation, verdict).flags & LEASE_OPEN and not situation.contended:
        return
    queued = situation.queued_excess_ns + situation.excess_ns
    assert queued <= max(situation.window_ns + situation.excess_ns, 2 * situation.excess_ns)


@given(situations())
def test_at_least_half_of_a_kernel_fits_before_the_end_unless_it_is_the_first(situation: Situation) -> None:
    verdict = situation.decide()
    assume(verdict.action == SUBMIT and not verdict.takes)
    lease = lease_of(situation, verdict)
    length = length_ns(situation)
    first = situation.last_epoch != lease.epoch
    assert first or lease.end_ns == FOREVER_NS or situation.now_ns + situation.backlog_ns + length // 2 <= lease.end_ns


@given(situations(), st.integers(1, 5 * MS))
def test_less_backlog_never_turns_a_submission_into_a_wait(situation: Situation, less: int) -> None:
    assume(situation.decide().action == SUBMIT)
    assert replace(situation, backlog_ns=max(situation.backlog_ns - less, 0)).decide().action == SUBMIT


@given(situations(), lengths)
def test_a_shorter_kernel_is_never_held_back_where_a_longer_one_goes(situation: Situation, shorter: int) -> None:
    assume(situation.decide().action == SUBMIT)
    if situation.predicted_ns == UNKNOWN_NS:
        return
    assert replace(situation, predicted_ns=min(shorter, situation.predicted_ns)).decide().action == SUBMIT


@given(situations())
def test_an_idle_process_with_a_usable_lease_always_gets_its_first_kernel_in(situation: Situation) -> None:
    """Otherwise a kernel longer than every quantum would never run."""
    idle = replace(situation, backlog_ns=0, unknown_in_flight=0, queued_excess_ns=0, last_epoch=99)
    assume(any(map(idle.usable, idle.plan)))
    assert idle.decide().action == SUBMIT


@given(situations())
def test_every_wait_is_for_something_that_comes(situation: Situation) -> None:
    """If only time passes and the queue runs as predicted until ``until_ns``, the verdict is another then."""
    verdict = situation.decide()
    assume(verdict.action != SUBMIT and verdict.until_ns != FOREVER_NS)
    assume(verdict.action != WAIT_BACKLOG or situation.unknown_in_flight == 0)
    assert verdict.until_ns > situation.now_ns
    waited = verdict.until_ns - situation.now_ns
    later = replace(
        situation,
        now_ns=verdict.until_ns,
        backlog_ns=max(situation.backlog_ns - waited, 0),
        queued_excess_ns=0 if waited >= situation.backlog_ns // 2 else situation.queued_excess_ns,
    )
    if verdict.action == WAIT_BACKLOG:
        lease = lease_of(situation, verdict)
        assert verdict.until_ns <= lease.end_ns
        again = later.decide().action == WAIT_BACKLOG and verdict.until_ns != lease.end_ns
        # What is queued may be shorter than predicted: a launch that does not fit behind it asks at half time, and
        # nobody sleeps for long.
        assert not again or not fits(situation, lease) or waited == KNOWN_LOOK_NS
        assert waited <= KNOWN_LOOK_NS
    else:
        assert any(later.usable(lease) and not situation.usable(lease) for lease in later.plan)


@given(situations())
def test_nobody_sleeps_by_a_guess(situation: Situation) -> None:
    """A launch of unknown length, or a doubted one that counts for what it was, may be over at once: it is looked for
    all the time, whatever the backlog says."""
    verdict = replace(situation, unknown_in_flight=max(situation.unknown_in_flight, 1)).decide()
    assume(verdict.action == WAIT_BACKLOG)
    end_ns = lease_of(situation, verdict).end_ns
    assert verdict.until_ns == min(situation.now_ns + UNKNOWN_LOOK_NS, end_ns)


@given(situations())
def test_waits_for_ever_only_if_time_alone_opens_no_lease(situation: Situation) -> None:
    verdict = situation.decide()
    assume(verdict.action == WAIT_LEASE and verdict.until_ns == FOREVER_NS)
    for lease in situation.plan:
        for now in (lease.start_ns, lease.go_by_ns):
            opened = replace(situation, now_ns=max(now, situation.now_ns))
            assert situation.usable(lease) or not opened.usable(lease)


def opens_ns(situation: Situation, lease: LeaseRecord) -> int:
    """The moment from which the lease is usable whether or not GO is given; FOREVER_NS: that time does not come."""
    alone = replace(situation, go_epoch=0)
    moments = [at for at in (lease.start_ns, lease.go_by_ns) if replace(alone, now_ns=at).usable(lease)]
    return min(moments, default=FOREVER_NS) if situation.now_ns < lease.end_ns else FOREVER_NS


@given(situations())
def test_a_plan_opens_with_its_first_lease_that_time_alone_makes_usable_and_is_due_at_its_start(
    situation: Situation,
) -> None:
    opens = [(opens_ns(situation, lease), lease) for lease in situation.plan]
    first_ns = native.plan_opens_ns(
        situation.plan,
        now_ns=situation.now_ns,
        returned_epoch=situation.returned_epoch,
        drained_epoch=situation.drained_epoch,
    )
    assert first_ns == min(at for at, _ in opens)
    for on_go in (False, True):
        due_ns = native.plan_due_ns(
            situation.plan,
            now_ns=situation.now_ns,
            returned_epoch=situation.returned_epoch,
            drained_epoch=situation.drained_epoch,
            on_go=on_go,
        )
        counted = (lease for at, lease in opens if at < FOREVER_NS and (lease.flags & LEASE_ON_GO or not on_go))
        assert due_ns == min((lease.start_ns for lease in counted), default=FOREVER_NS)
    if not any(map(situation.usable, situation.plan)):
        assert replace(situation, free_epoch=0).decide().until_ns == first_ns  # the gate looks again then


@given(situations(), st.integers(1, 2**32 - 1))
@example(
    Situation(PlanRecord(LeaseRecord(2, 0, 0, MS, 0), LeaseRecord(3, 0, MS, 2 * MS, MS)), returned_epoch=1), 2**32 - 3
)
@example(replace(NEAR_END, predicted_ns=4 * MS + 2), 1)  # it closes the lease
def test_epochs_wrap_around(situation: Situation, turn: int) -> None:
    """Only distances between epochs matter; 0, which means none, is stepped over."""
    used = {
        situation.go_epoch,
        situation.returned_epoch,
        situation.drained_epoch,
        situation.last_epoch,
        situation.free_epoch,
        situation.plan.current.epoch,
        situation.plan.next.epoch,
    }

    def turned(epoch: int) -> int:
        return (epoch + turn) % 2**32 if epoch else 0

    assume(all(turned(epoch) != 0 for epoch in used - {0}))
    current, following = (lease._replace(epoch=turned(lease.epoch)) for lease in situation.plan)
    moved = replace(
        situation,
        plan=PlanRecord(current, following),
        go_epoch=turned(situation.go_epoch),
        returned_epoch=turned(situation.returned_epoch),
        drained_epoch=turned(situation.drained_epoch),
        last_epoch=turned(situation.last_epoch),
        free_epoch=turned(situation.free_epoch),
    )
    before, after = situation.decide(), moved.decide()
    assert after == before._replace(epoch=turned(before.epoch), closed=turned(before.closed))


word, time64 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)
any_lease = st.builds(LeaseRecord, word, word, time64, time64, time64)


@given(
    st.builds(
        Situation,
        st.builds(PlanRecord, any_lease, any_lease),
        time64,
        time64,
        time64,
        st.one_of(st.just(UNKNOWN_NS), time64),
        word,
        word,
        word,
        word,
        word,
        st.booleans(),
        word,
        time64,
        time64,
        time64,
    )
)
def test_no_number_overflows(situation: Situation) -> None:
    """With any 64-bit times the verdict still says something about a lease of the plan, or about none."""
    verdict = situation.decide()
    assert verdict.action in (SUBMIT, WAIT_BACKLOG, WAIT_LEASE)
    assert verdict.epoch in {0, *(lease.epoch for lease in situation.plan)}
    assert verdict.until_ns >= (0 if verdict.action == SUBMIT else situation.now_ns)
