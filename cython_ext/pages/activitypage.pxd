"""The mapped page as an extension type: what relay and ledger work on."""

from libc.stdint cimport uint32_t

from cython_ext.pages cimport layout
from cython_ext.pages.page cimport Page


cdef class ActivityPage(Page):
    cdef uint32_t epoch      # of this broker; 0: none has taken the page over
    cdef layout.ActivityPage* get(self) except NULL
    cdef layout.Slot* slot(self, int index) except NULL
