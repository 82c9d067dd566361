"""What can be asked about a pointer, and the ways of handing memory to others that the simulation refuses."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_HOST, BACKING_MANAGED, BACKING_MAPPED, BACKING_POOL, BACKING_PRIVATE, mem_find,
    mem_reservation,
)
from cython_ext.sim.cuda.driver cimport (
    CUresult, INVALID_VALUE, NOT_SUPPORTED, SUCCESS, Stream, Work, drv_lock, drv_stream, drv_submit, drv_unlock,
)
from cython_ext.sim.state cimport OP_MARK

cdef enum:
    MEMORY_HOST = 1
    MEMORY_DEVICE = 2


cdef CUresult attribute(Allocation* a, int which, uint64_t address, void* out) noexcept nogil:
    """CU_POINTER_ATTRIBUTE_* of an allocation; its size is that of the attribute's type."""
    cdef bint host = a.backing >= BACKING_HOST
    cdef uint64_t start = 0, size = 0
    if which == 1:                          # context
        (<void**>out)[0] = NULL if a.backing in (BACKING_POOL, BACKING_MAPPED) else a.context
    elif which == 2:                        # memory type
        (<uint32_t*>out)[0] = MEMORY_HOST if host else MEMORY_DEVICE
    elif which in (3, 4):                   # device, host pointer
        if which == 4 and not host and a.backing != BACKING_MANAGED:
            return INVALID_VALUE
        (<uint64_t*>out)[0] = address
    elif which in (7, 20):                  # buffer, block id
        (<uint64_t*>out)[0] = a.id
    elif which == 8:
        (<char*>out)[0] = a.backing == BACKING_MANAGED
    elif which == 9:
        (<int*>out)[0] = a.context.device
    elif which == 10:                       # fit for cuIpcGetMemHandle: not what was mapped or came from a pool
        (<char*>out)[0] = a.backing == BACKING_PRIVATE
    elif which in (11, 12) and a.backing == BACKING_MAPPED:
        mem_reservation(a.address, &start, &size)
        (<uint64_t*>out)[0] = start if which == 11 else size
    elif which in (11, 19):                 # start of the range, of the mapping
        (<uint64_t*>out)[0] = a.address
    elif which in (12, 18):
        (<size_t*>out)[0] = a.size
    elif which == 13:
        (<char*>out)[0] = 1
    elif which == 14:
        (<uint64_t*>out)[0] = 0
    elif which == 15:
        (<char*>out)[0] = 0
    elif which == 16:
        (<uint32_t*>out)[0] = 3 if a.accessible else 0
    elif which == 17:
        (<void**>out)[0] = a.owner if a.backing == BACKING_POOL else NULL
    elif which == 6:
        (<uint32_t*>out)[0] = 0
    else:
        return INVALID_VALUE
    return SUCCESS


cdef public CUresult cuPointerGetAttribute(void* out, int which, uint64_t address) noexcept nogil:
    cdef Allocation* allocation
    cdef CUresult result = INVALID_VALUE
    if out == NULL:
        return INVALID_VALUE
    drv_lock()
    allocation = mem_find(address)
    if allocation != NULL:
        result = attribute(allocation, which, address, out)
    drv_unlock()
    return result


cdef size_t attribute_bytes(int which) noexcept nogil:
    if which in (8, 10, 13, 15):
        return 1
    return 4 if which in (2, 6, 9, 16) else 8


cdef public CUresult cuPointerGetAttributes(unsigned int count, int* which, void** out,
                                            uint64_t address) noexcept nogil:
    """Succeeds for any pointer; what is unknown is zero."""
    cdef Allocation* allocation
    cdef unsigned int i
    drv_lock()
    allocation = mem_find(address)
    for i in range(count):
        memset(out[i], 0, attribute_bytes(which[i]))
        if allocation != NULL:
            attribute(allocation, which[i], address, out[i])
        elif which[i] == 9:
            (<int*>out[i])[0] = -2  # no device
    drv_unlock()
    return SUCCESS


cdef public CUresult cuPointerSetAttribute(const void* value, int which, uint64_t address) noexcept nogil:
    return SUCCESS if which == 6 else INVALID_VALUE


# -- other processes: an address of this process means nothing there

cdef public struct IpcHandle:
    char reserved[64]


cdef public CUresult cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) noexcept nogil:
    """INVALID_VALUE for mapped and pooled memory, as on real hardware; for the rest the simulation has no answer."""
    cdef Allocation* allocation
    cdef bint plain
    drv_lock()
    allocation = mem_find(address)
    plain = allocation != NULL and allocation.backing == BACKING_PRIVATE
    drv_unlock()
    return NOT_SUPPORTED if plain else INVALID_VALUE


cdef public CUresult cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned int flags) noexcept nogil:
    return NOT_SUPPORTED


cdef public CUresult cuIpcCloseMemHandle(uint64_t address) noexcept nogil:
    return INVALID_VALUE


cdef public CUresult cuIpcGetEventHandle(IpcHandle* handle, void* event) noexcept nogil:
    return NOT_SUPPORTED


cdef public CUresult cuIpcOpenEventHandle(void** event, IpcHandle handle) noexcept nogil:
    return NOT_SUPPORTED


# -- managed memory: there is one copy, so hints and prefetches move nothing

cdef public struct Location:
    int type
    int id


cdef CUresult pass_by(void* handle) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        memset(&work, 0, sizeof(Work))
        work.kind = OP_MARK
        result = drv_submit(stream, &work)
    return result


cdef public CUresult cuMemPrefetchAsync_v2(uint64_t address, size_t size, Location where, unsigned int flags,
                                           void* stream) noexcept nogil:
    return pass_by(stream)


cdef public CUresult cuMemPrefetchAsync(uint64_t address, size_t size, int device, void* stream) noexcept nogil:
    return pass_by(stream)


cdef public CUresult cuMemAdvise_v2(uint64_t address, size_t size, int advice, Location where) noexcept nogil:
    return SUCCESS


cdef public CUresult cuMemAdvise(uint64_t address, size_t size, int advice, int device) noexcept nogil:
    return SUCCESS


cdef public CUresult cuStreamAttachMemAsync(void* stream, uint64_t address, size_t size,
                                            unsigned int flags) noexcept nogil:
    return pass_by(stream)
