"""Memory pools (interim)."""

from cython_ext.sim.cuda.driver cimport Context, CUresult, NOT_SUPPORTED
from cython_ext.sim.cuda.allocations cimport Allocation


cdef public CUresult mem_free_pooled(Allocation* allocation) noexcept nogil:
    return NOT_SUPPORTED


cdef public void mem_forget_pools(Context* context) noexcept nogil:
    pass


cdef public void mem_forget_physical(Context* context) noexcept nogil:
    pass
