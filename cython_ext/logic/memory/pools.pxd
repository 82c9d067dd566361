"""What a memory pool costs: the growth reserved before an allocation, and what is charged once it is known. Pure.

Threads allocate from a pool at once. It is not known before which allocation will find room in it and which will make
it grow. So the reservation is for all that are under way together: what the pool lacks for them, in whole steps.
"""

from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t

cdef enum:
    POOL_STEP = 32 << 20     # a pool takes so much from the card at a time


cdef struct PoolBook:        # the caller locks
    uint64_t pool            # its handle
    uint32_t gate            # set by the caller: the gate of its ledger
    uint32_t private         # likewise: its memory can be swappable instead (stream_ordered.pyx)
    uint32_t bounded         # likewise: it has a size limit
    uint64_t keeps           # likewise: its release threshold, as the program has set it
    uint64_t charged         # of what it has taken: committed in the ledger
    uint64_t reserved        # in the ledger, for growth
    uint64_t claimed         # sizes of allocations that the driver has not answered
    uint64_t stale           # of what it reports as used: freed by cuMemFree, which drivers do not subtract (580.159)


cdef struct PoolDue:         # for the ledger
    uint64_t commit          # of what is reserved
    uint64_t beyond          # grown by more than that: reserve it, then commit it
    uint64_t cancel          # reserved for nothing
    uint64_t release


cdef inline uint64_t pool_used(const PoolBook* book, uint64_t taken, uint64_t used) noexcept nogil:
    """What is in use of what a pool has ``taken``, where the driver reports ``used``."""
    return min(used - min(used, book.stale), taken)


cdef inline void pool_freed(PoolBook* book, uint64_t before, uint64_t after, uint64_t size) noexcept nogil:
    """``size`` bytes of it were freed by cuMemFree. The driver reported ``before`` used bytes, and now ``after``."""
    if before < after + size:
        book.stale += size


cdef inline uint64_t pool_steps(uint64_t size) noexcept nogil:
    """``size`` in whole steps."""
    return size if size > UINT64_MAX - POOL_STEP else (size + POOL_STEP - 1) / POOL_STEP * POOL_STEP


cdef inline uint64_t pool_lacks(uint64_t taken, uint64_t used, uint64_t claimed) noexcept nogil:
    """What a pool that has ``taken`` and handed out so much will take for ``claimed`` more, unless what it has free is
    in pieces."""
    cdef uint64_t needed = used + claimed
    return pool_steps(needed - taken) if needed > taken else 0


cdef inline uint64_t pool_growth(const PoolBook* book, uint64_t taken, uint64_t used, uint64_t size) noexcept nogil:
    """What has to be reserved for ``size`` bytes more. Settle before: what is reserved pays for growth to come."""
    cdef uint64_t lacks = pool_lacks(taken, used, book.claimed + size)
    return lacks - book.reserved if lacks > book.reserved else 0


cdef inline void pool_begin(PoolBook* book, uint64_t asked, uint64_t size) noexcept nogil:
    """So much was reserved for an allocation of ``size`` bytes that is about to be made."""
    book.reserved += asked
    book.claimed += size


cdef inline void pool_end(PoolBook* book, uint64_t size) noexcept nogil:
    """That allocation has been answered; the pool is to be settled."""
    book.claimed -= size


cdef inline void pool_settle(PoolBook* book, uint64_t taken, uint64_t used, PoolDue* due) noexcept nogil:
    """The pool has ``taken`` so much, and handed out of it what is ``used``."""
    cdef uint64_t grown = taken - book.charged if taken > book.charged else 0
    cdef uint64_t lacks = pool_lacks(taken, used, book.claimed)
    due.commit = min(grown, book.reserved)
    due.beyond = grown - due.commit
    due.release = book.charged - taken if book.charged > taken else 0
    book.reserved -= due.commit
    due.cancel = book.reserved - lacks if book.reserved > lacks else 0
    book.reserved -= due.cancel
    book.charged = taken
