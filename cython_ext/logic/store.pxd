"""Whose each block of a store is: host memory for what is away from the card (``layout.StorePage``).

A block is nobody's (0) or a process's, under a name that no other has while it lives. So one is taken by one
compare-and-swap and given back by one store, without a lock that a process could die with. Whoever is killed leaves its
name, at whatever moment that was, and the server gives back what stands under it.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.layout cimport StorePage
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
    """A block from ``begin`` on and before ``end`` that was nobody's; -1: there is none."""
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
    """All that stands under any of ``count`` names; so many it was. Read before anything is written: most of it is not
    theirs, and others are at work there."""
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
    """Every block, if none is anybody's; else none."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i
    for i in range(blocks):
        if not cas64(&owners[i], 0, name):
            store_give_all(store, i, &name, 1)
            return 0
    return 1
