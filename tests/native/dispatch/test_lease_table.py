"""The dispatcher's decisions against a twin that is obviously right, on a clock of the test's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cython_ext.readings import EventKind
from cython_ext.testing.bindings_lease_table import PyLeaseTable
from cython_ext.testing.bindings_logic import EARLY_NS

KEYS = (0, 64, 255)
QUIET_NS = 200_000
CLOSE_NS = 1_000_000
TAKE_MOST_NS = 1_000_000
EPOCHS = 2**32

Seen = tuple[EventKind, int, int, int, int | None, int | bool]


@dataclass
class Lease:
    """One live lease of the twin."""

    key: int
    epoch: int
    start_ns: int
    end_ns: int | None
    after: set[tuple[int, int]]
    go_by_ns: int
    early: bool
    on_want: bool
    alone: bool
    published_ns: int
    go_ns: int | None = None
    on_go: bool = False
    unacknowledged: bool = False
    split_drain: bool = False
    was_standby: bool = False


@dataclass
class Twin:
    """The rules of the table, each written down once and without regard to cost."""

    leases: list[Lease] = field(default_factory=list)
    wants: dict[int, bool] = field(default_factory=dict)
    changed_ns: dict[int, int] = field(default_factory=dict)
    submitted: dict[int, tuple[int, int]] = field(default_factory=dict)
    over_ns: int = 0
    seen: list[Seen] = field(default_factory=list)
    hushed: int = 0
    """Of what was seen: GO at the tail of another lease."""
    tails: dict[int, int] = field(default_factory=dict)

    def own(self, key: int) -> list[Lease]:
        return [lease for lease in self.leases if lease.key == key]

    def find(self, key: int, epoch: int) -> Lease | None:
        return next((lease for lease in self.leases if (lease.key, lease.epoch) == (key, epoch)), None)

    def older(self, lease: Lease) -> Lease | None:
        own = self.own(lease.key)
        return own[own.index(lease) - 1] if own.index(lease) else None

    @property
    def rests(self) -> bool:
        return all(lease.go_ns is None and lease.on_want for lease in self.leases)

    def free_epoch(self, key: int) -> int:
        """Of the lease that may be taken without GO."""
        free = self.rests and not any(self.wants.values())
        return next((lease.epoch for lease in self.own(key)[:1] if free and lease.alone), 0)

    def may_go(self, lease: Lease, now_ns: int) -> bool:
        older = self.older(lease)
        if lease.on_want and not self.wants[lease.key]:
            return False
        if older and older.go_ns is None:
            return False
        if lease.alone:
            return self.rests and not older and [key for key in KEYS if self.wants[key]] == [lease.key]
        if now_ns >= lease.go_by_ns:
            return True
        if not lease.on_want and any(other.unacknowledged and other.key != lease.key for other in self.leases):
            return False
        undrained = any(self.find(*pair) for pair in lease.after)
        still_held = older and (older.end_ns is None or now_ns < older.end_ns)
        opens_ns = lease.start_ns - (EARLY_NS if lease.on_go and not lease.on_want else 0)
        return not undrained and not still_held and (lease.early or now_ns >= opens_ns)

    def go(self, lease: Lease, now_ns: int) -> None:
        older = self.older(lease)
        held_ns = 0 if older is None else lease.go_by_ns if older.end_ns is None else min(older.end_ns, lease.go_by_ns)
        by_clock_ns = max(lease.start_ns, lease.published_ns, held_ns)
        lease.unacknowledged = lease.alone
        lease.go_ns = now_ns if lease.on_go else min(now_ns, by_clock_ns)
        taken_epoch, taken_ns = self.submitted[lease.key]
        first_ns = lease.go_ns
        held = any(other.go_ns is not None for other in self.leases if other is not lease)
        if lease.was_standby and taken_epoch == lease.epoch and not held:
            first_ns = min(now_ns, max(taken_ns, self.over_ns, now_ns - TAKE_MOST_NS))
        if lease.alone:
            lease.go_ns = first_ns
        later_ns = lease.go_ns - lease.start_ns
        if lease.end_ns is not None and (later_ns > 0 or lease.early or lease.on_want):
            lease.end_ns += later_ns
        first = (self.own(key)[0] for key in KEYS if self.own(key))
        self.hushed += any(
            x.go_ns is not None and x is not lease and self.tails[x.key] and self.reached(self.tails[x.key], x.epoch)
            for x in first
        )
        before_ns = max(0, lease.go_ns - first_ns)
        self.seen.append((EventKind.WENT, lease.key, lease.epoch, lease.go_ns, lease.end_ns, before_ns))

    @staticmethod
    def reached(epoch: int, wanted: int) -> bool:
        return (epoch - wanted) % EPOCHS < EPOCHS // 2

    def done(self, lease: Lease, at_ns: int, wants: bool) -> None:
        self.leases.remove(lease)
        self.over_ns = max(self.over_ns, at_ns)
        self.seen.append((EventKind.DRAINED, lease.key, lease.epoch, at_ns, 0, wants))

    def at_tail(self, key: int, epoch: int, now_ns: int) -> bool:
        lease = self.find(key, epoch)
        if lease is None or lease.go_ns is None or lease.end_ns is None or self.tails[key] != epoch:
            return False
        return lease.end_ns <= now_ns + CLOSE_NS

    def tail(self, key: int, epoch: int, now_ns: int) -> None:
        if self.at_tail(key, epoch, now_ns):
            for other in self.leases:
                if other.go_ns is None:
                    other.after.discard((key, epoch))

    def step(self, now_ns: int) -> None:
        again = True
        while again:
            again = False
            for granted in (True, False):
                for lease in list(self.leases):
                    if lease.go_ns is None and lease.alone is not granted and self.may_go(lease, now_ns):
                        self.go(lease, now_ns)
                        again = True
            for lease in list(self.leases):
                nobody_ns = max(self.changed_ns[lease.key], lease.go_ns or 0) + QUIET_NS
                first = self.own(lease.key)[0] is lease
                if lease.go_ns is not None and first and not self.wants[lease.key] and now_ns >= nobody_ns:
                    self.done(lease, now_ns, False)
                    again = True

    def quiet_at(self, now_ns: int) -> bool:
        later = copy.deepcopy(self)
        later.step(now_ns)
        return later.seen == self.seen


class LeaseTableAgainstTwin(RuleBasedStateMachine):
    """Every command, report and moment, in any order: the table says what the twin says, and knows what comes next."""

    @initialize(epoch=st.sampled_from([1, EPOCHS - 6]))
    def begin(self, epoch: int) -> None:
        self.table = PyLeaseTable()
        self.twin = Twin()
        self.now_ns = 1_000_000_000
        self.epoch = epoch
        self.words = {key: [0, 0, 0, 0] for key in KEYS}  # returned, drained, at its tail, split_drain, as last said
        self.newest: dict[int, int] = {}
        for key in KEYS:
            self.add(key)

    def add(self, key: int) -> None:
        self.table.add(key, self.now_ns)
        self.twin.wants[key] = False
        self.twin.changed_ns[key] = self.now_ns
        self.twin.tails[key] = 0
        self.twin.submitted[key] = (0, 0)
        self.words[key] = [0, 0, 0, 0]
        self.newest.pop(key, None)

    def next_epoch(self) -> int:
        self.epoch = self.epoch % (EPOCHS - 1) + 1
        return self.epoch

    def compare(self) -> None:
        assert self.table.pressing == (len(self.twin.seen) > self.twin.hushed)
        events, lost = self.table.events()
        assert lost == 0
        heard = [
            (e.kind, e.vgpu, e.epoch, e.at_ns, e.end_ns, e.taken_ns if e.kind is EventKind.WENT else e.wants)
            for e in events
            if e.kind != EventKind.OBSERVED
        ]
        assert sorted(heard, key=str) == sorted(self.twin.seen, key=str)
        self.twin.seen.clear()
        self.twin.hushed = 0
        for key in KEYS:
            assert self.table.outstanding(key) == [(x.epoch, x.go_ns is not None) for x in self.twin.own(key)]

    @rule(
        key=st.sampled_from(KEYS),
        start=st.integers(-2, 20),
        length=st.one_of(st.none(), st.integers(1, 20)),
        patience=st.integers(-2, 20),
        kind=st.sampled_from([(False, False), (True, False), (False, True), (True, True), (True, True, True)]),
        data=st.data(),
    )
    def publish(
        self,
        key: int,
        start: int,
        length: int | None,
        patience: int,
        kind: tuple[bool, ...],
        data: st.DataObject,
    ) -> None:
        early, on_want, alone = (*kind, False)[:3]
        live = self.twin.own(key)
        known = [(lease.key, lease.epoch) for lease in self.twin.leases if lease.key != key]
        after = data.draw(st.lists(st.sampled_from([*known, (KEYS[0], 77), (1, 1)]), max_size=3), "after")
        again = data.draw(st.sampled_from([None, *live]), "again")
        start_ns = self.now_ns + start * 100_000
        end_ns = None if length is None else start_ns + length * 100_000
        go_by_ns = start_ns + patience * 100_000
        if again is None and len(live) == 8:
            with pytest.raises(OverflowError):
                self.table.publish(
                    key, self.epoch % (EPOCHS - 1) + 1, start_ns, end_ns, (), 0, early, on_want, self.now_ns
                )
            return self.compare_after_step()
        epoch = again.epoch if again else self.next_epoch()
        assert self.table.publish(key, epoch, start_ns, end_ns, after, go_by_ns, early, on_want, self.now_ns, alone)
        self.twin.step(self.now_ns)
        if again and again.go_ns is not None:
            again.end_ns = again.end_ns if again.split_drain else end_ns
            again.unacknowledged = False
        else:
            live_pairs = {pair for pair in after if self.twin.find(*pair)}
            wait_for = {pair for pair in live_pairs if not self.twin.at_tail(*pair, self.now_ns)}
            lease = Lease(
                key, epoch, start_ns, end_ns, wait_for, max(go_by_ns, start_ns), early, on_want, alone, self.now_ns,
                on_go=bool(live_pairs) or early or on_want,
                was_standby=alone or (again is not None and again.was_standby),
            )  # fmt: skip
            if again:
                self.twin.leases[self.twin.leases.index(again)] = lease
            else:
                self.twin.leases.append(lease)
                self.newest[key] = epoch
        self.twin.step(self.now_ns)
        return self.compare()

    def compare_after_step(self) -> None:
        self.twin.step(self.now_ns)
        self.compare()

    @rule(key=st.sampled_from(KEYS))
    def publish_what_is_over(self, key: int) -> None:
        epoch = self.newest.get(key, 0)
        self.twin.step(self.now_ns)
        if epoch and not self.twin.find(key, epoch):
            assert not self.table.publish(key, epoch, self.now_ns, None, (), 0, True, False, self.now_ns)

    @rule(key=st.sampled_from(KEYS), data=st.data())
    def withdraw(self, key: int, data: st.DataObject) -> None:
        self.table.step(self.now_ns)
        self.compare_after_step()
        live = self.twin.own(key)
        if not live:
            return
        lease = data.draw(st.sampled_from(live), "lease")
        assert self.table.withdraw(key, lease.epoch, self.now_ns) == (lease.go_ns is None)
        if lease.go_ns is None:
            self.twin.leases.remove(lease)
        else:
            lease.end_ns = self.now_ns if lease.end_ns is None else min(lease.end_ns, self.now_ns)
        self.compare_after_step()

    @rule(key=st.sampled_from(KEYS), want=st.booleans())
    def changes_its_mind(self, key: int, want: bool) -> None:
        self.hear(key, want, *self.words[key], self.now_ns)

    @rule(key=st.sampled_from(KEYS), want=st.booleans())
    def drains(self, key: int, want: bool) -> None:
        went = [lease.epoch for lease in self.twin.own(key) if lease.go_ns is not None]
        if went:
            self.hear(key, want, self.words[key][0], went[-1], *self.words[key][2:], self.now_ns)

    @rule(key=st.sampled_from(KEYS), ago_ns=st.sampled_from([0, 30_000, 999_999, 5_000_000, -1_000_000]))
    def takes(self, key: int, ago_ns: int) -> None:
        """Its lease if it may, or else what it likes: that is a tenant's word."""
        epoch = self.table.plan(key).free_epoch or self.epoch
        self.twin.submitted[key] = (epoch, self.now_ns - ago_ns)
        self.hear(key, True, *self.words[key], self.now_ns)

    @rule(key=st.sampled_from(KEYS))
    def comes_to_its_tail(self, key: int) -> None:
        went = [lease.epoch for lease in self.twin.own(key) if lease.go_ns is not None]
        if went:
            self.hear(key, self.twin.wants[key], *self.words[key][:2], went[-1], self.words[key][3], self.now_ns)

    @rule(key=st.sampled_from(KEYS))
    def strands(self, key: int) -> None:
        went = [lease.epoch for lease in self.twin.own(key) if lease.go_ns is not None]
        if went:
            self.hear(key, True, *self.words[key][:3], went[-1], self.now_ns)

    @rule(key=st.sampled_from(KEYS), want=st.booleans(), data=st.data())
    def report(self, key: int, want: bool, data: st.DataObject) -> None:
        live = [lease.epoch for lease in self.twin.own(key)]
        words = [0, *self.words[key], *live]
        returned = data.draw(st.sampled_from([self.words[key][0], *words]), "returned")
        drained = data.draw(st.sampled_from([self.words[key][1], *words]), "drained")
        tail = data.draw(st.sampled_from([self.words[key][2], *words]), "tail")
        split_drain = data.draw(st.sampled_from([self.words[key][3], *words]), "split_drain")
        at_ns = self.now_ns + data.draw(st.sampled_from([-10_000_000, -50_000, 0, 10**12]), "drained_ns")
        self.hear(key, want, returned, drained, tail, split_drain, at_ns)

    def hear(self, key: int, want: bool, returned: int, drained: int, tail: int, split_drain: int, at_ns: int) -> None:
        self.table.report(
            key, self.now_ns, want=want, returned_epoch=returned, drained_epoch=drained, tail_epoch=tail,
            split_drain_epoch=split_drain, drained_ns=at_ns,
            submitted_epoch=self.twin.submitted[key][0], submitted_ns=self.twin.submitted[key][1],
        )  # fmt: skip
        self.twin.step(self.now_ns)
        before, self.words[key] = self.words[key], [returned, drained, tail, split_drain]
        self.twin.tails[key] = tail
        for old, new, wants in ((before[0], returned, False), (before[1], drained, want)):
            finished = self.finish(key, old, new, at_ns, wants)
            if finished and self.twin.wants[key] and not wants:
                self.twin.wants[key] = False
                self.twin.changed_ns[key] = self.now_ns
        if tail != before[2]:
            self.twin.tail(key, tail, self.now_ns)
        lease = self.twin.find(key, split_drain)
        if split_drain != before[3] and lease and lease.go_ns is not None:
            lease.end_ns = self.now_ns if lease.end_ns is None else min(lease.end_ns, self.now_ns)
            lease.split_drain = True
        if self.twin.wants[key] != want:
            self.twin.wants[key] = want
            self.twin.changed_ns[key] = self.now_ns
            if want:
                self.twin.seen.append((EventKind.WANTS, key, 0, self.now_ns, 0, False))
            elif not any(lease.go_ns is not None for lease in self.twin.own(key)):
                self.twin.seen.append((EventKind.IDLE, key, 0, self.now_ns, 0, False))
        self.compare_after_step()

    def finish(self, key: int, old: int, new: int, at_ns: int, wants: bool) -> bool:
        if new in (old, 0):
            return False
        reached = [
            lease for lease in self.twin.own(key) if lease.go_ns is not None and self.twin.reached(new, lease.epoch)
        ]
        for lease in reached:
            assert lease.go_ns is not None
            self.twin.done(lease, max(lease.go_ns, min(at_ns, self.now_ns)), wants)
        return bool(reached)

    @rule(key=st.sampled_from(KEYS))
    def remove_and_add(self, key: int) -> None:
        self.table.step(self.now_ns)
        self.compare_after_step()
        self.table.remove(key, self.now_ns)
        if any(lease.go_ns is not None for lease in self.twin.own(key)):
            self.twin.over_ns = self.now_ns
        self.twin.leases = [lease for lease in self.twin.leases if lease.key != key]
        self.add(key)
        self.table.step(self.now_ns)
        self.compare_after_step()

    @rule(passes_ns=st.sampled_from([1, 50_000, 199_999, 400_000, 3_000_000]))
    def time_passes(self, passes_ns: int) -> None:
        until_ns = self.now_ns + passes_ns
        while (deadline_ns := self.table.deadline_ns()) is not None and deadline_ns <= until_ns:
            assert deadline_ns > self.now_ns, "what is due now was not done"
            assert self.twin.quiet_at(deadline_ns - 1), "the deadline comes too late"
            assert not self.twin.quiet_at(deadline_ns), "the deadline comes too early"
            self.now_ns = deadline_ns
            self.table.step(self.now_ns)
            self.compare_after_step()
        self.now_ns = until_ns
        self.table.step(self.now_ns)
        self.compare_after_step()

    @invariant()
    def pages_show_what_is_in_force(self) -> None:
        if not hasattr(self, "table"):
            return
        for key in KEYS:
            plan = self.table.plan(key)
            own = self.twin.own(key)
            went = [lease for lease in own if lease.go_ns is not None]
            waiting = [lease for lease in own if lease.go_ns is None]
            shown = [*went[-1:], *waiting][:2]
            readings = [reading for reading in (plan.current, plan.next) if reading]
            assert [reading.epoch for reading in readings] == [lease.epoch for lease in shown]
            for reading, lease in zip(readings, shown, strict=True):
                start_ns = lease.start_ns if lease.go_ns is None else lease.go_ns
                go_by_ns = None if lease.on_want and lease.go_ns is None else lease.go_by_ns
                assert (reading.start_ns, reading.end_ns, reading.on_go) == (start_ns, lease.end_ns, lease.on_go)
                assert reading.go_by_ns == go_by_ns
            assert plan.go_epoch == (went[-1].epoch if went else 0)
            assert plan.free_epoch == self.twin.free_epoch(key)
            open_ended = bool(went) and went[-1].end_ns is None
            assert plan.open_epoch == (went[-1].epoch if open_ended else 0)


LeaseTableAgainstTwin.TestCase.settings = settings(stateful_step_count=50, max_examples=10 * settings().max_examples)
TestLeaseTableAgainstTwin = LeaseTableAgainstTwin.TestCase
