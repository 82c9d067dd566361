"""The gate off the fast path: it announces a launch, measures it, or makes it wait.

vgpu_enter decides between three ways through:

* *Plain*: the process has no vGPU, or the launch is captured.
* *Announced*: the lease is open-ended, and this is the first launch since the last drain. The gate notes the stream
  and publishes the want. The launches that follow take fastpath.pxd. The meter of logic/meter/meter.pxd counts them
  all.
* *Tracked*: the lease is finite. The gate adds a prediction to the backlog. The pure decision of logic/gate/gate.pxd
  holds the launch to the window and to the lease's end.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2
from cython_ext.hook.hook cimport (
    publish_prediction, vgpu_announce_in_context, vgpu_baton, vgpu_begin, vgpu_calling, vgpu_capturing,
    vgpu_claim_thread, vgpu_collect, vgpu_context_of_stream, vgpu_count_launch, vgpu_drained,
    vgpu_drained_as_predicted, vgpu_end, vgpu_foresee, vgpu_gate_here, vgpu_go_follows, vgpu_is_held_up,
    vgpu_know_stream, vgpu_look, vgpu_mark, vgpu_mark_launch, vgpu_may_be_spared, vgpu_outdate_probe,
    vgpu_publish_counts, vgpu_publish_submission, vgpu_queue_ahead, vgpu_recollect, vgpu_ring, vgpu_sample_begin,
    vgpu_sample_end, vgpu_sample_metered, vgpu_sample_void, vgpu_say, vgpu_siblings_run, vgpu_spent_epoch,
    vgpu_step_begins, vgpu_stream_index, vgpu_take, vgpu_touch, vgpu_touched, vgpu_turn_to, vgpu_wait_for_baton,
    vgpu_want, vgpu_was_held_up,
)
from cython_ext.hook.state cimport (
    CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA_SUCCESS, LAUNCH_OVERLAPS, LAUNCH_WAITS, PASS_ANNOUNCED, PASS_CALLING,
    PASS_PLAIN, PASS_TOUCHING, PASS_TRACKED, STREAM_OWN, Prediction, Gate, Pass, Stream, Thread, is_removed,
    is_swappable, state,
)
from cython_ext.pages.layout cimport (
    FOREVER_NS, GRANTS_CONTENDED, GRANTS_LOSS_ERROR, GRANTS_LOSS_RUN, MAX_PROCESSES, MODE_TEMPORAL, SLOT_ACTIVE, Plan,
    Slot, epoch_past, epoch_reached,
)
from cython_ext.logic.gate.prequeue cimport ahead_submit_graph, ahead_takes_graph
from cython_ext.logic.gate.baton cimport baton_bound
from cython_ext.logic.gate.poll_skip cimport belief_answered, belief_suffices
from cython_ext.logic.meter.durations cimport Duration, LaunchKey, durations_steady, is_graph
from cython_ext.logic.gate.overrun_bound cimport backlog_excess_ns
from cython_ext.logic.gate.gate cimport (
    GATE_SUBMIT, GATE_WAIT_BACKLOG, GATE_WAIT_LEASE, GateState, Verdict, gate_decide, lease_usable,
    plan_due_ns, take_ns,
)
from cython_ext.logic.gate.handover cimport AWAKE_AFTER_NS, AWAKE_ASKED_NS, AWAKE_BEFORE_NS
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.meter.meter cimport (
    UNLIMITED_NS, Timing, key_tag, meter_carries, meter_doubts, meter_grant, meter_knows, meter_never_times,
    meter_recall, meter_takes, meter_times, usage_room_ns, usage_takes_over, usage_tracks,
)
from cython_ext.logic.gate.plan cimport read_plan
from cython_ext.logic.gate.window cimport (
    FORGIVEN_NS, STALLED_NS, backlog_counted_ns, backlog_crowded, backlog_end_ns, backlog_ns, backlog_scaled_ns,
    backlog_submit, marker_due,
)
from cython_ext.native cimport (
    add32, fence, futex_wait, futex_wake, load32, load64, loadi64, now_ns, pause, store32, store64,
)

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "hook/hook_native.h" nogil:
    bint vgpu_may_cease
    void vgpu_cease_here() noexcept

cdef enum:
    OVERLAPS_AGAIN = 256     # launches after which a stream's next one is no longer expected to overlap
    ASK_NS = 30_000          # launching threads ask the driver about the queue that often at most: 0.1-0.5 us each time
    ASK_EMPTY_NS = 8_000     # ... and where it should be empty: an unobserved gap is charged as work
    DOUBTED_NS = 1_000_000   # a queue that is predicted to be shorter may be empty
    QUEUED_NS = 20_000       # behind so much work the time of the host is not in a launch's sample
    LEARNED = 1              # ask()
    SPARED = 2
    LOOK_NS = 1_000_000      # a waiting gate re-reads returned_epoch and its server's heartbeat that often
    LOOK_LONG_NS = 50_000_000    # ... where the plan has no lease that could become usable
    LOOK_QUEUE_NS = 50_000   # ... and the queue, while it waits for unmeasured work to drain
    ALLOWANCE_MOST_NS = 2_000_000    # of a vGPU with a limit, for one thread at a time
    # A process with kernels this long may launch nothing but firsts of leases. Those are timed then, too: the work
    # that other vGPUs still have on the GPU as they begin is no large part of them.
    LONG_NS = 4_000_000


# --- waiting

cdef inline void cease(Gate* gate) noexcept nogil:
    """A thread that was cancelled ends here. The caller has the lock, and no counter counts the thread."""
    if vgpu_may_cease:
        lock_release(&gate.lock)
        vgpu_cease_here()
        lock_acquire(&gate.lock)


cdef void wait(Gate* gate, uint32_t change, int64_t until, int64_t spin_from) noexcept nogil:
    """Give up the lock until ``grants.change`` is no longer ``change``, or ``until``; spin from ``spin_from`` on."""
    cdef const uint32_t* word = &gate.grants.change
    if not state().spins:
        spin_from = FOREVER_NS
    gate.waiters += 1
    lock_release(&gate.lock)
    vgpu_is_held_up()
    if now_ns() < spin_from:
        futex_wait(word, change, min(until, spin_from))
    while load32(word) == change and spin_from <= now_ns() < until:
        pause()
    vgpu_was_held_up()
    lock_acquire(&gate.lock)
    gate.waiters -= 1
    cease(gate)


cdef inline bint is_standby(const Plan* plan, int64_t now) noexcept nogil:
    """Whether it is a standby lease. On a free GPU that begins as soon as the dispatcher has read this vGPU's want."""
    return plan.current.epoch != 0 and plan.current.go_by_ns == FOREVER_NS and plan.current.start_ns <= now


cdef void wait_for_lease(Gate* gate, uint32_t change, const Plan* plan, int64_t opens, int64_t now) noexcept nogil:
    """No lease is usable: sleep until one may be."""
    cdef int64_t until = now + LOOK_LONG_NS
    cdef int64_t spin_from = FOREVER_NS
    cdef uint32_t returned = load32(&gate.activity.returned_epoch)
    cdef int64_t due, asked
    cdef GateState view
    vgpu_look(gate, now, &view)
    due = plan_due_ns(plan, &view, 1)
    vgpu_want(gate, now)
    asked = loadi64(&gate.slot.want_since_ns)
    if gate.began_epoch != 0:
        until = min(until, gate.lease_end_ns)    # from then on it may queue ahead
    if epoch_reached(returned, plan.current.epoch) and plan.current.end_ns > now:
        until = now + LOOK_NS            # the relay may yet take its return back
    if plan.current.end_ns > now and vgpu_spent_epoch(gate) == plan.current.epoch == view.go_epoch != 0:
        vgpu_ring(gate)                  # the scheduler moved its end: the relay is to report the split drain
    if opens < FOREVER_NS:
        until = min(until, opens)
        spin_from = opens - AWAKE_BEFORE_NS
        if due < FOREVER_NS and now - due < AWAKE_AFTER_NS:
            # GO is due at the start, not at go_by: be awake then
            until = min(until, due + AWAKE_AFTER_NS)
            spin_from = due - AWAKE_BEFORE_NS
    if now < asked + AWAKE_ASKED_NS and is_standby(plan, now):
        until = min(until, asked + AWAKE_ASKED_NS)
        spin_from = now
    store64(&gate.slot.gate_waits, gate.slot.gate_waits + 1)
    wait(gate, change, until, spin_from)
    store64(&gate.slot.gate_wait_ns, gate.slot.gate_wait_ns + <uint64_t>(now_ns() - now))


cdef int refused(Gate* gate) noexcept nogil:
    """The error of a gate that will not open again; CUDA_SUCCESS if the gate may open."""
    cdef uint32_t flags = load32(&gate.grants.flags)
    if is_removed(gate):
        if not gate.reported:
            gate.reported = 1
            vgpu_say(
                gate.vgpu_id, b" was removed while this program used it: ",
                b"no further GPU work; vgpuctl create makes a new one"
            )
        return CUDA_ERROR_DEVICE_UNAVAILABLE
    if gate.lost and flags & GRANTS_LOSS_ERROR:
        if not gate.reported:
            gate.reported = 1
            vgpu_say(
                b"the server of ", gate.vgpu_id, b" does not answer, and its --on-server-loss is error: vgpuctl serve "
                b"starts it again"
            )
        return CUDA_ERROR_DEVICE_UNAVAILABLE
    if gate.lost and gate.barred and not flags & GRANTS_LOSS_RUN:
        if not gate.reported:
            gate.reported = 1
            vgpu_say(
                b"this program runs as another user than when ", gate.vgpu_id, b" admitted it, and its broker does not "
                b"let it in again: start it again"
            )
        return CUDA_ERROR_DEVICE_UNAVAILABLE
    return CUDA_SUCCESS


# --- the vGPU's limit under an open-ended lease

cdef int64_t others_used_ns(const Gate* gate) noexcept nogil:
    """The GPU time that the vGPU's other processes have used, as the server counts it. Ended ones are included."""
    cdef uint64_t used_ns = <uint64_t>loadi64(&gate.activity.busy_base_ns)
    cdef const Slot* slot
    cdef uint32_t i
    for i in range(MAX_PROCESSES):
        slot = &gate.activity.slots[i]
        if slot != gate.slot and load32(&slot.state) == SLOT_ACTIVE:
            used_ns += load64(&slot.busy_ns)
    return <int64_t>used_ns


cdef bint affords(Gate* gate, Thread* thread) noexcept nogil:
    """Whether the vGPU's limit lets the thread launch now. The gate renews its allowance as far as the limit goes."""
    cdef int64_t allowed_ns = loadi64(&gate.grants.allowed_ns)
    cdef int64_t room_ns
    if allowed_ns == 0:
        if thread.meter.left_ns < UNLIMITED_NS / 2:
            meter_grant(&thread.meter, UNLIMITED_NS - thread.meter.left_ns)
        return 1
    meter_recall(&thread.meter, ALLOWANCE_MOST_NS)
    if thread.meter.left_ns > 0:
        return 1
    vgpu_publish_counts(gate)
    room_ns = usage_room_ns(&gate.usage, allowed_ns, others_used_ns(gate), gate.promised_ns)
    if room_ns <= 0:
        return 0
    room_ns = room_ns / max(load32(&gate.activity.processes), <uint32_t>1) + 1
    meter_grant(&thread.meter, min(room_ns, <int64_t>ALLOWANCE_MOST_NS) - thread.meter.left_ns)
    return 1


cdef bint learns(Gate* gate, Pass* launch, Thread* thread, int64_t now) noexcept nogil:
    """Whether the launch has to wait. Under a limit, one launch of a kernel without a sample is in flight at a time.
    Else a program could queue any amount of work before its first kernel has run. A kernel may wait for another launch
    on the GPU, so no launch waits here for longer than a stalled queue is believed (logic/gate/window.pxd)."""
    if gate.sampling and now >= gate.asked_ns + ASK_NS:
        gate.asked_ns = now
        vgpu_collect(gate, now)
    return (
        gate.learning != 0 and loadi64(&gate.grants.allowed_ns) != 0
        and now < gate.learning_ns + STALLED_NS and not meter_knows(&thread.meter, launch.tag)
    )


cdef void meter(
    Gate* gate, Pass* launch, Thread* thread, int index, LaunchKey* key, int64_t now
) noexcept nogil:
    """Add the announced launch to the time that the thread has used. One launch of many is timed."""
    cdef const Duration* known
    cdef Timing timing
    launch.stream = index
    if thread.meter.doubts != gate.doubts:
        thread.meter.doubts = gate.doubts
        meter_doubts(&thread.meter)
    if meter_takes(&thread.meter, launch.tag, 1):
        return
    known = vgpu_recollect(gate, key)
    timing = meter_times(
        &thread.meter, launch.tag, <int64_t>known.mean_ns, known.means, durations_steady(known), now
    )
    if gate.grants.mode != MODE_TEMPORAL:        # there held time counts
        meter_never_times(&thread.meter, launch.tag)
        return
    if timing.weight == 0:
        return
    launch.weight = timing.weight
    launch.sample = vgpu_sample_metered(gate, key, index, &timing, known.means == 0)
    if launch.sample < 0:
        meter_carries(&thread.meter, launch.tag, timing.weight)


# --- the three ways through

cdef bint announced(
    Gate* gate, Pass* launch, Thread* thread, LaunchKey* key, uint32_t epoch, int64_t now
) noexcept nogil:
    """Under an open-ended lease, publish that this stream has work. Later launches into it skip this step. 0: the lease
    ended before it was published."""
    cdef int index
    if not vgpu_publish_submission(gate, epoch, 0, now):
        return 0
    index = vgpu_stream_index(gate, launch.handle)
    gate.streams[index].dirty = 1
    if gate.streams[index].flags & STREAM_OWN:
        vgpu_outdate_probe(gate)
    if not gate.usage.metered and gate.grants.mode == MODE_TEMPORAL:
        vgpu_publish_counts(gate)        # until here the backlog has observed each launch
        usage_takes_over(&gate.usage, backlog_end_ns(&gate.backlog) - backlog_counted_ns(&gate.backlog, now))
    gate.untracked = 1
    gate.unseen_ns = gate.unseen_until_ns = 0    # not waited for while the lease is open
    gate.idle_since_ns = 0
    backlog_submit(&gate.backlog, now, 0, 0, 0)
    publish_prediction(gate)
    vgpu_count_launch(gate, thread)
    vgpu_know_stream(gate, thread, launch.handle)
    gate.baton_open = gate.baton
    store32(&thread.inside, 1)
    fence()
    if (
        load32(&gate.grants.open_epoch) != epoch
        or load32(&gate.activity.generation) != gate.generation
        or load32(&gate.activity.baton) != gate.baton
    ):
        store32(&thread.inside, 0)
        thread.launches -= 1             # it is counted once it is let through
        return 0
    launch.kind = PASS_ANNOUNCED
    meter(gate, launch, thread, index, key, now)
    return 1


cdef inline void count_tracked(Gate* gate, Thread* thread, int64_t predicted_ns) noexcept nogil:
    """Count a launch under a lease with an end by its predicted length."""
    if predicted_ns > 0:
        gate.tracked_ns += <uint64_t>predicted_ns
        thread.tracked_ns += <uint64_t>predicted_ns
        usage_tracks(&gate.usage, predicted_ns)


cdef void tracked(
    Gate* gate, Pass* launch, Thread* thread, int index, const LaunchKey* key, const Prediction* foreseen,
    bint programmatic, bint takes, bint first, int64_t now,
) noexcept nogil:
    """Add a launch that is admitted under a finite lease to the backlog. Where a marker is due, it goes behind the
    launches before this one."""
    cdef int64_t window = gate.window_ns
    cdef Stream* stream = &gate.streams[index]
    cdef bint own = stream.flags & STREAM_OWN != 0
    cdef bint unknown = foreseen.learned_ns < 0
    cdef int64_t least_ns = LONG_NS if first and not takes and foreseen.learned_ns < LONG_NS else 0
    if marker_due(&gate.backlog.unmarked, gate.marked_stream != index, first, programmatic, window):
        vgpu_mark(gate)      # behind the previous launch, never between it and one that overlaps with its tail
    if first and gate.backlog.unmarked.launches == 0:
        gate.over_markers = gate.backlog.count           # the lease before is drained once these are
    if not first and not gate.backlog.busy and gate.backlog.drained_ns:
        gate.gap_ns += (now - gate.backlog.drained_ns - gate.gap_ns) / 4
    gate.backlog.discard = not gate.lease_sampled or vgpu_siblings_run(gate)
    gate.marked_stream = index
    stream.dirty = 1
    stream.after = key.hash
    gate.idle_since_ns = 0
    launch.stream = index
    launch.kind = PASS_TRACKED
    if programmatic:
        stream.overlapping = OVERLAPS_AGAIN
    elif stream.overlapping:
        stream.overlapping -= 1
    launch.mark = unknown or load32(&state().captures) != 0
    if own and stream.overlapping:
        vgpu_outdate_probe(gate)
        gate.own_unmarked = 1            # the next one may overlap with it: marked before one that does not
    elif own:
        launch.mark = 1
    # The event at a sample's end, too, would keep the next launch from overlapping with this one. And it must be clear
    # whether the host's time until the launch is inside the sample: behind a queue it is not, into an empty one it is.
    if (
        (foreseen.sample or foreseen.anew) and (unknown or foreseen.disproved or not least_ns)
        and not gate.backlog.discard and (unknown or (
            stream.overlapping == 0 and (not gate.backlog.busy or backlog_ns(&gate.backlog, now) >= QUEUED_NS)
        ))
    ):
        launch.sample = vgpu_sample_begin(gate, key, index, not gate.backlog.busy, takes or least_ns > 0, least_ns)
    backlog_submit(&gate.backlog, now, foreseen.learned_ns, foreseen.assumed_ns, foreseen.excess_ns)
    count_tracked(gate, thread, foreseen.assumed_ns if unknown else foreseen.learned_ns)
    publish_prediction(gate)
    add32(&gate.submitting, 1)
    vgpu_count_launch(gate, thread)


cdef void queued(
    Gate* gate, Pass* launch, Thread* thread, int index, const LaunchKey* key, int64_t learned_ns, int64_t now
) noexcept nogil:
    """Count a launch that is queued ahead of its lease. The process wants that lease from now on."""
    vgpu_want(gate, now)
    if is_graph(key):
        ahead_submit_graph(&gate.ahead, learned_ns)
    count_tracked(gate, thread, learned_ns)
    gate.streams[index].after = key.hash
    launch.stream = index
    launch.kind = PASS_TRACKED
    add32(&gate.submitting, 1)
    vgpu_count_launch(gate, thread)


cdef int ask(Gate* gate, int index, bint timed, int64_t now) noexcept nogil:
    """Before a launch into the stream at ``index``, the gate now and then asks the driver what has run. The backlog is
    updated by the answer. SPARED: no question was needed, since the queue has run as predicted
    (logic/gate/poll_skip.pxd). LEARNED: samples came in. ``timed``: the launch may be timed; then the work before it
    matters."""
    cdef uint32_t sampling = gate.sampling
    cdef bint empty = not gate.untracked and now >= backlog_end_ns(&gate.backlog)
    if not gate.backlog.busy:
        return 0
    if empty and not timed and gate.asked_ns and vgpu_may_be_spared(gate, index):
        if belief_suffices(&gate.belief, now):
            return SPARED
    if now < gate.asked_ns + (ASK_EMPTY_NS if empty else ASK_NS):
        return 0
    gate.asked_ns = now
    vgpu_collect(gate, now)
    if not gate.untracked and backlog_ns(&gate.backlog, now) < DOUBTED_NS:
        vgpu_drained(gate, now, 0)
    if empty:
        belief_answered(&gate.belief, not gate.backlog.busy, now)
    return LEARNED if gate.sampling != sampling else 0


cdef bint unseen_for_long(Gate* gate, int64_t now) noexcept nogil:
    """Whether untracked work has kept launches waiting for so long that it may itself wait for one of them, or for a
    capture to end. Then the gate lets launches pass for a while, as a stalled queue is forgiven
    (logic/gate/window.pxd)."""
    if now < gate.unseen_until_ns:
        return 1
    if gate.unseen_ns == 0:
        gate.unseen_ns = now + STALLED_NS
    if now < gate.unseen_ns:
        return 0
    gate.unseen_ns = now + STALLED_NS
    gate.unseen_until_ns = now + FORGIVEN_NS
    return 1


cdef inline bint crowded(const Gate* gate, int index, int64_t now) noexcept nogil:
    """Whether the launch needs a marker for which there is no room (logic/gate/window.pxd). The marker goes before the
    launch. In a thread's own stream it goes behind the launch, since only that thread can set it. With work in one
    stream alone no marker is needed."""
    cdef uint32_t i
    if not backlog_crowded(&gate.backlog, now):
        return 0
    if not gate.streams[index].flags & STREAM_OWN:
        return gate.backlog.unmarked.launches != 0 and gate.marked_stream != index
    for i in range(gate.stream_count):
        if gate.streams[i].dirty and i != <uint32_t>index:
            return 1
    return 0


cdef void calls(Pass* launch) noexcept nogil:
    """The launch goes to the driver as any other call does."""
    cdef unsigned int* calling = vgpu_calling()
    if calling != NULL:
        launch.kind = PASS_CALLING
        calling[0] += 1


cdef int enter(Pass* launch, void* stream, LaunchKey* key, int manner) noexcept nogil:
    """``vgpu_enter`` where the stream's context is the current one. ``launch`` has all fields but those that are
    decided here."""
    cdef Gate* gate
    cdef Thread* thread
    cdef GateState view
    cdef Verdict verdict
    cdef Plan plan, bounded  # by the baton, too
    cdef uint32_t change, open_epoch
    cdef Prediction foreseen
    cdef int64_t now
    cdef bint counted = 0
    cdef int index, asked, error = CUDA_SUCCESS
    gate = vgpu_gate_here()
    if gate == NULL:
        return CUDA_SUCCESS
    if vgpu_capturing(stream):
        calls(launch)
        return CUDA_SUCCESS
    thread = vgpu_claim_thread()
    if thread == NULL:
        return CUDA_ERROR_DEVICE_UNAVAILABLE
    launch.gate = gate
    launch.thread = thread
    lock_acquire(&gate.lock)
    if thread.steps.waited:
        vgpu_step_begins(thread)
    while not gate.open and not (gate.lost and load32(&gate.grants.flags) & GRANTS_LOSS_RUN):
        change = load32(&gate.grants.change)
        error = refused(gate)
        if error != CUDA_SUCCESS:
            break
        now = now_ns()
        if load32(&gate.away):
            vgpu_want(gate, now)
            wait(gate, change, now + LOOK_LONG_NS, FOREVER_NS)
            continue
        if load32(&gate.activity.generation) != gate.generation or not read_plan(gate.grants, &plan):
            wait(gate, change, now + LOOK_NS, FOREVER_NS)        # the hook thread re-attaches
            continue
        vgpu_begin(gate, &plan, now)
        if not vgpu_baton(gate, &plan, now):
            vgpu_wait_for_baton(gate, now)
            cease(gate)
            continue
        open_epoch = load32(&gate.grants.open_epoch) if gate.baton_until_ns == FOREVER_NS else 0
        if open_epoch != 0 and not epoch_past(vgpu_spent_epoch(gate), open_epoch):
            vgpu_turn_to(gate, thread)
            if not affords(gate, thread):
                vgpu_want(gate, now)
                store64(&gate.slot.gate_waits, gate.slot.gate_waits + 1)
                wait(gate, change, now + LOOK_NS, FOREVER_NS)
                store64(&gate.slot.gate_wait_ns, gate.slot.gate_wait_ns + <uint64_t>(now_ns() - now))
                continue
            if learns(gate, launch, thread, now):
                wait(gate, change, now + LOOK_QUEUE_NS, FOREVER_NS)
                continue
            if announced(gate, launch, thread, key, open_epoch, now):
                break
            if load32(&gate.grants.open_epoch) == open_epoch and load32(&gate.activity.baton) == gate.baton:
                wait(gate, change, now + LOOK_NS, FOREVER_NS)    # given back a moment ago
            continue
        index = vgpu_stream_index(gate, launch.handle)
        vgpu_foresee(gate, key, gate.streams[index].after, counted, &foreseen)
        counted = 1
        asked = ask(gate, index, foreseen.learned_ns < 0 or foreseen.sample or foreseen.anew, now)
        if asked == LEARNED:
            vgpu_foresee(gate, key, gate.streams[index].after, counted, &foreseen)
        vgpu_look(gate, now, &view)
        view.window_ns = gate.window_ns
        view.backlog_ns = backlog_ns(&gate.backlog, now)
        view.predicted_ns = backlog_scaled_ns(&gate.backlog, foreseen.learned_ns)
        view.excess_ns = foreseen.excess_ns
        view.queued_excess_ns = backlog_excess_ns(&gate.backlog, now)
        view.unknown_in_flight = gate.backlog.unknown
        # The first launch of a turn passes as the first of a lease does.
        view.last_epoch = 0
        if gate.baton_used == gate.baton and not gate.lease_unused:
            view.last_epoch = load32(&gate.slot.last_epoch)
        view.doubted_ns = foreseen.doubted_ns
        view.contended = load32(&gate.grants.flags) & GRANTS_CONTENDED != 0
        bounded = plan
        baton_bound(&bounded, gate.baton_until_ns)
        gate_decide(&bounded, &view, &verdict)
        if gate.untracked and verdict.action != GATE_WAIT_LEASE and not unseen_for_long(gate, now):
            wait(gate, change, now + LOOK_QUEUE_NS, FOREVER_NS)  # the length of the earlier, untracked queue is unknown
        elif verdict.action == GATE_SUBMIT and gate.ahead.launches:
            # the lease began between the two reads: the work queued ahead of it goes first
            wait(gate, change, now + LOOK_QUEUE_NS, FOREVER_NS)
        elif verdict.action == GATE_SUBMIT and crowded(gate, index, now):
            wait(gate, change, now + LOOK_QUEUE_NS, FOREVER_NS)
            gate.asked_ns = 0
        elif verdict.action == GATE_SUBMIT:
            if verdict.takes:
                vgpu_end(gate, &plan, now)
            if vgpu_publish_submission(gate, verdict.epoch, verdict.takes, now):
                if verdict.takes:
                    vgpu_take(gate, verdict.epoch, take_ns(&view))
                if asked == SPARED and not verdict.takes:    # else another lease is over now, and needs its own drain
                    vgpu_drained_as_predicted(gate, now)
                tracked(
                    gate, launch, thread, index, key, &foreseen, manner & LAUNCH_OVERLAPS != 0, verdict.takes,
                    view.last_epoch != verdict.epoch, now,
                )
                break
        elif verdict.action == GATE_WAIT_BACKLOG:
            vgpu_want(gate, now)
            vgpu_mark(gate)      # else no marker shows when the tail of the queue has run
            wait(gate, change, verdict.until_ns, FOREVER_NS)
            gate.asked_ns = 0                                    # now the driver's answer is worth its cost
        elif gate.baton_until_ns < gate.lease_end_ns and (
            lease_usable(&plan.current, &view) or lease_usable(&plan.next, &view)
        ):
            vgpu_wait_for_baton(gate, now)       # the rest of this process's turn is too short for this launch
            cease(gate)
        else:
            if verdict.closed and load32(&gate.activity.processes) == 1:
                gate.closed_epoch = verdict.closed
            if vgpu_end(gate, &plan, now):
                futex_wake(&gate.grants.change, INT_MAX)     # the hook thread, if it sleeps until the lease would end
            if (
                manner & LAUNCH_WAITS == 0 and not vgpu_go_follows(gate, &plan, &view)
                and (not is_graph(key) or ahead_takes_graph(&gate.ahead, foreseen.learned_ns))
                and vgpu_queue_ahead(
                    gate, index, foreseen.learned_ns, foreseen.excess_ns, manner & LAUNCH_OVERLAPS != 0
                )
            ):
                queued(gate, launch, thread, index, key, foreseen.learned_ns, now)
                break
            wait_for_lease(gate, change, &plan, verdict.until_ns, now)
    lock_release(&gate.lock)
    if error == CUDA_SUCCESS and launch.kind == PASS_PLAIN:      # without a lease
        if is_swappable(gate):
            vgpu_touch(gate)
            launch.kind = PASS_TOUCHING
        else:
            calls(launch)
    return error


cdef public int vgpu_enter(Pass* launch, void* stream, LaunchKey* key, int manner) noexcept nogil:
    """Let one launch through, at once or after a wait. CUDA_SUCCESS: the caller launches, then calls vgpu_leave. Else
    the result is the error to return. The launch goes to the stream's GPU, whichever is current.

    ``key``: this function fills in ``hash``, ``after`` and the version of a graph. ``manner``: LAUNCH_*.
    """
    cdef void* context
    cdef int error
    launch.kind = PASS_PLAIN
    launch.sample = -1
    launch.mark = 0
    launch.handle = stream
    launch.tag = key_tag(key)
    launch.thread = vgpu_announce_in_context(stream, launch.tag)
    if launch.thread != NULL:
        launch.kind = PASS_ANNOUNCED
        return CUDA_SUCCESS
    context = vgpu_context_of_stream(stream)
    if context == NULL or real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return enter(launch, stream, key, manner)
    error = enter(launch, stream, key, manner)
    real_cuCtxPopCurrent_v2(&context)
    return error


cdef public void vgpu_leave(Pass* launch, int result) noexcept nogil:
    """The launch has reached the driver, which returned ``result``."""
    cdef Gate* gate = launch.gate
    if launch.kind == PASS_ANNOUNCED:
        if launch.sample >= 0:
            lock_acquire(&gate.lock)
            if result != CUDA_SUCCESS:
                vgpu_sample_void(gate, launch.sample)
            elif not vgpu_sample_end(gate, launch.sample, launch.stream):
                meter_carries(&launch.thread.meter, launch.tag, launch.weight)
            lock_release(&gate.lock)
        store32(&launch.thread.inside, 0)
    elif launch.kind == PASS_TRACKED:
        if launch.sample >= 0 or launch.mark:
            lock_acquire(&gate.lock)
            if launch.sample >= 0 and result == CUDA_SUCCESS:
                vgpu_sample_end(gate, launch.sample, launch.stream)
            elif launch.sample >= 0:
                vgpu_sample_void(gate, launch.sample)
            add32(&gate.submitting, <uint32_t>-1)            # from here on a marker is behind it
            if launch.mark:
                vgpu_mark_launch(gate, launch.stream, launch.handle)
            lock_release(&gate.lock)
        else:
            add32(&gate.submitting, <uint32_t>-1)
    elif launch.kind == PASS_TOUCHING:
        vgpu_touched(gate)
    elif launch.kind == PASS_CALLING:
        vgpu_calling()[0] -= 1
