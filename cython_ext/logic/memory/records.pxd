"""Records of one size that keep their addresses, in memory from mmap: the heap of the program is not used.

``records_give`` keeps a record for the next ``records_take``; the memory stays. The caller locks.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap

cdef enum:
    RECORDS_BYTES = 64 << 10     # are taken from the kernel at a time


cdef struct Records:             # all zero: none
    void* free                   # the first word of a free record is the address of the next


cdef inline bint records_grow(Records* records, uint64_t size) noexcept nogil:
    cdef char* memory = <char*>mmap(NULL, RECORDS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef uint64_t at = 0
    if memory == <char*>MAP_FAILED:
        return 0
    while at + size <= RECORDS_BYTES:
        (<void**>(memory + at))[0] = records.free
        records.free = memory + at
        at += size
    return 1


cdef inline void* records_take(Records* records, uint64_t size) noexcept nogil:
    """A record of zeros; NULL without memory. ``size``: the same for all records, a multiple of 8."""
    cdef void* record
    if records.free == NULL and not records_grow(records, size):
        return NULL
    record = records.free
    records.free = (<void**>record)[0]
    memset(record, 0, size)
    return record


cdef inline void records_give(Records* records, void* record) noexcept nogil:
    (<void**>record)[0] = records.free
    records.free = record
