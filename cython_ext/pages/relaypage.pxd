"""The mapped page as an extension type: what dispatcher and relays work on."""

from cython_ext.pages cimport layout
from cython_ext.pages.page cimport Page


cdef class RelayPage(Page):
    cdef layout.RelayPage* get(self) except NULL
    cdef layout.RelayEntry* at(self, int key) except NULL
