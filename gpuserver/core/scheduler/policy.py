"""The sharing policy's numbers: one frozen record, each with the reason it has that value.

``vgpu/share.py`` explains what a share means, and names the algorithm's sources: it is also the help text. The policy
charges held time, not computing, because the others could not use held time. The limit counts computing, because that
is what it promises.

The values were found by simulation, beside an H200's hand-over costs; see ``docs/policy.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000

PPM = 1_000_000
"""One: shares are counted in parts per million of one GPU's time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Defaults of the policy. Times in nanoseconds."""

    period_ns: int = 40 * MILLISECOND
    """P, temporal: every competing vGPU gets its share once in about this long. P grows with the hand-over cost."""
    period_max_ns: int = 200 * MILLISECOND
    period_short_ns: int = 24 * MILLISECOND
    """P where each vGPU that takes turns has short bursts: a decoder's step waits for the others' leases."""
    handover_loss_ppm: int = 7_000
    """The period grows until hand-overs cost no more than this part of the time (0.7 %). A pair that loses only what
    the GPU itself needs has 57 ms. At that period the step of a 30 % trainer varies least, too."""
    period_hold_ns: int = SECOND
    """The period changes at most this often …"""
    period_step_ppm: int = 250_000
    """… and by more than this part."""
    quantum_min_ns: int = 5 * MILLISECOND
    """At 3 ms, 64 vGPUs lose 5 % to hand-overs; at 10 ms they wait twice as long as at 5 ms."""
    quantum_max_ns: int = 100 * MILLISECOND
    handover_min_ns: int = 200 * MICROSECOND
    handover_max_ns: int = 500 * MICROSECOND
    """What the mean of the measured hand-over costs is clamped to: the GPU's own switch of contexts takes 138 µs."""
    idle_credit_ns: int = 20 * MILLISECOND
    """C: what a vGPU that was idle may be owed for that, at most. 40 ms gains nothing more."""
    wait_bucket_ns: int = 200 * MILLISECOND
    """A vGPU that waits saves up limit × this, so that long leases of others do not cost it its limit."""
    tie_ns: int = MILLISECOND
    """Deadlines this close are equal; the longest unserved runs first."""
    decision_ns: int = 200 * MICROSECOND
    """δ: from a decision to its effect; the scheduler moves no end closer than this."""
    guard_ns: int = 500 * MICROSECOND
    """A lease whose start is this close counts as started."""
    lookahead_ns: int = 2 * MILLISECOND
    """Temporal: the scheduler decides this long before a lease's end whether its holder goes on."""
    window_ns: int = 12 * MILLISECOND
    """The most predicted GPU time in flight while others wait. A host that pauses for longer (an optimizer step) leaves
    the GPU idle: ResNet-50 pairs on an H200 totalled 86 % at 1 ms, 90 % at 4, 93 % at 12 …"""
    window_low_ns: int = 250 * MICROSECOND
    """… and below a higher class that exists on this GPU."""
    minimum_stay_handovers: int = 5
    """A vGPU of the same class cuts no open-ended lease before it lasted this many hand-over costs."""
    standby: bool = True
    """Idle vGPUs have standby leases: on a free GPU a request starts without the scheduler."""
    grace_ns: int = 100 * MILLISECOND
    """The longest that a lease waits for a predecessor to drain."""
    allowance_ns: int = 10 * MILLISECOND
    """A vGPU with a limit that holds an open-ended lease is allowed more that often …"""
    allowance_ahead_ns: int = 12 * MILLISECOND
    """… and gets in advance what its bucket will get in this time: the scheduler may be late."""
    measure_ns: int = 50 * MILLISECOND
    """The runtime measures the demand of competing vGPUs that often."""
    shared_window_ns: int = 2 * MILLISECOND
    """A shared lease that is to end ends so long after the decision. Light vGPUs have little in flight."""
    slice_ns: int = 2050 * MICROSECOND
    """A time slice of the GPU: beside sharers a lease may drain later by so much for each of them."""
    tail_ns: int = 500 * MICROSECOND
    """Up to this length an overlap of two leases is the older one's work. In a longer one the GPU switched between
    both."""
    bursty_ppm: int = 500_000
    """A vGPU that gives back more than this part of its leases early waits for results: the period stays short. A
    trainer whose host is late now and then does not: on an H200, ResNet-50 gave back 8 % in all, and five of eight at
    times."""

    gang_late_ns: int = 2 * MILLISECOND
    """A gang member that has not drained so long after its lease waits for other members: they are called again."""
    gang_urgent_ns: int = 200 * MICROSECOND
    """The lease of a member that is called again: often one kernel is missing. A longer lease would begin work that the
    others do not have yet."""
    gang_lapse_ns: int = 500 * MILLISECOND
    """A message of another GPU Server binds no member for longer than this: that server may have died, or been
    stopped."""

    round_ns: int = 10 * MILLISECOND
    """R, spatial: leases end at common boundaries. 5 ms doubles the leases, 20 ms the waits."""
    round_lookahead_ns: int = 5 * MILLISECOND
    round_guard_ns: int = 1200 * MICROSECOND
    """A round that begins this soon stays as it is: its leases may begin 0.7 ms early. A decision beside 64 others
    usually takes 0.3 ms until its effect."""
    late_ns: int = 500 * MICROSECOND
    """A holder predicted to drain this long after a boundary keeps its SMs for the next round."""
    fill_min_ns: int = 2 * MILLISECOND
    """Less than this left of a round is not worth a lease."""
    clock_lead_ns: int = 400 * MILLISECOND
    """The guarantee clock is at most this far ahead of the mean virtual time."""
    forced_rounds: int = 4
    """A vGPU that has waited this many rounds' worth of its guarantee is placed first."""


DEFAULT_POLICY = Policy()


def with_period(policy: Policy, period_ns: int) -> Policy:
    """``policy`` with rounds of ``period_ns``, in either mode. A long round is not cut into shorter leases; a short one
    is planned less far ahead, within the one before it."""
    usual = DEFAULT_POLICY
    return replace(
        policy,
        period_ns=period_ns,
        period_max_ns=max(period_ns, usual.period_max_ns),
        period_short_ns=period_ns,
        quantum_max_ns=max(period_ns, usual.quantum_max_ns),
        round_ns=period_ns,
        round_lookahead_ns=min(usual.round_lookahead_ns, period_ns * 3 // 4),
    )
