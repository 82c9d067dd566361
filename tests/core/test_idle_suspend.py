"""When an idle vGPU is suspended, and that one is resumed soon after a program wants the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpuserver.core.states.idle import AGAIN_LEAST_NS, AGAIN_MOST_NS, IdleState, Step, decide

PATIENCE_NS = 60_000_000_000
IDLE = IdleState(patience_ns=PATIENCE_NS, used_ns=0)
IDLE_SUSPENDED = replace(IDLE, suspended=True, quiesced=True, suspended_ns=PATIENCE_NS)


@pytest.mark.parametrize(
    ("vgpu", "now_ns", "step"),
    [
        (IDLE, PATIENCE_NS - 1, Step.STAY),
        (IDLE, PATIENCE_NS, Step.SUSPEND),
        (replace(IDLE, wants=True), PATIENCE_NS, Step.STAY),
        (replace(IDLE, programs=False), PATIENCE_NS, Step.STAY),
        (replace(IDLE, quiesced=True), PATIENCE_NS, Step.STAY),  # a person's suspension
        (replace(IDLE, patience_ns=0), 1 << 62, Step.STAY),
        (replace(IDLE, failures=1, tried_ns=PATIENCE_NS), 2 * PATIENCE_NS - 1, Step.STAY),
        (replace(IDLE, failures=1, tried_ns=PATIENCE_NS), 2 * PATIENCE_NS, Step.SUSPEND),
        (replace(IDLE, failures=2, tried_ns=PATIENCE_NS), 3 * PATIENCE_NS - 1, Step.STAY),
        (replace(IDLE, failures=2, tried_ns=PATIENCE_NS), 3 * PATIENCE_NS, Step.SUSPEND),
        (IDLE_SUSPENDED, 1 << 62, Step.STAY),
        (replace(IDLE_SUSPENDED, wants=True), PATIENCE_NS, Step.RESUME),
        (replace(IDLE_SUSPENDED, used_ns=PATIENCE_NS + 1), PATIENCE_NS + 1, Step.RESUME),
        (replace(IDLE_SUSPENDED, used_ns=PATIENCE_NS), 1 << 62, Step.STAY),
        (replace(IDLE_SUSPENDED, programs=False), PATIENCE_NS, Step.RESUME),
        (replace(IDLE_SUSPENDED, patience_ns=0), PATIENCE_NS, Step.RESUME),
        (replace(IDLE_SUSPENDED, wants=True, failures=1, tried_ns=7), 7 + AGAIN_LEAST_NS - 1, Step.STAY),
        (replace(IDLE_SUSPENDED, wants=True, failures=1, tried_ns=7), 7 + AGAIN_LEAST_NS, Step.RESUME),
        (replace(IDLE_SUSPENDED, wants=True, failures=1000, tried_ns=7), 7 + AGAIN_MOST_NS, Step.RESUME),
    ],
)
def test_the_rules(vgpu: IdleState, now_ns: int, step: Step) -> None:
    assert decide(vgpu, now_ns) is step


class Server(RuleBasedStateMachine):
    """A shell that looks every now and then, whose attempts may fail, and which may be killed and begin again knowing
    only an idle-suspended vGPU. The twin knows when the vGPU was used, and since when somebody waits."""

    @initialize(patience_ns=st.sampled_from((1_000_000_000, 600_000_000_000)))
    def create(self, patience_ns: int) -> None:
        self.now_ns = 1
        self.vgpu = IdleState(patience_ns=patience_ns, used_ns=self.now_ns)
        self.used_ns = self.now_ns
        self.waits_ns: int | None = None
        self.dozed_after_ns: int | None = None

    def look(self, succeeds: bool) -> None:
        if self.vgpu.wants:
            self.vgpu = replace(self.vgpu, used_ns=self.now_ns)
        step = decide(self.vgpu, self.now_ns)
        if step is Step.STAY:
            return
        if not succeeds:
            self.vgpu = replace(self.vgpu, failures=self.vgpu.failures + 1, tried_ns=self.now_ns)
            return
        suspended = step is Step.SUSPEND
        self.dozed_after_ns = self.now_ns - self.used_ns if suspended else None
        self.vgpu = replace(
            self.vgpu,
            suspended=suspended,
            quiesced=suspended,
            failures=0,
            used_ns=self.now_ns,
            suspended_ns=self.now_ns,
        )
        if not suspended:
            self.waits_ns = None

    @rule(passed_ns=st.integers(1, 10**12), succeeds=st.booleans())
    def time_passes(self, passed_ns: int, succeeds: bool) -> None:
        self.now_ns += passed_ns
        self.look(succeeds)

    @rule()
    def begins_to_want(self) -> None:
        self.vgpu = replace(self.vgpu, wants=True)
        self.used_ns = self.now_ns
        if self.vgpu.suspended and self.waits_ns is None:
            self.waits_ns = self.now_ns

    @rule()
    def has_enough(self) -> None:
        """Only who is awake can have been served."""
        if not self.vgpu.suspended:
            self.vgpu = replace(self.vgpu, wants=False, used_ns=self.now_ns)
            self.used_ns = self.now_ns

    @rule()
    def killed(self) -> None:
        self.vgpu = IdleState(
            patience_ns=self.vgpu.patience_ns,
            used_ns=self.now_ns,
            wants=self.vgpu.wants,
            suspended=self.vgpu.suspended,
            suspended_ns=self.now_ns,
            quiesced=self.vgpu.quiesced,
        )

    @rule()
    def looked_at_until_it_works(self) -> None:
        """Not more often than allowed, and it has to succeed once: then nobody waits any more."""
        self.now_ns += AGAIN_MOST_NS
        self.look(succeeds=True)
        assert not (self.vgpu.suspended and self.vgpu.wants)
        assert self.waits_ns is None

    @invariant()
    def no_vgpu_is_suspended_that_was_used_lately(self) -> None:
        after_ns = getattr(self, "dozed_after_ns", None)
        assert after_ns is None or after_ns >= self.vgpu.patience_ns


TestServer = Server.TestCase
