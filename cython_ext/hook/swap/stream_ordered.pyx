"""Stream-ordered memory that can leave the card (--oversubscribe swap).

A driver's pool keeps its memory on the card. So in a swappable vGPU, cuMemAllocAsync returns memory of chunks
(swappable.pyx), unless its pool may be shared with another process or has a size limit. The memory is there at once,
which is more than stream order demands.

cuMemFreeAsync records an event in the stream and returns. The block is *returned*: the next allocation of its size
takes it, behind the event in the same stream, or at once if the event has passed. Blocks whose events have passed go
back to the card where the driver's pool would shrink: at a synchronisation, down to the pool's release threshold, by
cuMemPoolTrimTo, and before an allocation is refused. All of them go back before the vGPU leaves the card.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.hook.gate.fastpath cimport named
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuEventCreate,
    real_cuEventDestroy_v2, real_cuEventQuery, real_cuEventRecord, real_cuEventRecord_ptsz, real_cuStreamGetCtx,
    real_cuStreamWaitEvent, real_cuStreamWaitEvent_ptsz,
)
from cython_ext.hook.hook cimport (
    vgpu_allocate_swappable, vgpu_capturing, vgpu_doom, vgpu_drop_swappable, vgpu_fits, vgpu_free_swappable, vgpu_note,
    vgpu_touched, vgpu_try_touch,
)
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_ORDERED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_SUCCESS,
    CU_EVENT_DISABLE_TIMING, Gate, OWN_HANDLE, RETURNED, Returned, State, is_swappable, state,
)
from cython_ext.logic.memory.alloctable cimport Block
from cython_ext.logic.memory.arenas cimport UNIT_BYTES, units_for
from cython_ext.logic.memory.pieces cimport SMALL_BYTES, pieces_for
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport futex_wait, load32, load64, now_ns

cdef enum:
    NONE = 0xFFFFFFFF
    AT_ONCE = 64             # blocks that are dropped after one look at the table
    BUSY = 8                 # streams known not to have passed, in one look
    LOOK_NS = 1_000_000      # an allocation beyond the limit waits for what was freed, and looks that often ...
    WAIT_NS = 5_000_000_000  # ... for so long


# --- the returned blocks, in the order of their frees; the caller holds returned_lock

cdef inline uint64_t room_of(const Block* block) noexcept nogil:
    """What it takes."""
    return units_for(block.bytes) * UNIT_BYTES if block.bytes <= SMALL_BYTES else pieces_for(block.bytes)


cdef inline bint is_of_size(const Block* block, uint64_t size) noexcept nogil:
    """Whether an allocation of ``size`` bytes takes the same room."""
    if (block.bytes <= SMALL_BYTES) != (size <= SMALL_BYTES):
        return 0
    return units_for(block.bytes) == units_for(size) if size <= SMALL_BYTES else room_of(block) == pieces_for(size)


cdef struct Busy:            # streams of which an event was seen that has not passed: no later one has
    uint32_t count
    uint64_t[8] streams      # BUSY of them
    uint64_t[8] contexts


cdef bint has_passed(const Returned* returned, Busy* busy) noexcept nogil:
    """None counts as passed while a context is destroyed: the event may be of that one. A thread's own default stream
    has the same handle as that of another thread."""
    cdef uint32_t i
    if load32(&state().dying):
        return 0
    for i in range(busy.count):
        if busy.streams[i] == <uint64_t>returned.stream and busy.contexts[i] == returned.block.aux:
            return 0
    if real_cuEventQuery(returned.event) == CUDA_SUCCESS:
        return 1
    if busy.count < BUSY and <size_t>returned.stream != OWN_HANDLE:
        busy.streams[busy.count], busy.contexts[busy.count] = <uint64_t>returned.stream, returned.block.aux
        busy.count += 1
    return 0


cdef void remove(uint32_t i) noexcept nogil:
    """The others keep their order."""
    cdef State* all = state()
    cdef uint32_t k
    all.returned_bytes -= room_of(&all.returned[i].block)
    all.returned_count -= 1
    for k in range(i, all.returned_count):
        all.returned[k] = all.returned[k + 1]


cdef uint32_t passed_of_size(uint64_t size) noexcept nogil:
    cdef State* all = state()
    cdef Busy busy
    cdef uint32_t i
    busy.count = 0
    for i in range(all.returned_count):
        if is_of_size(&all.returned[i].block, size) and has_passed(&all.returned[i], &busy):
            return i
    return NONE


cdef uint32_t of_stream(uint64_t size, void* stream, bint own, void* context) noexcept nogil:
    """One that was returned in the stream of that name, the oldest."""
    cdef State* all = state()
    cdef const Returned* returned
    cdef uint32_t i
    for i in range(all.returned_count):
        returned = &all.returned[i]
        if returned.stream == named(stream, own) and returned.block.aux == <uint64_t>context:
            if is_of_size(&returned.block, size):
                return i
    return NONE


cdef uint32_t take_passed(uint64_t keep, Block* blocks) noexcept nogil:
    """The first blocks whose events have passed, until no more than ``keep`` bytes are left; at most AT_ONCE."""
    cdef State* all = state()
    cdef Busy busy
    cdef uint32_t i = 0, taken = 0
    busy.count = 0
    while i < all.returned_count and taken < AT_ONCE and all.returned_bytes > keep:
        if has_passed(&all.returned[i], &busy):
            real_cuEventDestroy_v2(all.returned[i].event)
            blocks[taken] = all.returned[i].block
            taken += 1
            remove(i)
        else:
            i += 1
    return taken


# --- they go back to the card

cdef void drop(uint64_t keep) noexcept nogil:
    cdef Block blocks[AT_ONCE]
    cdef uint32_t i, taken = AT_ONCE
    cdef int mode = relax()
    while taken == AT_ONCE:
        lock_acquire(&state().returned_lock)
        taken = take_passed(keep, blocks)
        lock_release(&state().returned_lock)
        for i in range(taken):
            vgpu_drop_swappable(&blocks[i])
    restore(mode)


cdef public void vgpu_drop_returned(Gate* gate, uint64_t keep) noexcept nogil:
    """Give blocks whose events have passed back to the card, until no more than ``keep`` bytes are left. Nothing
    happens while the vGPU's memory moves, or is away."""
    if state().returned_count and is_swappable(gate) and vgpu_try_touch(gate):
        drop(keep)
        vgpu_touched(gate)


cdef public void vgpu_drop_all_returned() noexcept nogil:
    """By the hook thread, behind the shut door: all work of the contexts is done."""
    if state().returned_count:
        drop(0)


cdef inline uint64_t beyond_used(uint64_t reserved) noexcept nogil:
    """Of what pools may keep ``reserved``, what is left for returned blocks."""
    cdef uint64_t used = load64(&state().ordered_bytes)
    return reserved - min(reserved, used)


cdef public void vgpu_shrink_returned(uint64_t reserved) noexcept nogil:
    """As a pool that keeps no more than that, with what is used."""
    if state().returned_count:
        vgpu_drop_returned(&state().gates[0], beyond_used(reserved))


cdef public bint vgpu_await_returned(Gate* gate, uint64_t size) noexcept nogil:
    """The limit has no room for ``size`` bytes, unless what was freed behind work goes back first: wait for that. The
    caller does not touch. 0: it would not do, or takes too long."""
    cdef int64_t until = now_ns() + WAIT_NS
    cdef uint32_t nobody_wakes = 0
    while not vgpu_fits(gate, size):
        if load32(&state().stopping) or now_ns() >= until:
            return 0
        if not vgpu_fits(gate, size - min(size, load64(&state().returned_bytes))):
            return 0
        vgpu_drop_returned(gate, 0)
        if not vgpu_fits(gate, size):
            futex_wait(&nobody_wakes, 0, now_ns() + LOOK_NS)
    return 1


# --- contexts

cdef public uint32_t vgpu_contexts_of_returned(void** contexts, uint32_t most) noexcept nogil:
    """The contexts of returned blocks, each once; at most ``most``."""
    cdef uint32_t i, k, count = 0
    lock_acquire(&state().returned_lock)
    for i in range(state().returned_count):
        k = 0
        while k < count and contexts[k] != <void*>state().returned[i].block.aux:
            k += 1
        if k == count and count < most:
            contexts[count] = <void*>state().returned[i].block.aux
            count += 1
    lock_release(&state().returned_lock)
    return count


cdef bint take_of_context(void* context, Block* block) noexcept nogil:
    cdef State* all = state()
    cdef uint32_t i = 0
    cdef bint found
    lock_acquire(&all.returned_lock)
    while i < all.returned_count and all.returned[i].block.aux != <uint64_t>context:
        i += 1
    found = i < all.returned_count
    if found:
        block[0] = all.returned[i].block
        remove(i)
    lock_release(&all.returned_lock)
    return found


cdef public void vgpu_returned_of_context_died(void* context, void* heir) noexcept nogil:
    """The events went with it, and all its work is done, or goes on in ``heir`` (not NULL)."""
    cdef Block block
    while take_of_context(context, &block):
        if heir == NULL:
            vgpu_drop_swappable(&block)
        else:
            block.aux = <uint64_t>heir
            vgpu_doom(&block)


# --- what is allocated: State.ordered_bytes and its peak

cdef void count(uint64_t added, uint64_t gone) noexcept nogil:
    cdef State* all = state()
    lock_acquire(&all.returned_lock)
    all.ordered_bytes += added - gone
    all.ordered_peak_bytes = max(all.ordered_peak_bytes, all.ordered_bytes)
    all.reserved_peak_bytes = max(all.reserved_peak_bytes, all.ordered_bytes + all.returned_bytes)
    lock_release(&all.returned_lock)


cdef public void vgpu_ordered_comes(const Block* block) noexcept nogil:
    """It is about to be in the table of allocations."""
    count(room_of(block), 0)


cdef public void vgpu_ordered_gone(const Block* block) noexcept nogil:
    """It is out of the table of allocations."""
    if block.flags & BLOCK_ORDERED:
        count(0, room_of(block))


cdef public void vgpu_ordered_totals(uint64_t* used, uint64_t* used_peak, uint64_t* reserved_peak) noexcept nogil:
    """In bytes. What is reserved besides is ``State.returned_bytes``."""
    lock_acquire(&state().returned_lock)
    used[0], used_peak[0] = state().ordered_bytes, state().ordered_peak_bytes
    reserved_peak[0] = state().reserved_peak_bytes
    lock_release(&state().returned_lock)


cdef public void vgpu_ordered_peaks_reset(bint reserved) noexcept nogil:
    lock_acquire(&state().returned_lock)
    if reserved:
        state().reserved_peak_bytes = state().ordered_bytes + state().returned_bytes
    else:
        state().ordered_peak_bytes = state().ordered_bytes
    lock_release(&state().returned_lock)


# --- allocations

cdef public void* vgpu_context_named(void* stream) noexcept nogil:
    """The context of a stream as the program names it; NULL: there is none."""
    cdef void* context = NULL
    cdef int result
    if <size_t>stream > OWN_HANDLE:
        result = real_cuStreamGetCtx(stream, &context)
    else:
        result = real_cuCtxGetCurrent(&context)
    return context if result == CUDA_SUCCESS else NULL


cdef bint enter(const Returned* returned, uint64_t used_bytes) noexcept nogil:
    """``used_bytes``: it was allocated until now."""
    cdef State* all = state()
    cdef bint room
    lock_acquire(&all.returned_lock)
    room = all.returned_count < RETURNED
    if room:
        all.returned[all.returned_count] = returned[0]
        all.returned_count += 1
        all.returned_bytes += room_of(&returned.block)
        all.ordered_bytes -= used_bytes
    lock_release(&all.returned_lock)
    return room


cdef bint waits_for(const Returned* returned, void* stream, bint own) noexcept nogil:
    """The stream waits for the event: its name may be that of a later stream. The driver keeps what a stream waits for.
    """
    cdef uint64_t event = <uint64_t>returned.event
    cdef int result
    if own:
        result = real_cuStreamWaitEvent_ptsz(<uint64_t>stream, event, 0)
    else:
        result = real_cuStreamWaitEvent(<uint64_t>stream, event, 0)
    if result == CUDA_SUCCESS:
        real_cuEventDestroy_v2(returned.event)
    elif not enter(returned, 0):
        vgpu_doom(&returned.block)
    return result == CUDA_SUCCESS


cdef bint take_returned(uint64_t size, void* stream, bint own, void* context, Block* block) noexcept nogil:
    cdef State* all = state()
    cdef Returned returned
    cdef uint32_t i
    cdef bint follows, found = 0
    cdef int mode
    if all.returned_count == 0:
        return 0
    mode = relax()
    lock_acquire(&all.returned_lock)
    i = of_stream(size, stream, own, context)
    follows = i != NONE
    if not follows:
        i = passed_of_size(size)
    if i != NONE:
        returned, found = all.returned[i], 1
        remove(i)
        if not follows:
            real_cuEventDestroy_v2(returned.event)
    lock_release(&all.returned_lock)
    if follows:
        found = waits_for(&returned, stream, own)
    restore(mode)
    if found:
        block[0] = returned.block
    return found


cdef public int vgpu_allocate_ordered(
    Gate* gate, unsigned long long* pointer, size_t size, void* stream, bint own
) noexcept nogil:
    """cuMemAllocAsync of a swappable vGPU, of a pool whose memory can leave. ``size``: not 0. The stream has a context.
    """
    cdef void* context = vgpu_context_named(stream)
    cdef Block block
    if not take_returned(size, stream, own, context, &block):
        return vgpu_allocate_swappable(gate, pointer, size, context, BLOCK_ORDERED)
    block.bytes, block.aux, block.flags = size, <uint64_t>context, block.flags | BLOCK_ORDERED
    vgpu_ordered_comes(&block)
    vgpu_note(&block)
    pointer[0] = block.address
    return CUDA_SUCCESS


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


cdef bint recorded(void* stream, bint own, void* context, void** event) noexcept nogil:
    """A green context can be current to one thread at a time: it is not pushed where it is current already."""
    cdef void* current = NULL
    cdef bint done
    if real_cuCtxGetCurrent(&current) != CUDA_SUCCESS:
        return 0
    if context != current and real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return 0
    done = record(stream, own, event)
    if context != current:
        real_cuCtxPopCurrent_v2(&context)
    return done


cdef public int vgpu_free_ordered(const Block* block, void* stream, bint own) noexcept nogil:
    """cuMemFreeAsync; ``block`` is out of the table already. It waits for no work, unless RETURNED frees are behind
    work that has not run."""
    cdef Gate* gate = &state().gates[block.flags & BLOCK_GATE]
    cdef void* context = vgpu_context_named(stream)
    cdef Returned returned
    cdef Block later
    cdef bint done
    cdef int mode
    if context == NULL:
        vgpu_note(block)
        return CUDA_ERROR_INVALID_HANDLE if <size_t>stream > OWN_HANDLE else CUDA_ERROR_INVALID_CONTEXT
    later = block[0]
    later.aux = <uint64_t>context        # where the work is that a free without an event waits for
    if vgpu_capturing(named(stream, own)):
        return vgpu_free_swappable(&later)
    if load32(&state().returned_count) >= RETURNED:
        vgpu_drop_returned(gate, state().returned_bytes / 2)
    returned.block, returned.stream = later, named(stream, own)
    returned.block.flags &= ~<uint32_t>BLOCK_ORDERED
    mode = relax()
    done = recorded(stream, own, context, &returned.event)
    if done and not enter(&returned, room_of(block) if block.flags & BLOCK_ORDERED else 0):
        real_cuEventDestroy_v2(returned.event)
        done = 0
    restore(mode)
    return CUDA_SUCCESS if done else vgpu_free_swappable(&later)
