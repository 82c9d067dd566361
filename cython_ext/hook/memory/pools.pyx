"""Stream-ordered allocation: a vGPU is charged for what its pools have taken from the card, not for what they hand out.

A pool grows in steps. It keeps freed memory until the next synchronisation, or for good, up to its release threshold:
PyTorch's and CuPy's back-ends on cuMemAllocAsync keep everything. So each pool that was used has an account
(logic/memory/pools.pxd) and is *settled*: the hook asks the driver what the pool has reserved. Then it charges, or
gives back, the difference to the account. It settles after each allocation, after each call that may make a pool
smaller, before the program reads what is free, and before an allocation is refused. Before a refusal, memory that pools
keep unused goes back to the card, too.

Before an allocation, the hook reserves the pool's possible growth, a whole step. If the pool grew by more, and into the
limit, the hook gives the allocation back and the call fails. Reason: the pool's free memory was in pieces, or went back
to the card in that very moment because another thread synchronised. An allocation under a capture becomes a node of a
graph, and belongs to no pool (graphmemory.pyx). But a device's graph memory has an account like a pool's. Pools of host
memory are not charged, nor pools on a GPU where the process has no vGPU. Only the GPU Server sees pools beyond POOLS,
as implicit memory.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.gate.fastpath cimport named
from cython_ext.hook.generated.driver cimport (
    real_cuDeviceGetDefaultMemPool, real_cuDeviceGetMemPool, real_cuMemAllocAsync, real_cuMemAllocAsync_ptsz,
    real_cuMemAllocFromPoolAsync, real_cuMemAllocFromPoolAsync_ptsz, real_cuMemFreeAsync, real_cuMemFreeAsync_ptsz,
    real_cuMemPoolCreate, real_cuMemPoolDestroy, real_cuMemPoolGetAttribute, real_cuMemPoolTrimTo,
    real_cuPointerGetAttribute,
)
from cython_ext.hook.hook cimport (
    charge_contexts, vgpu_allocate_ordered, vgpu_ask_graphs, vgpu_capturing, vgpu_card_has, vgpu_context_named,
    vgpu_drop_returned, vgpu_fits, vgpu_gate_here, vgpu_gate_of_stream, vgpu_log, vgpu_make_with_room,
    vgpu_ordered_peaks_reset, vgpu_ordered_totals, vgpu_pay, vgpu_reserve_more, vgpu_settle_ahead,
    vgpu_shrink_returned, vgpu_trim_graphs,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, MAX_GATES, POOLS, POOL_FULL, POOL_GRANTED, POOL_NOBODYS, POOL_REFUSED,
    OUT_OF_MORE_THAN_CARD, Gate, Pooled, attached, is_swappable, state,
)
from cython_ext.pages.layout cimport KIND_ASYNC, KIND_GRAPH
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pools cimport (
    PoolBook, PoolDue, pool_begin, pool_end, pool_freed, pool_growth, pool_settle, pool_steps, pool_used,
)
from cython_ext.native cimport add64, futex_wait, load32, now_ns

cdef enum:
    RESERVED = 5             # CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, and its high-water mark
    USED = 7                 # CU_MEMPOOL_ATTR_USED_MEM_CURRENT, likewise
    RESERVED_PEAK = 6
    USED_PEAK = 8
    RELEASE_THRESHOLD = 4    # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    RANGE_SIZE = 12          # CU_POINTER_ATTRIBUTE_RANGE_SIZE
    POOL_HANDLE = 17         # CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    LOCATION_DEVICE = 1      # CU_MEM_LOCATION_TYPE_DEVICE
    TYPE_PINNED = 1          # CU_MEM_ALLOCATION_TYPE_PINNED
    TYPE_MANAGED = 2         # CU_MEM_ALLOCATION_TYPE_MANAGED
    NOBODYS = 0xFFFFFFFF     # PoolBook.gate: no vGPU pays for it
    LOOKS = 100              # for allocations of other threads to be answered
    LOOK_NS = 20_000


cdef struct Place:           # CUmemLocation
    int type
    int id


cdef struct PoolProperties:      # CUmemPoolProps, its beginning
    int type
    int handle_types
    Place place
    void* security
    size_t most_bytes        # 0: the driver's own limit
    unsigned short usage     # for an engine of the GPU


cdef struct Asked:               # by cuMemAllocAsync
    bint own                 # stream 0 is the thread's
    bint given               # the program has named the pool
    unsigned long long* pointer
    size_t size
    void* pool
    void* stream


# --- accounts; the caller holds pools_lock

cdef inline bint of_graphs(uint64_t pool) noexcept nogil:
    """Not a pool, but what the device of the gate with index ``pool`` - 1 has taken for graphs."""
    return pool <= MAX_GATES


cdef inline uint32_t kind_of(const PoolBook* book) noexcept nogil:
    return KIND_GRAPH if of_graphs(book.pool) else KIND_ASYNC


cdef bint ask(const PoolBook* book, uint64_t* taken, uint64_t* used) noexcept nogil:
    """What the pool has taken from the card, and how much of that it has handed out. 0: the driver does not report it.
    """
    cdef int mode = relax()
    cdef bint answered
    if of_graphs(book.pool):
        answered = vgpu_ask_graphs(&state().gates[book.pool - 1], taken, used)
    else:
        answered = (
            real_cuMemPoolGetAttribute(<void*>book.pool, RESERVED, taken) == CUDA_SUCCESS
            and real_cuMemPoolGetAttribute(<void*>book.pool, USED, used) == CUDA_SUCCESS
        )
        used[0] = pool_used(book, taken[0], used[0])
    restore(mode)
    return answered


cdef PoolBook* find(uint64_t pool) noexcept nogil:
    cdef uint32_t i
    for i in range(state().pool_count):
        if state().pools[i].pool == pool:
            return &state().pools[i]
    return NULL


cdef PoolBook* open_book(uint64_t pool, uint32_t gate) noexcept nogil:
    """A book for a pool that has none. NULL: there is no room for one."""
    cdef PoolBook* book = NULL
    if state().pool_count < (POOLS if of_graphs(pool) else POOLS - MAX_GATES):
        book = &state().pools[state().pool_count]
        book.pool = pool
        book.gate = gate
        book.private = book.bounded = book.keeps = 0
        book.charged = book.reserved = book.claimed = book.stale = 0
        state().pool_count += 1
    return book


cdef bint settle(PoolBook* book, uint64_t taken, uint64_t used, bint limited) noexcept nogil:
    """Charge it for what it has ``taken``. 0: ``limited``, and beyond what was reserved the limit does not allow it. It
    is charged all the same."""
    cdef PoolDue due
    if of_graphs(book.pool) and taken < book.charged:
        add64(&state().gates[book.gate].graph_round, 1)
    pool_settle(book, taken, used, &due)
    return vgpu_pay(&state().gates[book.gate], kind_of(book), &due, limited)


cdef void trim_one(const PoolBook* book, uint64_t taken, uint64_t needed) noexcept nogil:
    cdef int mode
    if taken > needed or of_graphs(book.pool) and taken:
        mode = relax()
        if of_graphs(book.pool):
            vgpu_trim_graphs(&state().gates[book.gate])      # also what is kept for graphs that do not run now
        else:
            real_cuMemPoolTrimTo(<void*>book.pool, needed)
        restore(mode)


cdef void settle_all(bint trim) noexcept nogil:
    """Settle all pools. ``trim``: a pool's memory that no thread uses, or is about to use, goes back to the card."""
    cdef PoolBook* book
    cdef uint64_t taken, used
    cdef uint32_t i
    lock_acquire(&state().pools_lock)
    for i in range(state().pool_count):
        book = &state().pools[i]
        if book.gate == NOBODYS or not ask(book, &taken, &used):
            continue
        if trim:
            trim_one(book, taken, used + book.claimed)
            if not ask(book, &taken, &used):
                continue
        settle(book, taken, used, 0)
    lock_release(&state().pools_lock)


cdef public void vgpu_settle_pools() noexcept nogil:
    """Pools may have become smaller."""
    if not attached() or state().stopping:
        return
    vgpu_shrink_returned(state().returned_keep)
    if state().pool_count:
        settle_all(0)


cdef public void vgpu_trim_pools() noexcept nogil:
    """Trim pools, since an allocation needs memory. During a capture the driver may forbid that, and end the capture.
    """
    if attached():
        vgpu_drop_returned(&state().gates[0], 0)
    if state().pool_count:
        vgpu_settle_ahead()
        settle_all(load32(&state().captures) == 0)


cdef public void vgpu_trim_drained_pools() noexcept nogil:
    """By the hook thread, with no work queued and no capture open: so that only what is in use stays on the card."""
    if state().pool_count:
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


cdef uint32_t payer(uint64_t pool) noexcept nogil:
    """The gate of the pool's device; pools that the program has made are known (cuMemPoolCreate)."""
    cdef void* found
    cdef uint32_t i
    if of_graphs(pool):
        return pool - 1
    for i in range(state().gate_count):
        found = NULL
        if real_cuDeviceGetMemPool(&found, state().gates[i].device) == CUDA_SUCCESS and <uint64_t>found == pool:
            return i
        if real_cuDeviceGetDefaultMemPool(&found, state().gates[i].device) == CUDA_SUCCESS and <uint64_t>found == pool:
            return i
    return NOBODYS


cdef inline bint has_room(const Gate* gate, uint64_t size) noexcept nogil:
    return vgpu_fits(gate, size) and vgpu_card_has(gate, size)


cdef inline bint waits_for_card(const Gate* gate, uint64_t size) noexcept nogil:
    """It is not refused: others may leave the card for it (vgpu_make_with_room)."""
    return is_swappable(gate) and vgpu_fits(gate, size) and not vgpu_card_has(gate, size)


cdef int try_begin(uint64_t pool, uint64_t size, bint last, bint* others) noexcept nogil:
    """Reserve what the pool may grow by. ``last``: what does not fit is refused; ``others``: whether allocations of
    other threads are under way, which count twice for a moment, as used and as about to be."""
    cdef PoolBook* book
    cdef Gate* gate
    cdef uint64_t taken, used, asked
    cdef int answer = POOL_NOBODYS
    lock_acquire(&state().pools_lock)
    book = find(pool)
    if book == NULL:
        book = open_book(pool, payer(pool))
    if book != NULL and book.gate != NOBODYS and ask(book, &taken, &used):
        gate = &state().gates[book.gate]
        others[0] = book.claimed != 0
        settle(book, taken, used, 0)
        asked = pool_growth(book, taken, used, size)
        if asked == 0 or has_room(gate, asked) and vgpu_reserve_more(gate, kind_of(book), asked):
            pool_begin(book, asked, size)
            answer = POOL_GRANTED
        elif last and of_graphs(pool) and size <= taken:
            pool_begin(book, 0, size)        # the driver may let it share what others have: judged when it has answered
            answer = POOL_GRANTED
        elif last and waits_for_card(gate, asked):
            answer = POOL_FULL
        elif last and vgpu_reserve_more(gate, kind_of(book), asked):
            pool_begin(book, asked, size)    # another thread gave back a moment ago
            answer = POOL_GRANTED
        else:
            answer = POOL_REFUSED if last else POOL_FULL
    lock_release(&state().pools_lock)
    return answer


cdef public int vgpu_pool_begin(uint64_t pool, uint64_t size) noexcept nogil:
    """Reserve for an allocation. Before a refusal, unused pool memory goes back, and the thread waits a moment for
    other threads."""
    cdef uint32_t nobody_wakes = 0
    cdef bint others = 0
    cdef int _, answer = try_begin(pool, size, 0, &others)
    if answer != POOL_FULL:
        return answer
    vgpu_trim_pools()
    for _ in range(LOOKS):
        if not others:
            break
        answer = try_begin(pool, size, 0, &others)
        if answer != POOL_FULL:
            return answer
        futex_wait(&nobody_wakes, 0, now_ns() + LOOK_NS)
    return try_begin(pool, size, 1, &others)


cdef public bint vgpu_pool_end(uint64_t pool, uint64_t size, bint limited) noexcept nogil:
    """The driver has answered. 0: the pool grew beyond what was reserved, and into the limit."""
    cdef PoolBook* book
    cdef uint64_t taken, used
    cdef bint allowed = 1
    lock_acquire(&state().pools_lock)
    book = find(pool)
    if book != NULL:         # else destroyed in the middle of an allocation
        pool_end(book, size)
        if ask(book, &taken, &used):
            allowed = settle(book, taken, used, limited)
    lock_release(&state().pools_lock)
    return allowed


cdef bint is_private(const Gate* gate, void* pool) noexcept nogil:
    """A device's pool without a size limit, whose memory no other process can have."""
    cdef void* default = NULL
    cdef PoolBook* book
    cdef bint private
    if real_cuDeviceGetDefaultMemPool(&default, gate.device) == CUDA_SUCCESS and pool == default:
        return 1
    lock_acquire(&state().pools_lock)
    book = find(<uint64_t>pool)
    private = book != NULL and book.private
    lock_release(&state().pools_lock)
    return private


cdef bint may_grow(void* pool) noexcept nogil:
    """It is on the card, and has no size limit of its own."""
    cdef PoolBook* book
    cdef bint grows
    lock_acquire(&state().pools_lock)
    book = find(<uint64_t>pool)
    grows = book != NULL and book.gate != NOBODYS and not book.bounded
    lock_release(&state().pools_lock)
    return grows


cdef int from_pool(Gate* gate, void* what) noexcept nogil:
    """CUDA_ERROR_OUT_OF_MEMORY: the card has no room; OUT_OF_MORE_THAN_CARD: it would not do."""
    cdef const Asked* asked = <const Asked*>what
    cdef int result, answer = vgpu_pool_begin(<uint64_t>asked.pool, asked.size)
    if answer == POOL_FULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    if answer == POOL_REFUSED:
        return OUT_OF_MORE_THAN_CARD
    result = take(asked.own, asked.given, asked.pointer, asked.size, asked.pool, asked.stream)
    if answer == POOL_NOBODYS or vgpu_pool_end(<uint64_t>asked.pool, asked.size, result == CUDA_SUCCESS):
        if result == CUDA_ERROR_OUT_OF_MEMORY and not may_grow(asked.pool):
            result = OUT_OF_MORE_THAN_CARD
        return result
    vgpu_log(b"pool grew into the limit, for bytes", asked.size, 0)
    if asked.own:
        real_cuMemFreeAsync_ptsz(asked.pointer[0], asked.stream)
    else:
        real_cuMemFreeAsync(asked.pointer[0], asked.stream)
    vgpu_trim_pools()
    return OUT_OF_MORE_THAN_CARD


cdef int allocate(
    bint own, bint given, unsigned long long* pointer, size_t size, void* pool, void* stream
) noexcept nogil:
    cdef Gate* gate = vgpu_gate_of_stream(named(stream, own))
    cdef Asked asked
    cdef int result
    if gate == NULL or (given and of_graphs(<uint64_t>pool)) or vgpu_capturing(named(stream, own)):
        return take(own, given, pointer, size, pool, stream)
    charge_contexts(gate)
    if not given:
        real_cuDeviceGetMemPool(&pool, gate.device)
    if (
        is_swappable(gate) and pointer != NULL and size and is_private(gate, pool)
        and vgpu_context_named(stream) != NULL
    ):
        return vgpu_allocate_ordered(gate, pointer, size, stream, own)
    asked.own, asked.given, asked.pool, asked.stream = own, given, pool, stream
    asked.pointer, asked.size = pointer, size
    if is_swappable(gate):
        result = vgpu_make_with_room(gate, pool_steps(size), from_pool, &asked)
    else:
        result = from_pool(gate, &asked)
    return CUDA_ERROR_OUT_OF_MEMORY if result == OUT_OF_MORE_THAN_CARD else result


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


# --- cuMemFree of what came from a pool

cdef uint64_t said_used(uint64_t pool) noexcept nogil:
    """By the driver."""
    cdef int mode = relax()
    cdef uint64_t used = 0
    real_cuMemPoolGetAttribute(<void*>pool, USED, &used)
    restore(mode)
    return used


cdef public void vgpu_pooled(unsigned long long pointer, Pooled* pooled) noexcept nogil:
    """Before it is freed: of which pool it is, if of any. Programs without pools pay nothing for the question."""
    pooled.pool = 0
    if not (attached() and state().pool_count):
        return
    if real_cuPointerGetAttribute(&pooled.bytes, RANGE_SIZE, pointer) != CUDA_SUCCESS:
        return
    if real_cuPointerGetAttribute(&pooled.pool, POOL_HANDLE, pointer) != CUDA_SUCCESS:
        pooled.pool = 0
    if pooled.pool:
        pooled.used = said_used(pooled.pool)


cdef public void vgpu_pooled_freed(const Pooled* pooled) noexcept nogil:
    """It was freed."""
    cdef PoolBook* book
    lock_acquire(&state().pools_lock)
    book = find(pooled.pool)
    if book != NULL:
        pool_freed(book, pooled.used, said_used(pooled.pool), pooled.bytes)
    lock_release(&state().pools_lock)
    vgpu_settle_pools()


# --- what a swappable vGPU's pools seem to have

cdef public void vgpu_pool_attribute(void* pool, int which, void* value) noexcept nogil:
    """The driver has answered. What is allocated in stream order outside the pool is added: of all pools of the vGPU,
    since no account knows of which one it is."""
    cdef uint64_t used, used_peak, reserved_peak
    if not attached() or not state().swappable or not RESERVED <= which <= USED_PEAK:
        return
    if not is_private(&state().gates[0], pool):
        return
    vgpu_ordered_totals(&used, &used_peak, &reserved_peak)
    if which == RESERVED:
        used += state().returned_bytes
    elif which == RESERVED_PEAK:
        used = reserved_peak
    elif which == USED_PEAK:
        used = used_peak
    (<uint64_t*>value)[0] += used


cdef void keep_most() noexcept nogil:
    """The largest release threshold is that of all returned blocks. The caller holds pools_lock."""
    cdef uint64_t most = 0
    cdef uint32_t i
    for i in range(state().pool_count):
        most = max(most, state().pools[i].keeps)
    state().returned_keep = most


cdef public void vgpu_pool_set(void* pool, int which, const void* value) noexcept nogil:
    """The driver has set it."""
    cdef PoolBook* book
    if attached() and is_swappable(&state().gates[0]) and which == RELEASE_THRESHOLD:
        lock_acquire(&state().pools_lock)
        book = find(<uint64_t>pool)
        if book == NULL:
            book = open_book(<uint64_t>pool, payer(<uint64_t>pool))
        if book != NULL and book.gate != NOBODYS:
            book.keeps = (<const uint64_t*>value)[0]
        keep_most()
        lock_release(&state().pools_lock)
    elif attached() and (which == RESERVED_PEAK or which == USED_PEAK):
        vgpu_ordered_peaks_reset(which == RESERVED_PEAK)
    vgpu_settle_pools()


cdef public void vgpu_pool_trimmed(size_t keep) noexcept nogil:
    if attached():
        vgpu_shrink_returned(keep)
    vgpu_settle_pools()


# --- pools of the program's own

cdef uint32_t payer_at(int type, const Place* place) noexcept nogil:
    """The gate of the device that the pool takes memory from. Managed memory that prefers no device may come to the
    current one's, as that of cuMemAllocManaged."""
    cdef Gate* gate
    cdef uint32_t i
    if place.type == LOCATION_DEVICE:
        for i in range(state().gate_count):
            if state().gates[i].device == place.id:
                return i
    elif type == TYPE_MANAGED:
        gate = vgpu_gate_here()
        return NOBODYS if gate == NULL else gate - &state().gates[0]
    return NOBODYS


cdef public void vgpu_pool_found(void** pool, const void* place, int type) noexcept nogil:
    """The driver has named a pool of its own. The devices' are known without (payer)."""
    if type != TYPE_MANAGED or not attached():
        return
    lock_acquire(&state().pools_lock)
    if find(<uint64_t>pool[0]) == NULL:
        open_book(<uint64_t>pool[0], payer_at(type, <const Place*>place))
    lock_release(&state().pools_lock)


cdef public int cuMemPoolCreate(void** pool, const void* properties) noexcept nogil:
    cdef const PoolProperties* given = <const PoolProperties*>properties
    cdef PoolBook* book
    cdef int result = real_cuMemPoolCreate(pool, properties)
    if result != CUDA_SUCCESS or not attached():
        return result
    lock_acquire(&state().pools_lock)
    book = open_book(<uint64_t>pool[0], payer_at(given.type, &given.place))
    if book != NULL:
        book.bounded = given.most_bytes != 0
        book.private = (
            given.type == TYPE_PINNED and given.place.type == LOCATION_DEVICE and given.handle_types == 0
            and given.most_bytes == 0 and given.usage == 0
        )
    lock_release(&state().pools_lock)
    return result


cdef public int cuMemPoolDestroy(void* pool) noexcept nogil:
    """Its handle may not be asked afterwards: what is still allocated from it stays charged, to the process's end."""
    cdef PoolBook* book
    cdef uint64_t taken = 0, used = 0
    cdef int result
    if not attached():
        return real_cuMemPoolDestroy(pool)
    lock_acquire(&state().pools_lock)        # held across: the driver may hand the handle out again at once
    book = find(<uint64_t>pool)
    if book != NULL and not ask(book, &taken, &used):
        used = book.charged
    result = real_cuMemPoolDestroy(pool)
    if result == CUDA_SUCCESS and book != NULL:
        if book.gate != NOBODYS:
            book.claimed = 0
            settle(book, used, used, 0)
        state().pool_count -= 1
        book[0] = state().pools[state().pool_count]
        keep_most()
    lock_release(&state().pools_lock)
    return result
