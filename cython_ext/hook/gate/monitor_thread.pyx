"""The hook thread, one per gate. It detects drains when they happen, and gives idle leases back. It detects a silent
or new server, and threads that are kept in the driver because the vGPU is suspended.

It holds the slot's robust mutex for as long as the process lives. When the process dies, the kernel marks the mutex.
The hook thread blocks all signals. It sleeps on ``grants.change``, at most until the time that ``step`` returns. At
exit it makes no more driver calls, but keeps the mutex until the process has ended.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t

from cython_ext.hook.hook cimport (
    publish_prediction, vgpu_admit_release, vgpu_baton, vgpu_baton_over, vgpu_begin, vgpu_collect, vgpu_drained,
    vgpu_end, vgpu_give_turn, vgpu_is_calling, vgpu_let_go, vgpu_log, vgpu_move, vgpu_open_turn, vgpu_publish_counts,
    vgpu_reattach, vgpu_ring, vgpu_trace_busy, vgpu_trace_drain, vgpu_turn_opens_ns, vgpu_wait_ahead, vgpu_want,
)
from cython_ext.hook.state cimport Gate, State, is_removed, state
from cython_ext.pages.layout cimport (
    FOREVER_NS, GRANTS_AWAY, GRANTS_COMPANY, GRANTS_CONTENDED, GRANTS_SHARED, GRANTS_STILL, MODE_TEMPORAL, SLOT_ACTIVE,
    SLOT_RESERVED, Plan, Slot, epoch_past,
)
from cython_ext.logic.meter.demand cimport demand_looks, waits_until
from cython_ext.logic.meter.durations cimport durations_doubt
from cython_ext.logic.gate.handover cimport AWAKE_AFTER_NS, AWAKE_BEFORE_NS, TAIL_NS, awake_for
from cython_ext.logic.sync.lock cimport lock_release, lock_soon
from cython_ext.logic.meter.meter cimport usage_doubtful
from cython_ext.logic.gate.plan cimport read_plan
from cython_ext.logic.sync.robust cimport ROBUST_LOCKED, robust_hold
from cython_ext.logic.gate.window cimport (
    backlog_counted_ns, backlog_end_ns, backlog_longest_ns, backlog_seen_busy,
)
from cython_ext.logic.gate.windowlength cimport overrun_tolerated_ns, window_adapt
from cython_ext.native cimport (
    cas32, exchange32, fence, futex_wait, futex_wake, load32, load64, loadi64, now_ns, pause, store32, store64,
    storei64,
)

cdef extern from "hook/hook_native.h" nogil:
    bint vgpu_spawn(void* (*run)(void*) noexcept nogil, void* argument) noexcept
    void vgpu_prepare_thread() noexcept
    int vgpu_at_exit(void (*run)() noexcept nogil) noexcept

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    # The intervals at which the hook thread polls. No policy deadline depends on one: drains are dated by prediction.
    LOOK_ENDED_LEAST_NS = 15_000     # the lease is over, its work is not: other vGPUs wait for this one
    LOOK_ENDED_MOST_NS = 200_000     # ... when the drain is predicted to be far away
    LOOK_AWAKE_NS = 30_000           # close to a hand-over, with cores to spare: the next lease starts at the drain
    LOOK_LOCKED_NS = 50_000          # another thread has the lock: usually for a microsecond
    LOOK_LEASED_NS = 200_000         # inside a finite lease, or while other vGPUs wait
    LOOK_IDLE_NS = 500_000
    LOOK_ALONE_NS = 50_000_000       # no other vGPU wants: the accounts and the heartbeat are all there is to poll
    LOOK_METERED_NS = 10_000_000     # ... and work that the meter counts
    RETRY_NS = 20_000_000            # a server that restarts
    END_NS = 1_000_000_000           # at exit the process waits so long for the thread that holds the lock
    KNOCK_NS = 1_000_000_000         # after so long without a heartbeat the hook asks the broker, and that often

    # When an idle lease goes back: after the gap that costs as much as a hand-over of 0.4 ms
    BREAK_EVEN_NS = 800_000
    EXPECTED_IDLE_NS = 100_000
    STEPS_APART_NS = 2_000_000       # ... of a vGPU with a tpot after an eighth of that, up to so much
    IDLE_ALONE_NS = 20_000_000       # no other vGPU wants: the next to want, this one too, gets GO by the dispatcher


cdef void count(Gate* gate) noexcept nogil:
    """Publish the counters in the slot."""
    vgpu_publish_counts(gate)
    storei64(&gate.slot.counted_ns, backlog_counted_ns(&gate.backlog, now_ns()))
    storei64(&gate.slot.longest_kernel_ns, backlog_longest_ns(&gate.backlog))
    storei64(&gate.slot.refill_ns, gate.backlog.refill_ns)


cdef void sample_demand(Gate* gate, int64_t now) noexcept nogil:
    """Sample the process's demand. A process that returned its lease a moment ago is between two requests. That is
    host time, too."""
    cdef Slot* slot = gate.slot
    cdef int64_t worked_ns = max(loadi64(&slot.last_submit_ns), gate.backlog.drained_ns)
    cdef bint wants = load32(&slot.want) != 0 or now - worked_ns < IDLE_ALONE_NS
    cdef uint64_t waited_ns = waits_until(&state().waits, now)
    cdef uint64_t held_up_ns = waits_until(&state().held_up, now)
    cdef bint shared = load32(&gate.grants.flags) & GRANTS_SHARED != 0
    cdef uint64_t work_ns = gate.usage.spent_ns + gate.tracked_ns
    cdef uint32_t waits = load32(&state().waits.ended) - load32(&state().held_up.ended)
    demand_looks(&gate.demand, now, work_ns, waited_ns, held_up_ns, waits, wants, gate.began_epoch != 0, shared)
    store32(&slot.demand_ppm, gate.demand.ppm)
    store32(&slot.waits_ppm, gate.demand.waits_ppm)
    store32(&slot.burst_us, gate.demand.burst_us)
    store64(&slot.work_ns, work_ns)


cdef inline bint superseded(const Gate* gate) noexcept nogil:
    """Whether a server other than the writer of this gate's grants page is in charge."""
    return load32(&gate.activity.generation) != gate.grants.generation


cdef inline int64_t silent_ns(const Gate* gate) noexcept nogil:
    """The time since the last heartbeat of the server that wrote the grants page; 0 before its first."""
    cdef int64_t alive = loadi64(&gate.grants.alive_ns)
    return now_ns() - alive if alive else 0


cdef bint check_server(Gate* gate) noexcept nogil:
    """Whether the grants page is that of the server in charge. The fast path is shut where it is not, or where that
    server is silent. It is also shut while the process's memory is swapped out: no lease is usable then."""
    gate.lost = silent_ns(gate) > gate.grants.grace_ns
    store32(&gate.generation, 0 if gate.lost or load32(&gate.away) or superseded(gate) else gate.grants.generation)
    return gate.generation != 0 or not superseded(gate)


cdef void publish_drained(Gate* gate, uint32_t epoch) noexcept nogil:
    """Publish that no work of this process runs under ``epoch``, and that none will. The next holder waits for this
    word."""
    cdef Slot* slot = gate.slot
    cdef int64_t tolerated
    cdef int64_t overrun = gate.backlog.drained_ns - gate.over_end_ns if gate.over_end_ns < FOREVER_NS else 0
    if load32(&slot.last_epoch) == epoch:
        if overrun > 0:
            store64(&slot.overrun_ns, slot.overrun_ns + <uint64_t>overrun)
        tolerated = overrun_tolerated_ns(gate.grants.window_ns, backlog_longest_ns(&gate.backlog))
        gate.window_ns = window_adapt(gate.window_ns, gate.grants.window_ns, overrun, tolerated)
    storei64(&slot.drained_ns, gate.backlog.drained_ns)
    if load32(&gate.activity.processes) == 1:
        store32(&slot.tail_epoch, epoch)     # the scheduler may move its end only now: the lease is spent all the same
    store32(&slot.drained_epoch, epoch)
    if epoch_past(epoch, gate.closed_epoch):
        gate.closed_epoch = 0
    gate.over_epoch = 0
    vgpu_trace_drain(gate, epoch)
    vgpu_log(b"drained epoch, overrun ns", epoch, overrun)
    vgpu_log(b"refill ns, scale ppm", gate.backlog.refill_ns, <int64_t>(1e6 * gate.backlog.scale))
    vgpu_log(b"window ns, busy ns", gate.window_ns, <int64_t>gate.backlog.busy_ns)


cdef bint others_gain(const Gate* gate) noexcept nogil:
    """Whether an early return gains another vGPU or process GPU time."""
    return ends_ns(gate) < FOREVER_NS or load32(&gate.grants.flags) & GRANTS_CONTENDED != 0


cdef inline int64_t ends_ns(const Gate* gate) noexcept nogil:
    """The end of the lease, or of this process's turn with the baton within it."""
    return min(gate.lease_end_ns, gate.baton_until_ns)


cdef void doubt(Gate* gate, int64_t now) noexcept nogil:
    """The GPU is still at work. If it works for longer than the meter explains, the hook times each key anew."""
    if load64(&gate.slot.launches) != gate.quiet_launches:
        gate.quiet_launches = load64(&gate.slot.launches)
        gate.quiet_ns = now
    elif usage_doubtful(&gate.usage, now - gate.quiet_ns):
        gate.doubts += 1
        durations_doubt(&gate.durations)
        store32(&gate.round, gate.round + 1)


cdef void observe(Gate* gate, int64_t now) noexcept nogil:
    """Poll for the drain, and publish the result."""
    cdef Slot* slot = gate.slot
    cdef bint drained = not load32(&slot.undrained)
    cdef bint publish
    if not drained:
        vgpu_collect(gate, now)
        drained = vgpu_drained(gate, now, 1)
        if not drained and gate.untracked and not load32(&gate.grants.flags) & GRANTS_COMPANY:
            doubt(gate, now)             # with shared leases other vGPUs keep the GPU busy
    publish = gate.over_epoch and (drained or (gate.over_markers == 0 and load32(&slot.last_epoch) != gate.over_epoch))
    count(gate)              # before the epoch: a reader of the drained epoch then reads the whole lease's figures
    publish_prediction(gate)         # after the count: a reader that finds it past also finds the process alive
    if publish:
        publish_drained(gate, gate.over_epoch)
    if drained:
        exchange32(&slot.undrained, 0)
    if publish or (drained and vgpu_baton_over(gate, now)):
        vgpu_ring(gate)


cdef void publish_tail(Gate* gate, int64_t now) noexcept nogil:
    """Where the lease takes no more work and the queue is short, publish its tail (logic/gate/handover.pxd). The next
    holder may then get ready."""
    cdef uint32_t epoch = gate.over_epoch
    if (
        epoch != 0 and gate.began_epoch == 0 and load32(&gate.slot.tail_epoch) != epoch
        and load32(&gate.slot.last_epoch) == epoch
        and gate.backlog.busy and gate.backlog.unknown == 0 and not gate.untracked
        and backlog_end_ns(&gate.backlog) - now <= TAIL_NS and load32(&gate.activity.processes) == 1
    ):
        vgpu_log(b"tail of epoch, ns", epoch, backlog_end_ns(&gate.backlog) - now)
        gate.closed_epoch = epoch
        store32(&gate.slot.tail_epoch, epoch)
        vgpu_ring(gate)


cdef void give_back(Gate* gate, int64_t now) noexcept nogil:
    """Where the process was idle for longer than a hand-over costs, it gives the rest of the lease back."""
    cdef int64_t patience = EXPECTED_IDLE_NS if gate.gap_ns > BREAK_EVEN_NS else BREAK_EVEN_NS
    if not others_gain(gate):
        if gate.grants.mode != MODE_TEMPORAL:
            return
        patience = IDLE_ALONE_NS
    # Between two decode steps the host is soon done, and a hand-over in between would delay the next step.
    patience = max(patience, min(125 * <int64_t>load32(&gate.grants.tpot_us), <int64_t>STEPS_APART_NS))
    if now - gate.idle_since_ns < patience:
        return
    exchange32(&gate.slot.want, 0)
    fence()
    vgpu_log(b"idle since, gap ns", gate.idle_since_ns, gate.gap_ns)
    vgpu_ring(gate)


cdef int64_t step(Gate* gate, int64_t now) noexcept nogil:
    """Do everything that is due at ``now``. The result is the time of the next step, unless the plan changes before."""
    cdef Slot* slot = gate.slot
    cdef bint in_charge
    cdef Plan plan
    count(gate)
    sample_demand(gate, now)
    vgpu_trace_busy(gate)
    in_charge = check_server(gate)
    heed_limit(gate)
    if gate.lost or is_removed(gate) or load32(&gate.grants.flags) & GRANTS_STILL:
        vgpu_let_go(gate)
    if not in_charge or not read_plan(gate.grants, &plan):
        return now + RETRY_NS
    vgpu_end(gate, &plan, now)
    vgpu_begin(gate, &plan, now)
    vgpu_admit_release(gate)
    if gate.ahead.launches:
        vgpu_wait_ahead(gate, now)   # after a lease that was slept through, no thread may be in the gate to report it
    vgpu_baton(gate, &plan, now)
    if load32(&slot.undrained) or gate.over_epoch:
        if gate.over_epoch or vgpu_baton_over(gate, now) or now >= min(backlog_end_ns(&gate.backlog), gate.look_ns):
            observe(gate, now)
            gate.look_ns = now + look_every_ns(gate, now)
        publish_tail(gate, now)
    return min(next_look(gate, now), max(vgpu_turn_opens_ns(gate, &plan, now), now + LOOK_ENDED_LEAST_NS))


cdef int64_t due_ns(const Gate* gate) noexcept nogil:
    """The time of the hand-over that this process takes part in. It is the end of its lease until that has drained, or
    else the start of the lease that work is queued ahead of. FOREVER_NS: none."""
    if gate.over_epoch:
        return gate.over_end_ns
    if gate.began_epoch:
        return ends_ns(gate)
    return gate.turn_due_ns if gate.ahead.launches else <int64_t>FOREVER_NS


cdef inline int64_t alone_ns(const Gate* gate, int64_t now) noexcept nogil:
    """How often the hook thread polls where no other vGPU wants. It polls for overdue work again after a quarter of
    the time by which that is overdue. The backlog dates its end by the prediction, or by the last poll that found it
    running."""
    cdef int64_t usual = LOOK_METERED_NS if gate.usage.metered or gate.limited else LOOK_ALONE_NS
    cdef int64_t overdue = now - loadi64(&gate.slot.last_submit_ns) - gate.backlog.work_ns
    if load32(&gate.slot.undrained) == 0 or gate.untracked or overdue <= 0:
        return usual
    return min(usual, max(<int64_t>LOOK_LEASED_NS, overdue / 4))


cdef int64_t look_every_ns(const Gate* gate, int64_t now) noexcept nogil:
    """How often the hook thread polls the queue in the present state."""
    if state().spins and awake_for(due_ns(gate), AWAKE_BEFORE_NS, AWAKE_AFTER_NS, now):
        return LOOK_AWAKE_NS
    if gate.over_epoch:
        return LOOK_ENDED_MOST_NS
    return LOOK_LEASED_NS if others_gain(gate) else alone_ns(gate, now)


cdef void heed_limit(Gate* gate) noexcept nogil:
    """Where the limit came into force under an open-ended lease, or went out of force, send threads on the fast path
    through the gate. They ask there for a new allowance."""
    cdef bint limited = loadi64(&gate.grants.allowed_ns) != 0
    if limited != gate.limited:
        gate.limited = limited
        store32(&gate.round, gate.round + 1)


cdef int64_t next_look(Gate* gate, int64_t now) noexcept nogil:
    """When to poll again for running work. An idle lease is given back here."""
    cdef Slot* slot = gate.slot
    cdef int64_t again
    if load32(&slot.undrained):
        again = max(backlog_end_ns(&gate.backlog), now)
        if gate.over_epoch or vgpu_baton_over(gate, now):
            if gate.over_epoch and load32(&slot.tail_epoch) != gate.over_epoch:
                again = max(again - TAIL_NS, now)
            return min(max(again, now + LOOK_ENDED_LEAST_NS), now + look_every_ns(gate, now))
        if others_gain(gate):            # the prediction may be too long, and the poll must detect an idle GPU
            again = now + max((again - now) / 4, look_every_ns(gate, now))
            return max(min(ends_ns(gate), again), now + LOOK_ENDED_LEAST_NS)
        return now + alone_ns(gate, now)
    if load32(&slot.want) and gate.waiters == 0 and gate.ahead.launches == 0 and not gate.calls:
        give_back(gate, now)
    if vgpu_baton_over(gate, now):       # this process may get the baton at any moment, and must observe its work
        return now + (LOOK_LEASED_NS if load32(&slot.want) else LOOK_ALONE_NS)
    if gate.began_epoch and others_gain(gate):
        return min(ends_ns(gate), now + (LOOK_LEASED_NS if load32(&slot.want) else LOOK_IDLE_NS))
    return now + alone_ns(gate, now)


cdef void rest(Gate* gate, uint32_t change, int64_t due, int64_t until) noexcept nogil:
    """Sleep until the plan changes, or ``until``; awake for the hand-over that is ``due``."""
    cdef const uint32_t* word = &gate.grants.change
    cdef int64_t now = now_ns()
    if not state().spins or now - due >= AWAKE_AFTER_NS:
        futex_wait(word, change, until)
    elif not awake_for(due, AWAKE_BEFORE_NS, AWAKE_AFTER_NS, now):
        futex_wait(word, change, min(until, due - AWAKE_BEFORE_NS))
    else:
        while load32(word) == change and now_ns() < min(until, due + <int64_t>AWAKE_AFTER_NS):
            pause()


cdef inline bint stands_still(const Gate* gate) noexcept nogil:
    """Whether the process is checkpointed, or about to be. Where a vGPU's memory is swapped, the driver still answers.
    """
    return load32(&gate.grants.flags) & (GRANTS_STILL | GRANTS_AWAY) == GRANTS_STILL


cdef void look_for_calls(Gate* gate) noexcept nogil:
    """Check for threads in the driver while the vGPU is suspended. The caller does not hold gate.lock: the thread that
    has it may itself be in the driver. No other thread clears a want."""
    gate.calls = stands_still(gate) and vgpu_is_calling()
    if gate.calls:
        vgpu_want(gate, now_ns())


cdef inline bint no_lease_comes(const Gate* gate) noexcept nogil:
    """Whether the server of this grants page will give no lease to the work that is queued ahead."""
    return (
        superseded(gate) or silent_ns(gate) > gate.grants.grace_ns
        or is_removed(gate) or load32(&gate.grants.flags) & GRANTS_STILL != 0
    )


cdef void* run(void* argument) noexcept nogil:
    cdef Gate* gate = <Gate*>argument
    cdef State* all = state()
    cdef uint32_t change
    cdef int64_t again, due, moves, knocked_ns = 0
    vgpu_prepare_thread()
    if not vgpu_take_slot(gate.slot):
        store32(&gate.thread_state, 2)
        futex_wake(&gate.thread_state, 1)
        return NULL
    store32(&gate.thread_state, 1)
    futex_wake(&gate.thread_state, 1)
    while not load32(&all.stopping):
        if superseded(gate):
            store32(&gate.generation, 0)
            vgpu_reattach(gate)
        elif (
            (silent_ns(gate) > KNOCK_NS or load32(&gate.activity.broker_epoch) != gate.broker_epoch)
            and now_ns() - knocked_ns > KNOCK_NS
        ):
            # Server and broker may have died together. Then no process is left to change a word in these pages. Or a
            # new broker has started, which may not know this process.
            vgpu_reattach(gate)
            knocked_ns = now_ns()
        look_for_calls(gate)
        change = load32(&gate.grants.change)
        while not lock_soon(&gate.lock):
            # The thread that has the lock may be in the driver, behind a thread that waits for work queued ahead.
            if no_lease_comes(gate):
                vgpu_give_turn(gate)
            else:
                vgpu_open_turn(gate)
            if gate.ahead.launches:      # the relay passes over a process that slept through a lease or a turn
                vgpu_wait_ahead(gate, now_ns())
            look_for_calls(gate)
            storei64(&gate.slot.locked_out_ns, now_ns())
            rest(gate, change, due_ns(gate), now_ns() + LOOK_LOCKED_NS)
            change = load32(&gate.grants.change)
        again = step(gate, now_ns()) if not load32(&all.stopping) else 0
        due = due_ns(gate)
        lock_release(&gate.lock)
        moves = vgpu_move(gate)
        rest(gate, change, due, min(again, moves) if moves else again)
    while True:              # the process ends; this thread keeps the mutex until then
        futex_wait(&all.stopping, 1, INT64_MAX)


cdef void stop() noexcept nogil:
    """Stop the gates at exit, before libcuda shuts down. Afterwards the hook has no driver call under way, and begins
    none."""
    cdef State* all = state()
    cdef int64_t until = now_ns() + <int64_t>END_NS
    cdef bint locked
    cdef uint32_t i
    if all == NULL or not all.attached:
        return
    for i in range(all.gate_count):          # the driver's exit makes calls, in which a suspended process waits
        store32(&all.gates[i].slot.ends, 1)
    store32(&all.stopping, 1)
    for i in range(all.gate_count):
        locked = lock_soon(&all.gates[i].lock)
        while not locked and now_ns() < until:
            vgpu_give_turn(&all.gates[i])    # the thread that has it may be in the driver, behind work queued ahead
            futex_wait(&all.stopping, 1, now_ns() + LOOK_LOCKED_NS)
            locked = lock_soon(&all.gates[i].lock)
        if locked:                           # else a signal handler called exit, and this very thread holds the lock
            backlog_seen_busy(&all.gates[i].backlog, now_ns())   # running work is the last that the hook observes
            count(&all.gates[i])
            vgpu_let_go(&all.gates[i])
        all.gates[i].open = 1
        store32(&all.gates[i].generation, 0)
        if locked:
            lock_release(&all.gates[i].lock)
        futex_wake(&all.gates[i].away, INT_MAX)
        while load32(&all.gates[i].moving) and (locked or now_ns() < until):
            futex_wait(&all.gates[i].moving, 1, INT64_MAX if locked else until)
        while load32(&all.gates[i].pinning) and (locked or now_ns() < until):
            futex_wait(&all.gates[i].pinning, 1, INT64_MAX if locked else until)


cdef public bint vgpu_take_slot(Slot* slot) noexcept nogil:
    """Take a slot that the broker reserved. The kernel will mark this thread's death there."""
    return robust_hold(<uint32_t*>&slot.alive) == ROBUST_LOCKED and cas32(&slot.state, SLOT_RESERVED, SLOT_ACTIVE)


cdef public bint vgpu_start_thread(Gate* gate) noexcept nogil:
    """Start the gate's thread and wait until it holds the slot. 0: it could not."""
    if not vgpu_spawn(run, gate):
        return 0
    while load32(&gate.thread_state) == 0:
        futex_wait(&gate.thread_state, 0, INT64_MAX)
    return load32(&gate.thread_state) == 1


cdef public void vgpu_stop_at_exit() noexcept nogil:
    """Register ``stop``. Call it after the driver's cuInit: exit handlers run in reverse order, so ``stop`` runs before
    the driver's handler."""
    if cas32(&state().exit_known, 0, 1):
        vgpu_at_exit(stop)
