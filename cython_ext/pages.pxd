"""The mapped pages as extension types: what dispatcher, relay and ledger work on."""

from libc.stdint cimport uint64_t

from cython_ext cimport layout


cdef class Page:
    cdef void* base              # NULL once closed
    cdef size_t mapped_bytes
    cdef int descriptor          # -1 once closed
    cdef int pins                # native threads that use the mapping
    cdef readonly bint writable
    cdef int make(self, str name, size_t size, uint64_t magic, int more_seals) except -1
    cdef int adopt(self, int descriptor, size_t size, uint64_t magic, bint writable) except -1
    cdef int map_descriptor(self, int descriptor, size_t size, bint writable) except -1
    cdef int pin(self) except -1
    cdef int unpin(self) except -1
    cdef int check_open(self) except -1
    cdef int check_writable(self) except -1


cdef class GrantsPage(Page):
    cdef layout.GrantsPage* get(self) except NULL


cdef class ActivityPage(Page):
    cdef layout.ActivityPage* get(self) except NULL
    cdef layout.Slot* slot(self, int index) except NULL


cdef class RelayPage(Page):
    cdef layout.RelayPage* get(self) except NULL
