"""Linear memory that can leave the card and come back to the same addresses (--oversubscribe swap).

It is made of chunks (chunks.pyx). Small allocations share arenas of 2 MiB (logic/memory/arenas.pxd). swap.pyx takes the
chunks off the card and brings them back. The vGPU is charged for what the chunks take: whole pieces of 2 MiB, as of the
driver's own linear memory.

A process that uses several GPUs has no such memory. Reason: its GPUs copy from each other's memory, and access it,
without a call to the vGPU of that memory.

To the program it is what cuMemAlloc gives. cuMemFree waits for the work of its context, as the driver's does, because
cuMemUnmap does not wait (H200: the stream dies). Queries return the allocation's attributes instead of a chunk's
(attributes.pyx). Two things differ. It cannot be shared by cuIpcGetMemHandle, which returns an error. Under an open
capture, where the hook may not wait, a free is done later.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuCtxSynchronize,
)
from cython_ext.hook.hook cimport (
    charge_contexts, vgpu_await_returned, vgpu_describe, vgpu_fits, vgpu_make_chunks, vgpu_make_with_room, vgpu_note,
    vgpu_ordered_comes, vgpu_ordered_gone, vgpu_pin_ahead, vgpu_touch, vgpu_touched, vgpu_unmake_chunks,
)
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_SWAPPABLE, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS, Gate, state,
)
from cython_ext.pages.layout cimport KIND_DEVICE
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_insert, alloc_remove
from cython_ext.logic.memory.arenas cimport ARENA_BYTES, arenas_add, arenas_give, arenas_take
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pieces cimport SMALL_BYTES, pieces_for
from cython_ext.native cimport load32


cdef struct Asked:               # by cuMemAlloc
    uint64_t size
    unsigned long long* pointer
    void* context            # its free waits for the work of this context
    uint32_t flags           # BLOCK_ORDERED, or none


# --- allocations

cdef uint64_t take_small(Gate* gate, uint64_t size) noexcept nogil:
    cdef uint64_t address
    lock_acquire(&state().memory_lock)
    address = arenas_take(&gate.arenas, size)
    lock_release(&state().memory_lock)
    return address


cdef int allocate_small(Gate* gate, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t arena = 0
    cdef bint noted
    cdef int result
    address[0] = take_small(gate, size)
    while address[0] == 0:
        result = vgpu_make_chunks(gate, ARENA_BYTES, NULL, &arena)
        if result != CUDA_SUCCESS:
            return result
        lock_acquire(&state().memory_lock)
        noted = arenas_add(&gate.arenas, arena)
        lock_release(&state().memory_lock)
        if not noted:
            vgpu_unmake_chunks(gate, arena, ARENA_BYTES, KIND_DEVICE)
            return CUDA_ERROR_OUT_OF_MEMORY
        address[0] = take_small(gate, size)
    return CUDA_SUCCESS


cdef int allocate(Gate* gate, void* what) noexcept nogil:
    cdef const Asked* asked = <const Asked*>what
    cdef uint64_t address = 0
    cdef Block block
    cdef int result
    free_doomed()
    if asked.size <= SMALL_BYTES:
        result = allocate_small(gate, asked.size, &address)
    else:
        result = vgpu_make_chunks(gate, pieces_for(asked.size), NULL, &address)
    if result == CUDA_SUCCESS:
        vgpu_describe(gate, KIND_DEVICE, address, asked.size, &block)
        block.aux = <uint64_t>asked.context
        block.flags |= BLOCK_SWAPPABLE | asked.flags
        if asked.flags:
            vgpu_ordered_comes(&block)
        vgpu_note(&block)
        asked.pointer[0] = address
    return result


cdef public int vgpu_allocate_swappable(
    Gate* gate, unsigned long long* pointer, size_t size, void* context, uint32_t flags
) noexcept nogil:
    """cuMemAlloc of a swappable vGPU, in ``context``. ``size``: not 0. ``flags``: BLOCK_ORDERED, or 0.

    What it may own, and the card has no room for, is waited for."""
    cdef Asked asked
    cdef int result
    state().swappable = 1
    charge_contexts(gate)
    vgpu_pin_ahead(gate)
    asked.size, asked.pointer, asked.context, asked.flags = size, pointer, context, flags
    result = vgpu_make_with_room(gate, pieces_for(size), allocate, &asked)
    if result == CUDA_ERROR_OUT_OF_MEMORY and state().returned_count and not vgpu_fits(gate, pieces_for(size)):
        if vgpu_await_returned(gate, pieces_for(size)):
            result = vgpu_make_with_room(gate, pieces_for(size), allocate, &asked)
    return result


# --- frees

cdef public void vgpu_drop_swappable(const Block* block) noexcept nogil:
    """A block that is out of the table, and that nothing uses any more."""
    cdef Gate* gate = &state().gates[block.flags & BLOCK_GATE]
    cdef uint64_t base = block.address - block.address % ARENA_BYTES
    cdef bint emptied
    if block.bytes > SMALL_BYTES:
        vgpu_unmake_chunks(gate, block.address, pieces_for(block.bytes), KIND_DEVICE)
        return
    lock_acquire(&state().memory_lock)
    emptied = arenas_give(&gate.arenas, block.address, block.bytes)
    lock_release(&state().memory_lock)
    if emptied:
        vgpu_unmake_chunks(gate, base, ARENA_BYTES, KIND_DEVICE)


cdef int finish_work_of(void* context) noexcept nogil:
    """Wait for it, as the driver's cuMemFree does."""
    cdef int result = real_cuCtxPushCurrent_v2(context)
    if result == CUDA_ERROR_INVALID_CONTEXT or result == CUDA_ERROR_CONTEXT_IS_DESTROYED:
        return CUDA_SUCCESS      # it is gone, and its work with it
    if result != CUDA_SUCCESS:
        return result
    result = real_cuCtxSynchronize()
    real_cuCtxPopCurrent_v2(&context)
    return result


cdef public void vgpu_doom(const Block* block) noexcept nogil:
    """It is freed once no capture is open, and its context has no work."""
    lock_acquire(&state().memory_lock)
    alloc_insert(&state().doomed, block)
    lock_release(&state().memory_lock)


cdef void free_doomed() noexcept nogil:
    """What was freed under a capture, once none is open."""
    cdef AllocTable* table = &state().doomed
    cdef Block block
    cdef bint found
    cdef uint64_t i
    while load32(&state().captures) == 0:
        found = 0
        lock_acquire(&state().memory_lock)
        if table.count:
            i = 0
            while table.blocks[i].address == 0:
                i += 1
            block = table.blocks[i]
            found = alloc_remove(table, block.address, &block)
        lock_release(&state().memory_lock)
        if not found:
            return
        finish_work_of(<void*>block.aux)
        vgpu_drop_swappable(&block)


cdef public int vgpu_free_swappable(const Block* block) noexcept nogil:
    """cuMemFree; ``block`` is out of the table already."""
    cdef Gate* gate = &state().gates[block.flags & BLOCK_GATE]
    cdef int result
    vgpu_touch(gate)
    free_doomed()
    if load32(&state().captures):
        vgpu_doom(block)
        result = CUDA_SUCCESS
    else:
        result = finish_work_of(<void*>block.aux)
        if result == CUDA_SUCCESS:
            vgpu_drop_swappable(block)
        else:
            vgpu_note(block)     # a context that is broken frees nothing
    if result == CUDA_SUCCESS:
        vgpu_ordered_gone(block)
    vgpu_touched(gate)
    return result
