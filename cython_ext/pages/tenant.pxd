"""A tenant's numbers, as they stand in a page that its processes write, made to fit whatever reads them."""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t


cdef inline int64_t bounded(uint64_t value) noexcept nogil:
    """A tenant's unsigned word as one that fits everywhere (SQLite, msgpack): at most 2⁶³ − 1."""
    return <int64_t>value if value <= <uint64_t>INT64_MAX else INT64_MAX


cdef inline int64_t at_least_zero(int64_t value) noexcept nogil:
    return value if value > 0 else 0


cdef inline uint32_t part_of(uint32_t ppm) noexcept nogil:
    """A part in parts per million, at most 1."""
    return min(ppm, <uint32_t>1_000_000)
