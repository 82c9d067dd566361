"""The mapped page as an extension type: what relay and ledger work on."""

from cython_ext cimport layout
from cython_ext.page cimport Page


cdef class ActivityPage(Page):
    cdef layout.ActivityPage* get(self) except NULL
    cdef layout.Slot* slot(self, int index) except NULL
