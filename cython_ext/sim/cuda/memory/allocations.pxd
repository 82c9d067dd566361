"""The process's table of allocations, sorted by address."""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.sim.cuda.driver cimport Context, CUresult


cdef enum Backing:
    BACKING_PRIVATE = 1     # cuMemAlloc and its kin: anonymous memory of its own
    BACKING_POOL = 2        # a block of a memory pool
    BACKING_MAPPED = 3      # a piece of physical memory made by cuMemCreate
    BACKING_MANAGED = 4
    BACKING_GRAPH = 5       # of a node of a graph; accessible from that node to the one that frees it
    BACKING_HOST = 6        # page-locked host memory
    BACKING_REGISTERED = 7  # the program's own memory, registered


cdef public struct Allocation:
    uint64_t address
    uint64_t size           # as asked for
    uint64_t mapped         # bytes of address space
    Context* context
    uint32_t backing
    uint32_t flags          # of a host allocation
    uint64_t id
    void* owner             # MemoryPool or Physical
    bint accessible


cdef extern Allocation* mem_find(uint64_t address) noexcept nogil
cdef extern bint mem_add(Allocation* allocation) noexcept nogil
cdef extern void mem_remove(Allocation* allocation) noexcept nogil
cdef extern Allocation* mem_at(uint32_t index) noexcept nogil
cdef extern bint mem_charge(Context* context, uint64_t size) noexcept nogil
cdef extern void mem_discharge(Context* context, uint64_t size) noexcept nogil
cdef extern CUresult mem_check_range(uint64_t address, uint64_t size) noexcept nogil
cdef extern void mem_release(Allocation* allocation) noexcept nogil

# pools.pyx
cdef extern CUresult mem_free_pooled(Allocation* allocation) noexcept nogil
cdef extern CUresult mem_free_pooled_at_once(Allocation* allocation) noexcept nogil
cdef extern void mem_trim_pools(Context* context) noexcept nogil
cdef extern void mem_forget_pools(Context* context) noexcept nogil

# graphmemory.pyx
cdef extern void mem_free_of_graph(Allocation* allocation) noexcept nogil
cdef extern void mem_forget_graphs(Context* context) noexcept nogil

# vmm.pyx
cdef extern void mem_forget_physical(Context* context) noexcept nogil
cdef extern void mem_reservation(uint64_t address, uint64_t* start, uint64_t* size) noexcept nogil
