"""Stream-ordered memory that can leave the card (--oversubscribe swap).

A driver's pool keeps its memory on the card. So in a swappable vGPU, cuMemAllocAsync returns memory of chunks
(swappable.pyx), unless its pool may be shared with another process or has a size limit. The memory is there at once,
which is more than stream order demands.

cuMemFreeAsync records an event in the stream and returns. The block is *returned*: the next allocation of its size
takes it, at once if the event has passed, or behind the event in the same stream. Blocks whose events have passed go
back to the card where the driver's pool would shrink: at a synchronisation, down to the pool's release threshold, by
cuMemPoolTrimTo, and before an allocation is refused. All of them go back before the vGPU leaves the card.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.gate.fastpath cimport named
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuDeviceGetMemPool,
    real_cuEventCreate, real_cuEventDestroy_v2, real_cuEventQuery, real_cuEventRecord,
    real_cuEventRecord_ptsz, real_cuEventSynchronize, real_cuMemPoolGetAttribute, real_cuStreamGetCtx,
    real_cuStreamWaitEvent, real_cuStreamWaitEvent_ptsz,
)
from cython_ext.hook.hook cimport (
    vgpu_allocate_swappable, vgpu_capturing, vgpu_drop_swappable, vgpu_free_swappable, vgpu_note, vgpu_settle_ahead,
    vgpu_touched, vgpu_try_touch,
)
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_ORDERED, CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING, RETURNED, Gate, Returned, State, state,
)
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_find
from cython_ext.logic.memory.arenas cimport units_for
from cython_ext.logic.memory.pieces cimport SMALL_BYTES, pieces_for
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport load32

cdef enum:
    DEFAULT_HANDLES = 2      # 1 legacy, 2 the thread's own
    RELEASE_THRESHOLD = 4    # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    NONE = 0xFFFFFFFF


# --- the returned blocks; the caller holds returned_lock, but for ``finish``

cdef bint has_passed(const Returned* returned) noexcept nogil:
    cdef int mode = relax()
    cdef bint passed = real_cuEventQuery(returned.event) == CUDA_SUCCESS
    restore(mode)
    return passed


cdef inline uint64_t room_of(const Block* block) noexcept nogil:
    """What it takes."""
    return units_for(block.bytes) * 512 if block.bytes <= SMALL_BYTES else pieces_for(block.bytes)


cdef inline bint is_of_size(const Block* block, uint64_t size) noexcept nogil:
    """Whether an allocation of ``size`` bytes takes the same room."""
    if (block.bytes <= SMALL_BYTES) != (size <= SMALL_BYTES):
        return 0
    return units_for(block.bytes) == units_for(size) if size <= SMALL_BYTES else room_of(block) == pieces_for(size)


cdef void remove(uint32_t i, Returned* removed) noexcept nogil:
    cdef State* all = state()
    removed[0] = all.returned[i]
    all.returned_bytes -= room_of(&removed.block)
    all.returned_count -= 1
    all.returned[i] = all.returned[all.returned_count]


cdef uint32_t passed_one(uint64_t size) noexcept nogil:
    """Its index, of that size (0: any); else NONE."""
    cdef State* all = state()
    cdef uint32_t i
    for i in range(all.returned_count):
        if (size == 0 or is_of_size(&all.returned[i].block, size)) and has_passed(&all.returned[i]):
            return i
    return NONE


cdef uint32_t follows(uint64_t size, void* stream, bint own) noexcept nogil:
    """The index of one that was returned in the same stream, which waits for its event. Else NONE. The handle may be
    that of a later stream: hence the wait."""
    cdef State* all = state()
    cdef uint32_t i, found = NONE
    cdef int mode, result
    for i in range(all.returned_count):
        if all.returned[i].stream == named(stream, own) and is_of_size(&all.returned[i].block, size):
            found = i
    if found == NONE:
        return NONE
    mode = relax()
    if own:
        result = real_cuStreamWaitEvent_ptsz(<uint64_t>stream, <uint64_t>all.returned[found].event, 0)
    else:
        result = real_cuStreamWaitEvent(<uint64_t>stream, <uint64_t>all.returned[found].event, 0)
    restore(mode)
    return found if result == CUDA_SUCCESS else NONE


cdef void finish(const Returned* removed, bint wait) noexcept nogil:
    """Its event has passed, or is waited for. Without locks."""
    cdef int mode, result = CUDA_SUCCESS
    if wait:
        vgpu_settle_ahead()
    mode = relax()
    if wait:
        result = real_cuEventSynchronize(removed.event)
    real_cuEventDestroy_v2(removed.event)
    restore(mode)
    if result == CUDA_SUCCESS:
        vgpu_drop_swappable(&removed.block)
    else:
        vgpu_note(&removed.block)        # a context that is broken frees nothing


cdef void drop(uint64_t keep, bint wait) noexcept nogil:
    cdef State* all = state()
    cdef Returned removed
    cdef uint32_t i
    cdef bint waits
    while True:
        i, waits = NONE, 0
        lock_acquire(&all.returned_lock)
        if all.returned_bytes > keep:
            i = passed_one(0)
            if i == NONE and wait:
                i, waits = 0, 1
        if i != NONE:
            remove(i, &removed)
        lock_release(&all.returned_lock)
        if i == NONE:
            return
        finish(&removed, waits)


cdef public void vgpu_drop_returned(Gate* gate, uint64_t keep, bint wait) noexcept nogil:
    """Give returned blocks back to the card until no more than ``keep`` bytes are left: those whose events have passed,
    or, to ``wait``, all. Nothing happens while the vGPU's memory moves, or is away."""
    if state().returned_count and vgpu_try_touch(gate):
        drop(keep, wait)
        vgpu_touched(gate)


cdef public void vgpu_drop_all_returned() noexcept nogil:
    """By the hook thread, behind the shut door: all work of the contexts is done."""
    if state().returned_count:
        drop(0, 0)


cdef public void vgpu_shrink_returned() noexcept nogil:
    """After a synchronisation: the pool's release threshold remains."""
    cdef Gate* gate = &state().gates[0]
    cdef void* pool = NULL
    cdef uint64_t keep = 0
    if state().returned_count and real_cuDeviceGetMemPool(&pool, gate.device) == CUDA_SUCCESS:
        real_cuMemPoolGetAttribute(pool, RELEASE_THRESHOLD, &keep)
        vgpu_drop_returned(gate, keep, 0)


cdef public uint32_t vgpu_contexts_of_returned(void** contexts, uint32_t most) noexcept nogil:
    """The contexts of returned blocks, the first ``most`` of them, each perhaps several times. The result is how many
    were written."""
    cdef uint32_t i, count
    lock_acquire(&state().returned_lock)
    count = min(state().returned_count, most)
    for i in range(count):
        contexts[i] = <void*>state().returned[i].block.aux
    lock_release(&state().returned_lock)
    return count


cdef bint take_of_context(void* context, Block* block) noexcept nogil:
    cdef State* all = state()
    cdef Returned removed
    cdef uint32_t i = 0
    cdef bint found
    lock_acquire(&all.returned_lock)
    while i < all.returned_count and all.returned[i].block.aux != <uint64_t>context:
        i += 1
    found = i < all.returned_count
    if found:
        remove(i, &removed)
        block[0] = removed.block
    lock_release(&all.returned_lock)
    return found


cdef public void vgpu_returned_of_context_died(void* context) noexcept nogil:
    """The events went with it."""
    cdef Block block
    while take_of_context(context, &block):
        vgpu_drop_swappable(&block)


# --- allocations

cdef void* context_of(void* stream) noexcept nogil:
    """NULL: there is none."""
    cdef void* context = NULL
    cdef int result
    if <size_t>stream > DEFAULT_HANDLES:
        result = real_cuStreamGetCtx(stream, &context)
    else:
        result = real_cuCtxGetCurrent(&context)
    return context if result == CUDA_SUCCESS else NULL


cdef bint take_returned(uint64_t size, void* stream, bint own, Block* block) noexcept nogil:
    cdef State* all = state()
    cdef Returned removed
    cdef uint32_t i = NONE
    cdef int mode
    if all.returned_count == 0:
        return 0
    lock_acquire(&all.returned_lock)
    i = passed_one(size)
    if i == NONE:
        i = follows(size, stream, own)
    if i != NONE:
        remove(i, &removed)
    lock_release(&all.returned_lock)
    if i == NONE:
        return 0
    mode = relax()
    real_cuEventDestroy_v2(removed.event)        # the driver keeps what a stream waits for
    restore(mode)
    block[0] = removed.block
    return 1


cdef void mark_ordered(uint64_t address, void* context) noexcept nogil:
    cdef Block* known
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().allocations, address)
    if known != NULL:
        known.flags |= BLOCK_ORDERED
        known.aux = <uint64_t>context
    lock_release(&state().memory_lock)


cdef public int vgpu_allocate_ordered(
    Gate* gate, unsigned long long* pointer, size_t size, void* stream, bint own
) noexcept nogil:
    """cuMemAllocAsync of a swappable vGPU, of a pool whose memory can leave. ``size``: not 0."""
    cdef void* context = context_of(stream)
    cdef Block block
    cdef int result
    if take_returned(size, stream, own, &block):
        block.bytes, block.aux = size, <uint64_t>context
        vgpu_note(&block)
        pointer[0] = block.address
        return CUDA_SUCCESS
    result = vgpu_allocate_swappable(gate, pointer, size)
    if result == CUDA_SUCCESS:
        mark_ordered(pointer[0], context)
    return result


# --- frees

cdef bint record(void* stream, bint own, void** event) noexcept nogil:
    """A new event in the stream, whose context is current."""
    cdef int result
    if real_cuEventCreate(event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS:
        return 0
    result = real_cuEventRecord_ptsz(event[0], stream) if own else real_cuEventRecord(event[0], stream)
    if result != CUDA_SUCCESS:
        real_cuEventDestroy_v2(event[0])
    return result == CUDA_SUCCESS


cdef bint recorded(void* stream, bint own, Returned* returned) noexcept nogil:
    cdef void* context = context_of(stream)
    cdef bint done
    if context == NULL or real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return 0
    done = record(stream, own, &returned.event)
    returned.block.aux = <uint64_t>context
    returned.stream = named(stream, own)
    real_cuCtxPopCurrent_v2(&context)
    return done


cdef bint enter(const Returned* returned) noexcept nogil:
    cdef State* all = state()
    cdef bint room
    lock_acquire(&all.returned_lock)
    room = all.returned_count < RETURNED
    if room:
        all.returned[all.returned_count] = returned[0]
        all.returned_count += 1
        all.returned_bytes += room_of(&returned.block)
    lock_release(&all.returned_lock)
    return room


cdef public int vgpu_free_ordered(const Block* block, void* stream, bint own) noexcept nogil:
    """cuMemFreeAsync; ``block`` is out of the table already."""
    cdef Returned returned
    cdef bint done
    cdef int mode
    if vgpu_capturing(named(stream, own)):
        return vgpu_free_swappable(block)
    returned.block = block[0]
    returned.block.flags |= BLOCK_ORDERED
    mode = relax()
    done = recorded(stream, own, &returned)
    restore(mode)
    if not done:
        return vgpu_free_swappable(block)
    if load32(&state().returned_count) >= RETURNED:
        vgpu_drop_returned(&state().gates[block.flags & BLOCK_GATE], 0, 0)
    if enter(&returned):
        return CUDA_SUCCESS
    mode = relax()
    real_cuEventDestroy_v2(returned.event)
    restore(mode)
    return vgpu_free_swappable(block)


# --- what the program asks

cdef public uint64_t vgpu_ordered_bytes(bint reserved) noexcept nogil:
    """What is allocated in stream order; with what is ``reserved``: what that takes, and the returned blocks."""
    cdef AllocTable* table = &state().allocations
    cdef uint64_t i, total = 0
    lock_acquire(&state().memory_lock)
    for i in range(table.capacity):
        if table.blocks[i].address and table.blocks[i].flags & BLOCK_ORDERED:
            total += room_of(&table.blocks[i]) if reserved else table.blocks[i].bytes
    lock_release(&state().memory_lock)
    return total + (state().returned_bytes if reserved else 0)
