"""Events of the hook's own: which objects there are, and where one may be recorded. The hook records nothing in the
legacy stream while a blocking stream of its context captures.

The caller holds ``gate.lock``, and its thread's capture mode is RELAXED.
"""

from libc.stdint cimport uint32_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuEventCreate,
    real_cuEventDestroy_v2, real_cuEventQuery, real_cuEventRecord, real_cuStreamIsCapturing,
)
from cython_ext.hook.state cimport (
    CAPTURES, CU_EVENT_DISABLE_TIMING, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, EVENTS, LEGACY_HANDLE, STREAM_LEGACY,
    STREAM_OWN, Event, Gate, State, Stream, Thread, state, vgpu_thread,
)
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport load32


cdef inline void* current_context() noexcept nogil:
    cdef void* context = NULL
    real_cuCtxGetCurrent(&context)
    return context


cdef inline int take_event(Gate* gate, void* context, bint timed) noexcept nogil:
    """An event object of the current context, or -1. Once there are EVENTS, an unused one is destroyed for it."""
    cdef Event* event
    cdef int i, free = -1, other = -1
    for i in range(EVENTS):
        event = &gate.events[i]
        if event.used:
            continue
        if event.handle == NULL:
            if free < 0:
                free = i
        elif event.timed == timed and event.context == context:
            event.used = 1
            return i
        elif not (event.held and load32(&state().dying)):    # else its context may be about to go
            other = i
    if free < 0:
        if other < 0:
            return -1
        free = other
        real_cuEventDestroy_v2(gate.events[free].handle)
    event = &gate.events[free]
    if real_cuEventCreate(&event.handle, 0 if timed else CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS:
        event.handle = NULL
        return -1
    event.context = context
    event.timed = timed
    event.used = 1
    event.held = 0
    return free


cdef inline void give_event(Gate* gate, int index) noexcept nogil:
    gate.events[index].used = 0


cdef inline bint legacy_free() noexcept nogil:
    """Whether no blocking stream of the current context captures: an event in the legacy stream would end that. The
    caller holds captures_lock, so none begins meanwhile."""
    cdef const State* all = state()
    cdef uint32_t began = all.unlisted
    cdef int i, status = 0
    if all.captures == 0:
        return 1
    for i in range(CAPTURES):
        began += all.capturing[i].handle != NULL
    return (
        began == all.captures            # else one is just about to
        and real_cuStreamIsCapturing(<void*>LEGACY_HANDLE, &status) == CUDA_SUCCESS and status == 0
    )


cdef inline int record(Gate* gate, const Stream* stream, bint timed, bint held) noexcept nogil:
    """Record an event behind the stream's present work; its index, or -1. It is made in the stream's context, which
    need not be the current one. ``held``: the caller holds captures_lock."""
    cdef void* context = current_context()
    cdef bint elsewhere = stream.context != context
    cdef bint legacy = stream.flags & STREAM_LEGACY != 0
    cdef int event = -1
    if stream.handle == NULL:            # the stream is destroyed; the driver would take NULL for the default stream
        return -1
    if stream.flags & STREAM_OWN and stream.owner != <Thread*>vgpu_thread:
        return -1
    if elsewhere and (load32(&state().dying) or real_cuCtxPushCurrent_v2(stream.context) != CUDA_SUCCESS):
        return -1
    if legacy and not held:
        lock_acquire(&state().captures_lock)
    if not legacy or legacy_free():
        event = take_event(gate, stream.context, timed)
    if event >= 0 and real_cuEventRecord(gate.events[event].handle, stream.handle) != CUDA_SUCCESS:
        give_event(gate, event)
        event = -1
    if legacy and not held:
        lock_release(&state().captures_lock)
    if elsewhere:
        real_cuCtxPopCurrent_v2(&context)
    return event


cdef inline bint done(Gate* gate, int event) noexcept nogil:
    """Whether the event is complete. An event that died with its context, or that only returns errors, counts as
    complete."""
    cdef void* handle = gate.events[event].handle
    if gate.events[event].held and load32(&state().dying):
        return 0
    return handle == NULL or real_cuEventQuery(handle) != CUDA_ERROR_NOT_READY
