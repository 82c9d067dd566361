"""Small allocations within arenas of 2 MiB, where memory is made of whole pieces (--oversubscribe swap).

The driver's own allocator does the same (logic/memory/pieces.pxd), but what it makes cannot leave the card and come
back. An arena is divided into units of 512 bytes, one bit each: the first run of free units that is long enough is
taken, in the first arena that has one. An arena is searched only if it may have such a run: ``longest`` is exact after
a search in vain, and an upper bound after a free.

The caller serialises, gets an arena its memory, and takes back that of an empty one.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_clear, alloc_find, alloc_insert, alloc_remove

cdef extern from * nogil:
    int ctz64 "__builtin_ctzll"(uint64_t x) noexcept

cdef enum:
    ARENA_BYTES = 2 << 20
    UNIT_BYTES = 512         # what the driver aligns to
    ARENA_UNITS = 4096
    ARENAS_LEAST = 64        # of the first array


cdef struct Arena:
    uint64_t address
    uint32_t free            # units
    uint32_t longest         # no run of free units is longer
    uint64_t[64] used        # a bit per unit


cdef struct Arenas:          # all zero: none
    Arena* arena
    uint64_t capacity
    uint64_t count
    AllocTable places        # address of an arena → Block (aux: where in the array)


cdef inline uint32_t units_for(uint64_t size) noexcept nogil:
    """``size``: at most ARENA_BYTES."""
    return <uint32_t>((size + UNIT_BYTES - 1) / UNIT_BYTES)


cdef inline uint32_t next_unit(const Arena* arena, uint32_t at, bint used) noexcept nogil:
    """The first unit from ``at`` on that is used, or that is not; ARENA_UNITS if there is none."""
    cdef uint64_t word
    while at < ARENA_UNITS:
        word = arena.used[at / 64] if used else ~arena.used[at / 64]
        word >>= at % 64
        if word:
            return at + ctz64(word)
        at += 64 - at % 64
    return ARENA_UNITS


cdef inline void mark_units(Arena* arena, uint32_t at, uint32_t units) noexcept nogil:
    """Used units become free, and free ones used."""
    cdef uint32_t end = at + units
    while at < end:
        if at % 64 == 0 and end - at >= 64:
            arena.used[at / 64] = ~arena.used[at / 64]
            at += 64
        else:
            arena.used[at / 64] ^= <uint64_t>1 << at % 64
            at += 1


cdef inline uint32_t find_run(Arena* arena, uint32_t units) noexcept nogil:
    """Where the first run of so many free units begins; ARENA_UNITS, and ``longest`` is exact, if there is none."""
    cdef uint32_t at = 0, end, longest = 0
    while True:
        at = next_unit(arena, at, 0)
        if at == ARENA_UNITS:
            arena.longest = longest
            return ARENA_UNITS
        end = next_unit(arena, at, 1)
        if end - at >= units:
            return at
        longest = max(longest, end - at)
        at = end


cdef inline uint64_t arenas_take(Arenas* arenas, uint64_t size) noexcept nogil:
    """The address of ``size`` bytes (1 to ARENA_BYTES); 0: no arena has room for them."""
    cdef uint32_t units = units_for(size), at
    cdef Arena* arena
    cdef uint64_t i
    for i in range(arenas.count):
        arena = &arenas.arena[i]
        if arena.longest >= units:
            at = find_run(arena, units)
            if at < ARENA_UNITS:
                mark_units(arena, at, units)
                arena.free -= units
                arena.longest = min(arena.longest, arena.free)
                return arena.address + <uint64_t>at * UNIT_BYTES
    return 0


cdef inline bint arenas_grow(Arenas* arenas) noexcept nogil:
    cdef uint64_t capacity = 2 * arenas.capacity if arenas.capacity else ARENAS_LEAST
    cdef uint64_t i
    cdef void* memory = mmap(
        NULL, capacity * sizeof(Arena), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    )
    if memory == MAP_FAILED:
        return 0
    for i in range(arenas.count):
        (<Arena*>memory)[i] = arenas.arena[i]
    if arenas.capacity:
        munmap(arenas.arena, arenas.capacity * sizeof(Arena))
    arenas.arena = <Arena*>memory
    arenas.capacity = capacity
    return 1


cdef inline bint arenas_add(Arenas* arenas, uint64_t address) noexcept nogil:
    """There is an arena at ``address`` (a multiple of ARENA_BYTES), and nothing in it. 0: no memory to note it."""
    cdef Block place
    cdef Arena* arena
    if arenas.count == arenas.capacity and not arenas_grow(arenas):
        return 0
    place.address, place.bytes, place.aux = address, ARENA_BYTES, arenas.count
    place.kind = place.flags = 0
    if not alloc_insert(&arenas.places, &place):
        return 0
    arena = &arenas.arena[arenas.count]
    memset(arena, 0, sizeof(Arena))
    arena.address = address
    arena.free = arena.longest = ARENA_UNITS
    arenas.count += 1
    return 1


cdef inline bint arenas_give(Arenas* arenas, uint64_t address, uint64_t size) noexcept nogil:
    """What was taken is free again. 1: its arena is empty, and is none any more."""
    cdef uint64_t base = address - address % ARENA_BYTES
    cdef Block* place = alloc_find(&arenas.places, base)
    cdef Block gone
    cdef Arena* arena
    cdef Arena* last
    cdef uint64_t index
    if place == NULL:
        return 0
    index = place.aux
    arena = &arenas.arena[index]
    mark_units(arena, <uint32_t>((address - base) / UNIT_BYTES), units_for(size))
    arena.free += units_for(size)
    arena.longest = arena.free
    if arena.free < ARENA_UNITS:
        return 0
    alloc_remove(&arenas.places, base, &gone)
    arenas.count -= 1
    last = &arenas.arena[arenas.count]
    if last != arena:
        arena[0] = last[0]
        alloc_find(&arenas.places, arena.address).aux = index
    return 1


cdef inline void arenas_clear(Arenas* arenas) noexcept nogil:
    if arenas.capacity:
        munmap(arenas.arena, arenas.capacity * sizeof(Arena))
    alloc_clear(&arenas.places)
    arenas.arena = NULL
    arenas.capacity = arenas.count = 0
