"""A vGPU's memory leaves the card and comes back (--oversubscribe swap), as its grants page says (GRANTS_AWAY).

The hook thread moves it, while the vGPU gets no lease: chunk by chunk into host memory and back to the same addresses.
Meanwhile *touching* it has to wait: whatever reads, writes, makes or frees such memory without a lease (copies between
host and device, small fills, cuMemAlloc, cuMemFree) goes through ``vgpu_touch``. Who waits there wants the GPU.

First the door is shut (``Gate.away``), then all work of the contexts that use the memory is waited for, a bounded time,
then chunks are copied, and only when all are, their physical memory goes back. Until then everything can be taken
back, and afterwards the host has the only copy; so a chunk's place in host memory is kept until it is filled again.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap

from cython_ext.hook.generated.driver cimport (
    real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuCtxRecordEvent, real_cuEventCreate,
    real_cuEventDestroy_v2, real_cuEventQuery, real_cuMemHostRegister_v2, real_cuMemHostUnregister,
    real_cuMemcpyDtoHAsync_v2, real_cuMemcpyHtoDAsync_v2, real_cuStreamCreate, real_cuStreamDestroy_v2,
    real_cuStreamSynchronize,
)
from cython_ext.hook.hook cimport (
    BLOCK_GATE, BLOCK_SWAPPABLE, CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CUDA_SUCCESS,
    Gate, state, vgpu_furnish, vgpu_is_swappable, vgpu_log, vgpu_ring, vgpu_strip, vgpu_want,
)
from cython_ext.hook.relaxed cimport relax, restore
from cython_ext.layout cimport (
    GRANTS_AWAY, GRANTS_LOSS_RUN, GRANTS_PRESENT, GRANTS_REMOVED, GRANTS_SWAPPABLE, SLOT_AWAY, SLOT_MOVING,
    SLOT_RESIDENT, SLOT_STUCK,
)
from cython_ext.logic.alloctable cimport AllocTable, Block
from cython_ext.logic.lock cimport lock_acquire, lock_release
from cython_ext.native cimport (
    add32, exchange32, fence, futex_wait, futex_wake, load32, now_ns, store32, store64, storei64,
)

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "<sys/mman.h>" nogil:
    const int MADV_HUGEPAGE

cdef enum:
    PORTABLE = 1                 # CU_MEMHOSTREGISTER_PORTABLE
    LOOK_NS = 50_000_000         # who waits to touch looks that often
    ROOM_LOOK_NS = 5_000_000     # who waits for room on the card tries again that often
    POLL_NS = 100_000            # who waits for the door to be clear, and for the queues to drain
    DRAIN_NS = 2_000_000_000     # ... at most: a stream that waits for the host may wait for a thread that we hold
    AGAIN_NS = 500_000_000       # a move that was not possible is tried again after that
    CONTEXTS = 16                # that use a process's memory; one place more tells of more


# --- touching

cdef inline bint is_worth_a_wait(const Gate* gate) noexcept nogil:
    """Nobody waits in a process that ends, or in a vGPU that was removed, for memory that may never come back."""
    return load32(&state().stopping) == 0 and load32(&gate.grants.flags) & GRANTS_REMOVED == 0


cdef inline bint is_shut(const Gate* gate) noexcept nogil:
    return load32(&gate.away) != 0 and is_worth_a_wait(gate)


cdef void wait_until_back(Gate* gate) noexcept nogil:
    lock_acquire(&gate.lock)
    gate.waiters += 1
    while is_shut(gate):
        vgpu_want(gate, now_ns())        # again and again: our slot may be another one by now
        lock_release(&gate.lock)
        futex_wait(&gate.away, 1, now_ns() + LOOK_NS)
        lock_acquire(&gate.lock)
    gate.waiters -= 1
    lock_release(&gate.lock)


cdef public void vgpu_touch(Gate* gate) noexcept nogil:
    """Its memory is on the card from here on until ``vgpu_touched``, unless the process ends."""
    if not vgpu_is_swappable(gate):
        return
    add32(&gate.touching, 1)
    fence()
    while is_shut(gate):
        add32(&gate.touching, <uint32_t>-1)
        wait_until_back(gate)
        add32(&gate.touching, 1)
        fence()


cdef public void vgpu_touched(Gate* gate) noexcept nogil:
    if vgpu_is_swappable(gate):
        add32(&gate.touching, <uint32_t>-1)


cdef public bint vgpu_await_room(Gate* gate, uint64_t size, int64_t until) noexcept nogil:
    """The card has no room for ``size`` more: let the GPU Server know, who has others leave. The caller does not touch:
    it may have to leave itself. 0: nothing came of it."""
    cdef bint waits = now_ns() < until and is_worth_a_wait(gate)
    if waits:
        store64(&gate.slot.room_bytes, size)
        lock_acquire(&gate.lock)
        gate.waiters += 1
        vgpu_want(gate, now_ns())
        lock_release(&gate.lock)
        vgpu_ring(gate)
        futex_wait(&state().stopping, 0, now_ns() + ROOM_LOOK_NS)
        lock_acquire(&gate.lock)
        gate.waiters -= 1
        lock_release(&gate.lock)
    else:
        store64(&gate.slot.room_bytes, 0)
    return waits


# --- the door

cdef void open_door(Gate* gate) noexcept nogil:
    exchange32(&gate.away, 0)
    futex_wake(&gate.away, INT_MAX)


cdef bint shut_door(Gate* gate) noexcept nogil:
    """0: somebody goes on touching, in the driver for a long time."""
    cdef int64_t until = now_ns() + DRAIN_NS
    exchange32(&gate.away, 1)
    fence()
    while load32(&gate.touching):
        if now_ns() > until or load32(&state().stopping):
            return 0
        futex_wait(&gate.away, 1, now_ns() + POLL_NS)
    return 1


cdef bint has_drained(void* context, int64_t until) noexcept nogil:
    """All work of the context, in a bounded time. A driver older than CUDA 12.5 cannot be asked."""
    cdef void* event = NULL
    cdef int result
    if real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return 0
    result = real_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if result == CUDA_SUCCESS:
        result = real_cuCtxRecordEvent(context, event)
        while result == CUDA_SUCCESS:
            result = real_cuEventQuery(event)
            if result != CUDA_ERROR_NOT_READY or now_ns() > until or load32(&state().stopping):
                break
            result = CUDA_SUCCESS
            futex_wait(&state().stopping, 0, now_ns() + POLL_NS)
        real_cuEventDestroy_v2(event)
    real_cuCtxPopCurrent_v2(&context)
    return result == CUDA_SUCCESS


cdef uint32_t add_contexts(const Gate* gate, const AllocTable* table, void** contexts, uint32_t count) noexcept nogil:
    cdef uint32_t k
    cdef uint64_t i
    for i in range(table.capacity):
        if not (table.blocks[i].address and table.blocks[i].flags & BLOCK_SWAPPABLE):
            continue
        if &state().gates[table.blocks[i].flags & BLOCK_GATE] != gate:
            continue
        k = 0
        while k < count and contexts[k] != <void*>table.blocks[i].aux:
            k += 1
        if k == count and count <= CONTEXTS:
            contexts[count] = <void*>table.blocks[i].aux
            count += 1
    return count


cdef uint32_t contexts_of(const Gate* gate, void** contexts) noexcept nogil:
    """Those that made swappable memory; CONTEXTS + 1: more than that."""
    cdef uint32_t count
    lock_acquire(&state().memory_lock)
    count = add_contexts(gate, &state().allocations, contexts, 0)
    count = add_contexts(gate, &state().doomed, contexts, count)
    lock_release(&state().memory_lock)
    return count


# --- moving; nobody else looks at the table of chunks while the door is shut

cdef uint64_t chunks_bytes(const Gate* gate) noexcept nogil:
    cdef uint64_t bytes = 0, i
    for i in range(gate.chunks.capacity):
        if gate.chunks.blocks[i].address:
            bytes += gate.chunks.blocks[i].bytes
    return bytes


cdef bint store_holds(Gate* gate, uint64_t size, void* context) noexcept nogil:
    """Host memory for so much, pinned if driver and limits allow it. It is kept: to pin it takes 0.3 s a GiB (H200)."""
    cdef void* memory
    if gate.store_bytes >= size:
        return 1
    if real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return 0
    if gate.store_bytes:
        if gate.store_pinned:
            real_cuMemHostUnregister(gate.store)
        munmap(gate.store, gate.store_bytes)
        gate.store_bytes = 0
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if memory != MAP_FAILED:
        madvise(memory, size, MADV_HUGEPAGE)
        gate.store = <uint8_t*>memory
        gate.store_bytes = size
        gate.store_pinned = real_cuMemHostRegister_v2(memory, size, PORTABLE) == CUDA_SUCCESS
    real_cuCtxPopCurrent_v2(&context)
    return memory != MAP_FAILED


cdef bint copy_all(Gate* gate, bint out) noexcept nogil:
    """Each chunk, to or from its place in the store, which the order of the table tells. The caller has a context
    current."""
    cdef uint64_t i, place = <uint64_t>gate.store
    cdef void* stream = NULL
    cdef Block* chunk
    cdef int result = real_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), last
    if result != CUDA_SUCCESS:
        return 0
    for i in range(gate.chunks.capacity):
        chunk = &gate.chunks.blocks[i]
        if chunk.address and result == CUDA_SUCCESS:
            if out:
                result = real_cuMemcpyDtoHAsync_v2(<void*>place, chunk.address, chunk.bytes, stream)
            else:
                result = real_cuMemcpyHtoDAsync_v2(chunk.address, <const void*>place, chunk.bytes, stream)
            place += chunk.bytes
    last = real_cuStreamSynchronize(stream)
    real_cuStreamDestroy_v2(stream)
    return result == CUDA_SUCCESS and last == CUDA_SUCCESS


cdef void strip_first(Gate* gate, uint64_t count) noexcept nogil:
    """Of the first so many places of the table, the physical memory goes back to the card."""
    cdef uint64_t i
    for i in range(count):
        if gate.chunks.blocks[i].address:
            vgpu_strip(&gate.chunks.blocks[i])


cdef bint furnish_all(Gate* gate) noexcept nogil:
    """Physical memory for every chunk, or for none."""
    cdef unsigned long long handle
    cdef uint64_t i
    for i in range(gate.chunks.capacity):
        if gate.chunks.blocks[i].address:
            if vgpu_furnish(gate, &gate.chunks.blocks[i], &handle) != CUDA_SUCCESS:
                strip_first(gate, i)
                return 0
            gate.chunks.blocks[i].aux = handle
    return 1


cdef void tell(Gate* gate, uint32_t where, uint64_t away_bytes, int64_t began_ns) noexcept nogil:
    store64(&gate.slot.away_bytes, away_bytes)
    storei64(&gate.slot.moved_ns, now_ns() - began_ns)
    store32(&gate.slot.where, where)
    vgpu_ring(gate)


cdef bint has_left(Gate* gate, uint64_t bytes, int64_t until) noexcept nogil:
    """Behind the shut door: nothing uses the memory any more, and the store has it. 0: all is as it was."""
    cdef void* contexts[17]
    cdef uint32_t count = contexts_of(gate, contexts), i
    cdef bint well
    if count > CONTEXTS:
        return 0
    for i in range(count):
        if not has_drained(contexts[i], until):
            return 0
    if bytes == 0:
        return 1
    if count == 0 or not store_holds(gate, bytes, contexts[0]):
        return 0
    if real_cuCtxPushCurrent_v2(contexts[0]) != CUDA_SUCCESS:
        return 0
    well = copy_all(gate, 1)
    if well:
        strip_first(gate, gate.chunks.capacity)
        gate.store_context = contexts[0]
    real_cuCtxPopCurrent_v2(&contexts[0])
    return well


cdef bint leave(Gate* gate) noexcept nogil:
    cdef int64_t began_ns = now_ns()
    cdef uint64_t bytes
    if not shut_door(gate):
        open_door(gate)
        return 0
    store32(&gate.slot.where, SLOT_MOVING)
    bytes = chunks_bytes(gate)
    if not has_left(gate, bytes, began_ns + DRAIN_NS):
        open_door(gate)
        return 0
    gate.stored = 1
    tell(gate, SLOT_AWAY, bytes, began_ns)
    vgpu_log(b"away bytes, ns", bytes, now_ns() - began_ns)
    return 1


cdef bint come_back(Gate* gate) noexcept nogil:
    cdef int64_t began_ns = now_ns()
    cdef uint64_t bytes = chunks_bytes(gate)
    cdef void* context = gate.store_context
    cdef bint well = 1
    store32(&gate.slot.where, SLOT_MOVING)
    if bytes:
        if real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
            return 0
        well = furnish_all(gate)
        if well and not copy_all(gate, 0):
            strip_first(gate, gate.chunks.capacity)
            well = 0
        real_cuCtxPopCurrent_v2(&context)
    if not well:
        return 0
    gate.stored = 0
    tell(gate, SLOT_RESIDENT, 0, began_ns)
    open_door(gate)
    vgpu_log(b"back bytes, ns", bytes, now_ns() - began_ns)
    return 1


cdef inline bint is_at_work(const Gate* gate) noexcept nogil:
    """Under a lease, or with work of one that is over."""
    return (
        load32(&gate.grants.open_epoch) != 0 or load32(&gate.slot.undrained) != 0 or load32(&gate.submitting) != 0
        or gate.began_epoch != 0 or gate.over_epoch != 0 or gate.ahead.launches != 0
    )


cdef public int64_t vgpu_move(Gate* gate) noexcept nogil:
    """By the hook thread, without locks: be where the grants page says. When to look again at the latest; 0: whenever.
    """
    cdef uint32_t flags = load32(&gate.grants.flags)
    cdef bint out = flags & GRANTS_AWAY != 0, back = flags & (GRANTS_PRESENT | GRANTS_REMOVED) != 0
    cdef bint done
    cdef int mode
    if flags & GRANTS_SWAPPABLE == 0:
        return 0
    if gate.open or (gate.lost and flags & GRANTS_LOSS_RUN):
        back = 1
    if back:
        out = 0
    if not (out or back):
        return 0
    if out == (load32(&gate.away) != 0):
        if load32(&gate.slot.where) != (SLOT_AWAY if out else SLOT_RESIDENT):    # it was stuck on the other way
            store32(&gate.slot.where, SLOT_AWAY if out else SLOT_RESIDENT)
            vgpu_ring(gate)
        return 0
    if out and is_at_work(gate):
        return now_ns() + POLL_NS
    if now_ns() < gate.move_after_ns:
        return gate.move_after_ns
    store32(&gate.moving, 1)
    fence()
    if load32(&state().stopping):
        store32(&gate.moving, 0)
        return 0
    mode = relax()
    if not out:
        done = come_back(gate)
    else:                    # asked for its drain, a context would break the captures that are open
        done = load32(&state().captures) == 0 and leave(gate)
    restore(mode)
    exchange32(&gate.moving, 0)
    futex_wake(&gate.moving, INT_MAX)
    if done:
        return 0
    store32(&gate.slot.where, SLOT_STUCK)
    vgpu_ring(gate)
    gate.move_after_ns = now_ns() + AGAIN_NS
    return gate.move_after_ns
