"""The limit ledger: what the processes of a vGPU own of its memory, in the activity page, exact across kill -9.

The truth is two words per slot and kind: ``reserved_bytes`` (requested; the driver has not answered yet) and
``committed_bytes[kind]``. ``charged_bytes`` is their sum over all slots, kept so that a request needs no scan. An
operation that sets one word has happened once that is written. A commit sets two. So the process first writes it down
as an intent (``intent_*``, absolute values, hence safe to repeat), then carries it out, then clears the intent. The
next thread that gets the lock from a dead owner repeats each intent and adds up the sum anew. ARIES (Mohan et al. 1992)
calls it redo; this is its smallest form.

An allocation waits for the lines that are written here, so these are few: the lock's, the sum's and one or two of the
slot's. ``slot_*`` are the operations for a caller that has the lock already.

Each operation is given the name under which it takes the lock (logic/sync/section.pxd).

A tenant may write anything in the page. So sums saturate, a slot cannot give back more than it owns, and waits are
bounded.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint32_t, uint64_t

from cython_ext.pages.layout cimport (
    KIND_SHARED, MAX_PROCESSES, MEMORY_KINDS, SLOT_DEAD, SLOT_FREE, ActivityPage, Slot,
)
from cython_ext.logic.sync.robust cimport ROBUST_LOCKED, ROBUST_OWNER_DIED
from cython_ext.logic.sync.section cimport section_leave, section_try, section_wait
from cython_ext.native cimport load32, load64, now_ns, prefetch, rarely, store32, store64

cdef enum:
    LEDGER_OK = 0
    LEDGER_REFUSED = 1       # reserve: over the limit; others: the slot does not own that much
    LEDGER_BROKEN = 2        # the lock could not be had in time: its holder is stopped, or the page was scribbled on
    LEDGER_PATIENCE_SECONDS = 3


cdef inline uint64_t add_bytes(uint64_t a, uint64_t b) noexcept nogil:
    return a + b if a <= UINT64_MAX - b else UINT64_MAX


cdef inline uint32_t* ledger_word(ActivityPage* page) noexcept nogil:
    return <uint32_t*>&page.ledger


cdef inline void ledger_init(ActivityPage* page) noexcept nogil:
    """By the broker, before any hook has the page."""
    store32(ledger_word(page), 0)
    store64(&page.charged_bytes, 0)


cdef inline uint64_t slot_bytes(const Slot* slot) noexcept nogil:
    """What the slot owns; meaningful while its intent is clear."""
    cdef const uint64_t* each = &slot.committed_bytes[0]
    cdef uint64_t total = load64(&slot.reserved_bytes)
    cdef int kind
    if not rarely((total | each[0] | each[1] | each[2] | each[3] | each[4] | each[5] | each[6] | each[7]) >> 60 != 0):
        return total + each[0] + each[1] + each[2] + each[3] + each[4] + each[5] + each[6] + each[7]
    for kind in range(MEMORY_KINDS):
        total = add_bytes(total, load64(&slot.committed_bytes[kind]))
    return total


cdef inline uint64_t ledger_sum(const ActivityPage* page) noexcept nogil:
    cdef uint64_t total = 0
    cdef int i
    for i in range(MAX_PROCESSES):
        total = add_bytes(total, slot_bytes(&page.slots[i]))
    return total


cdef inline void ledger_apply(ActivityPage* page, uint64_t* word, uint64_t after) noexcept nogil:
    """Set one of a slot's words: under the lock, whole even if its holder dies between any two instructions."""
    cdef uint64_t before = word[0], charged = page.charged_bytes
    store64(word, after)
    store64(&page.charged_bytes, add_bytes(charged - min(before, charged), after))
    store64(&page.ledger_epoch, page.ledger_epoch + 1)


cdef inline void ledger_turn(
    ActivityPage* page, Slot* slot, uint32_t kind, uint64_t reserved, uint64_t committed
) noexcept nogil:
    """Set two of the slot's words as one; their sum stays."""
    store64(&slot.intent_bytes, committed)
    store64(&slot.intent_reserved_bytes, reserved)
    store64(&slot.intent_kind, kind + 1)
    store64(&slot.reserved_bytes, reserved)
    store64(&slot.committed_bytes[kind], committed)
    store64(&slot.intent_kind, 0)
    store64(&page.ledger_epoch, page.ledger_epoch + 1)


cdef inline void ledger_recover(ActivityPage* page) noexcept nogil:
    """The lock's last owner died: carry out its intent, then add up. Safe to repeat from any point."""
    cdef Slot* slot
    cdef uint64_t intent
    cdef int i
    for i in range(MAX_PROCESSES):
        slot = &page.slots[i]
        intent = load64(&slot.intent_kind)
        if 0 < intent <= MEMORY_KINDS:
            store64(&slot.reserved_bytes, slot.intent_reserved_bytes)
            store64(&slot.committed_bytes[intent - 1], slot.intent_bytes)
        store64(&slot.intent_kind, 0)
    store64(&page.charged_bytes, ledger_sum(page))
    store64(&page.ledger_epoch, page.ledger_epoch + 1)


cdef inline bint ledger_wait(ActivityPage* page, uint32_t name) noexcept nogil:
    cdef int result = section_wait(page, name, now_ns() + <int64_t>LEDGER_PATIENCE_SECONDS * 1_000_000_000)
    if result == ROBUST_OWNER_DIED:
        ledger_recover(page)
        return 1
    return result == ROBUST_LOCKED


cdef inline bint ledger_lock(ActivityPage* page, uint32_t name) noexcept nogil:
    return 1 if not rarely(not section_try(page, name)) else ledger_wait(page, name)     # mostly without the clock


cdef inline int ledger_unlock(ActivityPage* page, uint32_t name, int result) noexcept nogil:
    section_leave(page, name)
    return result


cdef inline void ledger_prefetch(ActivityPage* page, const Slot* slot) noexcept nogil:
    """Prefetch all lines that an operation touches, for a caller that is about to begin one."""
    prefetch(ledger_word(page))
    prefetch(&page.charged_bytes)
    prefetch(&slot.reserved_bytes)
    prefetch(&slot.intent_kind)


# --- for a caller that has the lock

cdef inline int slot_reserve(
    ActivityPage* page, Slot* slot, uint64_t size_bytes, uint64_t limit_bytes, uint64_t process_limit_bytes
) noexcept nogil:
    """As ``ledger_reserve``, but a refusal is not counted."""
    cdef uint64_t owned = slot_bytes(slot)
    if (
        size_bytes > min(limit_bytes, process_limit_bytes) or load64(&page.charged_bytes) > limit_bytes - size_bytes
        or owned > process_limit_bytes - size_bytes
    ):
        return LEDGER_REFUSED
    ledger_apply(page, &slot.reserved_bytes, add_bytes(slot.reserved_bytes, size_bytes))
    owned = add_bytes(owned, size_bytes)
    if owned > slot.peak_bytes:
        store64(&slot.peak_bytes, owned)
    return LEDGER_OK


cdef inline int slot_refused(Slot* slot, uint64_t size_bytes) noexcept nogil:
    store64(&slot.refusals, slot.refusals + 1)
    store64(&slot.refused_bytes, size_bytes)
    return LEDGER_REFUSED


cdef inline int slot_commit(ActivityPage* page, Slot* slot, uint32_t kind, uint64_t size_bytes) noexcept nogil:
    cdef uint64_t reserved = slot.reserved_bytes
    if reserved < size_bytes:
        return LEDGER_REFUSED
    ledger_turn(page, slot, kind, reserved - size_bytes, add_bytes(slot.committed_bytes[kind], size_bytes))
    return LEDGER_OK


cdef inline int slot_cancel(ActivityPage* page, Slot* slot, uint64_t size_bytes) noexcept nogil:
    if slot.reserved_bytes < size_bytes:
        return LEDGER_REFUSED
    ledger_apply(page, &slot.reserved_bytes, slot.reserved_bytes - size_bytes)
    return LEDGER_OK


cdef inline int slot_release(ActivityPage* page, Slot* slot, uint32_t kind, uint64_t size_bytes) noexcept nogil:
    if slot.committed_bytes[kind] < size_bytes:
        return LEDGER_REFUSED
    ledger_apply(page, &slot.committed_bytes[kind], slot.committed_bytes[kind] - size_bytes)
    return LEDGER_OK


cdef inline int slot_share(ActivityPage* page, Slot* slot, uint32_t kind, uint64_t size_bytes) noexcept nogil:
    """What was committed as ``kind`` is of KIND_SHARED from now on. In between it is reserved, so the sum stays, also
    if the process is killed there."""
    if kind == KIND_SHARED or slot.committed_bytes[kind] < size_bytes:
        return LEDGER_REFUSED
    ledger_turn(
        page, slot, kind, add_bytes(slot.reserved_bytes, size_bytes), slot.committed_bytes[kind] - size_bytes
    )
    return slot_commit(page, slot, KIND_SHARED, size_bytes)


# --- whole operations

cdef inline int ledger_reserve(
    ActivityPage* page, uint32_t name, uint32_t slot_index, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes,
    uint64_t process_limit_bytes
) noexcept nogil:
    """Reserve, before the call to the driver. ``limit_bytes``: the vGPU's memory limit less what it holds implicitly;
    ``process_limit_bytes``: the most that the slot may own.

    The kind counts only from the commit on, but is given here too so that one call site has one signature.
    """
    cdef int result
    if slot_index >= MAX_PROCESSES or kind >= MEMORY_KINDS or not ledger_lock(page, name):
        return LEDGER_BROKEN
    result = slot_reserve(page, &page.slots[slot_index], size_bytes, limit_bytes, process_limit_bytes)
    if result == LEDGER_REFUSED:
        slot_refused(&page.slots[slot_index], size_bytes)
    return ledger_unlock(page, name, result)


cdef inline int ledger_commit(
    ActivityPage* page, uint32_t name, uint32_t slot_index, uint32_t kind, uint64_t size_bytes
) noexcept nogil:
    """The driver gave what was reserved."""
    if slot_index >= MAX_PROCESSES or kind >= MEMORY_KINDS or not ledger_lock(page, name):
        return LEDGER_BROKEN
    return ledger_unlock(page, name, slot_commit(page, &page.slots[slot_index], kind, size_bytes))


cdef inline int ledger_cancel(
    ActivityPage* page, uint32_t name, uint32_t slot_index, uint32_t kind, uint64_t size_bytes
) noexcept nogil:
    """The driver refused what was reserved."""
    if slot_index >= MAX_PROCESSES or kind >= MEMORY_KINDS or not ledger_lock(page, name):
        return LEDGER_BROKEN
    return ledger_unlock(page, name, slot_cancel(page, &page.slots[slot_index], size_bytes))


cdef inline int ledger_release(
    ActivityPage* page, uint32_t name, uint32_t slot_index, uint32_t kind, uint64_t size_bytes
) noexcept nogil:
    """The driver took back what was committed."""
    if slot_index >= MAX_PROCESSES or kind >= MEMORY_KINDS or not ledger_lock(page, name):
        return LEDGER_BROKEN
    return ledger_unlock(page, name, slot_release(page, &page.slots[slot_index], kind, size_bytes))


cdef inline int ledger_share(
    ActivityPage* page, uint32_t name, uint32_t slot_index, uint32_t kind, uint64_t size_bytes
) noexcept nogil:
    """What was committed as ``kind`` is other processes', too, from now on."""
    if slot_index >= MAX_PROCESSES or kind >= MEMORY_KINDS or not ledger_lock(page, name):
        return LEDGER_BROKEN
    return ledger_unlock(page, name, slot_share(page, &page.slots[slot_index], kind, size_bytes))


cdef inline int ledger_reap(
    ActivityPage* page, uint32_t name, uint32_t slot_index, bint keeps_shared, uint64_t* freed_bytes
) noexcept nogil:
    """By the broker, once the driver no longer lists the process: SLOT_DEAD → SLOT_FREE, its bytes to ``freed_bytes``.
    ``keeps_shared``: other processes still have its shared memory, so that stays charged, and the slot stays dead.

    LEDGER_REFUSED if the slot is not dead: so a second reaping gives nothing back twice.
    """
    cdef Slot* slot
    cdef int kind
    freed_bytes[0] = 0
    if slot_index >= MAX_PROCESSES or not ledger_lock(page, name):
        return LEDGER_BROKEN
    slot = &page.slots[slot_index]
    if load32(&slot.state) != SLOT_DEAD:
        return ledger_unlock(page, name, LEDGER_REFUSED)
    freed_bytes[0] = slot_bytes(slot)
    ledger_apply(page, &slot.reserved_bytes, 0)
    for kind in range(MEMORY_KINDS):
        if not (keeps_shared and kind == KIND_SHARED):
            ledger_apply(page, &slot.committed_bytes[kind], 0)
    freed_bytes[0] -= slot_bytes(slot)
    store64(&page.charged_bytes, ledger_sum(page))
    if not keeps_shared:
        store32(&slot.state, SLOT_FREE)
    return ledger_unlock(page, name, LEDGER_OK)


cdef inline int ledger_check(ActivityPage* page, uint32_t name) noexcept nogil:
    """LEDGER_OK if ``charged_bytes`` is the sum and no intent is left; LEDGER_REFUSED if not, and then it is repaired.
    """
    cdef bint right
    cdef int i
    if not ledger_lock(page, name):
        return LEDGER_BROKEN
    right = load64(&page.charged_bytes) == ledger_sum(page)
    for i in range(MAX_PROCESSES):
        right = right and load64(&page.slots[i].intent_kind) == 0
    if not right:
        ledger_recover(page)
    return ledger_unlock(page, name, LEDGER_OK if right else LEDGER_REFUSED)
