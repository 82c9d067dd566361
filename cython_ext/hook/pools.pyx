"""Stream-ordered allocation: a vGPU pays for what its pools have taken from the card, not for what they hand out.

A pool grows in steps, and keeps what was freed until the next synchronisation or, as far as its release threshold says,
for good: PyTorch's and CuPy's back-ends on cuMemAllocAsync keep everything. So each pool that was used has a book
(logic/pools.pxd) and is *settled*: it is asked what it has reserved, and the difference to what is charged is charged
or given back. That is done after each allocation and after whatever may make it smaller, before the program is told
what is free, and before anybody is refused; then what pools keep for nothing goes back to the card, too.

What an allocation may make its pool grow by is reserved before, a whole step. If the pool grew by more, and into the
limit, the allocation is given back and the call fails: its free memory was in pieces, or went back to the card in that
very moment because another thread synchronised. What is allocated under a
capture becomes a node of a graph, and is no pool's. Nor are pools charged whose memory is the host's, or on a GPU where
the process has no vGPU; those beyond POOLS are seen by the GPU Server alone, as implicit memory.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.fastpath cimport named
from cython_ext.hook.generated.driver cimport (
    real_cuDeviceGetMemPool, real_cuMemAllocAsync, real_cuMemAllocAsync_ptsz, real_cuMemAllocFromPoolAsync,
    real_cuMemAllocFromPoolAsync_ptsz, real_cuMemFreeAsync, real_cuMemFreeAsync_ptsz, real_cuMemPoolCreate,
    real_cuMemPoolDestroy, real_cuMemPoolGetAttribute, real_cuMemPoolTrimTo,
)
from cython_ext.hook.hook cimport (
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, POOLS, Gate, attached, state, vgpu_capturing, vgpu_gate_here, vgpu_log,
    vgpu_fits, vgpu_pay, vgpu_reserve_more, vgpu_settle_ahead,
)
from cython_ext.layout cimport KIND_ASYNC
from cython_ext.logic.lock cimport lock_acquire, lock_release
from cython_ext.logic.pools cimport PoolBook, PoolDue, pool_begin, pool_end, pool_growth, pool_settle
from cython_ext.native cimport load32

cdef enum:
    RESERVED = 5             # CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    USED = 7                 # CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    LOCATION_DEVICE = 1      # CU_MEM_LOCATION_TYPE_DEVICE
    NOBODYS = 0xFFFFFFFF     # PoolBook.gate: no vGPU pays for it


cdef struct PoolProperties:      # CUmemPoolProps, its beginning
    int type
    int handle_types
    int location_type
    int location_id


# --- books; the caller holds pools_lock

cdef inline uint64_t attribute(uint64_t pool, int which) noexcept nogil:
    cdef uint64_t value = 0
    return value if real_cuMemPoolGetAttribute(<void*>pool, which, &value) == CUDA_SUCCESS else 0


cdef PoolBook* find(uint64_t pool) noexcept nogil:
    cdef uint32_t i
    for i in range(state().pool_count):
        if state().pools[i].pool == pool:
            return &state().pools[i]
    return NULL


cdef PoolBook* open_book(uint64_t pool, uint32_t gate) noexcept nogil:
    """The pool's book, a new one if it has none. NULL: there is no room for one."""
    cdef PoolBook* book = find(pool)
    if book == NULL and state().pool_count < POOLS:
        book = &state().pools[state().pool_count]
        book.pool = pool
        book.gate = gate
        book.charged = book.reserved = book.under_way = 0
        state().pool_count += 1
    return book


cdef bint settle(PoolBook* book, uint64_t taken, bint limited) noexcept nogil:
    """Charge it for what it has ``taken``. 0: ``limited``, and beyond what was reserved the limit does not allow it. It
    is charged all the same."""
    cdef PoolDue due
    pool_settle(book, taken, &due)
    return vgpu_pay(&state().gates[book.gate], KIND_ASYNC, &due, limited)


cdef void settle_all(bint trim) noexcept nogil:
    """``trim``: what a pool keeps, nobody uses, and nobody is about to goes back to the card."""
    cdef PoolBook* book
    cdef uint64_t needed
    cdef uint32_t i
    lock_acquire(&state().pools_lock)
    for i in range(state().pool_count):
        book = &state().pools[i]
        if book.gate != NOBODYS:
            needed = attribute(book.pool, USED) + book.claimed if trim else 0
            if trim and attribute(book.pool, RESERVED) > needed:
                real_cuMemPoolTrimTo(<void*>book.pool, needed)
            settle(book, attribute(book.pool, RESERVED), 0)
    lock_release(&state().pools_lock)


cdef public void vgpu_settle_pools() noexcept nogil:
    """Pools may have become smaller."""
    if attached() and state().pool_count and not state().stopping:
        settle_all(0)


cdef public void vgpu_trim_pools() noexcept nogil:
    """Somebody needs memory. While something is captured the driver may forbid to trim, and end the capture for it."""
    if state().pool_count:
        vgpu_settle_ahead()
        settle_all(load32(&state().captures) == 0)


# --- allocations

cdef inline int take(
    bint own, bint given, unsigned long long* pointer, size_t size, void* pool, void* stream
) noexcept nogil:
    """The driver's own call. ``own``: stream 0 is the thread's; ``given``: the program has named the pool."""
    if given and own:
        return real_cuMemAllocFromPoolAsync_ptsz(pointer, size, pool, stream)
    if given:
        return real_cuMemAllocFromPoolAsync(pointer, size, pool, stream)
    return real_cuMemAllocAsync_ptsz(pointer, size, stream) if own else real_cuMemAllocAsync(pointer, size, stream)


cdef bint begin(uint64_t pool, Gate** gate, uint64_t size, uint64_t* asked) noexcept nogil:
    """Reserve what the pool may grow by, from whoever pays for it: ``gate``, if it was unknown, then NULL if nobody. 0:
    over the limit."""
    cdef PoolBook* book
    cdef bint again, granted = 1
    for again in range(2):
        lock_acquire(&state().pools_lock)
        book = open_book(pool, gate[0] - &state().gates[0])
        gate[0] = &state().gates[book.gate] if book != NULL and book.gate != NOBODYS else NULL
        if gate[0] == NULL:
            break
        asked[0] = pool_growth(book, attribute(pool, RESERVED), attribute(pool, USED), size)
        if again or asked[0] == 0 or vgpu_fits(gate[0], asked[0]):
            granted = asked[0] == 0 or vgpu_reserve_more(gate[0], KIND_ASYNC, asked[0])
            if granted:
                pool_begin(book, asked[0], size)
            break
        lock_release(&state().pools_lock)
        vgpu_trim_pools()
    lock_release(&state().pools_lock)
    return granted


cdef bint end(uint64_t pool, uint64_t size, uint64_t asked, bint limited) noexcept nogil:
    """The driver has answered. 0: the pool grew beyond that, and into the limit."""
    cdef PoolBook* book
    cdef bint allowed = 1
    lock_acquire(&state().pools_lock)
    book = find(pool)
    if book != NULL:         # else destroyed in the middle of an allocation
        pool_end(book, asked, size)
        allowed = settle(book, attribute(pool, RESERVED), limited)
    lock_release(&state().pools_lock)
    return allowed


cdef int allocate(
    bint own, bint given, unsigned long long* pointer, size_t size, void* pool, void* stream
) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t asked
    cdef int result
    if gate == NULL or vgpu_capturing(named(stream, own)):
        return take(own, given, pointer, size, pool, stream)
    if not given:
        real_cuDeviceGetMemPool(&pool, gate.device)
    if not begin(<uint64_t>pool, &gate, size, &asked):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = take(own, given, pointer, size, pool, stream)
    if gate == NULL or end(<uint64_t>pool, size, asked, result == CUDA_SUCCESS):
        return result
    vgpu_log(b"pool grew into the limit, for bytes", size, asked)
    if own:
        real_cuMemFreeAsync_ptsz(pointer[0], stream)
    else:
        real_cuMemFreeAsync(pointer[0], stream)
    vgpu_trim_pools()
    return CUDA_ERROR_OUT_OF_MEMORY


cdef public int cuMemAllocAsync(unsigned long long* pointer, size_t size, void* stream) noexcept nogil:
    return allocate(0, 0, pointer, size, NULL, stream)


cdef public int cuMemAllocAsync_ptsz(unsigned long long* pointer, size_t size, void* stream) noexcept nogil:
    return allocate(1, 0, pointer, size, NULL, stream)


cdef public int cuMemAllocFromPoolAsync(
    unsigned long long* pointer, size_t size, void* pool, void* stream
) noexcept nogil:
    return allocate(0, 1, pointer, size, pool, stream)


cdef public int cuMemAllocFromPoolAsync_ptsz(
    unsigned long long* pointer, size_t size, void* pool, void* stream
) noexcept nogil:
    return allocate(1, 1, pointer, size, pool, stream)


# --- pools of the program's own

cdef public int cuMemPoolCreate(void** pool, const void* properties) noexcept nogil:
    cdef const PoolProperties* given = <const PoolProperties*>properties
    cdef int result = real_cuMemPoolCreate(pool, properties)
    cdef uint32_t i, gate = NOBODYS
    if result != CUDA_SUCCESS or not attached():
        return result
    if given.location_type == LOCATION_DEVICE:
        for i in range(state().gate_count):
            if state().gates[i].device == given.location_id:
                gate = i
    lock_acquire(&state().pools_lock)
    open_book(<uint64_t>pool[0], gate)
    lock_release(&state().pools_lock)
    return result


cdef public int cuMemPoolDestroy(void* pool) noexcept nogil:
    """Its handle may not be asked afterwards: what is still allocated from it is implicit memory from then on."""
    cdef PoolBook* book
    cdef int result
    if not attached():
        return real_cuMemPoolDestroy(pool)
    lock_acquire(&state().pools_lock)        # held across: the driver may hand the handle out again at once
    result = real_cuMemPoolDestroy(pool)
    book = find(<uint64_t>pool) if result == CUDA_SUCCESS else NULL
    if book != NULL:
        if book.gate != NOBODYS:
            book.under_way = 0
            settle(book, 0, 0)
        state().pool_count -= 1
        book[0] = state().pools[state().pool_count]
    lock_release(&state().pools_lock)
    return result
