"""Memory: every allocation is reserved in the vGPU's ledger, then asked of the driver, then committed or cancelled.

Over the limit the very call returns CUDA_ERROR_OUT_OF_MEMORY, as on a smaller card. Charged is what the driver takes
from the card: of linear memory its pieces (linear.pyx), of stream-ordered memory what its pools have (pools.pyx), of
arrays what their twins need (arrays.pyx), and what was asked for of the rest, managed memory and cuMemCreate's. Any
free call may free any pointer, so what it was worth is looked up by address.
What the program is told, cuMemGetInfo and cuDeviceTotalMem, is the vGPU's memory.
"""

from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuDeviceTotalMem, real_cuDeviceTotalMem_v2, real_cuMemAllocManaged, real_cuMemFree,
    real_cuMemFree_v2, real_cuMemFreeAsync, real_cuMemFreeAsync_ptsz, real_cuMemGetInfo, real_cuMemGetInfo_v2,
)
from cython_ext.hook.hook cimport (
    BLOCK_GATE, BLOCK_PIECES, BLOCK_SWAPPABLE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, Pooled, attached, state,
    vgpu_drop_swappable, vgpu_free_swappable, vgpu_gate_here, vgpu_log, vgpu_pooled, vgpu_pooled_freed,
    vgpu_settle_ahead, vgpu_settle_pools, vgpu_trim_pools,
)
from cython_ext.layout cimport (
    GRANTS_MANAGED, GRANTS_SWAPPABLE, KIND_DEVICE, KIND_MANAGED, KIND_VMM, MAX_PROCESSES, MEMORY_KINDS, ActivityPage,
    GrantsPage, Slot,
)
from cython_ext.logic.alloctable cimport AllocTable, Block, alloc_insert, alloc_remove
from cython_ext.logic.ledger cimport (
    LEDGER_OK, LEDGER_REFUSED, ledger_cancel, ledger_commit, ledger_release, ledger_reserve, slot_bytes,
)
from cython_ext.logic.lock cimport lock_acquire, lock_release
from cython_ext.logic.pieces cimport PIECE_BYTES, pieces_give
from cython_ext.logic.pools cimport PoolDue
from cython_ext.logic.robust cimport robust_forget
from cython_ext.native cimport load32, load64, store64

# --- the ledger

cdef uint64_t limit_bytes(const Gate* gate) noexcept nogil:
    """What the processes may own together: the vGPU's limit less what it holds without asking (contexts, modules)."""
    cdef uint64_t limit = load64(&gate.grants.memory_limit_bytes)
    cdef uint64_t implicit = load64(&gate.grants.implicit_bytes)
    return limit - min(limit, implicit)


cdef inline uint64_t process_limit(const Gate* gate) noexcept nogil:
    """What this process may own of it."""
    cdef uint64_t limit = load64(&gate.grants.process_limit_bytes)
    return limit if limit else UINT64_MAX


ctypedef int (*Operation)(ActivityPage*, uint32_t, uint32_t, uint64_t) noexcept nogil


cdef int enter(Gate* gate, Operation operation, uint32_t kind, uint64_t size) noexcept nogil:
    """One operation of the ledger that is not refused by a limit, on whichever page is ours now."""
    cdef int result
    lock_acquire(&gate.page_lock)
    result = operation(gate.activity, gate.slot_index, kind, size)
    lock_release(&gate.page_lock)
    return result


cdef inline bint need_not_fit(const GrantsPage* grants) noexcept nogil:
    """The card: it may own more."""
    return load32(&grants.flags) & (GRANTS_MANAGED | GRANTS_SWAPPABLE) != 0


cdef uint64_t card_left(const Gate* gate) noexcept nogil:
    """How much more the vGPU may have on the card just now, where that depends on what others have. A race among its
    own processes may let through what each of them alone could have had."""
    cdef uint64_t limit = load64(&gate.grants.card_limit_bytes)
    cdef uint64_t owned = load64(&gate.activity.charged_bytes) + load64(&gate.grants.implicit_bytes)
    cdef uint64_t elsewhere = 0
    cdef int i
    if limit == 0:
        return UINT64_MAX
    if need_not_fit(gate.grants):
        for i in range(MAX_PROCESSES):
            elsewhere += load64(&gate.activity.slots[i].away_bytes)
            if load32(&gate.grants.flags) & GRANTS_MANAGED:
                elsewhere += load64(&gate.activity.slots[i].committed_bytes[KIND_MANAGED])
    owned -= min(owned, elsewhere)
    return limit - min(limit, owned)


cdef public bint vgpu_card_has(const Gate* gate, uint64_t size) noexcept nogil:
    """Whether the vGPU may have so much more on the card just now, whatever its own limit says."""
    return size <= card_left(gate)


cdef inline bint is_bound(const Gate* gate, uint32_t kind) noexcept nogil:
    """To the card, at the time of the allocation."""
    return kind != KIND_MANAGED or load32(&gate.grants.flags) & GRANTS_MANAGED == 0


cdef int charge(Gate* gate, uint32_t kind, uint64_t size, uint64_t limit, uint64_t process) noexcept nogil:
    cdef int result
    lock_acquire(&gate.page_lock)
    if limit != UINT64_MAX and is_bound(gate, kind) and size > card_left(gate):
        store64(&gate.slot.refusals, gate.slot.refusals + 1)
        store64(&gate.slot.refused_bytes, size)
        lock_release(&gate.page_lock)
        return LEDGER_REFUSED
    result = ledger_reserve(gate.activity, gate.slot_index, kind, size, limit, process)
    lock_release(&gate.page_lock)
    return result


cdef public bint vgpu_reserve_more(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """``vgpu_reserve``, but no pool is asked for anything: the caller holds pools_lock, or has another way."""
    if gate == NULL or charge(gate, kind, size, limit_bytes(gate), process_limit(gate)) == LEDGER_OK:
        return 1
    vgpu_log(b"refused bytes, limit", size, min(limit_bytes(gate), process_limit(gate)))
    return 0


cdef public bint vgpu_reserve(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """1: go on and ask the driver. A NULL gate has no limit: the process has no vGPU. Before anything is refused, what
    the process's own pools keep for nothing goes back to the card."""
    if gate == NULL or (vgpu_fits(gate, size) and vgpu_reserve_more(gate, kind, size)):
        return 1
    vgpu_trim_pools()
    return vgpu_reserve_more(gate, kind, size)


cdef public bint vgpu_fits(const Gate* gate, uint64_t size) noexcept nogil:
    """Whether it would be granted, as things stand."""
    cdef uint64_t limit = limit_bytes(gate), own = process_limit(gate)
    return (
        size <= min(limit, own) and load64(&gate.activity.charged_bytes) <= limit - size
        and (own == UINT64_MAX or slot_bytes(&gate.activity.slots[gate.slot_index]) <= own - size)
    )


cdef public bint vgpu_pay(Gate* gate, uint32_t kind, const PoolDue* due, bint limited) noexcept nogil:
    """What a pool has come to. 0: ``limited``, and over the limit; it is charged all the same. By one who holds
    pools_lock."""
    cdef bint allowed = due.beyond == 0 or not limited or vgpu_reserve_more(gate, kind, due.beyond)
    if due.beyond and not (limited and allowed):
        charge(gate, kind, due.beyond, UINT64_MAX, UINT64_MAX)
    if due.commit + due.beyond:
        enter(gate, ledger_commit, kind, due.commit + due.beyond)
    if due.cancel:
        enter(gate, ledger_cancel, kind, due.cancel)
    if due.release:
        enter(gate, ledger_release, kind, due.release)
    return allowed


cdef public void vgpu_charge(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """What nobody could refuse any more, also beyond the limit; to be committed."""
    charge(gate, kind, size, UINT64_MAX, UINT64_MAX)


cdef public void vgpu_commit(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    if size:
        enter(gate, ledger_commit, kind, size)


cdef public void vgpu_cancel(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    if size:
        enter(gate, ledger_cancel, kind, size)


cdef public void vgpu_describe(Gate* gate, uint32_t kind, uint64_t address, uint64_t size, Block* block) noexcept nogil:
    """An entry of the table of allocations, by whoever made it in the current context."""
    block.address = address
    block.bytes = size
    block.kind = kind
    block.flags = gate - &state().gates[0]
    block.aux = current_context()


cdef public int vgpu_memory_settle(
    Gate* gate, uint32_t kind, uint64_t reserved, int result, uint64_t address
) noexcept nogil:
    """The driver has answered: commit what was reserved for ``address``, or cancel. ``result`` is passed on. An array's
    address is its handle: no memory of the GPU is where the host's is."""
    cdef Block block
    if gate == NULL:
        return result
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, kind, reserved)
        return result
    vgpu_describe(gate, kind, address, reserved, &block)
    vgpu_note(&block)
    vgpu_commit(gate, kind, reserved)
    return result


cdef inline uint64_t current_context() noexcept nogil:
    cdef void* context = NULL
    real_cuCtxGetCurrent(&context)
    return <uint64_t>context


cdef inline Gate* payer(const Block* block) noexcept nogil:
    return &state().gates[block.flags & BLOCK_GATE]


cdef public void vgpu_release(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    if size:
        enter(gate, ledger_release, kind, size)


cdef inline void release(const Block* block, uint64_t size) noexcept nogil:
    vgpu_release(payer(block), block.kind, size)


cdef inline uint64_t worth(const Block* block) noexcept nogil:
    """Of a block that is out of the table and freed: what the card has back. The caller holds memory_lock."""
    if block.flags & BLOCK_SWAPPABLE:
        return 0                 # its chunks are paid for
    return pieces_give(&payer(block).pieces, block.address, block.bytes) if block.flags & BLOCK_PIECES else block.bytes


cdef public void vgpu_note(const Block* block) noexcept nogil:
    """An allocation is there. Without room for it in the table it is charged to the end, never uncharged. What was at
    its address was freed without our being told yet (with its context, by another thread)."""
    cdef Block old
    cdef uint64_t bytes
    cdef bint stale
    lock_acquire(&state().memory_lock)
    stale = alloc_remove(&state().allocations, block.address, &old)
    bytes = worth(&old) if stale else 0
    alloc_insert(&state().allocations, block)
    lock_release(&state().memory_lock)
    if stale:
        release(&old, bytes)


cdef public bint vgpu_memory_forget(uint64_t address, Block* block) noexcept nogil:
    """Take the block out of the table *before* the driver frees it: another thread may be given the address at once."""
    cdef bint known
    if not attached() or address == 0:
        return 0
    lock_acquire(&state().memory_lock)
    known = alloc_remove(&state().allocations, address, block)
    lock_release(&state().memory_lock)
    return known


cdef public int vgpu_memory_freed(int result, bint known, const Block* block) noexcept nogil:
    """The driver's answer to a free: give the charge back, or, if it refused, keep the block."""
    cdef uint64_t bytes
    if not known:
        return result
    if result != CUDA_SUCCESS:
        vgpu_note(block)
        return result
    lock_acquire(&state().memory_lock)
    bytes = worth(block)
    lock_release(&state().memory_lock)
    release(block, bytes)
    return result


cdef public void vgpu_memory_of_context_died(void* context) noexcept nogil:
    """A context took its allocations along (cuMemCreate's are nobody's context's)."""
    cdef AllocTable* table = &state().allocations
    cdef Block block
    cdef uint64_t i = 0
    lock_acquire(&state().memory_lock)
    while i < table.capacity:
        # a removal may shift a later block to this place, so the place is looked at again
        if table.blocks[i].address and table.blocks[i].kind != KIND_VMM and table.blocks[i].aux == <uint64_t>context:
            block = table.blocks[i]
            alloc_remove(table, block.address, &block)
            if block.flags & BLOCK_SWAPPABLE:
                lock_release(&state().memory_lock)
                vgpu_drop_swappable(&block)      # the driver keeps it: it is nobody's context's
                lock_acquire(&state().memory_lock)
                i = 0
            else:
                release(&block, worth(&block))
        else:
            i += 1
    lock_release(&state().memory_lock)
    vgpu_settle_pools()


cdef public void vgpu_memory_inherited(void* context, void* heir) noexcept nogil:
    """What was allocated in one context belongs to another from here on."""
    cdef AllocTable* table = &state().allocations
    cdef uint64_t i
    lock_acquire(&state().memory_lock)
    for i in range(table.capacity):
        if table.blocks[i].address and table.blocks[i].kind != KIND_VMM and table.blocks[i].aux == <uint64_t>context:
            table.blocks[i].aux = <uint64_t>heir
    lock_release(&state().memory_lock)


cdef public void vgpu_memory_after_fork() noexcept nogil:
    """The child's thread is another one for the kernel, and the ledger's lock names threads."""
    robust_forget()


cdef public void vgpu_memory_moves(Gate* gate, ActivityPage* activity, uint32_t slot_index) noexcept nogil:
    """The gate's activity page is lost, and this is its new one: what the process owns is charged there, also beyond a
    limit that has become smaller."""
    cdef const Slot* before
    cdef uint32_t kind
    lock_acquire(&gate.page_lock)
    before = &gate.activity.slots[gate.slot_index]
    for kind in range(MEMORY_KINDS):
        if before.committed_bytes[kind]:
            ledger_reserve(activity, slot_index, kind, before.committed_bytes[kind], UINT64_MAX, UINT64_MAX)
            ledger_commit(activity, slot_index, kind, before.committed_bytes[kind])
    ledger_reserve(activity, slot_index, KIND_DEVICE, before.reserved_bytes, UINT64_MAX, UINT64_MAX)
    gate.activity = activity
    gate.slot_index = slot_index
    lock_release(&gate.page_lock)


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

cdef public int cuMemFree_v2(unsigned long long pointer) noexcept nogil:
    cdef Block block
    cdef Pooled pooled
    cdef int result
    cdef bint known = vgpu_memory_forget(pointer, &block)
    vgpu_settle_ahead()
    if known and block.flags & BLOCK_SWAPPABLE:
        return vgpu_free_swappable(&block)
    if known:
        return vgpu_memory_freed(real_cuMemFree_v2(pointer), known, &block)
    vgpu_pooled(pointer, &pooled)
    result = real_cuMemFree_v2(pointer)
    if result == CUDA_SUCCESS and pooled.pool:
        vgpu_pooled_freed(&pooled)
    return result


cdef public int cuMemFree(unsigned int pointer) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    vgpu_settle_ahead()
    return vgpu_memory_freed(real_cuMemFree(pointer), known, &block)


cdef public int cuMemFreeAsync(unsigned long long pointer, void* stream) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    if known and block.flags & BLOCK_SWAPPABLE:
        return vgpu_free_swappable(&block)
    return vgpu_memory_freed(real_cuMemFreeAsync(pointer, stream), known, &block)


cdef public int cuMemFreeAsync_ptsz(unsigned long long pointer, void* stream) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(pointer, &block)
    if known and block.flags & BLOCK_SWAPPABLE:
        return vgpu_free_swappable(&block)
    return vgpu_memory_freed(real_cuMemFreeAsync_ptsz(pointer, stream), known, &block)


# --- what the program is told

cdef inline uint64_t shown_limit(const GrantsPage* grants, uint64_t card_total) noexcept nogil:
    """The vGPU's memory; more than the card's only if it need not fit."""
    cdef uint64_t limit = load64(&grants.memory_limit_bytes)
    return limit if need_not_fit(grants) else min(limit, card_total)


cdef public bint vgpu_memory_reading(
    const Gate* gate, uint64_t card_total, uint64_t card_free, uint64_t* total, uint64_t* free
) noexcept nogil:
    """The vGPU's memory instead of the card's, or of that what one process may own, never more than the card's; as free
    what whole pieces can be had of. An observer (NVML before cuInit) owns nothing, and sees the vGPU's."""
    cdef bint fits = not need_not_fit(gate.grants)       # on the card it has to
    cdef uint64_t limit = shown_limit(gate.grants, card_total)
    cdef uint64_t used = load64(&gate.activity.charged_bytes), own = UINT64_MAX
    used = min(limit, used + min(limit, load64(&gate.grants.implicit_bytes)))
    if gate.slot != NULL:
        own = process_limit(gate)
    total[0] = min(limit, own)
    free[0] = min(limit - used, min(card_free, card_left(gate))) if fits else limit - used
    if own != UINT64_MAX:
        free[0] = min(free[0], own - min(own, slot_bytes(&gate.activity.slots[gate.slot_index])))
    free[0] -= free[0] % PIECE_BYTES
    return 1


cdef public int cuMemGetInfo_v2(size_t* free, size_t* total) noexcept nogil:
    cdef int result = real_cuMemGetInfo_v2(free, total)
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t shown_total, shown_free
    if result == CUDA_SUCCESS and gate != NULL:
        vgpu_settle_pools()
        vgpu_memory_reading(gate, total[0], free[0], &shown_total, &shown_free)
        total[0] = shown_total
        free[0] = shown_free
    return result


cdef inline unsigned int as_32_bits(uint64_t value) noexcept nogil:
    return <unsigned int>min(value, <uint64_t>0xFFFFFFFF)


cdef public int cuMemGetInfo(unsigned int* free, unsigned int* total) noexcept nogil:
    cdef int result = real_cuMemGetInfo(free, total)
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t shown_total, shown_free
    if result == CUDA_SUCCESS and gate != NULL:
        vgpu_settle_pools()
        vgpu_memory_reading(gate, <uint64_t>-1, <uint64_t>-1, &shown_total, &shown_free)
        total[0] = as_32_bits(shown_total)
        free[0] = as_32_bits(shown_free)
    return result


cdef inline uint64_t shown_total_of(int device, uint64_t card_total) noexcept nogil:
    cdef uint32_t i
    if attached():
        for i in range(state().gate_count):
            if state().gates[i].device == device:
                return min(shown_limit(state().gates[i].grants, card_total), process_limit(&state().gates[i]))
    return card_total


cdef public int cuDeviceTotalMem_v2(size_t* total, int device) noexcept nogil:
    cdef int result = real_cuDeviceTotalMem_v2(total, device)
    if result == CUDA_SUCCESS:
        total[0] = shown_total_of(device, total[0])
    return result


cdef public int cuDeviceTotalMem(unsigned int* total, int device) noexcept nogil:
    cdef int result = real_cuDeviceTotalMem(total, device)
    if result == CUDA_SUCCESS:
        total[0] = as_32_bits(shown_total_of(device, total[0]))
    return result
