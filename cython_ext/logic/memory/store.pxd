"""The owners of a store's blocks: host memory for what is swapped out of the card (``layout.StorePage``).

A block is free (0) or has the name of one process. No other process has that name while it lives. So a process takes a
block by one compare-and-swap and gives it back by one store, without a lock that it could die with. A killed process
leaves its name behind, at whatever moment it dies. Then the server gives back all blocks under that name.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.pages.layout cimport StorePage
from cython_ext.native cimport cas64, load64, store64

cdef enum:
    BLOCK_BYTES = 2 << 20
    SEGMENT_BLOCKS = 64      # get memory together, and are pinned together: 128 MiB
    START_BITS = 40


cdef inline uint64_t* store_owners(StorePage* store) noexcept nogil:
    return <uint64_t*>(store + 1)


cdef inline uint64_t store_size(uint64_t blocks, uint64_t* offset) noexcept nogil:
    """Bytes of a store, and where its first block lies."""
    offset[0] = sizeof(StorePage) + blocks * sizeof(uint64_t)
    offset[0] += (<uint64_t>-offset[0]) % BLOCK_BYTES
    return offset[0] + blocks * BLOCK_BYTES


cdef inline uint64_t store_name(uint32_t pid, uint64_t start_time) noexcept nogil:
    """Of a process, never 0; a pid has at most 22 bits."""
    return (<uint64_t>pid << START_BITS) | (start_time & ((<uint64_t>1 << START_BITS) - 1))


cdef inline int64_t store_take(StorePage* store, uint64_t name, uint64_t begin, uint64_t end) noexcept nogil:
    """Take a free block from ``begin`` on and before ``end``; -1: there is none."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i
    for i in range(begin, end):
        if load64(&owners[i]) == 0 and cas64(&owners[i], 0, name):
            return <int64_t>i
    return -1


cdef inline void store_give(StorePage* store, uint64_t block) noexcept nogil:
    store64(&store_owners(store)[block], 0)


cdef inline uint64_t store_give_all(
    StorePage* store, uint64_t blocks, const uint64_t* names, uint64_t count
) noexcept nogil:
    """Give back all blocks under any of ``count`` names; the result is how many. Each owner is read before a write.
    Reason: most blocks have other owners, which are at work there."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i, k, name, last = 0, given = 0
    cdef bint theirs = 0
    for i in range(blocks):
        name = load64(&owners[i])
        if name == 0:
            continue
        if name != last:
            last, k = name, 0
            while k < count and names[k] != name:
                k += 1
            theirs = k < count
        if theirs:
            given += cas64(&owners[i], name, 0)
    return given


cdef inline bint store_take_all(StorePage* store, uint64_t blocks, uint64_t name) noexcept nogil:
    """Take every block if all are free; else none."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i
    for i in range(blocks):
        if not cas64(&owners[i], 0, name):
            store_give_all(store, i, &name, 1)
            return 0
    return 1
