"""The owners of a store's blocks: host memory for what is swapped out of the card (``layout.StorePage``).

A block is free (0) or has the name of one process. No other process has that name while it lives. So a process takes a
block by one compare-and-swap and gives it back by one store, without a lock that it could die with. A killed process
leaves its name behind, at whatever moment it dies. Then the server gives back all blocks under that name.

A process *keeps* a block whose memory is on the card again: the block has a copy, which may still be the same when the
memory leaves. A process *reserves* a block that it has pinned, and has not used yet. Any process may take a kept or a
reserved block where there is no free one. So its owner takes it back by a compare-and-swap, too.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.pages.layout cimport StorePage
from cython_ext.native cimport cas64, load64, store64

cdef enum:
    BLOCK_BYTES = 2 << 20
    SEGMENT_BLOCKS = 64      # get memory together: 128 MiB
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


cdef inline uint64_t kept_by(uint64_t name) noexcept nogil:
    """The owner's word of a block that this process keeps: a name has 62 bits."""
    return name | (<uint64_t>1 << 63)


cdef inline uint64_t reserved_by(uint64_t name) noexcept nogil:
    """The owner's word of a block that this process reserves."""
    return name | (<uint64_t>1 << 62)


cdef inline bint is_kept(uint64_t owner) noexcept nogil:
    return owner >> 63


cdef inline bint is_reserved(uint64_t owner) noexcept nogil:
    return owner >> 62 == 1


cdef inline uint64_t name_in(uint64_t owner) noexcept nogil:
    return owner & ((<uint64_t>1 << 62) - 1)


cdef inline bint is_used(uint64_t owner) noexcept nogil:
    """Whether the block may have what is nowhere else."""
    return owner != 0 and owner == name_in(owner)


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


cdef inline void store_keep(StorePage* store, uint64_t block, uint64_t name) noexcept nogil:
    """A block of this process."""
    cas64(&store_owners(store)[block], name, kept_by(name))


cdef inline bint store_reclaim(StorePage* store, uint64_t block, uint64_t name) noexcept nogil:
    """A block that this process kept is its own again, with the copy in it; 0: another process has taken it."""
    return cas64(&store_owners(store)[block], kept_by(name), name)


cdef inline void store_drop(StorePage* store, uint64_t block, uint64_t name) noexcept nogil:
    """A block that this process kept; another process may have taken it."""
    cas64(&store_owners(store)[block], kept_by(name), 0)


cdef inline bint store_reserve(StorePage* store, uint64_t block, uint64_t name) noexcept nogil:
    """0: the block is not free."""
    return cas64(&store_owners(store)[block], 0, reserved_by(name))


cdef inline bint store_unreserve(StorePage* store, uint64_t block, uint64_t name) noexcept nogil:
    """The block is free. 0: this process does not reserve it."""
    return cas64(&store_owners(store)[block], reserved_by(name), 0)


cdef inline int64_t store_take_reserved(
    StorePage* store, uint64_t name, bint own, uint64_t begin, uint64_t end
) noexcept nogil:
    """Take a block from ``begin`` on and before ``end`` that this process reserves (``own``), or another one; -1: there
    is none."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i, owner
    for i in range(begin, end):
        owner = load64(&owners[i])
        if is_reserved(owner) and (name_in(owner) == name) == own and cas64(&owners[i], owner, name):
            return <int64_t>i
    return -1


cdef inline int64_t store_take_kept(
    StorePage* store, uint64_t name, uint64_t keeper, uint64_t begin, uint64_t end
) noexcept nogil:
    """Take a block from ``begin`` on and before ``end`` that the process ``keeper`` keeps, 0: any other process; -1:
    there is none."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i, owner
    for i in range(begin, end):
        owner = load64(&owners[i])
        if not is_kept(owner) or (owner == kept_by(name) if keeper == 0 else owner != kept_by(keeper)):
            continue
        if cas64(&owners[i], owner, name):
            return <int64_t>i
    return -1


cdef inline uint64_t store_give_all(
    StorePage* store, uint64_t blocks, const uint64_t* names, uint64_t count
) noexcept nogil:
    """Give back all blocks under any of ``count`` names; the result is how many. Each owner is read before a write.
    Reason: most blocks have other owners, which are at work there."""
    cdef uint64_t* owners = store_owners(store)
    cdef uint64_t i, k, name, owner, last = 0, given = 0
    cdef bint theirs = 0
    for i in range(blocks):
        owner = load64(&owners[i])
        if owner == 0:
            continue
        name = name_in(owner)
        if name != last:
            last, k = name, 0
            while k < count and names[k] != name:
                k += 1
            theirs = k < count
        if theirs:
            given += cas64(&owners[i], owner, 0)
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
