"""What every mapped page is to native code: an address, for as long as it is pinned."""

from libc.stdint cimport uint64_t

cdef enum:                       # linux/fcntl.h; Python names only some of them
    F_SEAL_SEAL = 1
    F_SEAL_SHRINK = 2
    F_SEAL_GROW = 4
    F_SEAL_FUTURE_WRITE = 16


cdef str text_of(const char* source, size_t size)


cdef class Page:
    cdef void* base              # NULL once closed
    cdef size_t mapped_bytes
    cdef int descriptor          # -1 once closed
    cdef int pins                # native threads that use the mapping
    cdef readonly bint writable
    cdef int make(self, str name, size_t size, uint64_t magic, int more_seals, size_t appended=*) except -1
    cdef int adopt(
        self, int descriptor, size_t size, uint64_t magic, bint writable, size_t appended=*, bint repair=*
    ) except -1
    cdef int write_own_header(self, size_t size, uint64_t magic) except -1
    cdef int map_descriptor(self, int descriptor, size_t size, bint writable) except -1
    cdef int pin(self) except -1
    cdef int unpin(self) except -1
    cdef int check_open(self) except -1
    cdef int check_writable(self) except -1
