"""Physical memory that a program made by cuMemCreate, and that can leave the card: its handles and its mappings.

The program's handle is a number of the hook's own, because the driver's handle is another one after each swap. The
number is the address of its *window*: an address range of the hook's. The hook maps the memory there to copy it, where
the program has no mapping for reading and writing.

The memory is made of chunks, each with a handle of the driver. It goes when it has neither handles nor mappings left.

The caller locks.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_add, alloc_find, alloc_remove
from cython_ext.logic.memory.records cimport Records, records_give, records_take

cdef enum:
    ALLOCATION_PINNED = 1    # CU_MEM_ALLOCATION_TYPE_PINNED
    LOCATION_DEVICE = 1      # CU_MEM_LOCATION_TYPE_DEVICE


cdef struct Properties:      # CUmemAllocationProp
    int type
    int handle_types         # to which it may be exported
    int location_type
    int location_id
    void* security
    uint8_t compression
    uint8_t rdma             # network cards may reach it, as they may the driver's own linear memory
    uint16_t usage           # of tiles for sparse arrays
    uint8_t[4] reserved


cdef struct Access:          # CUmemAccessDesc
    int location_type
    int location_id
    int flags


cdef struct Mapping:
    uint64_t address
    Physical* physical       # all of it: the driver maps no part of a handle
    Mapping* next            # of the same memory
    void* context            # current when it was mapped, or when its access was set; NULL: none was
    int access               # CU_MEM_ACCESS_FLAGS_* of the device


cdef struct Physical:
    uint64_t handle          # address of its window
    uint64_t bytes
    uint64_t chunk_bytes     # of each chunk but the last
    uint32_t references      # handles that the program has not released, and calls that use one
    uint32_t fixed           # 1: it stays on the card, because others have it, too
    Mapping* mappings
    void* context            # current when it was made; NULL: none was
    Properties properties    # as the program gave them


cdef struct PhysicalBook:    # all zero: empty
    AllocTable handles       # handle → Block (aux: its Physical)
    AllocTable mappings      # address → Block (bytes of the memory; aux: its Mapping)
    Records physical_records
    Records mapping_records


cdef inline Physical* physical_of(const PhysicalBook* book, uint64_t handle) noexcept nogil:
    """NULL: it is no handle of this book."""
    cdef Block* block = alloc_find(&book.handles, handle)
    return NULL if block == NULL else <Physical*>block.aux


cdef inline Physical* physical_add(
    PhysicalBook* book, uint64_t handle, uint64_t size, uint64_t chunk_bytes
) noexcept nogil:
    """Memory with one handle; NULL: there is no host memory for the record."""
    cdef Physical* physical = <Physical*>records_take(&book.physical_records, sizeof(Physical))
    cdef Block block
    if physical == NULL:
        return NULL
    physical.handle, physical.bytes, physical.chunk_bytes, physical.references = handle, size, chunk_bytes, 1
    block.address, block.bytes, block.aux = handle, size, <uint64_t>physical
    block.kind = block.flags = 0
    if not alloc_add(&book.handles, &block):
        records_give(&book.physical_records, physical)
        return NULL
    return physical


cdef inline void physical_remove(PhysicalBook* book, Physical* physical) noexcept nogil:
    cdef Block block
    alloc_remove(&book.handles, physical.handle, &block)
    records_give(&book.physical_records, physical)


cdef inline bint physical_release(Physical* physical) noexcept nogil:
    """One handle, or one call, fewer: 1 if the memory goes now."""
    physical.references -= 1
    return physical.references == 0 and physical.mappings == NULL


cdef inline Mapping* mapping_at(const PhysicalBook* book, uint64_t address) noexcept nogil:
    """The mapping that begins there, or NULL."""
    cdef Block* block = alloc_find(&book.mappings, address)
    return NULL if block == NULL else <Mapping*>block.aux


cdef inline Mapping* mapping_around(const PhysicalBook* book, uint64_t address) noexcept nogil:
    """The mapping that ``address`` is within, or NULL. It looks at all of them, unless one begins there."""
    cdef Mapping* found = mapping_at(book, address)
    cdef const Block* each
    cdef uint64_t i = 0
    while found == NULL and i < book.mappings.capacity:
        each = &book.mappings.blocks[i]
        if each.address and each.address <= address < each.address + each.bytes:
            found = <Mapping*>each.aux
        i += 1
    return found


cdef inline Mapping* mapping_add(PhysicalBook* book, Physical* physical, uint64_t address) noexcept nogil:
    """The memory at an address that has no mapping; NULL: there is no host memory for the record."""
    cdef Mapping* mapping = <Mapping*>records_take(&book.mapping_records, sizeof(Mapping))
    cdef Block block
    if mapping == NULL:
        return NULL
    mapping.address, mapping.physical = address, physical
    block.address, block.bytes, block.aux = address, physical.bytes, <uint64_t>mapping
    block.kind = block.flags = 0
    if not alloc_add(&book.mappings, &block):
        records_give(&book.mapping_records, mapping)
        return NULL
    mapping.next = physical.mappings
    physical.mappings = mapping
    return mapping


cdef inline bint mapping_remove(PhysicalBook* book, Mapping* mapping) noexcept nogil:
    """1 if its memory goes now: it was the last mapping, and there is no handle."""
    cdef Physical* physical = mapping.physical
    cdef Mapping** link = &physical.mappings
    cdef Block block
    while link[0] != mapping:
        link = &link[0].next
    link[0] = mapping.next
    alloc_remove(&book.mappings, mapping.address, &block)
    records_give(&book.mapping_records, mapping)
    return physical.references == 0 and physical.mappings == NULL


cdef inline bint mappings_are_whole(const PhysicalBook* book, uint64_t address, uint64_t size) noexcept nogil:
    """Whether the range consists of whole mappings of this book, without a gap."""
    cdef uint64_t at = address
    cdef Mapping* mapping
    while at < address + size:
        mapping = mapping_at(book, at)
        if mapping == NULL:
            return 0
        at += mapping.physical.bytes
    return size != 0 and at == address + size


cdef inline uint64_t chunk_in(const Physical* physical, uint64_t offset) noexcept nogil:
    """Bytes of the chunk that begins at ``offset``."""
    return min(physical.chunk_bytes, physical.bytes - offset)
