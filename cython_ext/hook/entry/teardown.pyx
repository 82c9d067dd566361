"""When what the hook keeps track of (track.pyx) may not be asked any more, or is no more: captures begin and end,
streams, contexts, graphs and modules die. The caller holds no lock.
"""

from libc.stdint cimport INT64_MAX, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuStreamGetCtx, real_cuStreamIsCapturing,
)
from cython_ext.hook.hook cimport (
    vgpu_claim_thread, vgpu_leave_all_behind, vgpu_leave_behind, vgpu_let_go, vgpu_mark, vgpu_mark_ahead,
    vgpu_memory_inherited, vgpu_memory_of_context_died, vgpu_touch, vgpu_touched,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CAPTURES, CUDA_SUCCESS, EVENTS, OWN_HANDLE, WORD_NEW, Capture, Gate, State, Stream, Thread, attached, state,
    vgpu_thread,
)
from cython_ext.logic.meter.durations cimport durations_forget
from cython_ext.logic.meter.graphs cimport graph_forget, graph_updated
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport add32, fence, futex_wait, load32, store32


cdef inline bint over() noexcept nogil:
    """Whether tracking is off, or not needed any more. Where the process ends, a signal's handler may have called
    exit() out of a call that holds the lock."""
    return not attached() or load32(&state().stopping) != 0


# --- captures

cdef public bint vgpu_capturing(void* handle) noexcept nogil:
    """Whether a launch into this stream (normalised) would be captured, not run."""
    cdef int status = 0
    if load32(&state().captures) == 0:
        return 0
    return real_cuStreamIsCapturing(handle, &status) == CUDA_SUCCESS and status != 0


cdef public void* vgpu_capture_begins(void* handle) noexcept nogil:
    """A capture is about to begin: mark what may not be marked any more until it ends. The stream's context, which is
    not asked for any more then."""
    cdef void* context = NULL
    cdef uint32_t i
    if over():
        return NULL
    if <size_t>handle <= OWN_HANDLE or real_cuStreamGetCtx(handle, &context) != CUDA_SUCCESS:
        real_cuCtxGetCurrent(&context)
    for i in range(state().gate_count):
        lock_acquire(&state().gates[i].lock)
        if state().gates[i].untracked:
            vgpu_leave_all_behind(&state().gates[i])
        else:
            vgpu_mark(&state().gates[i])
        vgpu_mark_ahead(&state().gates[i])
        lock_release(&state().gates[i].lock)
    lock_acquire(&state().captures_lock)                 # from here on no stream is asked ...
    state().captures += 1
    lock_release(&state().captures_lock)
    return context


cdef public void vgpu_capture_began(void* handle, void* context) noexcept nogil:
    """The driver's answer to vgpu_capture_begins; NULL: it refused."""
    cdef State* all = state()
    cdef Capture new
    cdef int i
    if over():
        return
    new.handle = handle
    new.owner = vgpu_claim_thread() if <size_t>handle == OWN_HANDLE else NULL
    new.context = context
    lock_acquire(&all.captures_lock)
    if handle == NULL:
        all.captures -= all.captures > 0
    else:
        for i in range(CAPTURES):
            if all.capturing[i].handle == NULL:
                all.capturing[i] = new
                break
        else:
            all.unlisted += 1
    lock_release(&all.captures_lock)


cdef inline void strike(Capture* capture) noexcept nogil:
    """The caller holds captures_lock."""
    capture.handle = NULL
    state().captures -= state().captures > 0


cdef void drop_capture(void* handle, bint well) noexcept nogil:
    """``well``: the driver has ended one, so that it is one of those that are not listed if it is not listed."""
    cdef State* all = state()
    cdef Thread* owner = <Thread*>vgpu_thread if <size_t>handle == OWN_HANDLE else NULL
    cdef int i
    lock_acquire(&all.captures_lock)
    for i in range(CAPTURES):
        if all.capturing[i].handle == handle and all.capturing[i].owner == owner:
            strike(&all.capturing[i])
            break
    else:
        if all.unlisted and well:
            all.unlisted -= 1
            all.captures -= 1
    lock_release(&all.captures_lock)


cdef void drop_captures(void* handle, void* context, const Thread* owner) noexcept nogil:
    """Drop the captures of that stream, in that context, or of that thread (one is given, the others are NULL). It has
    ended, and no thread can end those captures any more."""
    cdef Capture* capture
    cdef int i
    if load32(&state().captures) == 0:
        return
    lock_acquire(&state().captures_lock)
    for i in range(CAPTURES):
        capture = &state().capturing[i]
        if capture.handle != NULL and (
            capture.handle == handle or context != NULL and capture.context == context
            or owner != NULL and capture.owner == owner
        ):
            strike(capture)
    lock_release(&state().captures_lock)


cdef public void vgpu_captures_end_with(Thread* thread) noexcept nogil:
    """It takes its default streams along."""
    drop_captures(NULL, NULL, thread)


cdef public void vgpu_capture_ended(void* handle, bint well) noexcept nogil:
    """A capture that began in this stream is over, if the driver agrees (an end in the wrong thread is none)."""
    cdef int status = 0
    if over() or load32(&state().captures) == 0:
        return
    if real_cuStreamIsCapturing(handle, &status) != CUDA_SUCCESS or status == 0:
        drop_capture(handle, well)


# --- handles that die

cdef public void vgpu_stream_dies(void* handle) noexcept nogil:
    """Before cuStreamDestroy: its work goes on, under a marker."""
    cdef Gate* gate
    cdef Stream* stream
    cdef uint32_t g, i
    cdef int mode
    if over():
        return
    for g in range(state().gate_count):
        gate = &state().gates[g]
        lock_acquire(&gate.lock)
        for i in range(gate.stream_count):
            stream = &gate.streams[i]
            if stream.handle != handle:
                continue
            mode = relax()
            if gate.untracked and stream.dirty:
                vgpu_leave_behind(gate, stream)
            restore(mode)
            if gate.marked_stream == <int>i:
                vgpu_mark(gate)
            if gate.ahead_stream == <int>i:
                vgpu_mark_ahead(gate)
            memset(stream, 0, sizeof(Stream))
            store32(&gate.round, gate.round + 1)         # the next stream may get the same handle
        lock_release(&gate.lock)
    drop_captures(handle, NULL, NULL)


cdef public void vgpu_context_dies(void* context) noexcept nogil:
    """Before a context is destroyed, reset or released, which need not be its end. Meanwhile the hook queries nothing
    in it, nor its own events there."""
    cdef Gate* gate
    cdef uint32_t g, i
    if over():
        return
    for g in range(state().gate_count):      # what can leave the card is moved in its contexts: not while one goes
        vgpu_touch(&state().gates[g])
    add32(&state().dying, 1)
    fence()
    lock_acquire(&state().returned_lock)     # no thread queries an event of this context from here on
    lock_release(&state().returned_lock)
    for g in range(state().gate_count):
        gate = &state().gates[g]
        while load32(&gate.pinning):         # some milliseconds, in one of the process's contexts
            futex_wait(&gate.pinning, 1, INT64_MAX)
        lock_acquire(&gate.lock)
        vgpu_let_go(gate)
        for i in range(EVENTS):
            if gate.events[i].context == context:
                gate.events[i].held = 1
        lock_release(&gate.lock)


cdef void drop_events(Gate* gate, void* context) noexcept nogil:
    """The events ended with their context; a later query of one finds it complete."""
    cdef uint32_t i
    for i in range(EVENTS):
        if gate.events[i].context == context:
            gate.events[i].handle = gate.events[i].context = NULL
            gate.events[i].held = 0


cdef void bury(void* context, bint dead) noexcept nogil:
    cdef Gate* gate
    cdef uint32_t g, i
    for g in range(state().gate_count):
        gate = &state().gates[g]
        lock_acquire(&gate.lock)
        if dead:
            drop_events(gate, context)
        for i in range(gate.stream_count):
            if dead and gate.streams[i].context == context:
                memset(&gate.streams[i], 0, sizeof(Stream))
        if dead and gate.word_context == context:
            gate.word_state = WORD_NEW
        if dead:
            durations_forget(&gate.durations, 0)
            graph_forget(&gate.graphs, 0)
            store32(&gate.round, gate.round + 1)         # its handles, too, may be given again
        lock_release(&gate.lock)


cdef void touched() noexcept nogil:
    """The end of what vgpu_context_dies has begun."""
    cdef uint32_t g
    add32(&state().dying, <uint32_t>-1)
    for g in range(state().gate_count):
        vgpu_touched(&state().gates[g])


cdef public void vgpu_context_died(void* context, bint dead) noexcept nogil:
    """After it. ``dead``: it is gone, and all its work with it; else it lives on."""
    if over():
        return
    bury(context, dead)
    if dead:
        drop_captures(NULL, context, NULL)
        vgpu_memory_of_context_died(context)
    touched()


cdef public void vgpu_green_context_died(void* context, void* primary, bint dead) noexcept nogil:
    """The same of a green one: what was allocated in it is the primary one's."""
    if over():
        return
    bury(context, dead)
    if dead:
        drop_captures(NULL, context, NULL)
    if dead and primary != NULL:
        vgpu_memory_inherited(context, primary)
    touched()


cdef public void vgpu_graph_updated(void* graph) noexcept nogil:
    """An executable graph does something else from its next launch on, perhaps for another length of time."""
    cdef uint32_t g
    if over():
        return
    for g in range(state().gate_count):
        lock_acquire(&state().gates[g].lock)
        graph_updated(&state().gates[g].graphs, <uint64_t>graph)
        lock_release(&state().gates[g].lock)


cdef public void vgpu_forget(uint64_t handle) noexcept nogil:
    """A graph died (or, 0: a module): the handles of its kernels will mean something else."""
    cdef uint32_t g
    if over():
        return
    for g in range(state().gate_count):
        lock_acquire(&state().gates[g].lock)
        durations_forget(&state().gates[g].durations, handle)
        if handle:
            graph_forget(&state().gates[g].graphs, handle)
        lock_release(&state().gates[g].lock)
