"""The in-flight window: how much GPU time a process has queued, when it will be done, how long the GPU was busy.

Theory of operation
-------------------
The model of the GPU is one FIFO per process. Launches are added with their predicted length (``backlog_submit``). Now
and then the hook records an event behind them, a **marker** (``backlog_mark``), which closes a **stretch** of launches.
The hook polls the markers, oldest first. A marker is not yet complete (``backlog_seen_busy``), or it is complete
(``backlog_completed``) and everything up to it is done. A process with several streams marks a stream before it
launches into another. A stretch is only retired after all older ones, so the backlog then errs towards too much. Where
there is no room for that marker the launch waits. Reason: in a stretch with work in two streams, the marker behind one
would retire the other's work, and a GPU at work would be idle in the account. One thread may leave a stream while
another thread is just submitting into it. Then the marker may come before that launch. One more goes behind it
(``backlog_mark_late``). Or, where the streams are queried in the end, the GPU counts as busy since
(``backlog_resume``).

A completion happened somewhere between the last poll that found the GPU busy and the poll that found it complete. The
predicted completion, clipped to that interval, is taken for it. That is exact if polls are close together, and unbiased
by late polls if the application slept (policy 7.3, 7.10). From there the rest of the queue is predicted anew. The
observed interval may contradict the prediction, whatever gaps the launches may have left. Then ``scale`` moves by that
much (policy 7.5). At the first stretch of a lease the difference has to exceed what a predecessor's tail may take.
Beside a sibling's work nothing is learned.

A marker long overdue may stand behind a kernel that waits for another launch (of a peer, of another stream). The window
must not hold that launch back for ever. So every STALLED_NS the queue is **forgiven** and counts as empty for a moment.

The account: the GPU is **busy** from a submission into an empty queue to the completion that was observed to empty it
again. Inside a lease it is **idle** otherwise. Unobserved time counts as busy (but for poll_skip.pxd). The account is
the union over the streams, never their sum.

All times are CLOCK_MONOTONIC ns. The caller serialises.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

cdef enum:
    MARKERS = 128                        # unfinished markers at most; a full ring refuses the next one
    MARK_LAUNCHES = 64                   # a marker at least that often ...
    MARK_PARTS = 4                       # ... and after a quarter of the window of predicted work
    LONGEST_KEPT_NS = 1_000_000_000      # longest_kernel_ns looks back this far, up to twice
    REFILL_NS = 8_000_000                # a lease's start, in which its queue refills (policy 6: the hand-over cost c)
    THIN_NS = 500_000                    # behind a longer queue no host is late: an idle gap is a wrong prediction
    REFILL_LEAST_NS = 1                  # no refill time is a finding, too; 0: nothing was found out
    PART_NONE = 0                        # this lease shows nothing (any more) about refilling
    PART_START = 1                       # the first REFILL_NS
    PART_REST = 2                        # after it
    SCALE_SETTLES_NS = 60_000_000        # GPU time over which the scale follows what is observed
    FIRST_UNSURE_NS = 1_000_000          # of a lease's first: a switch, and the GPU's slices for a predecessor's tail
    STALLED_NS = 100_000_000             # a marker this much overdue: see above
    FORGIVEN_NS = 5_000_000              # ... for so long

cdef extern from *:
    """
    #define PREDICTION_MAX_NS (INT64_C(1) << 58)    /* 9 years: no sum comes near an overflow */
    #define DISPROVED 1.5                           /* a scale beyond it, or below its inverse */
    """
    const int64_t PREDICTION_MAX_NS
    const double DISPROVED


cdef struct Stretch:
    # Begun at s, it ends at max(s + work, tail): launches that were queued in time run through, others leave gaps.
    int64_t work_ns          # predicted, scaled
    int64_t learned_ns       # the same, not scaled
    int64_t tail_ns          # when it ends if nothing was before it
    int64_t first_ns         # first submission
    int64_t last_ns          # last submission
    uint32_t launches
    uint32_t unknown         # of these of unknown length
    int64_t unsure_ns        # other vGPUs may have so much of its time; PREDICTION_MAX_NS: all of it
    int64_t excess_ns        # how much longer it may take (overrun_bound.pxd)
    uint64_t tag             # of the marker at its end: the caller's event


cdef struct Backlog:
    Stretch[128] marked      # a ring, the oldest at ``head``
    Stretch unmarked         # what was submitted since the last marker
    uint32_t head
    uint32_t count
    # --- prediction
    double scale             # what a prediction is multiplied by
    int64_t frontier_ns      # completion of what was last retired, or the submission that ended idleness
    int64_t end_ns           # predicted completion of everything
    int64_t work_ns          # predicted length of everything not retired
    int64_t excess_ns        # how much longer that may take
    int64_t seen_busy_ns     # the newest poll that found the queue's head unfinished
    int64_t forgiven_ns      # when the queue last counted as empty though it was not
    uint32_t unknown         # launches of unknown length not retired
    bint discard             # set by the caller while a predecessor drains or another process runs beside
    # --- the account
    bint busy                # work is queued or running, or its end was not observed yet
    bint leased
    bint refilling           # leased, nothing submitted under the lease yet
    int64_t lease_ns         # start of the lease
    int64_t since_ns         # start of the busy interval or idle gap under way
    int64_t drained_ns       # estimated instant of the last drain
    uint64_t busy_ns         # closed busy intervals
    uint64_t idle_ns         # closed idle gaps inside leases
    int64_t refill_ns        # idle time that the start of the last lease had more than leases' rests have; 0: unknown
    int part                 # PART_* of the lease, which is being watched ...
    int64_t part_from_ns     # ... from here on
    int64_t part_work_ns     # ... work retired in it
    bint thin                # the queue was short at some time in it: the GPU may have waited for the host
    double slack             # idle part of the time in the rest of leases: of a host that never keeps up
    int64_t longest_ns       # longest prediction since longest_from_ns ...
    int64_t longest_before_ns            # ... and in the stretch of time before
    int64_t longest_from_ns


cdef inline void backlog_init(Backlog* backlog) noexcept nogil:
    memset(backlog, 0, sizeof(Backlog))
    backlog.scale = 1.0
    backlog.forgiven_ns = -PREDICTION_MAX_NS


cdef inline int64_t clip_ns(int64_t value, int64_t low, int64_t high) noexcept nogil:
    return low if value < low else (high if value > high else value)


# --- what is asked of it

cdef inline int64_t backlog_ns(const Backlog* backlog, int64_t now_ns) noexcept nogil:
    """Predicted GPU time still queued at ``now_ns``."""
    return backlog.end_ns - now_ns if backlog.busy and backlog.end_ns > now_ns else 0


cdef inline int64_t backlog_scaled_ns(const Backlog* backlog, int64_t predicted_ns) noexcept nogil:
    """A learned duration as the gate should take it; unknown stays unknown."""
    if predicted_ns < 0:
        return predicted_ns
    return <int64_t>(<double>min(predicted_ns, PREDICTION_MAX_NS) * backlog.scale)


cdef inline bint backlog_disproved(const Backlog* backlog) noexcept nogil:
    """Whether learned lengths are half as long again as the observed ones, or the other way round. Then launches are
    timed anew."""
    return backlog.scale > DISPROVED or backlog.scale * DISPROVED < 1


cdef inline int64_t backlog_end_ns(const Backlog* backlog) noexcept nogil:
    """Predicted completion of everything submitted; the last drain if nothing is."""
    return backlog.end_ns if backlog.busy else backlog.drained_ns


cdef inline bint backlog_unpredicted(const Backlog* backlog) noexcept nogil:
    """Whether that is not known: some work is of unknown length, or was so long overdue that it has been forgiven."""
    return backlog.unknown != 0 or (backlog.busy and backlog.forgiven_ns >= stretch_at(backlog, 0).first_ns)


cdef inline uint64_t backlog_busy_ns(const Backlog* backlog) noexcept nogil:
    """Time with work on the GPU, as far as observed; never falls. For ``Slot.busy_ns``."""
    cdef int64_t known_ns
    if not backlog.busy:
        return backlog.busy_ns
    known_ns = max(backlog.seen_busy_ns, newest_submission_ns(backlog))
    return backlog.busy_ns + <uint64_t>max(known_ns - backlog.since_ns, <int64_t>0)


cdef inline int64_t backlog_counted_ns(const Backlog* backlog, int64_t now_ns) noexcept nogil:
    """Up to when ``backlog_busy_ns`` is known. For ``Slot.counted_ns``."""
    if not backlog.busy:
        return now_ns
    return min(now_ns, max(backlog.seen_busy_ns, newest_submission_ns(backlog)))


cdef inline int64_t backlog_longest_ns(const Backlog* backlog) noexcept nogil:
    """The longest prediction of the last second or two. For ``Slot.longest_kernel_ns``."""
    return max(backlog.longest_ns, backlog.longest_before_ns)


cdef inline int64_t newest_submission_ns(const Backlog* backlog) noexcept nogil:
    if backlog.unmarked.launches or backlog.count == 0:
        return backlog.unmarked.last_ns
    return backlog.marked[(backlog.head + backlog.count - 1) % MARKERS].last_ns


# --- leases

cdef inline void backlog_begin(Backlog* backlog, int64_t usable_ns) noexcept nogil:
    """A lease has become usable, by its start or its GO. Running work goes on under it."""
    if not backlog.leased and not backlog.busy:
        backlog.since_ns = max(usable_ns, backlog.drained_ns)
    learn_slack(backlog)
    backlog.leased = 1
    backlog.refilling = 1
    backlog.lease_ns = usable_ns


cdef inline void backlog_finish(Backlog* backlog, int64_t returned_ns) noexcept nogil:
    """The lease is over: drained at its end, or returned early. Running work is busy until it is observed to drain."""
    if backlog.leased and not backlog.busy:
        backlog.idle_ns += <uint64_t>max(returned_ns - backlog.since_ns, <int64_t>0)
    learn_slack(backlog)
    backlog.leased = 0
    backlog.refilling = 0


# --- launches and markers

cdef inline void note_longest(Backlog* backlog, int64_t now_ns, int64_t predicted_ns) noexcept nogil:
    if now_ns - backlog.longest_from_ns > <int64_t>LONGEST_KEPT_NS:
        backlog.longest_before_ns = (
            backlog.longest_ns if now_ns - backlog.longest_from_ns <= 2 * <int64_t>LONGEST_KEPT_NS else 0
        )
        backlog.longest_ns = 0
        backlog.longest_from_ns = now_ns
    backlog.longest_ns = max(backlog.longest_ns, predicted_ns)


cdef inline void backlog_wake(Backlog* backlog, int64_t now_ns) noexcept nogil:
    """A launch is being submitted: the end of an idle gap, and perhaps the lease's first."""
    if not backlog.busy:
        if backlog.leased:
            backlog.idle_ns += <uint64_t>max(now_ns - backlog.since_ns, <int64_t>0)
        backlog.busy = 1
        backlog.since_ns = backlog.frontier_ns = backlog.end_ns = now_ns
        if backlog.refilling:
            watch_part(backlog, PART_START, max(backlog.lease_ns, backlog.drained_ns))
            backlog.refill_ns = max(now_ns - backlog.part_from_ns, <int64_t>REFILL_LEAST_NS)
    elif backlog.refilling:
        backlog.refill_ns = REFILL_LEAST_NS
        backlog.part = PART_NONE
    backlog.refilling = 0


cdef inline int64_t unsure_now_ns(const Backlog* backlog) noexcept nogil:
    """``Stretch.unsure_ns`` of a launch that is submitted now."""
    if backlog.discard:
        return PREDICTION_MAX_NS
    return FIRST_UNSURE_NS if backlog.refilling else 0


cdef inline void backlog_submit(
    Backlog* backlog, int64_t now_ns, int64_t predicted_ns, int64_t assumed_ns, int64_t excess_ns
) noexcept nogil:
    """A launch went to the GPU; ``predicted_ns`` as learned; below 0 (unknown) it counts as ``assumed_ns``. It may take
    ``excess_ns`` longer."""
    cdef bint unknown = predicted_ns < 0
    cdef int64_t work_ns = assumed_ns if unknown else backlog_scaled_ns(backlog, predicted_ns)
    cdef int64_t unsure_ns = unsure_now_ns(backlog)
    cdef Stretch* stretch = &backlog.unmarked
    work_ns = clip_ns(work_ns, 0, PREDICTION_MAX_NS)
    if not unknown:
        note_longest(backlog, now_ns, work_ns + excess_ns)
    backlog_wake(backlog, now_ns)
    if backlog.end_ns - now_ns < <int64_t>THIN_NS:
        backlog.thin = 1
    if stretch.launches == 0:
        memset(stretch, 0, sizeof(Stretch))
        stretch.first_ns = now_ns
    stretch.unsure_ns = max(stretch.unsure_ns, unsure_ns)
    stretch.last_ns = now_ns
    stretch.launches += 1
    stretch.work_ns = min(stretch.work_ns + work_ns, PREDICTION_MAX_NS)
    stretch.learned_ns = min(stretch.learned_ns + clip_ns(predicted_ns, 0, PREDICTION_MAX_NS), PREDICTION_MAX_NS)
    stretch.tail_ns = min(max(stretch.tail_ns, now_ns), PREDICTION_MAX_NS) + work_ns
    stretch.unknown += unknown
    stretch.excess_ns = min(stretch.excess_ns + excess_ns, PREDICTION_MAX_NS)
    backlog.unknown += unknown
    backlog.excess_ns = min(backlog.excess_ns + excess_ns, PREDICTION_MAX_NS)
    backlog.work_ns = min(backlog.work_ns + work_ns, PREDICTION_MAX_NS)
    backlog.end_ns = min(max(backlog.end_ns, now_ns), PREDICTION_MAX_NS) + work_ns


cdef inline bint marker_due(
    const Stretch* unmarked, bint turned, bint first, bint programmatic, int64_t window_ns
) noexcept nogil:
    """Whether a marker goes behind the unmarked launches before the next one. ``turned``: the next goes into another
    stream; ``first``: it is the first of a lease; ``programmatic``: it may overlap with its predecessor's tail. A
    marker between the two would forbid that."""
    if unmarked.launches == 0:
        return 0
    return turned or (not programmatic and (
        first or unmarked.launches >= MARK_LAUNCHES
        or (unmarked.work_ns + unmarked.excess_ns) * MARK_PARTS >= window_ns
    ))


cdef inline bint backlog_mark(Backlog* backlog, uint64_t tag) noexcept nogil:
    """A marker follows everything submitted: 1; 0 if there is nothing to mark or the ring is full (try again later)."""
    if backlog.unmarked.launches == 0 or backlog.count == MARKERS:
        return 0
    backlog.unmarked.tag = tag
    backlog.marked[(backlog.head + backlog.count) % MARKERS] = backlog.unmarked
    backlog.count += 1
    memset(&backlog.unmarked, 0, sizeof(Stretch))
    return 1


cdef inline void backlog_resume(Backlog* backlog) noexcept nogil:
    """Work runs that no stretch contains, since its marker was before it. The GPU has not been idle since."""
    if not backlog.busy:
        backlog.busy = 1
        backlog.part = PART_NONE


cdef inline bint backlog_mark_late(Backlog* backlog, int64_t now_ns, uint64_t tag) noexcept nogil:
    """A marker follows a launch that may have come after the one for its stretch: one more stretch, without work. 1; 0
    if the ring is full."""
    cdef Stretch* stretch = &backlog.marked[(backlog.head + backlog.count) % MARKERS]
    if backlog.count == MARKERS:
        return 0
    backlog_resume(backlog)
    memset(stretch, 0, sizeof(Stretch))
    stretch.first_ns = stretch.last_ns = now_ns
    stretch.tag = tag
    backlog.count += 1
    return 1


cdef inline bint backlog_crowded(const Backlog* backlog, int64_t now_ns) noexcept nogil:
    """No room for a marker before the next launch and one behind it. Never while the queue is forgiven: its head may
    wait for that launch."""
    return backlog.count >= MARKERS - 1 and now_ns - backlog.forgiven_ns > <int64_t>FORGIVEN_NS


cdef inline bint backlog_oldest(const Backlog* backlog, uint64_t* tag) noexcept nogil:
    """The marker to poll next, into ``tag``: 1; 0 if there is none."""
    if backlog.count == 0:
        return 0
    tag[0] = backlog.marked[backlog.head].tag
    return 1


# --- what is observed

cdef inline void backlog_seen_busy(Backlog* backlog, int64_t now_ns) noexcept nogil:
    """The oldest marker (without one: the stream) was polled and is not complete. All work behind it is still to run.
    """
    cdef const Stretch* oldest = stretch_at(backlog, 0)
    if not backlog.busy:
        return
    backlog.seen_busy_ns = max(backlog.seen_busy_ns, now_ns)
    if now_ns - max(stretch_end_ns(oldest, backlog.frontier_ns), backlog.forgiven_ns) > <int64_t>STALLED_NS:
        forgive(backlog, now_ns)
    elif now_ns - backlog.forgiven_ns > <int64_t>FORGIVEN_NS:
        backlog.end_ns = max(backlog.end_ns, now_ns + (backlog.work_ns - oldest.work_ns))


cdef inline void forgive(Backlog* backlog, int64_t now_ns) noexcept nogil:
    cdef uint32_t i
    for i in range(backlog.count):
        backlog.marked[(backlog.head + i) % MARKERS].unsure_ns = PREDICTION_MAX_NS
        backlog.marked[(backlog.head + i) % MARKERS].unknown = 0
    backlog.unmarked.unsure_ns = PREDICTION_MAX_NS if backlog.unmarked.launches else 0
    backlog.unmarked.unknown = 0
    backlog.unknown = 0
    backlog.end_ns = now_ns
    backlog.forgiven_ns = now_ns


cdef inline void learn_scale(
    Backlog* backlog, const Stretch* stretch, int64_t start_ns, int64_t low_ns, int64_t high_ns
) noexcept nogil:
    """The stretch began at ``start_ns`` at the earliest and ended in [low, high]: correct what that disproves.

    ``scale`` moves towards the factor that the learned durations should have had, not by the prediction's error.
    Reason: the prediction was made with the scale of a queue's length ago, and correcting it once more would swing.
    """
    cdef int64_t late_ns = max(start_ns, stretch.last_ns)
    cdef int64_t lasted_ns
    cdef double weight
    if stretch.unknown or stretch.work_ns <= 0 or stretch.learned_ns <= 0:
        return
    if high_ns + stretch.unsure_ns < start_ns + stretch.work_ns:     # shorter than predicted, even without a gap
        lasted_ns = high_ns + stretch.unsure_ns - start_ns
    elif low_ns - stretch.unsure_ns > late_ns + stretch.work_ns:     # longer, even if it all began with the last launch
        lasted_ns = low_ns - stretch.unsure_ns - late_ns
    else:
        return
    weight = <double>stretch.work_ns / (<double>stretch.work_ns + <double>SCALE_SETTLES_NS)
    if weight > 0.25:
        weight = 0.25
    backlog.scale += weight * (<double>lasted_ns / <double>stretch.learned_ns - backlog.scale)
    if backlog.scale < 0.25:
        backlog.scale = 0.25
    elif backlog.scale > 4.0:
        backlog.scale = 4.0


cdef inline const Stretch* stretch_at(const Backlog* backlog, uint32_t i) noexcept nogil:
    """The stretches in order, i = 0 … count; the last is the unmarked one, perhaps without launches."""
    if i < backlog.count:
        return &backlog.marked[(backlog.head + i) % MARKERS]
    return &backlog.unmarked


cdef inline int64_t stretch_end_ns(const Stretch* stretch, int64_t begin_ns) noexcept nogil:
    return max(min(begin_ns, PREDICTION_MAX_NS) + stretch.work_ns, stretch.tail_ns)


cdef inline void watch_part(Backlog* backlog, int part, int64_t from_ns) noexcept nogil:
    backlog.part = part
    backlog.part_from_ns = from_ns
    backlog.part_work_ns = 0
    backlog.thin = 0


cdef inline void learn_refill(Backlog* backlog, const Stretch* stretch) noexcept nogil:
    """Up to the frontier the lease has run this stretch, too. For the rest of the time so far the GPU waited for a host
    that had lost its lead. Most of those gaps are not observed, so they are not in the account."""
    cdef int64_t lasted_ns = backlog.frontier_ns - backlog.part_from_ns
    if stretch.unknown:
        backlog.part = PART_NONE
        return
    backlog.part_work_ns = min(backlog.part_work_ns + stretch.work_ns, PREDICTION_MAX_NS)
    if backlog.part == PART_START and lasted_ns >= REFILL_NS:
        lasted_ns -= backlog.part_work_ns + <int64_t>(backlog.slack * <double>lasted_ns)
        if backlog.thin:
            backlog.refill_ns = max(backlog.refill_ns, lasted_ns)
        watch_part(backlog, PART_REST, backlog.frontier_ns)


cdef inline void learn_slack(Backlog* backlog) noexcept nogil:
    """The lease is over. If its rest was long enough for any host to regain its lead, the rest shows the idle part that
    this host always has."""
    cdef double lasted = <double>(backlog.frontier_ns - backlog.part_from_ns)
    cdef double idle
    if backlog.part == PART_REST and lasted >= <double>REFILL_NS:
        idle = 1.0 - <double>backlog.part_work_ns / lasted
        backlog.slack += (max(idle, 0.0) - backlog.slack) / 8
    backlog.part = PART_NONE


cdef inline void retire(Backlog* backlog, const Stretch* stretch, int64_t now_ns) noexcept nogil:
    """The oldest work was found complete at ``now_ns``; the caller has taken ``stretch`` off the queue."""
    cdef int64_t low_ns = max(backlog.seen_busy_ns, stretch.last_ns)
    cdef int64_t high_ns = max(now_ns, low_ns)
    cdef const Stretch* rest
    cdef uint32_t i
    learn_scale(backlog, stretch, max(backlog.frontier_ns, stretch.first_ns), low_ns, high_ns)
    backlog.frontier_ns = clip_ns(stretch_end_ns(stretch, backlog.frontier_ns), low_ns, high_ns)
    if backlog.part != PART_NONE:
        learn_refill(backlog, stretch)
    backlog.unknown -= stretch.unknown
    backlog.work_ns = backlog.excess_ns = 0
    backlog.end_ns = backlog.frontier_ns
    for i in range(backlog.count + 1):
        rest = stretch_at(backlog, i)
        if rest.launches:
            backlog.work_ns = min(backlog.work_ns + rest.work_ns, PREDICTION_MAX_NS)
            backlog.excess_ns = min(backlog.excess_ns + rest.excess_ns, PREDICTION_MAX_NS)
            backlog.end_ns = stretch_end_ns(rest, backlog.end_ns)
    if backlog.count == 0 and backlog.unmarked.launches == 0:
        backlog.busy_ns += <uint64_t>max(backlog.frontier_ns - backlog.since_ns, <int64_t>0)
        backlog.busy = 0
        backlog.since_ns = backlog.drained_ns = backlog.frontier_ns


cdef inline bint backlog_completed(Backlog* backlog, int64_t now_ns) noexcept nogil:
    """The oldest marker is complete: drop it and its stretch. Whether the queue is now drained."""
    cdef Stretch stretch
    if backlog.count == 0:
        return not backlog.busy
    stretch = backlog.marked[backlog.head]
    backlog.head = (backlog.head + 1) % MARKERS
    backlog.count -= 1
    retire(backlog, &stretch, now_ns)
    return not backlog.busy


cdef inline void backlog_drained(Backlog* backlog, int64_t now_ns) noexcept nogil:
    """Everything submitted is complete (a synchronisation returned). The tags of all markers are the caller's again.

    If the call blocked until the GPU was done, call ``backlog_seen_busy`` with the same instant first.
    """
    cdef Stretch whole
    cdef const Stretch* part
    cdef uint32_t i
    if not backlog.busy:
        return
    memset(&whole, 0, sizeof(Stretch))
    whole.first_ns = stretch_at(backlog, 0).first_ns
    for i in range(backlog.count + 1):
        part = stretch_at(backlog, i)
        if part.launches:
            whole.work_ns = min(whole.work_ns + part.work_ns, PREDICTION_MAX_NS)
            whole.learned_ns = min(whole.learned_ns + part.learned_ns, PREDICTION_MAX_NS)
            whole.tail_ns = stretch_end_ns(part, whole.tail_ns)
            whole.last_ns = part.last_ns
            whole.unknown += part.unknown
            whole.unsure_ns = max(whole.unsure_ns, part.unsure_ns)
    backlog.count = 0
    memset(&backlog.unmarked, 0, sizeof(Stretch))
    retire(backlog, &whole, now_ns)
