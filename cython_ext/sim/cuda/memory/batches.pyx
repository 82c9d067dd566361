"""Copies and prefetches in batches: checked as a whole, then queued one after the other. With their twins for
per-thread default streams.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport Allocation, BACKING_MANAGED, mem_check_range, mem_find
from cython_ext.sim.cuda.driver cimport (
    Array, Copy3D, CUresult, INVALID_HANDLE, INVALID_VALUE, SUCCESS, Side3D, Stream, Work, drv_devices, drv_is_array,
    drv_lock, drv_stream, drv_submit, drv_touch, drv_unlock,
)
from cython_ext.sim.state cimport OP_COPY_IN, OP_COPY_OUT

cdef enum:
    LEGACY = 1              # this stream and NULL take no batches
    PER_THREAD = 2
    SET_UP_NS = 1500
    MEMORY_UNIFIED = 4
    OPERAND_POINTER = 1
    OPERAND_ARRAY = 2
    ORDER_ANY = 3           # the last CUmemcpySrcAccessOrder
    LOCATION_DEVICE = 1
    LOCATION_HOST_NUMA_CURRENT = 4

cdef extern CUresult cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpy3DAsync_v2(const void* c, void* stream) noexcept nogil


cdef inline void* own(void* stream) noexcept nogil:
    return <void*>PER_THREAD if stream == NULL else stream


# -- copies

cdef public CUresult cuMemcpyBatchAsync_v2(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                                           void* attributes, size_t* indices, size_t kinds,
                                           void* stream) noexcept nogil:
    cdef size_t i
    cdef CUresult result = SUCCESS
    if <uint64_t>stream <= LEGACY:
        return INVALID_HANDLE
    for i in range(count):
        if result == SUCCESS:
            result = cuMemcpyAsync(targets[i], sources[i], sizes[i], stream)
    return result


cdef public CUresult cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                                        void* attributes, size_t* indices, size_t kinds, size_t* failed,
                                        void* stream) noexcept nogil:
    return cuMemcpyBatchAsync_v2(targets, sources, sizes, count, attributes, indices, kinds, stream)


cdef public struct Operand:         # CUmemcpy3DOperand
    int type
    uint64_t address                # of memory; or an array
    size_t x                        # of memory: elements of a row
    size_t y                        # of memory: rows of a layer
    size_t z                        # of memory: a location, which is a hint


cdef public struct BatchedCopy:     # CUDA_MEMCPY3D_BATCH_OP
    Operand source
    Operand target
    size_t width                    # elements
    size_t height
    size_t depth
    int order
    unsigned int flags


cdef size_t element_bytes(const Operand* operand) noexcept nogil:
    """0: whatever the other side has."""
    return (<Array*>operand.address).element_bytes if operand.type == OPERAND_ARRAY else 0


cdef CUresult take_side(const Operand* o, const BatchedCopy* c, size_t element, Side3D* side) noexcept nogil:
    cdef Array* array
    side.type = MEMORY_UNIFIED
    if o.type == OPERAND_POINTER:
        side.device = o.address
        side.pitch = element * (o.x if o.x else c.width)
        side.height = o.y if o.y else c.height
        return SUCCESS if side.pitch >= element * c.width and side.height >= c.height else INVALID_VALUE
    array = <Array*>o.address
    if o.x + c.width > array.width or o.y + c.height > array.rows or o.z + c.depth > 1:
        return INVALID_VALUE
    side.device = array.address
    side.pitch = element * array.width
    side.height = array.rows
    side.x = element * o.x
    side.y = o.y
    return SUCCESS


cdef bint is_operand(const Operand* o) noexcept nogil:
    return o.type == OPERAND_POINTER or (o.type == OPERAND_ARRAY and drv_is_array(<Array*>o.address))


cdef CUresult take_copy(const BatchedCopy* c, Copy3D* plain) noexcept nogil:
    cdef size_t source, target, element
    cdef CUresult result
    if c.width * c.height * c.depth == 0 or not 1 <= c.order <= ORDER_ANY:
        return INVALID_VALUE
    if not is_operand(&c.source) or not is_operand(&c.target):
        return INVALID_VALUE
    source, target = element_bytes(&c.source), element_bytes(&c.target)
    if source and target and source != target:
        return INVALID_VALUE
    element = max(source, target, <size_t>1)
    memset(plain, 0, sizeof(Copy3D))
    plain.width = element * c.width
    plain.height = c.height
    plain.depth = c.depth
    result = take_side(&c.source, c, element, &plain.source)
    return take_side(&c.target, c, element, &plain.target) if result == SUCCESS else result


cdef public CUresult cuMemcpy3DBatchAsync(size_t count, BatchedCopy* copies, size_t* failed, unsigned long long flags,
                                          void* stream) noexcept nogil:
    """`failed`: which one was wrong, or the largest number if it was none of them."""
    cdef Copy3D plain
    cdef CUresult result
    cdef size_t i
    if failed != NULL:
        failed[0] = <size_t>-1
    if <uint64_t>stream <= LEGACY:
        return INVALID_HANDLE
    if count == 0 or copies == NULL or flags != 0:
        return INVALID_VALUE
    for i in range(count):
        result = take_copy(&copies[i], &plain)
        if result != SUCCESS:
            if failed != NULL:
                failed[0] = i
            return result
    for i in range(count):
        take_copy(&copies[i], &plain)
        result = cuMemcpy3DAsync_v2(&plain, stream)
        if result != SUCCESS:
            return result
    return SUCCESS


cdef public CUresult cuMemcpy3DBatchAsync_v2(size_t count, BatchedCopy* copies, unsigned long long flags,
                                             void* stream) noexcept nogil:
    return cuMemcpy3DBatchAsync(count, copies, NULL, flags, stream)


cdef public CUresult cuMemcpy3DBatchAsync_ptsz(size_t count, BatchedCopy* copies, size_t* failed,
                                               unsigned long long flags, void* stream) noexcept nogil:
    return cuMemcpy3DBatchAsync(count, copies, failed, flags, own(stream))


cdef public CUresult cuMemcpy3DBatchAsync_v2_ptsz(size_t count, BatchedCopy* copies, unsigned long long flags,
                                                  void* stream) noexcept nogil:
    return cuMemcpy3DBatchAsync(count, copies, NULL, flags, own(stream))


# -- prefetches: all of a range is taken to be on the other side, and its contents stay where they are

cdef public struct Place:           # CUmemLocation
    int type
    int id


cdef bint is_managed(uint64_t address, size_t size) noexcept nogil:
    cdef Allocation* allocation
    cdef bint managed
    drv_lock()
    allocation = mem_find(address)
    managed = allocation != NULL and allocation.backing == BACKING_MANAGED
    drv_unlock()
    return managed and mem_check_range(address, size) == SUCCESS


cdef CUresult check_prefetch(uint64_t* addresses, size_t* sizes, size_t count, Place* places, size_t* indices,
                             size_t kinds) noexcept nogil:
    cdef size_t i
    if addresses == NULL or sizes == NULL or places == NULL or indices == NULL:
        return INVALID_VALUE
    if kinds == 0 or kinds > count or indices[0] != 0 or indices[kinds - 1] >= count:
        return INVALID_VALUE
    for i in range(kinds):
        if i and indices[i] <= indices[i - 1]:
            return INVALID_VALUE
        if not LOCATION_DEVICE <= places[i].type <= LOCATION_HOST_NUMA_CURRENT:
            return INVALID_VALUE
        if places[i].type == LOCATION_DEVICE and not 0 <= places[i].id < drv_devices():
            return INVALID_VALUE
    for i in range(count):
        if sizes[i] == 0 or not is_managed(addresses[i], sizes[i]):
            return INVALID_VALUE
    return SUCCESS


cdef CUresult prefetch(uint64_t* addresses, size_t* sizes, size_t count, Place* places, size_t* indices, size_t kinds,
                       unsigned long long flags, bint moves, void* handle) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result
    cdef size_t i, place = 0
    if <uint64_t>handle <= LEGACY:
        return INVALID_HANDLE
    result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = check_prefetch(addresses, sizes, count, places, indices, kinds) if flags == 0 else INVALID_VALUE
    for i in range(count if result == SUCCESS else 0):
        while place + 1 < kinds and indices[place + 1] <= i:
            place += 1
        memset(&work, 0, sizeof(Work))
        work.kind = OP_COPY_IN if places[place].type == LOCATION_DEVICE else OP_COPY_OUT
        work.ns = SET_UP_NS + (sizes[i] / stream.gpu.copy_bytes_per_ns if moves else 0)
        drv_touch(&work.effect, addresses[i])
        result = drv_submit(stream, &work)
        if result != SUCCESS:
            break
    return result


cdef public CUresult cuMemPrefetchBatchAsync(uint64_t* addresses, size_t* sizes, size_t count, Place* places,
                                             size_t* indices, size_t kinds, unsigned long long flags,
                                             void* stream) noexcept nogil:
    return prefetch(addresses, sizes, count, places, indices, kinds, flags, True, stream)


cdef public CUresult cuMemPrefetchBatchAsync_ptsz(uint64_t* addresses, size_t* sizes, size_t count, Place* places,
                                                  size_t* indices, size_t kinds, unsigned long long flags,
                                                  void* stream) noexcept nogil:
    return prefetch(addresses, sizes, count, places, indices, kinds, flags, True, own(stream))


cdef public CUresult cuMemDiscardAndPrefetchBatchAsync(uint64_t* addresses, size_t* sizes, size_t count, Place* places,
                                                       size_t* indices, size_t kinds, unsigned long long flags,
                                                       void* stream) noexcept nogil:
    """Nothing of it has to be moved."""
    return prefetch(addresses, sizes, count, places, indices, kinds, flags, False, stream)


cdef public CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(uint64_t* addresses, size_t* sizes, size_t count,
                                                            Place* places, size_t* indices, size_t kinds,
                                                            unsigned long long flags, void* stream) noexcept nogil:
    return prefetch(addresses, sizes, count, places, indices, kinds, flags, False, own(stream))
