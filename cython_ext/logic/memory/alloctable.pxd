"""The process's own allocations: device address → (bytes, kind, aux), so that a free knows what it gives back.

Robin Hood hashing (Celis 1986) with deletion by shifting back: no tombstones, short probes at 3/4 load. Memory comes
from mmap and doubles. So the table disturbs no program whose malloc is interposed, or that calls the hook from inside
it. The caller locks.
"""

from libc.stdint cimport uint32_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from cython_ext.logic.meter.durations cimport mix64
from cython_ext.native cimport prefetch, rarely

cdef enum:
    ALLOC_LEAST = 256        # blocks of the first table, a power of two


cdef struct Block:
    uint64_t address         # 0: empty
    uint64_t bytes
    uint64_t aux             # the caller's: a handle, a pool, a stream
    uint32_t kind            # KIND_*
    uint32_t flags           # the caller's


cdef struct AllocTable:      # all zero is an empty table
    Block* blocks
    uint64_t capacity        # a power of two, or 0
    uint64_t count


cdef inline uint64_t probe_length(const AllocTable* table, uint64_t at) noexcept nogil:
    """How far the block at index ``at`` sits from where its address hashes to."""
    return (at - mix64(table.blocks[at].address)) & (table.capacity - 1)


cdef inline Block* alloc_find(const AllocTable* table, uint64_t address) noexcept nogil:
    """The block that begins at ``address``, or NULL. Valid until the next insertion or removal."""
    cdef uint64_t mask = table.capacity - 1
    cdef uint64_t at, length = 0
    if table.count == 0 or address == 0:
        return NULL
    at = mix64(address) & mask
    while table.blocks[at].address != address:
        if table.blocks[at].address == 0 or probe_length(table, at) < length:
            return NULL
        at = (at + 1) & mask
        length += 1
    return &table.blocks[at]


cdef inline void alloc_place(AllocTable* table, Block block) noexcept nogil:
    """There is room, and the address is not there yet."""
    cdef uint64_t mask = table.capacity - 1
    cdef uint64_t at = mix64(block.address) & mask
    cdef uint64_t length = 0, other
    cdef Block richer
    while table.blocks[at].address != 0:
        other = probe_length(table, at)
        if other < length:
            richer = table.blocks[at]
            table.blocks[at] = block
            block = richer
            length = other
        at = (at + 1) & mask
        length += 1
    table.blocks[at] = block
    table.count += 1


cdef inline bint alloc_grow(AllocTable* table) noexcept nogil:
    cdef AllocTable bigger
    cdef uint64_t i
    cdef void* memory
    bigger.capacity = 2 * table.capacity if table.capacity else ALLOC_LEAST
    bigger.count = 0
    memory = mmap(NULL, bigger.capacity * sizeof(Block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if memory == MAP_FAILED:
        return 0
    bigger.blocks = <Block*>memory
    for i in range(table.capacity):
        if table.blocks[i].address != 0:
            alloc_place(&bigger, table.blocks[i])
    if table.capacity:
        munmap(table.blocks, table.capacity * sizeof(Block))
    table[0] = bigger
    return 1


cdef inline bint alloc_add(AllocTable* table, const Block* block) noexcept nogil:
    """Note a block at an address, not 0, that is not there yet: 1; 0 (nothing changed) without memory."""
    if rarely(4 * (table.count + 1) > 3 * table.capacity) and not alloc_grow(table):
        return 0
    alloc_place(table, block[0])
    return 1


cdef inline bint alloc_insert(AllocTable* table, const Block* block) noexcept nogil:
    """Note a block, replacing one at the same address: 1; 0 (nothing changed) without memory or for address 0."""
    cdef Block* known
    if block.address == 0:
        return 0
    known = alloc_find(table, block.address)
    if known != NULL:
        known[0] = block[0]
        return 1
    return alloc_add(table, block)


cdef inline void alloc_prefetch(const AllocTable* table, uint64_t address) noexcept nogil:
    """Prefetch the first place of ``address``. The table may grow meanwhile: nothing is read."""
    prefetch(table.blocks + (mix64(address) & (table.capacity - 1)))


cdef inline bint alloc_remove(AllocTable* table, uint64_t address, Block* out) noexcept nogil:
    """Remove the block that begins at ``address``, and copy it out: 1; 0 if there is none."""
    cdef uint64_t mask = table.capacity - 1
    cdef uint64_t at, following
    cdef Block* found = alloc_find(table, address)
    if found == NULL:
        return 0
    out[0] = found[0]
    at = <uint64_t>(found - table.blocks)
    following = (at + 1) & mask
    while table.blocks[following].address != 0 and probe_length(table, following) > 0:
        table.blocks[at] = table.blocks[following]
        at = following
        following = (following + 1) & mask
    table.blocks[at].address = 0
    table.count -= 1
    return 1


cdef inline void alloc_clear(AllocTable* table) noexcept nogil:
    if table.capacity:
        munmap(table.blocks, table.capacity * sizeof(Block))
    table.blocks = NULL
    table.capacity = 0
    table.count = 0
