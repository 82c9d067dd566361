"""What a memory pool costs: the growth reserved before an allocation, and what is charged once it is known. Pure.

Threads allocate from a pool at once, and nobody can tell whose allocation made it grow. So what was reserved for any of
them pays for whatever it has grown by, and goes back where more is left of it than those under way have asked for.
"""

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    POOL_STEP = 32 << 20     # a pool takes so much from the card at a time


cdef struct PoolBook:        # the caller locks
    uint64_t pool            # its handle
    uint32_t gate            # the caller's: whose ledger it is in
    uint64_t charged         # of what it has taken: committed in the ledger
    uint64_t reserved        # in the ledger, for growth ...
    uint64_t under_way       # ... of allocations that the driver has not answered, as much as they asked for
    uint64_t claimed         # their sizes: of the room that the pool still shows, this is spoken for


cdef struct PoolDue:         # for the ledger
    uint64_t commit          # of what is reserved
    uint64_t beyond          # grown by more than that: reserve it, then commit it
    uint64_t cancel          # reserved for nothing
    uint64_t release


cdef inline uint64_t pool_growth(const PoolBook* book, uint64_t taken, uint64_t used, uint64_t size) noexcept nogil:
    """What a pool that has ``taken`` and handed out so much will take for ``size`` bytes more, unless what it has free
    is in pieces."""
    cdef uint64_t spoken_for = used + book.claimed
    cdef uint64_t room = taken - spoken_for if taken > spoken_for else 0
    return (size - room + POOL_STEP - 1) / POOL_STEP * POOL_STEP if size > room else 0


cdef inline void pool_begin(PoolBook* book, uint64_t asked, uint64_t size) noexcept nogil:
    """So much was reserved for an allocation of ``size`` bytes that is about to be made."""
    book.reserved += asked
    book.under_way += asked
    book.claimed += size


cdef inline void pool_end(PoolBook* book, uint64_t asked, uint64_t size) noexcept nogil:
    """That allocation has been answered; the pool is to be settled."""
    book.under_way -= asked
    book.claimed -= size


cdef inline void pool_settle(PoolBook* book, uint64_t taken, PoolDue* due) noexcept nogil:
    """The pool has ``taken`` so much."""
    cdef uint64_t grown = taken - book.charged if taken > book.charged else 0
    due.commit = min(grown, book.reserved)
    due.beyond = grown - due.commit
    due.release = book.charged - taken if book.charged > taken else 0
    book.reserved -= due.commit
    due.cancel = book.reserved - book.under_way if book.reserved > book.under_way else 0
    book.reserved -= due.cancel
    book.charged = taken
