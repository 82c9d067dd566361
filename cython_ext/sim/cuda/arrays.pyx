"""CUDA arrays of one and two dimensions: a shape over ordinary device memory, and the copies that name one. With their
twins for per-thread default streams.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc

from cython_ext.sim.cuda.allocations cimport mem_check_range
from cython_ext.sim.cuda.driver cimport (
    Array, CUresult, INVALID_HANDLE, INVALID_VALUE, MARK_ARRAY, OUT_OF_MEMORY, SUCCESS, drv_lock, drv_unlock,
)

cdef enum:
    PER_THREAD = 2

cdef extern CUresult cuMemAlloc_v2(uint64_t* address, size_t size) noexcept nogil
cdef extern CUresult cuMemFree_v2(uint64_t address) noexcept nogil
cdef extern CUresult cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) noexcept nogil
cdef extern CUresult cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t size) noexcept nogil
cdef extern CUresult cuMemcpyDtoH_v2(void* target, uint64_t source, size_t size) noexcept nogil
cdef extern CUresult cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyHtoDAsync_v2(
    uint64_t target, const void* source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuStreamSynchronize(void* stream) noexcept nogil

cdef Array* unused              # destroyed: kept, so that stale handles are recognised


cdef public struct ArrayDescriptor:     # CUDA_ARRAY_DESCRIPTOR
    size_t width
    size_t height
    int format
    unsigned int channels


cdef size_t format_bytes(int format) noexcept nogil:
    if format in (0x01, 0x08):
        return 1
    if format in (0x02, 0x09, 0x10):
        return 2
    return 4 if format in (0x03, 0x0a, 0x20) else 0


cdef public bint drv_is_array(const Array* array) noexcept nogil:
    return array != NULL and array.mark == MARK_ARRAY


cdef public CUresult cuArrayCreate_v2(Array** out, const ArrayDescriptor* d) noexcept nogil:
    global unused
    cdef Array* array
    cdef uint64_t address = 0
    cdef size_t element
    cdef CUresult result
    if out == NULL or d == NULL or d.width == 0 or d.channels not in (1, 2, 4):
        return INVALID_VALUE
    element = format_bytes(d.format) * d.channels
    if element == 0:
        return INVALID_VALUE
    result = cuMemAlloc_v2(&address, element * d.width * max(d.height, <size_t>1))
    if result != SUCCESS:
        return result
    drv_lock()
    array = unused
    if array != NULL:
        unused = array.next
    drv_unlock()
    if array == NULL:
        array = <Array*>calloc(1, sizeof(Array))
    if array == NULL:
        cuMemFree_v2(address)
        return OUT_OF_MEMORY
    array.address = address
    array.width = d.width
    array.rows = max(d.height, <size_t>1)
    array.element_bytes = element
    array.mark = MARK_ARRAY
    out[0] = array
    return SUCCESS


cdef public CUresult cuArrayDestroy(Array* array) noexcept nogil:
    global unused
    cdef CUresult result
    if not drv_is_array(array):
        return INVALID_HANDLE
    result = cuMemFree_v2(array.address)
    drv_lock()
    array.mark = 0
    array.next = unused
    unused = array
    drv_unlock()
    return result


cdef CUresult locate(const Array* array, size_t at, size_t size, uint64_t* address) noexcept nogil:
    """Where so many bytes lie, from byte `at` on."""
    if not drv_is_array(array):
        return INVALID_HANDLE
    if at + size > array.element_bytes * array.width * array.rows:
        return INVALID_VALUE
    address[0] = array.address + at
    return mem_check_range(address[0], size)


cdef CUresult locate_both(
    const Array* target, size_t target_at, const Array* source, size_t source_at, size_t size,
    uint64_t* to, uint64_t* of
) noexcept nogil:
    cdef CUresult result = locate(target, target_at, size, to)
    return locate(source, source_at, size, of) if result == SUCCESS else result


cdef CUresult finish(CUresult result) noexcept nogil:
    return cuStreamSynchronize(<void*>PER_THREAD) if result == SUCCESS else result


cdef public CUresult cuMemcpyDtoA_v2(Array* target, size_t at, uint64_t source, size_t size) noexcept nogil:
    cdef uint64_t to = 0
    cdef CUresult result = locate(target, at, size, &to)
    return cuMemcpyDtoD_v2(to, source, size) if result == SUCCESS else result


cdef public CUresult cuMemcpyDtoA_v2_ptds(Array* target, size_t at, uint64_t source, size_t size) noexcept nogil:
    cdef uint64_t to = 0
    cdef CUresult result = locate(target, at, size, &to)
    return finish(cuMemcpyDtoDAsync_v2(to, source, size, <void*>PER_THREAD)) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoD_v2(uint64_t target, Array* source, size_t at, size_t size) noexcept nogil:
    cdef uint64_t of = 0
    cdef CUresult result = locate(source, at, size, &of)
    return cuMemcpyDtoD_v2(target, of, size) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoD_v2_ptds(uint64_t target, Array* source, size_t at, size_t size) noexcept nogil:
    cdef uint64_t of = 0
    cdef CUresult result = locate(source, at, size, &of)
    return finish(cuMemcpyDtoDAsync_v2(target, of, size, <void*>PER_THREAD)) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoA_v2(
    Array* target, size_t target_at, Array* source, size_t source_at, size_t size
) noexcept nogil:
    cdef uint64_t to = 0
    cdef uint64_t of = 0
    cdef CUresult result = locate_both(target, target_at, source, source_at, size, &to, &of)
    return cuMemcpyDtoD_v2(to, of, size) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoA_v2_ptds(
    Array* target, size_t target_at, Array* source, size_t source_at, size_t size
) noexcept nogil:
    cdef uint64_t to = 0
    cdef uint64_t of = 0
    cdef CUresult result = locate_both(target, target_at, source, source_at, size, &to, &of)
    return finish(cuMemcpyDtoDAsync_v2(to, of, size, <void*>PER_THREAD)) if result == SUCCESS else result


cdef public CUresult cuMemcpyHtoA_v2(Array* target, size_t at, const void* source, size_t size) noexcept nogil:
    cdef uint64_t to = 0
    cdef CUresult result = locate(target, at, size, &to)
    return cuMemcpyHtoD_v2(to, source, size) if result == SUCCESS else result


cdef public CUresult cuMemcpyHtoA_v2_ptds(Array* target, size_t at, const void* source, size_t size) noexcept nogil:
    cdef uint64_t to = 0
    cdef CUresult result = locate(target, at, size, &to)
    return finish(cuMemcpyHtoDAsync_v2(to, source, size, <void*>PER_THREAD)) if result == SUCCESS else result


cdef public CUresult cuMemcpyHtoAAsync_v2(
    Array* target, size_t at, const void* source, size_t size, void* stream
) noexcept nogil:
    cdef uint64_t to = 0
    cdef CUresult result = locate(target, at, size, &to)
    return cuMemcpyHtoDAsync_v2(to, source, size, stream) if result == SUCCESS else result


cdef public CUresult cuMemcpyHtoAAsync_v2_ptsz(Array* target, size_t at, const void* source, size_t size,
                                               void* stream) noexcept nogil:
    return cuMemcpyHtoAAsync_v2(target, at, source, size, <void*>PER_THREAD if stream == NULL else stream)


cdef public CUresult cuMemcpyAtoH_v2(void* target, Array* source, size_t at, size_t size) noexcept nogil:
    cdef uint64_t of = 0
    cdef CUresult result = locate(source, at, size, &of)
    return cuMemcpyDtoH_v2(target, of, size) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoH_v2_ptds(void* target, Array* source, size_t at, size_t size) noexcept nogil:
    cdef uint64_t of = 0
    cdef CUresult result = locate(source, at, size, &of)
    return finish(cuMemcpyDtoHAsync_v2(target, of, size, <void*>PER_THREAD)) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoHAsync_v2(
    void* target, Array* source, size_t at, size_t size, void* stream
) noexcept nogil:
    cdef uint64_t of = 0
    cdef CUresult result = locate(source, at, size, &of)
    return cuMemcpyDtoHAsync_v2(target, of, size, stream) if result == SUCCESS else result


cdef public CUresult cuMemcpyAtoHAsync_v2_ptsz(void* target, Array* source, size_t at, size_t size,
                                               void* stream) noexcept nogil:
    return cuMemcpyAtoHAsync_v2(target, source, at, size, <void*>PER_THREAD if stream == NULL else stream)
