"""The mapped pages as extension types: what dispatcher, relay and ledger work on."""

from cython_ext cimport layout
from cython_ext.page cimport Page


cdef class GrantsPage(Page):
    cdef layout.GrantsPage* get(self) except NULL


cdef class ActivityPage(Page):
    cdef layout.ActivityPage* get(self) except NULL
    cdef layout.Slot* slot(self, int index) except NULL


cdef class RelayPage(Page):
    cdef layout.RelayPage* get(self) except NULL
