"""The process's quota: how much of its vGPU's memory it may own, how much it owns, and how much the program sees.

The hook reserves before the call to the driver, commits or cancels by its result, and releases after a free. Each is an
operation of the limit ledger (logic/memory/ledger.pxd) on the activity page. cuMemGetInfo and cuDeviceTotalMem return
the vGPU's memory to the program.

All of it runs with cold caches, since the driver has been in the kernel. Target: an allocation with its free costs less
than a microsecond.
"""

from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuDeviceTotalMem, real_cuDeviceTotalMem_v2, real_cuMemGetInfo, real_cuMemGetInfo_v2,
)
from cython_ext.hook.hook cimport charge_contexts, vgpu_gate_here, vgpu_log, vgpu_settle_pools, vgpu_trim_pools
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, attached, state
from cython_ext.pages.layout cimport (
    GRANTS_MANAGED, GRANTS_SWAPPABLE, KIND_DEVICE, KIND_MANAGED, MAX_PROCESSES, MEMORY_KINDS, ActivityPage, GrantsPage,
    Slot,
)
from cython_ext.logic.memory.ledger cimport (
    LEDGER_OK, LEDGER_REFUSED, ledger_commit, ledger_lock, ledger_prefetch, ledger_reserve, ledger_unlock, slot_bytes,
    slot_cancel, slot_commit, slot_refused, slot_release, slot_reserve, slot_share,
)
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.logic.memory.pools cimport PoolDue
from cython_ext.logic.sync.robust cimport robust_forget
from cython_ext.logic.sync.section cimport section_name
from cython_ext.native cimport fence, futex_wait, load32, load64, now_ns, rarely, store32, store64

cdef enum:
    MOVE_LOOK_NS = 50_000        # a thread that waits for the process's slot to have moved polls that often

# --- what it may own

cdef uint64_t limit_bytes(const Gate* gate) noexcept nogil:
    """What the processes may own together: the vGPU's limit less what it holds without asking (contexts, modules)."""
    cdef uint64_t limit = load64(&gate.grants.memory_limit_bytes)
    cdef uint64_t implicit = load64(&gate.grants.implicit_bytes)
    return limit - min(limit, implicit)


cdef inline uint64_t process_limit(const Gate* gate) noexcept nogil:
    """What this process may own of it."""
    cdef uint64_t limit = load64(&gate.grants.process_limit_bytes)
    return limit if limit else UINT64_MAX


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
    """Whether the vGPU may have so much more on the card just now, apart from its own limit."""
    return size <= card_left(gate)


cdef inline bint is_bound(const Gate* gate, uint32_t kind) noexcept nogil:
    """To the card, at the time of the allocation."""
    return kind != KIND_MANAGED or load32(&gate.grants.flags) & GRANTS_MANAGED == 0


cdef inline bint lacks_card(const Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    return load64(&gate.grants.card_limit_bytes) != 0 and is_bound(gate, kind) and size > card_left(gate)


# --- the ledger, on the activity page that the gate has now

# Gate.ledger: page, slot and tag may change at any time. They are one word, so that a reader gets three that belong
# together. A page's address leaves the low 12 bits free, and a process's addresses the high 16.

cdef inline ActivityPage* page_at(uint64_t place) noexcept nogil:
    return <ActivityPage*><size_t>(place & 0xFFFFFFFFF000ULL)


cdef inline Slot* slot_at(uint64_t place) noexcept nogil:
    return &page_at(place).slots[place & 0xFFF]


cdef inline uint32_t name_at(uint64_t place) noexcept nogil:
    """The name under which the process takes that page's lock (logic/sync/section.pxd)."""
    return section_name(place & 0xFFF, <uint32_t>(place >> 48))


cdef public uint64_t vgpu_place_books(ActivityPage* page, uint32_t slot_index) noexcept nogil:
    """What ``Gate.ledger`` is with a slot of that page, which shows the name from now on: before anything is done under
    it, and before the slot is active. The tag is another one each time."""
    cdef uint64_t tag = <uint64_t>now_ns() * 0x9E3779B97F4A7C15ULL >> 48
    cdef uint64_t place = tag << 48 | <uint64_t><size_t>page | slot_index
    store32(&page.slots[slot_index].ledger_name, name_at(place))
    return place


cdef inline uint64_t books_place(const Gate* gate) noexcept nogil:
    return load64(&gate.ledger)


cdef uint64_t open_moved(Gate* gate) noexcept nogil:
    cdef uint64_t place = books_place(gate)
    while True:
        if place == 0:
            futex_wait(&state().stopping, 0, now_ns() + MOVE_LOOK_NS)
        elif not ledger_lock(page_at(place), name_at(place)):
            return 0
        elif place == books_place(gate):
            return place
        else:
            close_ledger(place, LEDGER_OK)
        place = books_place(gate)


cdef inline uint64_t open_ledger(Gate* gate) noexcept nogil:
    """Open the ledger where the process's slot is now, locked until ``close_ledger``. 0: the lock could not be had."""
    cdef uint64_t place = books_place(gate)
    if rarely(place == 0 or not ledger_lock(page_at(place), name_at(place))):
        return open_moved(gate) if place == 0 else 0
    if rarely(place != books_place(gate)):
        close_ledger(place, LEDGER_OK)
        return open_moved(gate)
    return place


cdef inline int close_ledger(uint64_t place, int result) noexcept nogil:
    return ledger_unlock(page_at(place), name_at(place), result)


cdef public void vgpu_memory_moves(Gate* gate, ActivityPage* activity, uint32_t slot_index) noexcept nogil:
    """The gate's activity page is lost, and this is its new one. The process's memory is charged there, also beyond a
    limit that has become smaller.

    This waits for threads that already have the old page's lock as the gate's page. Later threads wait for this move.
    """
    cdef uint64_t place = books_place(gate)
    cdef ActivityPage* old = page_at(place)
    cdef const Slot* before = slot_at(place)
    cdef uint32_t name, kind
    store64(&gate.ledger, 0)
    fence()
    if ledger_lock(old, name_at(place)):
        ledger_unlock(old, name_at(place), LEDGER_OK)
    place = vgpu_place_books(activity, slot_index)
    name = name_at(place)
    for kind in range(MEMORY_KINDS):
        if before.committed_bytes[kind]:
            ledger_reserve(activity, name, slot_index, kind, before.committed_bytes[kind], UINT64_MAX, UINT64_MAX)
            ledger_commit(activity, name, slot_index, kind, before.committed_bytes[kind])
    ledger_reserve(activity, name, slot_index, KIND_DEVICE, before.reserved_bytes, UINT64_MAX, UINT64_MAX)
    gate.activity = activity
    gate.slot_index = slot_index
    store64(&gate.ledger, place)


cdef public void vgpu_memory_after_fork() noexcept nogil:
    """The child's thread is another one for the kernel, and ``Slot.alive`` names threads."""
    robust_forget()


# --- what it owns

cdef public bint vgpu_reserve_now(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """``vgpu_reserve`` if it is granted at once; a refusal is no refusal yet."""
    cdef int result = LEDGER_REFUSED
    cdef uint64_t place
    ledger_prefetch(gate.activity, gate.slot)
    place = open_ledger(gate)
    if rarely(place == 0):
        return 0
    if not rarely(lacks_card(gate, kind, size)):
        result = slot_reserve(page_at(place), slot_at(place), size, limit_bytes(gate), process_limit(gate))
    return close_ledger(place, result) == LEDGER_OK


cdef public bint vgpu_reserve_more(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """``vgpu_reserve``, but no pool is asked for anything: the caller holds pools_lock, or has another way."""
    cdef uint64_t place
    if gate == NULL or vgpu_reserve_now(gate, kind, size):
        return 1
    place = open_ledger(gate)
    if place:
        close_ledger(place, slot_refused(slot_at(place), size))
    vgpu_log(b"refused bytes, limit", size, min(limit_bytes(gate), process_limit(gate)))
    return 0


cdef public bint vgpu_reserve(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """1: go on and ask the driver. A NULL gate has no limit: the process has no vGPU. Before anything is refused, what
    the process's own pools keep for nothing goes back to the card."""
    charge_contexts(gate)
    if gate == NULL or vgpu_reserve_now(gate, kind, size):
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
    """Charge the growth of a pool. 0: ``limited``, and over the limit; it is charged all the same. The caller holds
    pools_lock."""
    cdef bint allowed = due.beyond == 0 or not limited or vgpu_reserve_more(gate, kind, due.beyond)
    if due.beyond and not (limited and allowed):
        vgpu_charge(gate, due.beyond)
    vgpu_commit(gate, kind, due.commit + due.beyond)
    vgpu_cancel(gate, due.cancel)
    vgpu_release(gate, kind, due.release)
    return allowed


cdef public void vgpu_charge(Gate* gate, uint64_t size) noexcept nogil:
    """Charge memory that can no longer be refused, also beyond the limit; the caller commits it."""
    cdef uint64_t place = open_ledger(gate)
    if place:
        close_ledger(place, slot_reserve(page_at(place), slot_at(place), size, UINT64_MAX, UINT64_MAX))


cdef public void vgpu_commit(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    cdef uint64_t place = open_ledger(gate) if size else 0
    if place:
        close_ledger(place, slot_commit(page_at(place), slot_at(place), kind, size))


cdef public void vgpu_cancel(Gate* gate, uint64_t size) noexcept nogil:
    cdef uint64_t place = open_ledger(gate) if size else 0
    if place:
        close_ledger(place, slot_cancel(page_at(place), slot_at(place), size))


cdef public void vgpu_release(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    cdef uint64_t place = open_ledger(gate) if size else 0
    if place:
        close_ledger(place, slot_release(page_at(place), slot_at(place), kind, size))


cdef public void vgpu_share(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil:
    """Memory that was charged as ``kind`` is another process's, too, from now on. The charge stays as it is."""
    cdef uint64_t place = open_ledger(gate) if size else 0
    if place:
        close_ledger(place, slot_share(page_at(place), slot_at(place), kind, size))


# --- what the program sees

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
    """The driver takes a null for either result."""
    cdef int result = real_cuMemGetInfo_v2(free, total)
    cdef Gate* gate = vgpu_gate_here()
    cdef size_t card_free = 0, card_total = 0
    cdef uint64_t shown_total, shown_free
    if result == CUDA_SUCCESS and gate != NULL:
        if free == NULL or total == NULL:
            result = real_cuMemGetInfo_v2(&card_free, &card_total)
        else:
            card_free, card_total = free[0], total[0]
        if result != CUDA_SUCCESS:
            return result
        charge_contexts(gate)
        vgpu_settle_pools()
        vgpu_memory_reading(gate, card_total, card_free, &shown_total, &shown_free)
        if total != NULL:
            total[0] = shown_total
        if free != NULL:
            free[0] = shown_free
    return result


cdef inline unsigned int as_32_bits(uint64_t value) noexcept nogil:
    return <unsigned int>min(value, <uint64_t>0xFFFFFFFF)


cdef public int cuMemGetInfo(unsigned int* free, unsigned int* total) noexcept nogil:
    cdef int result = real_cuMemGetInfo(free, total)
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t shown_total, shown_free
    if result == CUDA_SUCCESS and gate != NULL:
        charge_contexts(gate)
        vgpu_settle_pools()
        vgpu_memory_reading(gate, <uint64_t>-1, <uint64_t>-1, &shown_total, &shown_free)
        if total != NULL:
            total[0] = as_32_bits(shown_total)
        if free != NULL:
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
    if result == CUDA_SUCCESS and total != NULL:
        total[0] = shown_total_of(device, total[0])
    return result


cdef public int cuDeviceTotalMem(unsigned int* total, int device) noexcept nogil:
    cdef int result = real_cuDeviceTotalMem(total, device)
    if result == CUDA_SUCCESS and total != NULL:
        total[0] = as_32_bits(shown_total_of(device, total[0]))
    return result
