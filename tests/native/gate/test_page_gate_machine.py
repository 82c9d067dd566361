"""A server that publishes plans, a page between, a gate that launches, and a GPU that works: anything in any order.

The server side writes through the real page, the gate side reads it and decides with the real gate and backlog; the
twin is a GPU that knows exactly when each kernel ends, and the contract's sentence on when a lease is usable.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import FOREVER_NS, LEASE_ON_GO, LEASE_OPEN, GateVerdict, LeaseRecord, PlanRecord

MS = 1_000_000
WINDOW_NS = 2 * MS
KNOWN_LOOK_NS = MS // 4  # nobody sleeps for longer behind what is queued
lengths = st.sampled_from([MS // 20, MS // 2, MS, 3 * MS, 40 * MS])
spans = st.sampled_from([MS // 10, MS, 5 * MS, 20 * MS])


class PageAndGate(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.page = native.Grants(bytearray(native.GRANTS_BYTES))
        self.backlog = native.Backlog()
        self.plan = PlanRecord()
        self.now_ns = MS
        self.gpu_free_ns = 0  # when everything submitted so far has run
        self.newest_epoch = self.go_epoch = self.returned_epoch = self.drained_epoch = self.last_epoch = 0
        self.contended = False

    # --- the server

    def publish(self, current: LeaseRecord, following: LeaseRecord) -> None:
        self.plan = PlanRecord(current, following)
        self.page.publish(self.plan)

    def new_lease(self, start_ns: int, span_ns: int | None, on_go: bool) -> LeaseRecord:
        """``span_ns`` None: open-ended."""
        self.newest_epoch += 1
        end_ns = FOREVER_NS if span_ns is None else start_ns + span_ns
        flags = (LEASE_OPEN if span_ns is None else 0) | (LEASE_ON_GO if on_go else 0)
        return LeaseRecord(self.newest_epoch, flags, start_ns, end_ns, start_ns + 5 * MS)

    @rule(wait_ns=st.sampled_from([0, MS, 10 * MS]), span_ns=st.none() | spans, on_go=st.booleans())
    def grant(self, wait_ns: int, span_ns: int | None, on_go: bool) -> None:
        """Now, where the vGPU holds nothing; else the lease after the one it holds."""
        current = self.plan.current
        if not self.alive(current):
            self.publish(self.new_lease(self.now_ns + wait_ns, span_ns, on_go), LeaseRecord())
        elif current.end_ns != FOREVER_NS:
            self.publish(current, self.new_lease(current.end_ns + wait_ns, span_ns, on_go))

    @precondition(lambda self: self.alive(self.plan.current))
    @rule(notice_ns=st.sampled_from([0, MS // 5, 2 * MS]))
    def revoke(self, notice_ns: int) -> None:
        current = self.plan.current
        end_ns = min(current.end_ns, max(self.now_ns + notice_ns, current.start_ns + 1))
        self.publish(current._replace(end_ns=end_ns, flags=current.flags & ~LEASE_OPEN), LeaseRecord())

    @rule()
    def go(self) -> None:
        self.go_epoch = max(self.go_epoch, self.plan.current.epoch)

    @rule(contended=st.booleans())
    def others_want(self, contended: bool) -> None:
        self.contended = contended

    # --- the application

    @rule(burst=st.lists(lengths, min_size=1, max_size=6), patient=st.booleans())
    def launch(self, burst: list[int], patient: bool) -> None:
        """One after the other; patient: waiting as the gate says, for as long as it knows until when."""
        for length_ns in burst:
            looks = max(0, self.gpu_free_ns - self.now_ns) // KNOWN_LOOK_NS
            self.launch_one(length_ns, 200 + looks if patient else 1)

    def launch_one(self, length_ns: int, most_waits: int) -> None:
        for _ in range(most_waits):
            verdict = self.decide(length_ns)
            if verdict.action == native.GATE_SUBMIT:
                self.submit(verdict.epoch, length_ns)
                return
            assert verdict.until_ns > self.now_ns, "a wait for what has been already"
            if verdict.action == native.GATE_WAIT_BACKLOG:
                assert self.usable(self.lease(verdict.epoch))
                assert self.gpu_free_ns > self.now_ns, "a wait for an empty queue"
            else:
                self.first_launches_never_wait(length_ns)
                if verdict.until_ns == FOREVER_NS:
                    return
            self.pass_to(verdict.until_ns)
        assert most_waits == 1, f"{most_waits} waits that led to nothing"

    def decide(self, length_ns: int) -> GateVerdict:
        plan = self.page.read()
        assert plan is not None
        return native.gate_decide(
            plan,
            now_ns=self.now_ns,
            window_ns=WINDOW_NS,
            backlog_ns=self.backlog.backlog_ns(self.now_ns),
            predicted_ns=length_ns,
            go_epoch=self.go_epoch,
            returned_epoch=self.returned_epoch,
            drained_epoch=self.drained_epoch,
            last_epoch=self.last_epoch,
            contended=self.contended,
        )

    def submit(self, epoch: int, length_ns: int) -> None:
        lease = self.lease(epoch)
        assert self.usable(lease), "submitted outside a usable lease"
        begin_ns = max(self.now_ns, self.gpu_free_ns)
        if lease.flags & LEASE_OPEN == 0 and self.last_epoch == epoch:
            assert begin_ns + length_ns // 2 <= lease.end_ns, "less than half of it fits, and it is not the first"
        if not lease.flags & LEASE_OPEN or self.contended:
            queued_ns = begin_ns - self.now_ns
            assert queued_ns + length_ns <= WINDOW_NS or queued_ns <= WINDOW_NS // 4, "beyond the window"
        self.backlog.submit(self.now_ns, length_ns)
        self.gpu_free_ns = begin_ns + length_ns
        self.last_epoch = epoch

    def first_launches_never_wait(self, length_ns: int) -> None:
        if self.gpu_free_ns > self.now_ns:
            return
        for lease in filter(self.usable, self.plan):
            fits = length_ns // 2 <= lease.end_ns - self.now_ns
            assert not fits, "idle, a usable lease with room, and yet held back"
            assert self.last_epoch == lease.epoch, "idle, a usable lease, and yet the first is held back"

    @precondition(lambda self: self.usable(self.plan.current) and self.gpu_free_ns <= self.now_ns)
    @rule()
    def give_back(self) -> None:
        self.returned_epoch = self.plan.current.epoch

    @rule(time_ns=st.sampled_from([MS // 10, MS, 7 * MS, 50 * MS]))
    def time_passes(self, time_ns: int) -> None:
        self.pass_to(self.now_ns + time_ns)

    def pass_to(self, now_ns: int) -> None:
        """What the hook thread does meanwhile: it sees the queue drain, and reports a lease that ended drained."""
        self.now_ns = now_ns
        if self.backlog.busy:
            if self.gpu_free_ns > now_ns:
                self.backlog.seen_busy(now_ns)
            else:
                self.backlog.drained(now_ns)
        lease = self.plan.current
        if self.last_epoch == lease.epoch and now_ns >= lease.end_ns and not self.backlog.busy:
            self.drained_epoch = lease.epoch

    # --- the contract

    def lease(self, epoch: int) -> LeaseRecord:
        [lease] = [lease for lease in self.plan if lease.epoch == epoch]
        return lease

    def alive(self, lease: LeaseRecord) -> bool:
        given_up = max(self.returned_epoch, self.drained_epoch)
        return lease.epoch > given_up and self.now_ns < lease.end_ns

    def usable(self, lease: LeaseRecord) -> bool:
        if not self.alive(lease):
            return False
        if lease.flags & LEASE_ON_GO:
            return self.go_epoch >= lease.epoch or self.now_ns >= lease.go_by_ns
        return self.now_ns >= lease.start_ns

    @invariant()
    def the_page_says_what_was_published(self) -> None:
        assert self.page.read() == self.plan

    @invariant()
    def what_is_queued_is_known(self) -> None:
        """The kernels' lengths were predicted exactly, so the backlog is exact too."""
        assert self.backlog.backlog_ns(self.now_ns) == max(0, self.gpu_free_ns - self.now_ns)
        assert self.backlog.scale == 1.0

    def teardown(self) -> None:
        """Whatever has happened: once the GPU is idle, a fresh lease lets the next launch go."""
        self.pass_to(max(self.now_ns, self.gpu_free_ns) + 1)
        self.publish(self.new_lease(self.now_ns, None, on_go=True), LeaseRecord())
        self.go()
        assert self.decide(MS).action == native.GATE_SUBMIT


TestPageAndGate = PageAndGate.TestCase
# Its steps cost microseconds: many short stories find more than a few.
TestPageAndGate.settings = settings(stateful_step_count=30, max_examples=20 * settings().max_examples)
