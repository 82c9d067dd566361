"""Memory: the hook reserves every allocation in the quota (quota.pyx), calls the driver, then commits or cancels.

Over the limit the very call returns CUDA_ERROR_OUT_OF_MEMORY, as on a smaller card. The vGPU is charged for what the
driver takes from the card: of linear memory its pieces (linear.pyx), of stream-ordered memory what its pools have
(pools.pyx), of arrays what their twins need (arrays.pyx). Of managed memory and cuMemCreate's, the requested size is
charged. Any free call may free any pointer, so a table has each allocation's charge by address.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuMemAllocManaged, real_cuMemFree, real_cuMemFree_v2, real_cuMemFreeAsync,
    real_cuMemFreeAsync_ptsz,
)
from cython_ext.hook.hook cimport (
    vgpu_cancel, vgpu_charge, vgpu_commit, vgpu_drop_swappable, vgpu_forget_hasher, vgpu_forget_pins,
    vgpu_free_ordered, vgpu_free_swappable, vgpu_gate_here, vgpu_ordered_gone, vgpu_physical_of_context_died,
    vgpu_pooled, vgpu_pooled_freed, vgpu_release, vgpu_reserve, vgpu_returned_of_context_died, vgpu_settle_ahead,
    vgpu_settle_pools,
)
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_PIECES, BLOCK_SWAPPABLE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, Pooled, attached,
    state,
)
from cython_ext.pages.layout cimport KIND_DEVICE, KIND_MANAGED, KIND_VMM
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_add, alloc_find, alloc_prefetch, alloc_remove
from cython_ext.logic.memory.ledger cimport ledger_prefetch
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pieces cimport pieces_are_shared, pieces_give, pieces_take
from cython_ext.native cimport load32, rarely

cdef enum:
    PRIMARY_CONTEXT = 0          # Block.aux of what was allocated while there were no other contexts

# --- the table of allocations

cdef inline void describe(Gate* gate, uint32_t kind, uint64_t address, uint64_t size, Block* block) noexcept nogil:
    block.address = address
    block.bytes = size
    block.kind = kind
    block.flags = gate - &state().gates[0]
    block.aux = current_context() if rarely(load32(&state().contexts)) else PRIMARY_CONTEXT


cdef public void vgpu_describe(Gate* gate, uint32_t kind, uint64_t address, uint64_t size, Block* block) noexcept nogil:
    """Fill an entry of the table of allocations, for one that was made in the current context."""
    describe(gate, kind, address, size, block)


cdef public int vgpu_memory_settle(
    Gate* gate, uint32_t kind, uint64_t reserved, int result, uint64_t address
) noexcept nogil:
    """The driver has answered: commit what was reserved for ``address``, or cancel. ``result`` is passed on. An array's
    address is its handle: no memory of the GPU is where the host's is."""
    cdef Block block
    if gate == NULL:
        return result
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, reserved)
        return result
    describe(gate, kind, address, reserved, &block)
    vgpu_note(&block)
    vgpu_commit(gate, kind, reserved)
    return result


cdef inline uint64_t current_context() noexcept nogil:
    cdef void* context = NULL
    real_cuCtxGetCurrent(&context)
    return <uint64_t>context


cdef inline Gate* payer(const Block* block) noexcept nogil:
    return &state().gates[block.flags & BLOCK_GATE]


cdef inline void release(const Block* block, uint64_t size) noexcept nogil:
    vgpu_release(payer(block), block.kind, size)


cdef inline uint64_t worth(const Block* block) noexcept nogil:
    """What the card has back of a block that is out of the table and freed. The caller holds memory_lock, unless the
    block shares no piece."""
    if block.flags & BLOCK_SWAPPABLE:
        return 0                 # its chunks are paid for
    return pieces_give(&payer(block).pieces, block.address, block.bytes) if block.flags & BLOCK_PIECES else block.bytes


cdef uint64_t worth_shared(const Block* block) noexcept nogil:
    """What others can change the worth of."""
    cdef uint64_t bytes
    lock_acquire(&state().memory_lock)
    bytes = worth(block)
    lock_release(&state().memory_lock)
    return bytes


cdef inline bint replaced(const Block* block, Block* old) noexcept nogil:
    """Into the table, under memory_lock: whether ``old`` was there."""
    cdef AllocTable* table = &state().allocations
    cdef Block* known = alloc_find(table, block.address)
    if rarely(known != NULL):
        old[0] = known[0]
        known[0] = block[0]
        return 1
    if block.address:
        alloc_add(table, block)
    return 0


cdef public void vgpu_note(const Block* block) noexcept nogil:
    """Enter an allocation. Without room for it in the table its charge stays until the process ends. An entry that has
    its address was freed, and the hook has not noted that yet (it went with its context, or another thread freed it).
    """
    cdef Block old
    cdef uint64_t bytes
    cdef bint stale
    lock_acquire(&state().memory_lock)
    stale = replaced(block, &old)
    bytes = worth(&old) if stale else 0
    lock_release(&state().memory_lock)
    if stale:
        release(&old, bytes)


cdef void amend(Gate* gate, uint64_t reserved, uint64_t taken) noexcept nogil:
    """Something else was reserved than was taken."""
    if taken > reserved:
        vgpu_charge(gate, taken - reserved)
    else:
        vgpu_cancel(gate, reserved - taken)


cdef public void vgpu_note_linear(Gate* gate, uint64_t reserved, uint64_t address, uint64_t size) noexcept nogil:
    """Linear memory is there: for what it takes of the pieces the gate pays, as far as it is ``reserved`` with that."""
    cdef Block block, old
    cdef uint64_t taken, bytes = 0
    cdef bint stale
    alloc_prefetch(&state().allocations, address)
    ledger_prefetch(gate.activity, gate.slot)
    describe(gate, KIND_DEVICE, address, size, &block)
    block.flags |= BLOCK_PIECES
    lock_acquire(&state().memory_lock)
    taken = pieces_take(&gate.pieces, address, size)
    stale = replaced(&block, &old)
    if rarely(stale):
        bytes = worth(&old)
    lock_release(&state().memory_lock)
    if rarely(stale):
        release(&old, bytes)
    if rarely(taken != reserved):
        amend(gate, reserved, taken)
    vgpu_commit(gate, KIND_DEVICE, taken)


cdef public bint vgpu_memory_forget(uint64_t address, Block* block) noexcept nogil:
    """Take the block out of the table *before* the driver frees it: another thread may be given the address at once."""
    cdef bint known
    if not attached() or address == 0:
        return 0
    alloc_prefetch(&state().allocations, address)
    lock_acquire(&state().memory_lock)
    known = alloc_remove(&state().allocations, address, block)
    lock_release(&state().memory_lock)
    return known


cdef public int vgpu_memory_freed(int result, bint known, const Block* block) noexcept nogil:
    """The driver's answer to a free: give the charge back, or, if it refused, keep the block."""
    if not known:
        return result
    ledger_prefetch(payer(block).activity, payer(block).slot)
    if rarely(result != CUDA_SUCCESS):
        vgpu_note(block)
    elif block.flags & BLOCK_PIECES and pieces_are_shared(block.bytes):
        release(block, worth_shared(block))
    else:
        release(block, worth(block))
    return result


cdef public void vgpu_memory_of_context_died(void* context) noexcept nogil:
    """A context took its allocations along. cuMemCreate's belong to no context."""
    cdef AllocTable* table = &state().allocations
    cdef Block block
    cdef uint64_t i = 0
    cdef uint32_t g
    for g in range(state().gate_count):
        vgpu_forget_pins(&state().gates[g])
        vgpu_forget_hasher(&state().gates[g], context)
    vgpu_returned_of_context_died(context, NULL)
    lock_acquire(&state().memory_lock)
    vgpu_physical_of_context_died(context, NULL)
    while i < table.capacity:
        # a removal may shift a later block to this place, so the loop checks the place again
        if table.blocks[i].address and table.blocks[i].kind != KIND_VMM and table.blocks[i].aux == <uint64_t>context:
            block = table.blocks[i]
            alloc_remove(table, block.address, &block)
            if block.flags & BLOCK_SWAPPABLE:
                lock_release(&state().memory_lock)
                vgpu_ordered_gone(&block)
                vgpu_drop_swappable(&block)      # the driver keeps it: it belongs to no context
                lock_acquire(&state().memory_lock)
                i = 0
            else:
                release(&block, worth(&block))
        else:
            i += 1
    lock_release(&state().memory_lock)
    vgpu_settle_pools()


cdef public void vgpu_memory_inherited(void* context, void* heir) noexcept nogil:
    """What was allocated in one context belongs to another from here on, in which its work may go on."""
    cdef AllocTable* table = &state().allocations
    cdef uint64_t i
    cdef uint32_t g
    for g in range(state().gate_count):
        vgpu_forget_hasher(&state().gates[g], context)
    vgpu_returned_of_context_died(context, heir)
    lock_acquire(&state().memory_lock)
    vgpu_physical_of_context_died(context, heir)
    for i in range(table.capacity):
        if table.blocks[i].address and table.blocks[i].kind != KIND_VMM and table.blocks[i].aux == <uint64_t>context:
            table.blocks[i].aux = <uint64_t>heir
    lock_release(&state().memory_lock)


cdef public void vgpu_memory_of_primary(int device, void* context) noexcept nogil:
    """The primary context that allocations of before there were others are in is this one."""
    cdef AllocTable* table = &state().allocations
    cdef uint64_t i
    lock_acquire(&state().memory_lock)
    for i in range(table.capacity):
        if table.blocks[i].address and table.blocks[i].kind != KIND_VMM and table.blocks[i].aux == PRIMARY_CONTEXT:
            if payer(&table.blocks[i]).device == device:
                table.blocks[i].aux = <uint64_t>context
    lock_release(&state().memory_lock)


# --- allocations

cdef public int vgpu_allocate_managed(
    Gate* gate, unsigned long long* pointer, size_t size, unsigned int flags
) noexcept nogil:
    cdef int result
    if not vgpu_reserve(gate, KIND_MANAGED, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAllocManaged(pointer, size, flags)
    return vgpu_memory_settle(gate, KIND_MANAGED, size, result, pointer[0] if result == CUDA_SUCCESS else 0)


cdef public int cuMemAllocManaged(unsigned long long* pointer, size_t size, unsigned int flags) noexcept nogil:
    return vgpu_allocate_managed(vgpu_gate_here(), pointer, size, flags)


# --- frees

cdef int free_unknown(unsigned long long pointer) noexcept nogil:
    """The pointer is of a pool, or unknown to the hook."""
    cdef Pooled pooled
    cdef int result
    vgpu_settle_ahead()
    vgpu_pooled(pointer, &pooled)
    result = real_cuMemFree_v2(pointer)
    if result == CUDA_SUCCESS and pooled.pool:
        vgpu_pooled_freed(&pooled)
    return result


cdef public int cuMemFree_v2(unsigned long long pointer) noexcept nogil:
    cdef Block block
    if rarely(not vgpu_memory_forget(pointer, &block)):
        return free_unknown(pointer)
    if rarely(payer(&block).ahead.launches):
        vgpu_settle_ahead()
    if rarely(block.flags & BLOCK_SWAPPABLE):
        return vgpu_free_swappable(&block)
    return vgpu_memory_freed(real_cuMemFree_v2(pointer), 1, &block)


cdef public int cuMemFree(unsigned int pointer) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    vgpu_settle_ahead()
    return vgpu_memory_freed(real_cuMemFree(pointer), known, &block)


cdef public int cuMemFreeAsync(unsigned long long pointer, void* stream) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    if known and block.flags & BLOCK_SWAPPABLE:
        return vgpu_free_ordered(&block, stream, 0)
    return vgpu_memory_freed(real_cuMemFreeAsync(pointer, stream), known, &block)


cdef public int cuMemFreeAsync_ptsz(unsigned long long pointer, void* stream) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    if known and block.flags & BLOCK_SWAPPABLE:
        return vgpu_free_ordered(&block, stream, 1)
    return vgpu_memory_freed(real_cuMemFreeAsync_ptsz(pointer, stream), known, &block)
