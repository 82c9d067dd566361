"""Events: marks in streams, to wait for and to measure time between."""

from libc.stdlib cimport calloc
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport mem_trim_pools
from cython_ext.sim.cuda.driver cimport (
    CAPTURED_EVENT, CAPTURE_UNSUPPORTED, Context, CUresult, EFFECT_EVENT, EFFECT_REMOTE, Event, INVALID_CONTEXT,
    INVALID_HANDLE, MARK_CONTEXT, MARK_EVENT, NOT_READY, NOT_SUPPORTED, SUCCESS, Stream, Work, drv_begin,
    drv_capture_event, drv_capture_wait, drv_check_unsafe, drv_current_context, drv_end, drv_follow, drv_is_done,
    drv_next_id, drv_stream, drv_streams, drv_submit, drv_synchronize_before, drv_wait,
)
from cython_ext.sim.queues cimport sim_reached
from cython_ext.sim.state cimport OP_EXTERNAL, OP_MARK, OP_WAIT

cdef enum:
    EVENT_DISABLE_TIMING = 2

cdef Event* unused_events


cdef public void drv_note_record(Event* event, Stream* stream) noexcept nogil:
    """The event now stands for everything in this stream up to the operation about to be submitted."""
    event.recorded = True
    event.gpu = stream.gpu
    event.slot = stream.slot
    event.generation = stream.generation
    event.count = stream.gpu.streams[stream.slot].tail + 1
    event.time_ns = 0
    event.pending += 1
    event.before_seq = 0
    event.capture = NULL


cdef public CUresult cuEventCreate(Event** out, unsigned int flags) noexcept nogil:
    global unused_events
    cdef Context* context
    cdef Event** link = &unused_events
    cdef Event* event
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    drv_begin(context)
    while link[0] != NULL and link[0].pending:
        link = &link[0].next
    event = link[0]
    if event != NULL:
        link[0] = event.next
        memset(event, 0, sizeof(Event))
    else:
        event = <Event*>calloc(1, sizeof(Event))
    event.mark = MARK_EVENT
    event.id = drv_next_id()
    event.context = context
    event.flags = flags
    drv_end(context)
    out[0] = event
    return SUCCESS


cdef CUresult check_event(Event* event) noexcept nogil:
    if event == NULL or event.mark != MARK_EVENT:
        return INVALID_HANDLE
    return SUCCESS if event.context.mark == MARK_CONTEXT else INVALID_CONTEXT


cdef CUresult check_waitable(Event* event) noexcept nogil:
    """Before a query or a wait: neither is allowed for an event within a capture, which it breaks."""
    cdef CUresult result = check_event(event)
    if result != SUCCESS:
        return result
    if event.capture != NULL:
        event.capture.invalidated = True
        return CAPTURED_EVENT
    return drv_check_unsafe()


cdef public CUresult cuEventDestroy_v2(Event* event) noexcept nogil:
    global unused_events
    if event == NULL or event.mark != MARK_EVENT:
        return INVALID_HANDLE
    if event.context.mark == MARK_CONTEXT:
        drv_begin(event.context)
    event.mark = 0
    event.next = unused_events
    unused_events = event
    if event.context.mark == MARK_CONTEXT:
        drv_end(event.context)
    return SUCCESS


cdef public CUresult cuEventRecordWithFlags(Event* event, void* handle, unsigned int flags) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = check_event(event)
    if result != SUCCESS:
        return result
    if event.context != stream.context:
        return INVALID_HANDLE
    if stream.capture != NULL and not flags & 1:
        return drv_capture_event(stream, event)
    memset(&work, 0, sizeof(Work))
    work.kind = OP_MARK
    work.effect.kind = EFFECT_EVENT
    work.effect.event = event
    return drv_submit(stream, &work)


cdef public CUresult cuEventRecord(Event* event, void* handle) noexcept nogil:
    return cuEventRecordWithFlags(event, handle, 0)


cdef public CUresult cuCtxRecordEvent(Context* context, Event* event) noexcept nogil:
    """The event stands for everything in the context so far."""
    cdef Stream* stream = drv_streams()
    cdef CUresult result = check_event(event)
    if result != SUCCESS:
        return result
    if event.context != context:
        return INVALID_HANDLE
    result = drv_begin(context)
    while stream != NULL:
        if stream.context == context and stream.capture != NULL:
            stream.capture.invalidated = True
            result = CAPTURE_UNSUPPORTED
        stream = stream.next
    if result == SUCCESS:
        event.recorded = True
        event.gpu = context.gpu
        event.before_seq = context.gpu.next_seq
        event.capture = NULL
    drv_end(context)
    return result


cdef public CUresult cuEventQuery(Event* event) noexcept nogil:
    cdef bint done
    cdef CUresult result = check_waitable(event)
    if result != SUCCESS:
        return result
    result = drv_begin(event.context)
    if event.recorded and event.before_seq:
        done = event.gpu != event.context.gpu or drv_is_done(event.context, event.before_seq)
    else:
        done = not event.recorded or sim_reached(event.gpu, event.slot, event.generation, event.count)
    drv_end(event.context)
    return result if result != SUCCESS else SUCCESS if done else NOT_READY


cdef public CUresult cuEventSynchronize(Event* event) noexcept nogil:
    cdef CUresult result = check_waitable(event)
    if result != SUCCESS:
        return result
    if not event.recorded:
        return SUCCESS
    if event.before_seq:
        drv_follow()         # what it was recorded behind on another GPU is done
        if event.gpu != event.context.gpu:
            return SUCCESS
        return drv_synchronize_before(event.context, False, event.before_seq)
    result = drv_wait(event.context, event.gpu, event.slot, event.generation, event.count)
    if result == SUCCESS:
        mem_trim_pools(event.context)
    return result


cdef public CUresult cuEventElapsedTime_v2(float* ms, Event* first, Event* second) noexcept nogil:
    """Between the completion of two events, in ms."""
    cdef CUresult result = check_event(first)
    if result == SUCCESS:
        result = check_event(second)
    if result != SUCCESS:
        return result
    if (first.flags | second.flags) & EVENT_DISABLE_TIMING or not first.recorded or not second.recorded:
        return INVALID_HANDLE
    result = drv_begin(first.context)
    drv_end(first.context)
    if result == SUCCESS and (first.time_ns == 0 or second.time_ns == 0):
        result = NOT_READY
    if result == SUCCESS:
        ms[0] = (second.time_ns - first.time_ns) / 1e6
    return result


cdef public CUresult cuEventElapsedTime(float* ms, Event* first, Event* second) noexcept nogil:
    return cuEventElapsedTime_v2(ms, first, second)


cdef public CUresult cuStreamWaitEvent(void* handle, Event* event, unsigned int flags) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if event == NULL or event.mark != MARK_EVENT:
        return INVALID_HANDLE
    if stream.capture != NULL or event.capture != NULL:
        return drv_capture_wait(stream, event)
    if not event.recorded:
        return SUCCESS
    if event.before_seq:
        return NOT_SUPPORTED  # the simulation's streams wait for one other
    memset(&work, 0, sizeof(Work))
    if event.gpu == stream.gpu:
        work.kind = OP_WAIT
        work.wait_gpu = event.gpu        # if the stream moves before this is queued, the event has happened
        work.wait_slot = event.slot
        work.wait_generation = event.generation
        work.wait_count = event.count
    else:
        # Another GPU's progress is only known here, not to the caller that advances this one.
        work.kind = OP_EXTERNAL
        work.effect.kind = EFFECT_REMOTE
        work.effect.event = event.gpu
        work.effect.flags = event.slot
        work.effect.value = event.generation
        work.effect.address = event.count
    return drv_submit(stream, &work)
