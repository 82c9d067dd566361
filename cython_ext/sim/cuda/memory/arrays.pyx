"""CUDA arrays of up to three dimensions, mipmapped ones, and the copies that name one, with their twins for per-thread
default streams. An array is a shape over ordinary device memory, in whole blocks of 64 KiB; a deferred one has none.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport mem_check_range
from cython_ext.sim.cuda.driver cimport (
    Array, CUresult, INVALID_HANDLE, INVALID_VALUE, MARK_ARRAY, MARK_MIPMAP, OUT_OF_MEMORY, SUCCESS, drv_lock,
    drv_unlock,
)

cdef enum:
    PER_THREAD = 2
    BLOCK = 1 << 16
    LEVELS_MOST = 16
    DEFERRED = 0x80

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


cdef public struct Array3DDescriptor:   # CUDA_ARRAY3D_DESCRIPTOR
    size_t width
    size_t height
    size_t depth
    int format
    unsigned int channels
    unsigned int flags


cdef public struct Requirements:        # CUDA_ARRAY_MEMORY_REQUIREMENTS
    size_t size
    size_t alignment
    unsigned int reserved[4]


cdef size_t format_bytes(int format) noexcept nogil:
    if format in (0x01, 0x08):
        return 1
    if format in (0x02, 0x09, 0x10):
        return 2
    return 4 if format in (0x03, 0x0a, 0x20) else 0


cdef public bint drv_is_array(const Array* array) noexcept nogil:
    return array != NULL and array.mark == MARK_ARRAY


cdef Array* new_array(const Array3DDescriptor* d, size_t element) noexcept nogil:
    """Without memory."""
    global unused
    cdef Array* array
    drv_lock()
    array = unused
    if array != NULL:
        unused = array.next
    drv_unlock()
    if array == NULL:
        array = <Array*>calloc(1, sizeof(Array))
    if array != NULL:
        array.address = 0
        array.width = d.width
        array.rows = max(d.height, <size_t>1) * max(d.depth, <size_t>1)
        array.element_bytes = element
        array.mark = MARK_ARRAY
    return array


cdef void drop_array(Array* array) noexcept nogil:
    global unused
    drv_lock()
    array.mark = 0
    array.next = unused
    unused = array
    drv_unlock()


cdef inline uint64_t array_bytes(const Array* array) noexcept nogil:
    return (array.element_bytes * array.width * array.rows + BLOCK - 1) / BLOCK * BLOCK


cdef size_t check_shape(void* out, const Array3DDescriptor* d) noexcept nogil:
    """Bytes of an element; 0: no such array."""
    if out == NULL or d == NULL or d.width == 0 or d.channels not in (1, 2, 4):
        return 0
    return format_bytes(d.format) * d.channels


cdef public CUresult cuArray3DCreate_v2(Array** out, const Array3DDescriptor* d) noexcept nogil:
    cdef size_t element = check_shape(out, d)
    cdef CUresult result = SUCCESS
    cdef Array* array
    if element == 0:
        return INVALID_VALUE
    array = new_array(d, element)
    if array == NULL:
        return OUT_OF_MEMORY
    if not d.flags & DEFERRED:
        result = cuMemAlloc_v2(&array.address, array_bytes(array))
    if result != SUCCESS:
        drop_array(array)
        return result
    out[0] = array
    return SUCCESS


cdef public CUresult cuArrayCreate_v2(Array** out, const ArrayDescriptor* d) noexcept nogil:
    cdef Array3DDescriptor shape
    if d == NULL:
        return INVALID_VALUE
    shape.width, shape.height, shape.depth = d.width, d.height, 0
    shape.format, shape.channels, shape.flags = d.format, d.channels, 0
    return cuArray3DCreate_v2(out, &shape)


cdef public CUresult cuArrayDestroy(Array* array) noexcept nogil:
    cdef CUresult result = SUCCESS
    if not drv_is_array(array):
        return INVALID_HANDLE
    if array.address:
        result = cuMemFree_v2(array.address)
    drop_array(array)
    return result


cdef void tell_requirements(Requirements* out, uint64_t size) noexcept nogil:
    memset(out, 0, sizeof(Requirements))
    out.size = size
    out.alignment = BLOCK


cdef public CUresult cuArrayGetMemoryRequirements(Requirements* out, Array* array, int device) noexcept nogil:
    """Of a deferred one alone, as documented."""
    if out == NULL or not drv_is_array(array) or array.address:
        return INVALID_VALUE
    tell_requirements(out, array_bytes(array))
    return SUCCESS


# -- mipmaps

cdef public struct Mipmap:
    uint32_t mark
    unsigned int count
    bint deferred
    Array* level[LEVELS_MOST]


cdef bint is_mipmap(const Mipmap* mipmap) noexcept nogil:
    return mipmap != NULL and mipmap.mark == MARK_MIPMAP


cdef public CUresult cuMipmappedArrayCreate(
    Mipmap** out, const Array3DDescriptor* d, unsigned int levels
) noexcept nogil:
    cdef Array3DDescriptor shape
    cdef CUresult result = SUCCESS
    cdef Mipmap* mipmap
    if check_shape(out, d) == 0 or levels == 0:
        return INVALID_VALUE
    mipmap = <Mipmap*>calloc(1, sizeof(Mipmap))
    if mipmap == NULL:
        return OUT_OF_MEMORY
    mipmap.mark = MARK_MIPMAP
    mipmap.deferred = d.flags & DEFERRED != 0
    shape = d[0]
    while result == SUCCESS and mipmap.count < min(levels, <unsigned int>LEVELS_MOST):
        result = cuArray3DCreate_v2(&mipmap.level[mipmap.count], &shape)
        mipmap.count += result == SUCCESS
        if max(shape.width, max(shape.height, shape.depth)) == 1:
            break
        shape.width = max(shape.width / 2, <size_t>1)
        shape.height = max(shape.height / 2, <size_t>1) if d.height else 0
        shape.depth = max(shape.depth / 2, <size_t>1) if d.depth else 0
    if result != SUCCESS:
        cuMipmappedArrayDestroy(mipmap)
        return result
    out[0] = mipmap
    return SUCCESS


cdef public CUresult cuMipmappedArrayDestroy(Mipmap* mipmap) noexcept nogil:
    cdef unsigned int i
    if not is_mipmap(mipmap):
        return INVALID_HANDLE
    for i in range(mipmap.count):
        cuArrayDestroy(mipmap.level[i])
    mipmap.mark = 0
    free(mipmap)
    return SUCCESS


cdef public CUresult cuMipmappedArrayGetLevel(Array** out, Mipmap* mipmap, unsigned int level) noexcept nogil:
    if out == NULL or not is_mipmap(mipmap) or level >= mipmap.count:
        return INVALID_VALUE
    out[0] = mipmap.level[level]
    return SUCCESS


cdef public CUresult cuMipmappedArrayGetMemoryRequirements(
    Requirements* out, Mipmap* mipmap, int device
) noexcept nogil:
    cdef uint64_t size = 0
    cdef unsigned int i
    if out == NULL or not is_mipmap(mipmap) or not mipmap.deferred:
        return INVALID_VALUE
    for i in range(mipmap.count):
        size += array_bytes(mipmap.level[i])
    tell_requirements(out, size)
    return SUCCESS


# -- copies

cdef CUresult locate(const Array* array, size_t at, size_t size, uint64_t* address) noexcept nogil:
    """Where so many bytes lie, from byte `at` on."""
    if not drv_is_array(array):
        return INVALID_HANDLE
    if array.address == 0 or at + size > array.element_bytes * array.width * array.rows:
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
