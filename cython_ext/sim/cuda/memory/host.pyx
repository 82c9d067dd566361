"""Page-locked host memory: allocated, or the program's own and registered."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_HOST, BACKING_REGISTERED, mem_add, mem_find, mem_remove,
)
from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY,
    SUCCESS, drv_current_context, drv_lock, drv_synchronize_context, drv_unlock,
)
from cython_ext.sim.share cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
)

cdef enum:
    PAGE = 4096


cdef CUresult host_memory(void** out, size_t size, unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef Allocation allocation
    cdef void* memory
    cdef uint64_t pages = (size + PAGE - 1) / PAGE * PAGE
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if size == 0:
        return INVALID_VALUE
    memory = mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if memory == MAP_FAILED:
        return OUT_OF_MEMORY
    memset(&allocation, 0, sizeof(Allocation))
    allocation.address = <uint64_t>memory
    allocation.size = size
    allocation.mapped = pages
    allocation.context = context
    allocation.backing = BACKING_HOST
    allocation.flags = flags
    allocation.accessible = True
    drv_lock()
    mem_add(&allocation)
    drv_unlock()
    out[0] = memory
    return SUCCESS


cdef public CUresult cuMemHostAlloc(void** out, size_t size, unsigned int flags) noexcept nogil:
    return host_memory(out, size, flags)


cdef public CUresult cuMemAllocHost_v2(void** out, size_t size) noexcept nogil:
    return host_memory(out, size, 0)


cdef CUresult drop_host(void* memory, uint32_t backing) noexcept nogil:
    cdef Allocation* allocation
    cdef CUresult result = INVALID_VALUE
    drv_lock()
    allocation = mem_find(<uint64_t>memory)
    if allocation != NULL and allocation.address == <uint64_t>memory and allocation.backing == backing:
        if backing == BACKING_HOST:
            munmap(memory, allocation.mapped)
        mem_remove(allocation)
        result = SUCCESS
    drv_unlock()
    return result


cdef public CUresult cuMemFreeHost(void* memory) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        result = drv_synchronize_context(context)
    return drop_host(memory, BACKING_HOST) if result == SUCCESS else result


cdef public CUresult cuMemHostRegister_v2(void* memory, size_t size, unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef Allocation allocation
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if memory == NULL or size == 0:
        return INVALID_VALUE
    memset(&allocation, 0, sizeof(Allocation))
    allocation.address = <uint64_t>memory
    allocation.size = size
    allocation.context = context
    allocation.backing = BACKING_REGISTERED
    allocation.flags = flags
    allocation.accessible = True
    drv_lock()
    if mem_find(<uint64_t>memory) != NULL:
        result = HOST_MEMORY_ALREADY_REGISTERED
    else:
        mem_add(&allocation)
    drv_unlock()
    return result


cdef public CUresult cuMemHostUnregister(void* memory) noexcept nogil:
    cdef CUresult result = drop_host(memory, BACKING_REGISTERED)
    return HOST_MEMORY_NOT_REGISTERED if result == INVALID_VALUE else result


cdef public CUresult cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned int flags) noexcept nogil:
    cdef Allocation* allocation
    drv_lock()
    allocation = mem_find(<uint64_t>memory)
    drv_unlock()
    if allocation == NULL or allocation.backing not in (BACKING_HOST, BACKING_REGISTERED):
        return INVALID_VALUE
    address[0] = <uint64_t>memory
    return SUCCESS


cdef public CUresult cuMemHostGetFlags(unsigned int* flags, void* memory) noexcept nogil:
    cdef Allocation* allocation
    drv_lock()
    allocation = mem_find(<uint64_t>memory)
    if allocation != NULL:
        flags[0] = allocation.flags
    drv_unlock()
    return SUCCESS if allocation != NULL else INVALID_VALUE
