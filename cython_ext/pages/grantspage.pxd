"""The mapped page as an extension type: what dispatcher and relay work on; a lease in it as Python reads it."""

from cython_ext.pages cimport layout
from cython_ext.pages.page cimport Page


cdef class GrantsPage(Page):
    cdef layout.GrantsPage* get(self) except NULL


cdef object lease_reading(const layout.Lease* lease)
