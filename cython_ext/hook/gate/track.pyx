"""The hook's own questions to the driver: markers behind launches, timed samples, and whether everything has drained.

Rules that every call here keeps:

* It runs with the thread's capture mode RELAXED (relaxed.pxd).
* It records nothing in the legacy stream while a blocking stream of its context captures (events.pxd).
* While a capture is open in the process, it asks no stream about its work. Reason: the stream may have joined the
  capture, and the question would end that. Then the hook knows only what markers show. Those were set before, or in a
  stream that has not joined.
* Only a thread itself can name its own default stream. So the thread marks its launches there one by one. Where they
  overlap with each other, one event in the legacy stream, behind all of them, shows their drain.
* The hook drops handles that die (streams, contexts) before the driver does (teardown.pyx).

Unless said otherwise the caller holds ``gate.lock``.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.hook.gate.events cimport current_context, done, give_event, record
from cython_ext.hook.generated.driver cimport (
    real_cuCtxSetCurrent, real_cuEventElapsedTime, real_cuStreamGetCtx, real_cuStreamGetFlags, real_cuStreamQuery,
)
from cython_ext.hook.hook cimport vgpu_capturing, vgpu_log, vgpu_trace_idle, vgpu_trace_launch
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, LEFT_BEHIND, LEGACY_HANDLE, OWN_HANDLE, SAMPLES,
    STREAM_BLOCKING, STREAM_LEGACY, STREAM_OWN, STREAMS, Gate, Sample, State, Stream, Thread, state, vgpu_thread,
)
from cython_ext.pages.layout cimport GRANTS_COMPANY
from cython_ext.logic.gate.prequeue cimport ahead_mark
from cython_ext.logic.meter.durations cimport (
    Duration, LaunchKey, durations_believe, durations_find, durations_learn, durations_predict, is_graph,
)
from cython_ext.logic.gate.gate cimport UNKNOWN_NS
from cython_ext.logic.meter.event_cost cimport event_cost_length_ns, event_cost_notes, event_cost_wants
from cython_ext.logic.meter.graphs cimport graph_timed, graph_updates
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.meter.meter cimport Timing, usage_amends
from cython_ext.logic.gate.window cimport (
    backlog_completed, backlog_drained, backlog_mark, backlog_mark_late, backlog_oldest, backlog_resume,
    backlog_seen_busy,
)
from cython_ext.native cimport fence, fence_all, load32, loadi64, now_ns, store32

cdef enum:
    OVERLAPS_NS = 200_000        # after a pause this long there is no tail left to overlap with
    LOADS_NS = 200_000           # a launch that takes the host longer than this does more than launch
    HOST_MOST_NS = 50_000        # a longer launch is in its own sample, by a part that the hook cannot know


# --- streams

cdef inline void* context_of(void* handle) noexcept nogil:
    """The context of the stream (normalised), which need not be the current one. A default stream is of the current
    context."""
    cdef void* context = NULL
    if <size_t>handle > OWN_HANDLE and real_cuStreamGetCtx(handle, &context) == CUDA_SUCCESS:
        return context
    return current_context()


cdef void leave_place(Gate* gate, int index) noexcept nogil:
    """Another stream takes that place: put the work of the stream before under a marker."""
    cdef int mode
    if gate.untracked and gate.streams[index].dirty:
        mode = relax()
        leave_behind(gate, &gate.streams[index], 0)
        restore(mode)
    if gate.marked_stream == index:
        vgpu_mark(gate)
    if gate.ahead_stream == index:
        vgpu_mark_ahead(gate)


cdef public int vgpu_stream_index(Gate* gate, void* handle) noexcept nogil:
    """The place of a stream (normalised: 1 legacy, 2 the thread's own, in the current context) among those known to the
    gate. A stream belongs to its own context, whichever is current, and ends with that."""
    cdef bint default = <size_t>handle <= OWN_HANDLE
    cdef void* context = current_context() if default else NULL
    cdef Thread* owner = <Thread*>vgpu_thread if <size_t>handle == OWN_HANDLE else NULL
    cdef Stream* stream
    cdef unsigned int flags = 0
    cdef int free = -1
    cdef uint32_t i
    for i in range(gate.stream_count):
        stream = &gate.streams[i]
        if stream.handle == handle and (not default or (stream.context == context and stream.owner == owner)):
            return i
        if not stream.dirty:
            free = i
    if gate.stream_count < STREAMS:
        free = gate.stream_count
        gate.stream_count += 1
    elif free < 0:
        free = STREAMS - 1   # hundreds of busy streams: the last place stands for all the rest
    leave_place(gate, free)
    stream = &gate.streams[free]
    stream.handle = handle
    stream.context = context_of(handle)
    stream.owner = owner
    stream.dirty = 0
    stream.overlapping = 0
    stream.after = 0
    stream.turn = 0
    if <size_t>handle == LEGACY_HANDLE:
        stream.flags = STREAM_LEGACY | STREAM_BLOCKING
    elif owner != NULL:
        stream.flags = STREAM_OWN | STREAM_BLOCKING
    else:
        real_cuStreamGetFlags(handle, &flags)
        stream.flags = 0 if flags & CU_STREAM_NON_BLOCKING else STREAM_BLOCKING
    return free


cdef public void vgpu_mark(Gate* gate) noexcept nogil:
    """Close the stretch of unmarked launches with an event, where one may be recorded now."""
    cdef int mode, event
    if gate.untracked or gate.backlog.unmarked.launches == 0:
        return               # untracked work is in any stream, not in one
    mode = relax()
    event = record(gate, &gate.streams[gate.marked_stream], 0, 0)
    restore(mode)
    if load32(&gate.submitting):
        gate.outrun = 1      # another thread is just submitting a launch, perhaps into that stream
    if event >= 0 and not backlog_mark(&gate.backlog, event):
        give_event(gate, event)


cdef public void vgpu_mark_launch(Gate* gate, int index, void* handle) noexcept nogil:
    """The same behind a launch that has just reached the driver, in the stream (normalised) at ``index``. The launch
    gets a marker of its own if another thread has launched into another stream meanwhile. Markers in that stream show
    nothing of this launch."""
    cdef int mode, event
    if gate.marked_stream == index:
        vgpu_mark(gate)
    elif gate.streams[index].handle == handle:
        mode = relax()
        event = record(gate, &gate.streams[index], 0, 0)
        restore(mode)
        if event >= 0 and not backlog_mark_late(&gate.backlog, now_ns(), event):
            give_event(gate, event)


cdef public void vgpu_mark_ahead(Gate* gate) noexcept nogil:
    """The same for launches that are queued ahead of their lease."""
    cdef int mode, event
    if gate.ahead.unmarked.launches == 0 or gate.ahead_stream < 0:
        return
    mode = relax()
    event = record(gate, &gate.streams[gate.ahead_stream], 0, 0)
    restore(mode)
    if load32(&gate.submitting):
        gate.outrun = 1
    if event >= 0 and not ahead_mark(&gate.ahead, event):
        give_event(gate, event)


cdef public int vgpu_sample_begin(
    Gate* gate, const LaunchKey* key, int stream, bint empty, bint cold, int64_t least_ns
) noexcept nogil:
    """Time the launch that follows; the sample's index, or -1. ``empty``: nothing is queued before it. ``cold``: it may
    be the first ever, for which the host loads code. ``least_ns``: a shorter sample is not learned."""
    cdef Sample* sample
    cdef int i, mode
    for i in range(SAMPLES):
        sample = &gate.samples[i]
        if sample.used:
            continue
        mode = relax()
        sample.start = record(gate, &gate.streams[stream], 1, 0)
        restore(mode)
        if sample.start < 0:
            return -1
        sample.key = key[0]
        sample.generation = gate.durations.generation
        sample.updates = graph_updates(&gate.graphs, key.handle) if is_graph(key) else 0
        sample.end = -1
        sample.began_ns = now_ns() if empty else 0
        sample.host_ns = 0
        sample.cold = cold
        sample.least_ns = least_ns
        sample.metered = sample.pair = sample.first = 0
        sample.used = 1
        gate.sampling += 1
        return i
    return -1


cdef public int vgpu_sample_metered(
    Gate* gate, const LaunchKey* key, int stream, const Timing* timing, bint first
) noexcept nogil:
    """The same for a launch under an open-ended lease, with nothing known of the queue before it. ``first``: its key
    has no mean yet."""
    cdef int mode, status, index
    if load32(&state().captures):
        return -1            # no stream is asked
    mode = relax()
    status = real_cuStreamQuery(gate.streams[stream].handle)
    restore(mode)
    if status != CUDA_SUCCESS and status != CUDA_ERROR_NOT_READY:
        return -1
    index = vgpu_sample_begin(gate, key, stream, status == CUDA_SUCCESS, 0, 0)
    if index >= 0 and event_cost_wants(&gate.event_cost, status == CUDA_SUCCESS):
        gate.samples[index].pair = 1
        vgpu_sample_end(gate, index, stream)
        return -1            # the next one
    if index >= 0:
        gate.samples[index].metered = 1
        gate.samples[index].timing = timing[0]
        gate.samples[index].first = first
        if first:
            gate.learning += 1
            gate.learning_ns = now_ns()
    return index


cdef inline bint has_host_time(Gate* gate, const Sample* sample) noexcept nogil:
    """Whether the sample contains host time: the queue ran empty before the launch reached the GPU, or the launch took
    the host long."""
    return sample.host_ns > HOST_MOST_NS if sample.began_ns else done(gate, sample.start)


cdef inline void forget_first(Gate* gate, const Sample* sample) noexcept nogil:
    if sample.first:
        gate.learning -= 1


cdef public void vgpu_sample_void(Gate* gate, int index) noexcept nogil:
    """Drop the sample: no launch followed its start event."""
    forget_first(gate, &gate.samples[index])
    give_event(gate, gate.samples[index].start)
    gate.samples[index].used = 0
    gate.sampling -= 1


cdef public bint vgpu_sample_end(Gate* gate, int index, int stream) noexcept nogil:
    """The launch has been submitted. 0: the sample is of no use, and void."""
    cdef Sample* sample = &gate.samples[index]
    cdef int mode = relax()
    if sample.began_ns:
        sample.host_ns = now_ns() - sample.began_ns
    if not (sample.metered or sample.pair) or not has_host_time(gate, sample):
        sample.end = record(gate, &gate.streams[stream], 1, 0)
    restore(mode)
    if sample.end < 0:
        vgpu_sample_void(gate, index)
    return sample.end >= 0


cdef void prove(Gate* gate, const Sample* sample, int64_t lasted_ns) noexcept nogil:
    """Judge a graph's updates by the sample behind them."""
    cdef const Duration* known = durations_find(&gate.durations, &sample.key)
    cdef int64_t learned_ns = UNKNOWN_NS if known == NULL else durations_predict(&gate.durations, known)
    graph_timed(&gate.graphs, sample.key.handle, sample.updates, learned_ns, lasted_ns)


cdef void learn_one(Gate* gate, const Sample* sample, int64_t lasted_ns, int64_t now) noexcept nogil:
    if is_graph(&sample.key):
        prove(gate, sample, lasted_ns)
    durations_learn(&gate.durations, &sample.key, sample.generation, lasted_ns)
    vgpu_trace_launch(gate, &sample.key, lasted_ns, now)
    vgpu_log(b"learned handle, ns", <int64_t>sample.key.handle, lasted_ns)


cdef inline bint in_company(const Gate* gate) noexcept nogil:
    """Whether other vGPUs compute at the same time."""
    return load32(&gate.grants.flags) & GRANTS_COMPANY != 0


cdef inline int64_t believed(Gate* gate, const Sample* sample, int64_t lasted_ns) noexcept nogil:
    cdef Duration* known = durations_find(&gate.durations, &sample.key)
    if known == NULL:
        return lasted_ns
    return durations_believe(known, lasted_ns, load32(&gate.grants.company_ppm), sample.began_ns != 0)


cdef void learn(Gate* gate, int64_t now) noexcept nogil:
    """Turn samples whose end event has passed into durations."""
    cdef Sample* sample
    cdef int64_t elapsed_ns, lasted_ns
    cdef bint cold, empty
    cdef float ms
    cdef int i
    for i in range(SAMPLES):
        sample = &gate.samples[i]
        if not sample.used or sample.end < 0 or not done(gate, sample.end):
            continue
        ms = -1
        if gate.events[sample.start].handle != NULL and gate.events[sample.end].handle != NULL:
            if real_cuEventElapsedTime(
                &ms, gate.events[sample.start].handle, gate.events[sample.end].handle
            ) == CUDA_SUCCESS:
                elapsed_ns = <int64_t>(ms * 1e6)
                empty = sample.began_ns != 0
                vgpu_log(b"timed, ns; host time in it, -1: busy queue", elapsed_ns, sample.host_ns if empty else -1)
                lasted_ns = event_cost_length_ns(&gate.event_cost, elapsed_ns, sample.host_ns, empty)
                if in_company(gate) and not sample.pair:
                    lasted_ns = believed(gate, sample, lasted_ns)
                cold = sample.cold and sample.host_ns >= max(<int64_t>LOADS_NS, elapsed_ns / 2)
                if sample.pair:
                    event_cost_notes(&gate.event_cost, elapsed_ns, sample.host_ns, empty)
                    vgpu_log(b"two events are apart, ns; in an empty queue", elapsed_ns - sample.host_ns, empty)
                elif not cold and lasted_ns >= sample.least_ns:
                    learn_one(gate, sample, lasted_ns, now)
                if sample.metered and lasted_ns >= 0:
                    usage_amends(&gate.usage, lasted_ns, sample.timing.assumed_ns, sample.timing.weight)
        forget_first(gate, sample)
        give_event(gate, sample.start)
        give_event(gate, sample.end)
        sample.used = 0
        gate.sampling -= 1


cdef public void vgpu_collect(Gate* gate, int64_t now) noexcept nogil:
    """Query the markers, oldest first, and update prediction and durations."""
    cdef uint64_t event
    cdef int64_t since_ns = gate.backlog.since_ns
    cdef int mode
    if gate.backlog.count == 0 and gate.sampling == 0:
        return
    mode = relax()
    while backlog_oldest(&gate.backlog, &event):
        if not done(gate, <int>event):
            backlog_seen_busy(&gate.backlog, now)
            break
        give_event(gate, <int>event)
        if backlog_completed(&gate.backlog, now):
            vgpu_trace_idle(gate, since_ns)
        gate.over_markers -= gate.over_markers > 0
    learn(gate, now)
    restore(mode)


# --- events that stand for untracked work, because the driver may soon not be asked about its streams any more

cdef bint leave_behind(Gate* gate, Stream* stream, bint held) noexcept nogil:
    cdef int event
    if gate.left_count == LEFT_BEHIND:
        return 0
    event = record(gate, stream, 0, held)
    if event < 0:
        return 0
    gate.left[gate.left_count] = event
    gate.left_count += 1
    return 1


cdef public bint vgpu_leave_behind(Gate* gate, Stream* stream) noexcept nogil:
    """An event behind the stream's work stands for it from now on."""
    return leave_behind(gate, stream, 0)


cdef bint left_busy(Gate* gate) noexcept nogil:
    while gate.left_count and done(gate, gate.left[gate.left_count - 1]):
        gate.left_count -= 1
        give_event(gate, gate.left[gate.left_count])
    return gate.left_count > 0


cdef bint some_dirty(const Gate* gate) noexcept nogil:
    cdef uint32_t i
    for i in range(gate.stream_count):
        if gate.streams[i].dirty:
            return 1
    return 0


cdef public void vgpu_leave_all_behind(Gate* gate) noexcept nogil:
    """Put an event behind each stream's work. A stream that gets work after this is announced anew (a new round).
    Where a thread is submitting just now, nothing happens."""
    cdef Stream* stream
    cdef uint32_t i
    cdef int mode
    store32(&gate.round, gate.round + 1)
    if not all_outside(gate):
        return
    mode = relax()
    for i in range(gate.stream_count):
        stream = &gate.streams[i]
        if stream.dirty:
            stream.dirty = not leave_behind(gate, stream, 0)
    restore(mode)


cdef void leave_unjoined_behind(Gate* gate) noexcept nogil:
    """The same while a capture is open, for streams that have not joined it. If a stream has joined since, its event
    may be a part of the capture, and must not be queried. The caller holds captures_lock."""
    cdef Stream* stream
    cdef uint32_t i
    for i in range(gate.stream_count):
        stream = &gate.streams[i]
        if not stream.dirty or stream.flags & STREAM_OWN:
            continue
        if vgpu_capturing(stream.handle) or not leave_behind(gate, stream, 1):
            continue
        if vgpu_capturing(stream.handle):
            gate.left_count -= 1
            give_event(gate, gate.left[gate.left_count])
        else:
            stream.dirty = 0


# --- drains

cdef bint all_outside(Gate* gate) noexcept nogil:
    """Whether no thread is between check and submission. After a new round, a true result also means that each later
    launch reads that round."""
    cdef Thread* thread = state().threads
    if gate.fences or not gate.untracked:
        fence()
    elif not fence_all():
        gate.fences = 1                  # refused since (seccomp): from here on each launch has one of its own
        return 0
    while thread != NULL:
        if load32(&thread.inside):
            return 0
        thread = thread.next
    return 1


cdef public void vgpu_outdate_probe(Gate* gate) noexcept nogil:
    """A thread's own default stream gets work, so the probe event, if there is one, is not behind all of it."""
    if gate.probe >= 0:
        give_event(gate, gate.probe)
        gate.probe = -1


cdef inline bint overlaps_now(const Gate* gate) noexcept nogil:
    """Whether launches in a thread's own stream follow each other closely. Then an event in the legacy stream would
    come between two that overlap. The stream has work in any case."""
    return (
        gate.own_unmarked and not gate.untracked and gate.over_epoch == 0
        and now_ns() - loadi64(&gate.slot.last_submit_ns) < OVERLAPS_NS
    )


cdef bint own_streams_busy(Gate* gate, void* context) noexcept nogil:
    """Whether threads' own default streams of the current context have unmarked work. An event in the context's legacy
    stream completes after all of it. The backlog does not show this: a marker in another stream may have closed its
    stretch."""
    cdef Stream legacy
    cdef uint32_t i
    if overlaps_now(gate):
        return 1
    if gate.probe < 0:
        memset(&legacy, 0, sizeof(Stream))
        legacy.handle = <void*>LEGACY_HANDLE
        legacy.context = context
        gate.probe = record(gate, &legacy, 0, 1)
        gate.probed = context
        return 1
    if not done(gate, gate.probe):
        return 1
    vgpu_outdate_probe(gate)
    for i in range(gate.stream_count):
        if gate.streams[i].flags & STREAM_OWN and gate.streams[i].context == gate.probed:
            gate.streams[i].dirty = 0
    return gate.probed != context        # there may be more of them, in one context after the other


cdef bint streams_busy(Gate* gate, bint anywhere) noexcept nogil:
    """Query each stream that has work of this process, the threads' own ones last. ``anywhere``: this is the hook
    thread, which may change its current context."""
    cdef void* context = NULL if anywhere else current_context()
    cdef bint own, unmarked = gate.untracked or gate.own_unmarked
    cdef Stream* stream
    cdef uint32_t i
    for own in range(2):
        for i in range(gate.stream_count):
            stream = &gate.streams[i]
            if not stream.dirty or own != (stream.flags & STREAM_OWN != 0) or (own and not unmarked):
                continue
            if stream.context != context:
                if not anywhere or real_cuCtxSetCurrent(stream.context) != CUDA_SUCCESS:
                    return 1
                context = stream.context
            if own_streams_busy(gate, context) if own else real_cuStreamQuery(stream.handle) == CUDA_ERROR_NOT_READY:
                return 1
    return 0


cdef public bint vgpu_drained(Gate* gate, int64_t now, bint anywhere) noexcept nogil:
    """Whether everything submitted so far has run; if so, the backlog is emptied.

    Untracked work takes three steps. A new round begins, so that a thread that launches from here on announces again.
    No thread may be between check and submission. Then the streams are queried. So a launch is either found by this
    query or announced anew.
    """
    cdef State* all = state()
    cdef int64_t since_ns
    cdef bint was_busy, busy
    cdef int mode
    cdef uint32_t i
    if gate.ahead.launches:  # streams wait for ``Slot.turn``: only markers show what ran under the lease before
        vgpu_collect(gate, now)
        mode = relax()
        busy = gate.backlog.busy or left_busy(gate)
        restore(mode)
        return not busy
    if gate.untracked:
        store32(&gate.round, gate.round + 1)
    if load32(&gate.submitting) or load32(&all.dying) or not all_outside(gate):
        return 0
    lock_acquire(&all.captures_lock)                     # no capture begins during the query
    mode = relax()
    if all.captures:         # only events may be queried (vgpu_collect has queried the markers)
        if gate.untracked:
            leave_unjoined_behind(gate)
        busy = some_dirty(gate) if gate.untracked else gate.backlog.busy
    else:
        busy = streams_busy(gate, anywhere)
    busy = busy or left_busy(gate)
    restore(mode)
    if not busy and not all.captures and gate.backlog.count:     # streams that are no more may have left markers
        vgpu_collect(gate, now)
        busy = gate.backlog.count > 0
    lock_release(&all.captures_lock)
    if busy:
        if gate.outrun:
            backlog_resume(&gate.backlog)
        backlog_seen_busy(&gate.backlog, now)
        return 0
    if gate.untracked:
        backlog_seen_busy(&gate.backlog, now)            # unmeasured time counts as busy
    forget_markers(gate)
    was_busy = gate.backlog.busy         # its last marker may have been found a moment ago
    since_ns = gate.backlog.since_ns
    backlog_drained(&gate.backlog, now)
    if was_busy:
        vgpu_trace_idle(gate, since_ns)
    for i in range(gate.stream_count):
        gate.streams[i].dirty = 0
    gate.untracked = gate.own_unmarked = gate.outrun = 0
    gate.unseen_ns = gate.unseen_until_ns = 0
    gate.idle_since_ns = gate.backlog.drained_ns
    return 1


cdef public bint vgpu_may_be_spared(const Gate* gate, int index) noexcept nogil:
    """Whether a launch into the stream at ``index`` may go without a query of whether the queue has run. All work not
    known to have run is in that stream, and under the same lease. So the launch comes after it. No drain is reported
    before it, however wrong the prediction was."""
    return not (
        gate.marked_stream != index or gate.backlog.count or gate.backlog.unknown or gate.untracked
        or gate.own_unmarked or gate.outrun or gate.left_count or gate.ahead.launches or gate.over_epoch
        or load32(&gate.slot.last_epoch) != gate.began_epoch or load32(&gate.submitting) or load32(&state().captures)
    )


cdef public void vgpu_drained_as_predicted(Gate* gate, int64_t now) noexcept nogil:
    """Where the query was spared, the backlog takes the work before the launch to have run when it was predicted to."""
    cdef int64_t since_ns = gate.backlog.since_ns
    backlog_drained(&gate.backlog, now)
    vgpu_trace_idle(gate, since_ns)


cdef void forget_markers(Gate* gate) noexcept nogil:
    """Free the markers' events. Samples stay until their events were read."""
    cdef uint32_t i
    for i in range(gate.backlog.count):
        give_event(gate, <int>gate.backlog.marked[(gate.backlog.head + i) % 128].tag)
