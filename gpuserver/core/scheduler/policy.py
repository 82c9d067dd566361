"""The scheduler's constants: one frozen record, each with the reason for its value.

``vgpu/share.py`` says what a share means, and is the help text too. A guarantee counts the time that a vGPU holds the
GPU, because other vGPUs cannot use that time. A limit counts the time that a vGPU computes.

The values come from simulation and from measurements on an H200: ``docs/internals/policy-evidence.md``.
``docs/reference/policy-constants.md`` is made from this file by ``python -m tests.ctl.references``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Policy:
    """Defaults of the policy. Times in nanoseconds."""

    period_ns: int = 40 * MILLISECOND
    """P, temporal: every competing vGPU gets its share about once per period. It grows with the hand-over cost."""
    period_max_ns: int = 200 * MILLISECOND
    """P does not grow beyond this."""
    period_short_ns: int = 24 * MILLISECOND
    """P if each vGPU that takes turns has a short run length. A decoder's step waits for the other turns."""
    handover_loss_ppm: int = 7_000
    """P grows until hand-overs cost no more than this part of the time."""
    period_hold_ns: int = SECOND
    """P changes at most this often."""
    period_step_ppm: int = 250_000
    """P changes by more than this part, or not at all."""
    quantum_min_ns: int = 5 * MILLISECOND
    """The shortest token. Shorter ones lose more to hand-overs; longer ones make others wait."""
    quantum_max_ns: int = 100 * MILLISECOND
    """The longest token."""
    handover_min_ns: int = 200 * MICROSECOND
    """c, the mean of the measured hand-over costs, counts for at least this much."""
    handover_max_ns: int = 500 * MICROSECOND
    """c counts for at most this much. A trainer loses nothing in one lease and much in the next."""
    idle_credit_ns: int = 20 * MILLISECOND
    """C: the most that a vGPU is owed for its idle time when it wakes."""
    wait_bucket_ns: int = 200 * MILLISECOND
    """A vGPU that waits saves up its limit times this, so that others' long turns do not cost it its limit."""
    tie_ns: int = MILLISECOND
    """Deadlines this close are equal. The vGPU that was unserved for longest goes first."""
    decision_ns: int = 200 * MICROSECOND
    """δ: from a decision to its effect. No end moves closer than this."""
    guard_ns: int = 500 * MICROSECOND
    """A lease whose start is this close counts as started."""
    lookahead_ns: int = 2 * MILLISECOND
    """Temporal: the scheduler decides this long before a lease's end whether the holder goes on."""
    window_ns: int = 12 * MILLISECOND
    """The most predicted GPU time in flight while others wait. A host that pauses for longer leaves the GPU idle."""
    window_low_ns: int = 250 * MICROSECOND
    """The window below a higher class that exists on this GPU."""
    slo_window_ns: int = 2 * MILLISECOND
    """The window beside a vGPU with a tpot, of the same class or a higher one, that had the GPU lately."""
    slo_turn_ppm: int = 125_000
    """While such a vGPU wants, a turn of another lasts this part of the tpot at most, or half of quantum_min_ns."""
    slo_credit_ns: int = SECOND
    """The most that all vGPUs with an slo are owed for their idle time. Turns of others do not cut a shorter answer."""
    slo_pause_ns: int = 20 * MILLISECOND
    """After a longer pause a vGPU with an slo has a new request: its ttft counts, not its tpot. The hook's PAUSE_NS."""
    slo_active_ns: int = SECOND
    """A vGPU with a tpot that had the GPU so lately keeps the windows of others short, and their leases finite."""
    minimum_stay_handovers: int = 5
    """A vGPU of the same class cuts no open-ended lease before it lasted this many hand-over costs."""
    standby: bool = True
    """Idle vGPUs have standby leases: on a free GPU a request starts without the scheduler."""
    grace_ns: int = 100 * MILLISECOND
    """The longest wait for a predecessor to drain."""
    allowance_ns: int = 10 * MILLISECOND
    """A vGPU with a limit that holds an open-ended lease is allowed more this often."""
    allowance_ahead_ns: int = 12 * MILLISECOND
    """An allowance includes what the bucket will get in this time, because the scheduler may be late."""
    measure_ns: int = 50 * MILLISECOND
    """The demand of vGPUs that compete is measured this often."""
    shared_window_ns: int = 2 * MILLISECOND
    """A shared lease that has to end does so within this time. Light vGPUs have little in flight."""
    slice_ns: int = 2050 * MICROSECOND
    """A time slice of the GPU. Beside sharers a turn may drain this much later for each of them."""
    tail_ns: int = 500 * MICROSECOND
    """A shorter overlap of two leases is the older one's. In a longer one the GPU alternated between both."""
    bursty_ppm: int = 500_000
    """A vGPU that returns more than this part of its leases early waits for its results. It keeps P short."""

    gang_late_ns: int = 2 * MILLISECOND
    """A gang's member that has not drained this long after its lease may wait for the others: they are called again."""
    gang_urgent_ns: int = 200 * MICROSECOND
    """The lease of such a call. A longer one would begin a collective that the other member does not have yet."""
    gang_lapse_ns: int = 500 * MILLISECOND
    """A message of another GPU Server binds a vGPU for this long. That server may have ended, or been stopped."""

    round_ns: int = 10 * MILLISECOND
    """R, spatial: leases end at common boundaries. Shorter rounds have more leases, longer ones longer waits."""
    round_lookahead_ns: int = 5 * MILLISECOND
    """A round is planned this long before it begins."""
    round_guard_ns: int = 1200 * MICROSECOND
    """A round that begins this soon stays as it is: its leases may begin early, and a decision takes a while."""
    late_ns: int = 500 * MICROSECOND
    """A holder that is predicted to drain this long after a boundary keeps its SMs for the next round."""
    fill_min_ns: int = 2 * MILLISECOND
    """A shorter rest of a round is not worth a lease."""
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
