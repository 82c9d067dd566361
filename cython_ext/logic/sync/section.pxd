"""The lock of the memory ledger: a futex word that names its owner by slot. TIDs name no thread across PID namespaces.

The word holds ``name``: a bit that no TID has, a tag, and the number of the owner's slot from 1 on. Each process has
another tag, and its slot has the whole name. The owner is dead if the slot is not active, has another name, or has its
``alive`` marked by the kernel (logic/sync/robust.pxd). The broker has a number of its own, and its epoch as the tag. So
a new broker's epoch makes its predecessor's name a dead one. A name that fits no process is a dead one, too. So a
scribbled word costs a recovery and no more.

A waiter takes a dead owner's lock by a compare-and-swap of the word that it has seen, and recovers. It first waits
SECTION_ENDS_NS: ``alive`` belongs to the hook's thread, and the kernel ends threads of a process one after another. The
thread inside may be on another processor, a few microseconds away from the interrupt that ends it.

Threads of one process have one name. They exclude each other as processes do: the word is taken from 0 only.

No thread names the word to the kernel. A waiter that dies leaves at most FUTEX_WAITERS behind. A sleeper reads the word
again every SECTION_LOOK_NS, since nothing wakes it when the owner dies.

*Hooks and brokers of before* put their TID there and have the kernel mark the word. Both kinds exclude each other in
one vGPU, because both take the word from 0, or from a mark, by compare-and-swap. A TID is taken for an owner only while
the page shows that one of those processes may be there. An older process waits in vain for a dead owner of the new
kind, until the broker, or any newer process, takes the lock over. Two *older* hooks in two PID namespaces still do not
exclude each other.
"""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.pages.layout cimport MAX_PROCESSES, SLOT_ACTIVE, SLOT_RESERVED, ActivityPage, Slot
from cython_ext.logic.sync.robust cimport (
    FUTEX_OWNER_DIED, FUTEX_TID_MASK, FUTEX_WAITERS, ROBUST_LOCKED, ROBUST_OWNER_DIED, ROBUST_TIMEOUT, robust_is_held,
)
from cython_ext.native cimport cas32, futex_wait, futex_wake, load32, now_ns, pause, rarely

cdef enum:
    SECTION_NAMED = 1 << 29      # no TID has it
    SECTION_TAG_SHIFT = 8
    SECTION_TAG_MASK = 0x1FFFFF
    SECTION_NUMBER_MASK = 0xFF
    SECTION_BROKER = 64          # the broker's slot, if it had one: the first that no process has

    SECTION_SPINS = 100
    SECTION_LOOK_NS = 5_000_000
    SECTION_ENDS_NS = 2_000_000  # from a death to the last instruction of another thread of that process, at most


cdef inline uint32_t section_name(uint32_t slot, uint32_t tag) noexcept nogil:
    return SECTION_NAMED | (tag & SECTION_TAG_MASK) << SECTION_TAG_SHIFT | (slot + 1)


cdef inline uint32_t section_broker(uint32_t broker_epoch) noexcept nogil:
    return section_name(SECTION_BROKER, broker_epoch)


cdef inline bint section_has_older(const ActivityPage* page) noexcept nogil:
    """Whether some process of the page may put its TID in the word."""
    cdef const Slot* slot
    cdef uint32_t state
    cdef int i
    if load32(&page.naming_epoch) != load32(&page.broker_epoch):
        return 1
    for i in range(MAX_PROCESSES):
        slot = &page.slots[i]
        state = load32(&slot.state)
        if (state == SLOT_ACTIVE or state == SLOT_RESERVED) and load32(&slot.ledger_name) == 0:
            return 1
    return 0


cdef inline bint section_owner_lives(const ActivityPage* page, uint32_t seen) noexcept nogil:
    """Whether the word, as it was seen, names a process that may be inside."""
    cdef uint32_t name = seen & FUTEX_TID_MASK
    cdef uint32_t slot = (name & SECTION_NUMBER_MASK) - 1
    if not name & SECTION_NAMED:
        return section_has_older(page)
    if slot == SECTION_BROKER:
        return name == section_broker(load32(&page.broker_epoch))
    return (
        slot < MAX_PROCESSES and load32(&page.slots[slot].state) == SLOT_ACTIVE
        and load32(&page.slots[slot].ledger_name) == name
        and robust_is_held(load32(<const uint32_t*>&page.slots[slot].alive))
    )


cdef inline int section_wait(ActivityPage* page, uint32_t name, int64_t until_ns) noexcept nogil:
    """ROBUST_LOCKED, ROBUST_OWNER_DIED (locked; what it protects is half done) or, not locked, ROBUST_TIMEOUT."""
    cdef uint32_t* word = <uint32_t*>&page.ledger
    cdef uint32_t seen, dead = 0, waiters = 0
    cdef int64_t look_ns, dead_ns = 0
    cdef int spins = 0
    while True:
        seen = load32(word)
        if not seen & FUTEX_TID_MASK:
            if cas32(word, seen, name | waiters | (seen & FUTEX_WAITERS)):
                return ROBUST_OWNER_DIED if seen & FUTEX_OWNER_DIED else ROBUST_LOCKED
            continue
        if spins < SECTION_SPINS:
            spins += 1
            pause()
            continue
        look_ns = now_ns()
        if section_owner_lives(page, seen):
            dead = 0
        elif dead != seen & FUTEX_TID_MASK:
            dead = seen & FUTEX_TID_MASK
            dead_ns = look_ns
        elif look_ns - dead_ns >= SECTION_ENDS_NS:
            if cas32(word, seen, name | FUTEX_WAITERS):
                return ROBUST_OWNER_DIED
            continue
        if look_ns >= until_ns:
            return ROBUST_TIMEOUT
        if seen & FUTEX_WAITERS or cas32(word, seen, seen | FUTEX_WAITERS):
            look_ns += SECTION_ENDS_NS if dead else SECTION_LOOK_NS
            futex_wait(word, seen | FUTEX_WAITERS, min(until_ns, look_ns))
            waiters = FUTEX_WAITERS      # other threads may sleep behind this one: its release must wake them


cdef inline bint section_try(ActivityPage* page, uint32_t name) noexcept nogil:
    """Take the lock if it is free, and no owner died with it. 0: ``section_wait`` takes it, or reports why not."""
    return cas32(<uint32_t*>&page.ledger, 0, name)


cdef inline void section_leave(ActivityPage* page, uint32_t name) noexcept nogil:
    """Release what ``name`` has; the lock stays as it is where another owner has it by now."""
    cdef uint32_t* word = <uint32_t*>&page.ledger
    if rarely(not cas32(word, name, 0)) and cas32(word, name | FUTEX_WAITERS, 0):
        futex_wake(word, 1)
