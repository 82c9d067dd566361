"""Streams: the queues, waiting for them, and the words in memory that they wait for and write."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport mem_trim_pools
from cython_ext.sim.cuda.driver cimport (
    CAPTURE_UNSUPPORTED, Context, CUresult, EFFECT_EVENT, EFFECT_HOST, EFFECT_REMOTE, EFFECT_WAIT, EFFECT_WRITE,
    Effect, Event, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, MARK_CONTEXT, MARK_STREAM, NOT_READY,
    OUT_OF_MEMORY, SUCCESS, Stream, WIDE_WORD, Work, drv_begin, drv_break_captures, drv_capture_work,
    drv_check_unsafe, drv_current_context, drv_end, drv_new_stream, drv_move_data, drv_next_id,
    drv_note_record, drv_streams,
    drv_wait, drv_wait_room, drv_wake_agent, sim_thread,
)
from cython_ext.sim.queues cimport sim_fetch, sim_has_room, sim_next_op, sim_open_stream, sim_submit
from cython_ext.sim.state cimport (
    OP_EXTERNAL, OP_MARK, SIM_NOWHERE, SIM_QUEUE, STREAM_LEGACY, STREAM_NONBLOCKING, SimGpu, SimOp,
)

cdef enum:
    OWN_STREAMS = 8


# -- the queue

cdef public CUresult drv_open_stream(Context* context, uint32_t flags, int priority, Stream** out) noexcept nogil:
    cdef CUresult result = drv_begin(context)
    cdef Stream* stream
    cdef uint32_t slot = SIM_NOWHERE
    if result == SUCCESS:
        slot = sim_open_stream(context.gpu, context.slot, flags, priority)
        if slot == SIM_NOWHERE:
            result = OUT_OF_MEMORY
    if result == SUCCESS:
        stream = drv_new_stream()
        stream.mark = MARK_STREAM
        stream.id = drv_next_id()
        stream.context = context
        stream.gpu = context.gpu
        stream.slot = slot
        stream.generation = context.gpu.streams[slot].generation
        stream.flags = flags
        stream.priority = priority
        out[0] = stream
    drv_end(context)
    return result


cdef CUresult own_stream(Context* context, Stream** out) noexcept nogil:
    """The calling thread's default stream in this context, made at its first use."""
    cdef uint32_t i
    cdef CUresult result
    for i in range(OWN_STREAMS):
        if sim_thread.own[i].context == context and sim_thread.own[i].id == context.id:
            out[0] = <Stream*>sim_thread.own[i].stream
            return SUCCESS
    result = drv_open_stream(context, 0, 0, out)
    if result == SUCCESS:
        i = sim_thread.own_next % OWN_STREAMS
        sim_thread.own_next += 1
        sim_thread.own[i].context = context
        sim_thread.own[i].id = context.id
        sim_thread.own[i].stream = out[0]
    return result


cdef public CUresult drv_stream(void* handle, Stream** out) noexcept nogil:
    """The stream behind a handle: NULL and 1 are the legacy stream, 2 is the thread's own."""
    cdef Context* context
    cdef CUresult result
    if <uint64_t>handle <= 2:
        result = drv_current_context(&context)
        if result != SUCCESS:
            return result
        if <uint64_t>handle == 2:
            return own_stream(context, out)
        out[0] = context.legacy
        return SUCCESS
    out[0] = <Stream*>handle
    if out[0].mark != MARK_STREAM or out[0].context.mark != MARK_CONTEXT:
        return INVALID_CONTEXT  # what an H200's driver answers for a destroyed stream
    return SUCCESS


cdef public CUresult drv_enqueue(Stream* stream, Work* work) noexcept nogil:
    """Queue an operation; blocks while the queue is full."""
    cdef CUresult result
    cdef SimOp* op
    cdef Effect* effect
    while True:
        result = drv_begin(stream.context)
        if result != SUCCESS or sim_has_room(stream.gpu, stream.slot):
            break
        drv_end(stream.context)
        result = drv_wait_room(stream)
        if result != SUCCESS:
            return result
    if result == SUCCESS and stream.flags & STREAM_LEGACY and stream.context.captures:
        result = drv_break_captures(stream.context)
    if result == SUCCESS:
        op = sim_next_op(stream.gpu, stream.slot)
        op.kind = OP_MARK if work.wait_gpu != NULL and work.wait_gpu != stream.gpu else work.kind
        op.sms = work.sms if 0 < work.sms <= stream.gpu.sms else stream.gpu.sms
        op.remaining_ns = work.ns
        if work.function != NULL and stream.gpu.contexts[stream.context.slot].managed_bytes:
            op.remaining_ns += sim_fetch(stream.gpu, stream.context.slot)
        op.wait_stream = work.wait_slot
        op.wait_generation = work.wait_generation
        op.wait_ordinal = work.wait_count
        op.failed = work.failed
        effect = &stream.effects[stream.gpu.streams[stream.slot].tail % SIM_QUEUE]
        effect[0] = work.effect
        if effect.kind == EFFECT_EVENT:
            drv_note_record(<Event*>effect.event, stream)
        sim_submit(stream.gpu, stream.slot)
        if effect.kind in (EFFECT_WRITE, EFFECT_WAIT, EFFECT_HOST, EFFECT_REMOTE):
            drv_wake_agent()
    drv_end(stream.context)
    return result


cdef public CUresult drv_submit(Stream* stream, Work* work) noexcept nogil:
    """Queue an operation, or make it a node of the graph that the stream captures."""
    if stream.capture != NULL:
        return drv_capture_work(stream, work)
    if work.data:
        drv_move_data(work)
    return drv_enqueue(stream, work)


cdef public CUresult drv_synchronize(Stream* stream) noexcept nogil:
    cdef uint64_t count
    cdef CUresult result = drv_begin(stream.context)
    cdef SimGpu* gpu = stream.gpu
    cdef uint32_t slot = stream.slot, generation = stream.generation
    count = gpu.streams[slot].tail
    drv_end(stream.context)
    if result != SUCCESS:
        return result
    if stream.flags & STREAM_LEGACY:
        return drv_synchronize_blocking(stream.context)
    return drv_wait(stream.context, gpu, slot, generation, count)


cdef Stream* unfinished(Context* context, bint blocking_only, uint64_t seq) noexcept nogil:
    """A stream of the context with work that was submitted before ``seq``; NULL: none. Under the locks."""
    cdef Stream* stream = drv_streams()
    while stream != NULL:
        if (stream.context == context and not (blocking_only and stream.flags & STREAM_NONBLOCKING)
                and submitted_before(stream, seq) > context.gpu.streams[stream.slot].head):
            return stream
        stream = stream.next
    return NULL


cdef public bint drv_is_done(Context* context, uint64_t seq) noexcept nogil:
    """Whether all is done in the context that was submitted before ``seq``. Under the locks."""
    return unfinished(context, False, seq) == NULL


cdef public CUresult drv_synchronize_before(Context* context, bint blocking_only, uint64_t seq) noexcept nogil:
    """Wait for what was submitted before; streams are looked up anew each time, as others may end meanwhile. Where the
    process has been restored on another GPU since, all of it is done."""
    cdef Stream* stream
    cdef SimGpu* gpu
    cdef uint32_t slot, generation
    cdef uint64_t count
    cdef CUresult result = drv_begin(context)
    gpu = context.gpu
    if seq == 0:
        seq = gpu.next_seq
    while result == SUCCESS and context.gpu == gpu:
        stream = unfinished(context, blocking_only, seq)
        if stream == NULL:
            break
        count = submitted_before(stream, seq)
        slot = stream.slot
        generation = stream.generation
        drv_end(context)
        result = drv_wait(context, gpu, slot, generation, count)
        drv_begin(context)
    drv_end(context)
    return result


cdef uint64_t submitted_before(Stream* stream, uint64_t seq) noexcept nogil:
    """How many operations of a stream were submitted before `seq`."""
    cdef uint64_t count = stream.gpu.streams[stream.slot].tail
    while (0 < count - stream.gpu.streams[stream.slot].head <= SIM_QUEUE
           and stream.gpu.ops[stream.slot][(count - 1) % SIM_QUEUE].seq >= seq):
        count -= 1
    return count


cdef CUresult drv_synchronize_blocking(Context* context) noexcept nogil:
    return drv_synchronize_before(context, True, 0)


cdef public CUresult drv_synchronize_context(Context* context) noexcept nogil:
    cdef CUresult result = drv_check_unsafe()
    if result == SUCCESS:
        result = drv_synchronize_before(context, False, 0)
    if result == SUCCESS:
        mem_trim_pools(context)
    return result


cdef CUresult check_not_capturing(Stream* stream) noexcept nogil:
    """Asking a capturing stream whether it is done breaks its capture."""
    if stream.capture != NULL:
        stream.capture.invalidated = True
        return CAPTURE_UNSUPPORTED
    return drv_check_unsafe()


# -- streams

cdef public CUresult cuStreamCreateWithPriority(Stream** out, unsigned int flags, int priority) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if flags > 1:
        return INVALID_VALUE
    return drv_open_stream(context, STREAM_NONBLOCKING if flags & 1 else 0, max(-5, min(0, priority)), out)


cdef public CUresult cuStreamCreate(Stream** out, unsigned int flags) noexcept nogil:
    return cuStreamCreateWithPriority(out, flags, 0)


cdef public CUresult cuStreamDestroy_v2(void* handle) noexcept nogil:
    """Returns at once; what is queued is still done."""
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if <uint64_t>handle <= 2:
        return INVALID_HANDLE
    drv_begin(stream.context)
    stream.mark = 0
    stream.closing = True
    drv_end(stream.context)
    return SUCCESS


cdef public CUresult cuStreamQuery(void* handle) noexcept nogil:
    cdef Stream* stream
    cdef bint done
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = check_not_capturing(stream)
    if result != SUCCESS:
        return result
    result = drv_begin(stream.context)
    done = stream.gpu.streams[stream.slot].head == stream.gpu.streams[stream.slot].tail
    drv_end(stream.context)
    return result if result != SUCCESS else SUCCESS if done else NOT_READY


cdef public CUresult cuStreamSynchronize(void* handle) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = check_not_capturing(stream)
    if result == SUCCESS:
        result = drv_synchronize(stream)
    if result == SUCCESS:
        mem_trim_pools(stream.context)
    return result

cdef public CUresult cuStreamGetPriority(void* handle, int* priority) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        priority[0] = stream.priority
    return result


cdef public CUresult cuStreamGetFlags(void* handle, unsigned int* flags) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        flags[0] = 1 if stream.flags & STREAM_NONBLOCKING else 0
    return result


cdef public CUresult cuStreamGetId(void* handle, unsigned long long* number) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        number[0] = stream.id
    return result


cdef public CUresult cuStreamGetCtx(void* handle, Context** context) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        context[0] = stream.context
    return result


cdef public CUresult cuStreamGetCtx_v2(void* handle, Context** context, void** green) noexcept nogil:
    green[0] = NULL
    return cuStreamGetCtx(handle, context)


cdef public CUresult cuStreamGetDevice(void* handle, int* device) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        device[0] = stream.context.device
    return result


# -- words in memory that streams wait for and write

cdef CUresult word_operation(void* handle, uint64_t address, uint64_t value, unsigned int flags, uint32_t kind,
                             bint wide) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if address == 0 or address & (7 if wide else 3):
        return INVALID_VALUE
    memset(&work, 0, sizeof(Work))
    work.kind = OP_EXTERNAL if kind == EFFECT_WAIT else OP_MARK
    work.effect.kind = kind
    work.effect.flags = (flags & 3) | (WIDE_WORD if wide else 0)
    work.effect.address = address
    work.effect.value = value
    return drv_submit(stream, &work)


cdef public CUresult cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value,
                                            unsigned int flags) noexcept nogil:
    return word_operation(stream, address, value, flags, EFFECT_WAIT, False)


cdef public CUresult cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value,
                                             unsigned int flags) noexcept nogil:
    return word_operation(stream, address, value, flags, EFFECT_WRITE, False)


cdef public CUresult cuStreamWaitValue64_v2(void* stream, uint64_t address, uint64_t value,
                                            unsigned int flags) noexcept nogil:
    return word_operation(stream, address, value, flags, EFFECT_WAIT, True)


cdef public CUresult cuStreamWriteValue64_v2(void* stream, uint64_t address, uint64_t value,
                                             unsigned int flags) noexcept nogil:
    return word_operation(stream, address, value, flags, EFFECT_WRITE, True)


# One entry of a batch: operation (1 wait, 2 write 32 bits; 4 wait, 5 write 64 bits), address, value, flags.
cdef public struct WordOperation:
    int operation
    uint64_t address
    uint64_t value
    unsigned int flags
    uint64_t rest[2]


cdef public CUresult cuStreamBatchMemOp_v2(void* stream, unsigned int count, WordOperation* operations,
                                           unsigned int flags) noexcept nogil:
    cdef unsigned int i
    cdef WordOperation* o
    cdef CUresult result = SUCCESS
    for i in range(count):
        o = &operations[i]
        if o.operation in (1, 2, 4, 5) and result == SUCCESS:
            result = word_operation(stream, o.address, o.value, o.flags,
                                    EFFECT_WAIT if o.operation in (1, 4) else EFFECT_WRITE, o.operation >= 4)
        elif o.operation not in (3, 6):  # flushes and barriers: memory is coherent here
            result = INVALID_VALUE if result == SUCCESS else result
    return result
