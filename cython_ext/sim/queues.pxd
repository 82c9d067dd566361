"""The queues of a simulated GPU: contexts, their streams, the streams' operations, and the owners of the memory.

Pure, like the engine that works them off (engine.pxd): functions of the state alone.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.sim.shares cimport sim_leave_shares
from cython_ext.sim.state cimport (
    CONTEXT_ALIVE, CONTEXT_DYING, CONTEXT_FREE, OP_COPY_IN, OP_COPY_OUT, OP_KERNEL, OP_MARK, SIM_CONTEXTS, SIM_NOWHERE,
    SIM_QUEUE, SIM_STREAMS, SIM_WORDS, STREAM_LEGACY, SimContext, SimGpu, SimOp, SimParticipant, SimStream, sim_context,
    sim_op, sim_stream,
)


cdef extern from * nogil:
    int ctz64 "__builtin_ctzll"(uint64_t x) noexcept


cdef inline void sim_set_busy(SimGpu* gpu, uint32_t stream, bint busy) noexcept nogil:
    if busy:
        gpu.busy[(stream >> 6) % SIM_WORDS] |= (<uint64_t>1) << (stream & 63)
    else:
        gpu.busy[(stream >> 6) % SIM_WORDS] &= ~((<uint64_t>1) << (stream & 63))


cdef inline uint32_t sim_next_busy(SimGpu* gpu, uint32_t first) noexcept nogil:
    """The first busy stream at or after `first`, or SIM_NOWHERE."""
    cdef uint32_t word = first >> 6
    cdef uint64_t bits
    if first >= SIM_STREAMS:
        return SIM_NOWHERE
    bits = gpu.busy[word] & ~(((<uint64_t>1) << (first & 63)) - 1)
    while bits == 0:
        word += 1
        if word == SIM_WORDS:
            return SIM_NOWHERE
        bits = gpu.busy[word]
    return (word << 6) + ctz64(bits)


# -- contexts and streams

cdef inline uint32_t sim_open_context(SimGpu* gpu, uint32_t participant, const SimParticipant* process, uint64_t server,
                                      uint32_t sm_cap, uint64_t memory_limit) noexcept nogil:
    """A free slot made into a context without memory and streams, or SIM_NOWHERE."""
    cdef uint32_t i
    cdef SimContext* context
    for i in range(SIM_CONTEXTS):
        context = &gpu.contexts[i]
        if context.state == CONTEXT_FREE:
            context.generation += 1
            context.participant = participant
            context.pid = process.pid
            context.pid_namespace = process.pid_namespace
            context.pid_start = process.pid_start
            context.server = server
            context.server_namespace = process.pid_namespace
            context.group = server if server != 0 else i + 1
            context.sm_cap = sm_cap if 0 < sm_cap < gpu.sms else gpu.sms
            context.memory_bytes = context.managed_bytes = context.resident_bytes = context.saved_bytes = 0
            context.frozen = context.moved_to = 0
            context.origin = 0
            context.memory_limit = memory_limit
            context.legacy = SIM_NOWHERE
            context.error = 0
            context.sm_ns = 0
            context.load.window = context.load.now_ns = context.load.before_ns = context.load.total_ns = 0
            context.state = CONTEXT_ALIVE
            return i
    return SIM_NOWHERE


cdef inline uint32_t sim_open_stream(SimGpu* gpu, uint32_t context, uint32_t flags, int priority) noexcept nogil:
    cdef uint32_t i
    cdef SimStream* stream
    for i in range(SIM_STREAMS):
        stream = &gpu.streams[i]
        if stream.context == 0:
            stream.generation += 1
            stream.flags = flags
            stream.priority = priority
            stream.head = stream.tail = stream.delivered = 0
            stream.context = context + 1
            if flags & STREAM_LEGACY:
                sim_context(gpu, context).legacy = i
            return i
    return SIM_NOWHERE


cdef inline void sim_close_stream(SimGpu* gpu, uint32_t stream) noexcept nogil:
    """Forget a stream and whatever it still holds."""
    sim_stream(gpu, stream).generation += 1
    sim_set_busy(gpu, stream, False)
    sim_stream(gpu, stream).context = 0


cdef inline void sim_free_context(SimGpu* gpu, uint32_t index) noexcept nogil:
    cdef uint32_t i
    cdef SimContext* context = sim_context(gpu, index)
    for i in range(SIM_STREAMS):
        if gpu.streams[i].context == index + 1:
            sim_close_stream(gpu, i)
    sim_leave_shares(gpu, index)
    context.memory_bytes = 0
    context.managed_bytes = context.resident_bytes = 0
    context.state = CONTEXT_FREE


cdef inline void sim_kill_context(SimGpu* gpu, uint32_t index, int64_t grace_ns) noexcept nogil:
    """Its process is gone: queued work is dropped, what is on the SMs has `grace_ns` to leave them."""
    cdef uint32_t i
    cdef bint running = False
    cdef SimStream* stream
    cdef SimOp* op
    sim_context(gpu, index).state = CONTEXT_DYING
    for i in range(SIM_STREAMS):
        stream = &gpu.streams[i]
        if stream.context != index + 1:
            continue
        op = sim_op(gpu, i, stream.head)
        if stream.head < stream.tail and op.start_ns != 0 and op.kind in (OP_KERNEL, OP_COPY_IN, OP_COPY_OUT):
            stream.tail = stream.head + 1
            op.failed = 0
            if op.remaining_ns > grace_ns:
                op.remaining_ns = grace_ns
            running = True
        else:
            stream.tail = stream.head
            sim_set_busy(gpu, i, False)
    if not running:
        sim_free_context(gpu, index)


cdef inline void sim_fail_context(SimGpu* gpu, uint32_t index, uint32_t error) noexcept nogil:
    """A fatal fault: the context, and every other one of its MPS server, answers with `error` from now on."""
    cdef uint32_t i, s
    cdef uint64_t server = sim_context(gpu, index).server
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state != CONTEXT_ALIVE or gpu.contexts[i].error != 0:
            continue
        if i == index or (gpu.contexts[i].server != 0 and gpu.contexts[i].server == server):
            gpu.contexts[i].error = error
            for s in range(SIM_STREAMS):
                if gpu.streams[s].context == i + 1:
                    gpu.streams[s].head = gpu.streams[s].tail
                    sim_set_busy(gpu, s, False)


cdef inline void sim_recover(SimGpu* gpu) noexcept nogil:
    """A participant died with the lock: rebuild what is derived, and repair what a half-made change may have left."""
    cdef uint32_t i, owner
    cdef SimStream* stream
    gpu.recoveries += 1
    for i in range(SIM_STREAMS):
        stream = &gpu.streams[i]
        owner = stream.context
        if owner > SIM_CONTEXTS or (owner != 0 and gpu.contexts[owner - 1].state == CONTEXT_FREE):
            stream.context = owner = 0
        if stream.head > stream.tail:
            stream.head = stream.tail
        if stream.delivered > stream.head:
            stream.delivered = stream.head
        if stream.tail > stream.delivered + SIM_QUEUE:
            stream.tail = stream.delivered + SIM_QUEUE
        sim_set_busy(gpu, i, owner != 0 and stream.head < stream.tail)
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state > CONTEXT_DYING:
            gpu.contexts[i].state = CONTEXT_DYING
        owner = gpu.contexts[i].legacy
        if owner != SIM_NOWHERE and (owner >= SIM_STREAMS or gpu.streams[owner].context != i + 1):
            gpu.contexts[i].legacy = SIM_NOWHERE


cdef enum:
    FAULTS = 4              # fetching page by page is so many times slower than copying


cdef inline uint64_t sim_memory_used(SimGpu* gpu) noexcept nogil:
    cdef uint32_t i
    cdef uint64_t used = 0
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state != CONTEXT_FREE:
            used += gpu.contexts[i].memory_bytes
    return used


cdef inline uint64_t sim_evict(SimGpu* gpu, uint32_t but, uint64_t size) noexcept nogil:
    """Managed memory of other contexts than ``but`` goes to the host until `size` bytes have; how many did."""
    cdef uint64_t gone = 0, part
    cdef uint32_t i
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state != CONTEXT_FREE and i != but and gone < size:
            part = min(size - gone, gpu.contexts[i].resident_bytes)
            gpu.contexts[i].resident_bytes -= part
            gpu.contexts[i].memory_bytes -= part
            gone += part
    return gone


cdef inline double sim_fetch(SimGpu* gpu, uint32_t context) noexcept nogil:
    """A kernel touches the managed memory of its context: as much of it as there is room for comes to the card, page by
    page, and others' goes. How long that takes, in ns. More than the card has is not moved to and fro."""
    cdef SimContext* owner = sim_context(gpu, context)
    cdef uint64_t wanted = owner.managed_bytes - owner.resident_bytes
    cdef uint64_t used, left, gone = 0
    if wanted == 0:
        return 0
    used = sim_memory_used(gpu)
    left = gpu.memory_bytes - min(used, gpu.memory_bytes)
    if wanted > left:
        gone = sim_evict(gpu, context, wanted - left)
        wanted = min(wanted, left + gone)
    owner.resident_bytes += wanted
    owner.memory_bytes += wanted
    return (wanted + gone) * FAULTS / gpu.copy_bytes_per_ns


cdef inline bint sim_take_memory(SimGpu* gpu, uint32_t context, uint64_t size) noexcept nogil:
    """Whether `size` bytes more were still free, or held by managed memory, and now belong to `context`."""
    cdef uint64_t used = sim_memory_used(gpu)
    cdef SimContext* owner = sim_context(gpu, context)
    if size <= gpu.memory_bytes and used > gpu.memory_bytes - size:
        used -= sim_evict(gpu, SIM_CONTEXTS, used - (gpu.memory_bytes - size))
    if size > gpu.memory_bytes or used > gpu.memory_bytes - size:
        return False
    if owner.memory_limit != 0 and (size > owner.memory_limit or owner.memory_bytes > owner.memory_limit - size):
        return False
    owner.memory_bytes += size
    return True


# -- operations

cdef inline bint sim_has_room(SimGpu* gpu, uint32_t stream) noexcept nogil:
    return sim_stream(gpu, stream).tail - sim_stream(gpu, stream).delivered < SIM_QUEUE


cdef inline SimOp* sim_next_op(SimGpu* gpu, uint32_t stream) noexcept nogil:
    """The cell that sim_submit will publish; the caller fills in what its kind needs."""
    cdef SimOp* op = sim_op(gpu, stream, sim_stream(gpu, stream).tail)
    op.kind = OP_MARK
    op.sms = 0
    op.remaining_ns = 0
    op.start_ns = op.end_ns = 0
    op.wait_ordinal = 0
    op.wait_stream = op.wait_generation = op.released = op.failed = 0
    return op


cdef inline uint64_t sim_submit(SimGpu* gpu, uint32_t stream) noexcept nogil:
    """Publish the cell; the ordinal of the operation: it is done when head > ordinal."""
    cdef uint64_t ordinal = sim_stream(gpu, stream).tail
    sim_op(gpu, stream, ordinal).seq = gpu.next_seq
    gpu.next_seq += 1
    sim_stream(gpu, stream).tail = ordinal + 1
    sim_set_busy(gpu, stream, True)
    return ordinal


cdef inline bint sim_reached(SimGpu* gpu, uint32_t stream, uint32_t generation, uint64_t count) noexcept nogil:
    """Whether the first `count` operations of a stream (that use of the slot) are done."""
    return sim_stream(gpu, stream).generation != generation or sim_stream(gpu, stream).head >= count
