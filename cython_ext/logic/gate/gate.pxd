"""The gate's decision, pure: may this launch go to the GPU now, and if not, when should the gate decide again?

A lease is **usable** for a process when it has an epoch that neither the vGPU returned nor this process drained, it
has begun (its start has come; with LEASE_ON_GO: GO was given, even before the start, or ``go_by_ns`` has passed) and
it has not ended. Inside a usable lease two rules hold a launch back:

* **end**: it starts only if at least half of it fits behind the queued work, or if it is the first of the lease (a
  kernel longer than every quantum must run some time; its overuse is charged). Close to the end, or where it would not
  fit even alone, the lease is **closed** for the process: it takes no more work (logic/gate/handover.pxd).
* **window**: the queued work and this launch together stay within the window. But behind a *small* backlog, a quarter
  of the window, any launch may queue. Else kernels longer than the window would leave the GPU idle between each other.
  A kernel of unknown length counts as long as the window (1 ms at most), queues only behind a small backlog, and
  alone of its kind. A launch that may take far longer than predicted (logic/gate/overrun_bound.pxd) queues behind
  others of that kind only while these are no more than a window longer at worst; two may always. No waiting thread
  sleeps by a guess, nor for long by a learned length. Reason: the same kernel may take a tenth of the time with other
  arguments, and the GPU would be idle meanwhile.

An open-ended lease has no end, and no window unless another vGPU of the GPU wants.

On a free GPU (no vGPU holds a lease or wants one) a standby lease need not wait for GO. Reason: two sleeping threads
would have to wake for that GO. A process may **take** the lease, an optimistic start (``GrantsPage.free_epoch``), for
some work, its part of a millisecond. A launch of unknown length counts for a quarter of that. Only one is in flight:
its length is known afterwards. GO follows, and the lease is charged from the first launch on. Two vGPUs that start in
the same moment run beside each other for no longer than that. Then one of them has GO, and the other waits for its
lease.
"""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.pages.layout cimport FOREVER_NS, LEASE_ON_GO, LEASE_OPEN, Lease, Plan, epoch_past, epoch_reached
from cython_ext.logic.gate.handover cimport CLOSE_NS

cdef enum:
    UNKNOWN_NS = -1          # a duration that was not measured yet

    GATE_SUBMIT = 1          # under Verdict.epoch
    GATE_WAIT_BACKLOG = 2    # the lease is usable; enough of the queue should have run by until_ns
    GATE_WAIT_LEASE = 3      # not now; the next lease opens at until_ns unless the plan changes (FOREVER_NS: never)

    UNKNOWN_MOST_NS = 1_000_000  # what a launch of unknown length counts for, at most
    GATE_LOOK_NS = 10_000    # shortest wait worth suggesting
    KNOWN_LOOK_NS = 250_000  # longest: lengths are learned, not promised, and the queued work may be far shorter
    UNKNOWN_LOOK_NS = 50_000     # ... for what is of unknown length
    TAKE_MOST_NS = 1_000_000     # work of a vGPU under a lease without GO


cdef struct GateState:
    int64_t now_ns
    int64_t window_ns
    int64_t backlog_ns       # predicted GPU time queued, not below 0
    int64_t predicted_ns     # of this launch (window.backlog_scaled_ns), or UNKNOWN_NS
    int64_t excess_ns        # how much longer than that it may take (logic/gate/overrun_bound.pxd) ...
    int64_t queued_excess_ns     # ... and what is queued
    uint32_t unknown_in_flight   # launches of unknown length submitted and not seen done
    uint32_t go_epoch        # GrantsPage
    uint32_t returned_epoch  # ActivityPage
    uint32_t drained_epoch   # drained or closed: the newest lease that takes no more work of this process; 0: none
    uint32_t last_epoch      # own Slot: the newest submission's; under another epoch this launch is the first
    bint contended           # GRANTS_CONTENDED
    uint32_t free_epoch      # GrantsPage; 0 too where nothing may be taken for another reason
    int64_t take_most_ns     # work of this process that may be submitted under free_epoch without GO ...
    int64_t taken_ns         # ... and has been
    int64_t doubted_ns       # of a launch of unknown length, what it took before it was changed; else 0


cdef struct Verdict:
    int action               # GATE_*
    uint32_t epoch           # the lease that GATE_SUBMIT and GATE_WAIT_BACKLOG speak of, else 0
    int64_t until_ns         # when to decide again; 0 with GATE_SUBMIT
    uint32_t closed          # a lease that is usable and takes no more work of this process; 0: none
    bint takes               # GATE_SUBMIT: without GO


cdef inline bint lease_alive(const Lease* lease, const GateState* state) noexcept nogil:
    """Whether the lease can still be, or become, usable."""
    return (
        lease.epoch != 0
        and not epoch_reached(state.returned_epoch, lease.epoch)
        and not epoch_past(state.drained_epoch, lease.epoch)
        and state.now_ns < lease.end_ns
    )


cdef inline bint lease_usable(const Lease* lease, const GateState* state) noexcept nogil:
    if not lease_alive(lease, state):
        return 0
    if lease.flags & LEASE_ON_GO:
        return epoch_reached(state.go_epoch, lease.epoch) or state.now_ns >= lease.go_by_ns
    return state.now_ns >= lease.start_ns


cdef inline int64_t lease_opens_ns(const Lease* lease, const GateState* state) noexcept nogil:
    """When an unusable lease becomes usable by itself; FOREVER_NS if never."""
    cdef int64_t opens_ns
    if not lease_alive(lease, state):
        return FOREVER_NS
    opens_ns = lease.go_by_ns if lease.flags & LEASE_ON_GO else lease.start_ns
    return opens_ns if opens_ns < lease.end_ns else FOREVER_NS


cdef inline int64_t plan_opens_ns(const Plan* plan, const GateState* state) noexcept nogil:
    """When the first lease of the plan is usable by itself, unless GO is given before; FOREVER_NS if never."""
    return min(lease_opens_ns(&plan.current, state), lease_opens_ns(&plan.next, state))


cdef inline int64_t plan_due_ns(const Plan* plan, const GateState* state, bint on_go) noexcept nogil:
    """The first start of a lease that opens. GO is due then if the lease before it has drained. FOREVER_NS: no lease
    opens. ``on_go``: only leases that begin with a GO count."""
    cdef int64_t due_ns = FOREVER_NS
    cdef const Lease* lease
    cdef int i
    for i in range(2):
        lease = &plan.current if i == 0 else &plan.next
        if lease_opens_ns(lease, state) < FOREVER_NS and (lease.flags & LEASE_ON_GO or not on_go):
            due_ns = min(due_ns, lease.start_ns)
    return due_ns


cdef inline int64_t length_ns(const GateState* state) noexcept nogil:
    """The launch's predicted length, or what an unknown one counts for."""
    return min(state.window_ns, UNKNOWN_MOST_NS) if state.predicted_ns < 0 else state.predicted_ns


cdef inline bint fits_alone(const Lease* lease, const GateState* state) noexcept nogil:
    """Whether at least half of the launch would fit into the rest of the lease behind an empty queue."""
    return length_ns(state) / 2 <= lease.end_ns - state.now_ns


cdef inline bint fits_end(const Lease* lease, const GateState* state) noexcept nogil:
    if lease.flags & LEASE_OPEN or state.last_epoch != lease.epoch:
        return 1
    return length_ns(state) / 2 <= (lease.end_ns - state.now_ns) - state.backlog_ns


cdef inline int64_t window_room_ns(const Lease* lease, const GateState* state) noexcept nogil:
    """The longest backlog behind which this launch may queue."""
    cdef int64_t small_ns = state.window_ns / 4
    if lease.flags & LEASE_OPEN and not state.contended:
        return FOREVER_NS
    if state.predicted_ns < 0:
        return length_ns(state) / 4 if state.unknown_in_flight == 0 else -1
    return max(state.window_ns - state.predicted_ns, small_ns)


cdef inline bint bounded_at_worst(const Lease* lease, const GateState* state) noexcept nogil:
    """Whether the launch may queue behind work that may be longer than predicted, as it may itself."""
    if lease.flags & LEASE_OPEN and not state.contended:
        return 1
    return state.excess_ns == 0 or state.queued_excess_ns <= max(state.window_ns, state.excess_ns)


cdef inline int64_t take_ns(const GateState* state) noexcept nogil:
    """What the launch counts for if it takes a lease."""
    return max(state.take_most_ns / 4, state.doubted_ns) if state.predicted_ns < 0 else state.predicted_ns


cdef inline bint may_take(const Plan* plan, const GateState* state) noexcept nogil:
    return (
        state.free_epoch != 0
        and state.free_epoch == plan.current.epoch
        and not epoch_reached(state.returned_epoch, state.free_epoch)
        and not epoch_past(state.drained_epoch, state.free_epoch)
        and (state.predicted_ns >= 0 or state.unknown_in_flight == 0)
        and take_ns(state) <= state.take_most_ns - state.taken_ns
    )


cdef inline int64_t look_ns(const Lease* lease, const GateState* state, int64_t surplus_ns) noexcept nogil:
    """When to decide again: when so much of the queue should have run, or sooner."""
    cdef int64_t wait_ns = UNKNOWN_LOOK_NS
    if not state.unknown_in_flight:
        wait_ns = min(max(surplus_ns, <int64_t>GATE_LOOK_NS), <int64_t>KNOWN_LOOK_NS)
    return state.now_ns + min(wait_ns, lease.end_ns - state.now_ns)


cdef inline void gate_decide(const Plan* plan, const GateState* state, Verdict* verdict) noexcept nogil:
    cdef int64_t room_ns
    cdef int64_t opens_ns = FOREVER_NS
    cdef const Lease* lease
    cdef int i
    verdict.action = GATE_WAIT_LEASE
    verdict.epoch = verdict.closed = 0
    verdict.takes = 0
    for i in range(2):
        lease = &plan.current if i == 0 else &plan.next
        if not lease_usable(lease, state):
            opens_ns = min(opens_ns, lease_opens_ns(lease, state))
        elif not fits_end(lease, state):
            if lease.end_ns - state.now_ns <= CLOSE_NS or not fits_alone(lease, state):
                verdict.closed = lease.epoch
            elif verdict.action != GATE_WAIT_BACKLOG:
                # the queued work may be shorter than predicted
                verdict.action = GATE_WAIT_BACKLOG
                verdict.epoch = lease.epoch
                verdict.until_ns = look_ns(lease, state, state.backlog_ns / 2)
        else:
            room_ns = window_room_ns(lease, state)
            verdict.epoch = lease.epoch
            if state.backlog_ns <= room_ns and bounded_at_worst(lease, state):
                verdict.action = GATE_SUBMIT
                verdict.until_ns = 0
            elif state.backlog_ns <= room_ns:
                verdict.action = GATE_WAIT_BACKLOG
                verdict.until_ns = look_ns(lease, state, state.backlog_ns / 2)      # it is as likely to be as short
            else:
                verdict.action = GATE_WAIT_BACKLOG
                verdict.until_ns = look_ns(lease, state, state.backlog_ns - max(room_ns, <int64_t>0))
            return
    if verdict.action == GATE_WAIT_LEASE and verdict.closed == 0 and may_take(plan, state):
        verdict.action = GATE_SUBMIT
        verdict.epoch = state.free_epoch
        verdict.until_ns = 0
        verdict.takes = 1
    elif verdict.action == GATE_WAIT_LEASE:
        verdict.until_ns = opens_ns
