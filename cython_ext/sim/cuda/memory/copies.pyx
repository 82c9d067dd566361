"""Copies and fills: memory changes when they are submitted, time passes when the GPU comes to them."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

from cython_ext.sim.cuda.driver cimport (
    Context, Copy3D, CUresult, DATA_COPY, DATA_FILL, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED,
    SUCCESS, Side3D, Stream, Work, drv_is_context, drv_lock, drv_stream, drv_submit, drv_synchronize, drv_touch,
    drv_unlock, drv_check_unsafe, drv_waits_for_graph,
)
from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_HOST, BACKING_PRIVATE, BACKING_REGISTERED, mem_check_range, mem_find,
)
from cython_ext.sim.share cimport MADV_DONTNEED, madvise
from cython_ext.sim.state cimport OP_COPY_IN, OP_COPY_OUT, OP_KERNEL

cdef enum:
    COPY_NS = 1500          # set-up of a copy
    PAGE = 4096
    MEMORY_HOST = 1
    MEMORY_DEVICE = 2
    MEMORY_ARRAY = 3
    MEMORY_UNIFIED = 4


# -- contents

cdef void fill_row(char* at, Work* work) noexcept nogil:
    cdef uint64_t i
    if work.fill_bytes == 1:
        memset(at, <int>work.fill, work.width)
    elif work.fill_bytes == 2:
        for i in range(work.width / 2):
            (<uint16_t*>at)[i] = <uint16_t>work.fill
    else:
        for i in range(work.width / 4):
            (<uint32_t*>at)[i] = work.fill


cdef void clear(uint64_t address, uint64_t size) noexcept nogil:
    """Zeros cost nothing where whole pages of private memory can be given back instead."""
    cdef uint64_t first = (address + PAGE - 1) / PAGE * PAGE, last = (address + size) / PAGE * PAGE
    cdef Allocation* allocation
    cdef bint private
    drv_lock()
    allocation = mem_find(address)
    private = allocation != NULL and allocation.backing == BACKING_PRIVATE
    drv_unlock()
    if not private or last <= first or madvise(<void*>first, last - first, MADV_DONTNEED) != 0:
        memset(<void*>address, 0, size)
        return
    memset(<void*>address, 0, first - address)
    memset(<void*>last, 0, address + size - last)


cdef public void drv_move_data(Work* work) noexcept nogil:
    cdef uint64_t row
    if work.data == DATA_COPY and work.source == work.target and work.source_pitch == work.target_pitch:
        return               # onto itself: it takes the GPU's time alone, which is all that some tests want of a copy
    if work.data == DATA_FILL and work.fill == 0 and (work.height == 1 or work.target_pitch == work.width):
        clear(work.target, work.width * work.height)
        return
    for row in range(work.height):
        if work.data == DATA_COPY:
            memmove(<void*>(work.target + row * work.target_pitch), <void*>(work.source + row * work.source_pitch),
                    work.width)
        else:
            fill_row(<char*>(work.target + row * work.target_pitch), work)


cdef bint on_device(uint64_t address) noexcept nogil:
    cdef Allocation* allocation
    cdef bint found
    drv_lock()
    allocation = mem_find(address)
    found = allocation != NULL and allocation.backing < BACKING_HOST
    drv_unlock()
    return found


cdef bint ends_in_part(uint64_t address, uint64_t size) noexcept nogil:
    """Whether a range begins in pinned host memory and ends beyond it. The driver refuses such a copy, even where the
    rest is pinned, too, by another call (cuMemcpyAsync: regions must be entirely registered, or not at all)."""
    cdef Allocation* allocation
    cdef bint found
    drv_lock()
    allocation = mem_find(address)
    found = allocation != NULL and allocation.backing in (BACKING_HOST, BACKING_REGISTERED) and (
        size > allocation.address + allocation.size - address
    )
    drv_unlock()
    return found


cdef void touch_range(Work* work, uint64_t address, uint64_t size) noexcept nogil:
    """Note every piece of device memory in a range."""
    cdef Allocation* piece
    cdef uint64_t end = address + size
    while address < end:
        drv_touch(&work.effect, address)
        drv_lock()
        piece = mem_find(address)
        address = piece.address + piece.size if piece != NULL else end
        drv_unlock()


cdef bint crosses(Work* work) noexcept nogil:
    """Whether a copy goes between host and device."""
    return work.data == DATA_COPY and on_device(work.target) != on_device(work.source)


cdef uint64_t span(uint64_t pitch, uint64_t width, uint64_t height) noexcept nogil:
    """Bytes from the first byte of the first row to the last byte of the last; 2^64 - 1 where 64 bits are too few."""
    cdef uint64_t most = <uint64_t>-1
    if height > 1 and pitch > (most - width) / (height - 1):
        return most
    return (height - 1) * pitch + width


cdef public CUresult drv_price_copy(Stream* stream, Work* work) noexcept nogil:
    """Check the device sides of a copy or fill, and compute its cost."""
    cdef uint64_t size = work.width * work.height
    cdef bint into = on_device(work.target)
    cdef uint64_t written = span(work.target_pitch, work.width, work.height)
    cdef uint64_t read = span(work.source_pitch, work.width, work.height)
    if (into or work.data == DATA_FILL) and mem_check_range(work.target, written) != SUCCESS:
        return INVALID_VALUE
    if work.data == DATA_COPY and on_device(work.source) and mem_check_range(work.source, read) != SUCCESS:
        return INVALID_VALUE
    if work.data == DATA_COPY and (ends_in_part(work.target, written) or ends_in_part(work.source, read)):
        return INVALID_VALUE
    touch_range(work, work.target, work.width)
    if work.data == DATA_COPY:
        touch_range(work, work.source, work.width)
    if crosses(work):
        work.kind = OP_COPY_IN if into else OP_COPY_OUT
        work.ns = COPY_NS + size / stream.gpu.copy_bytes_per_ns
    else:
        # Inside the device a copy reads and writes at the memory's speed, and takes few SMs.
        work.kind = OP_KERNEL
        work.sms = 16
        work.ns = COPY_NS + size * (2 if work.data == DATA_COPY else 1) / stream.gpu.memory_bytes_per_ns
    return SUCCESS


cdef CUresult submit(void* handle, Work* work, bint synchronous) noexcept nogil:
    """Queue a copy or fill, and wait for it if the call is a synchronous one."""
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS and synchronous:
        result = drv_check_unsafe()
    if result != SUCCESS or work.width * work.height == 0:
        return result
    result = drv_price_copy(stream, work)
    if stream.capture == NULL and (drv_waits_for_graph(work.target) or drv_waits_for_graph(work.source)):
        result = INVALID_VALUE
    if result == SUCCESS:
        result = drv_submit(stream, work)
    # Fills return before they are done; so do copies within the device.
    if result == SUCCESS and synchronous and crosses(work):
        result = drv_synchronize(stream)
    return result


cdef CUresult copy(uint64_t target, uint64_t source, uint64_t size, void* stream, bint synchronous) noexcept nogil:
    cdef Work work
    memset(&work, 0, sizeof(Work))
    work.data = DATA_COPY
    work.target = target
    work.source = source
    work.width = size
    work.height = 1
    return submit(stream, &work, synchronous)


cdef CUresult fill(uint64_t target, uint64_t pitch, uint32_t value, uint32_t unit, uint64_t width, uint64_t height,
                   void* stream, bint synchronous) noexcept nogil:
    cdef Work work
    if target & (unit - 1):
        return INVALID_VALUE
    memset(&work, 0, sizeof(Work))
    work.data = DATA_FILL
    work.target = target
    work.target_pitch = pitch
    work.width = width * unit
    work.height = height
    work.fill = value
    work.fill_bytes = unit
    return submit(stream, &work, synchronous)


# -- one-dimensional copies

cdef public CUresult cuMemcpy(uint64_t target, uint64_t source, size_t size) noexcept nogil:
    return copy(target, source, size, NULL, True)


cdef public CUresult cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil:
    return copy(target, source, size, stream, False)


cdef CUresult explicit(uint64_t target, uint64_t source, size_t size, uint64_t device1, uint64_t device2,
                       void* stream, bint synchronous) noexcept nogil:
    """A copy whose call says which sides are device memory: those must be."""
    if size and (mem_check_range(device1, size) != SUCCESS or mem_check_range(device2, size) != SUCCESS):
        return INVALID_VALUE
    return copy(target, source, size, stream, synchronous)


cdef public CUresult cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t size) noexcept nogil:
    return explicit(target, <uint64_t>source, size, target, target, NULL, True)


cdef public CUresult cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t size,
                                          void* stream) noexcept nogil:
    return explicit(target, <uint64_t>source, size, target, target, stream, False)


cdef public CUresult cuMemcpyDtoH_v2(void* target, uint64_t source, size_t size) noexcept nogil:
    return explicit(<uint64_t>target, source, size, source, source, NULL, True)


cdef public CUresult cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size, void* stream) noexcept nogil:
    return explicit(<uint64_t>target, source, size, source, source, stream, False)


cdef public CUresult cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) noexcept nogil:
    return explicit(target, source, size, target, source, NULL, True)


cdef public CUresult cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size,
                                          void* stream) noexcept nogil:
    return explicit(target, source, size, target, source, stream, False)


cdef public CUresult cuMemcpyPeer(uint64_t target, Context* target_context, uint64_t source,
                                  Context* source_context, size_t size) noexcept nogil:
    if not drv_is_context(target_context) or not drv_is_context(source_context):
        return INVALID_CONTEXT
    return copy(target, source, size, NULL, True)


cdef public CUresult cuMemcpyPeerAsync(uint64_t target, Context* target_context, uint64_t source,
                                       Context* source_context, size_t size, void* stream) noexcept nogil:
    if not drv_is_context(target_context) or not drv_is_context(source_context):
        return INVALID_CONTEXT
    return copy(target, source, size, stream, False)


# -- two and three dimensions

cdef public struct Copy2D:
    size_t source_x
    size_t source_y
    int source_type
    const void* source_host
    uint64_t source_device
    void* source_array
    size_t source_pitch
    size_t target_x
    size_t target_y
    int target_type
    void* target_host
    uint64_t target_device
    void* target_array
    size_t target_pitch
    size_t width
    size_t height


cdef CUresult copy_2d(const Copy2D* c, void* stream, bint synchronous) noexcept nogil:
    cdef Work work
    if c == NULL:
        return INVALID_VALUE
    if c.source_type == MEMORY_ARRAY or c.target_type == MEMORY_ARRAY:
        return NOT_SUPPORTED
    memset(&work, 0, sizeof(Work))
    work.data = DATA_COPY
    work.source_pitch = c.source_pitch if c.source_pitch else c.width
    work.target_pitch = c.target_pitch if c.target_pitch else c.width
    if work.source_pitch < c.width or work.target_pitch < c.width:
        return INVALID_VALUE
    work.source = <uint64_t>c.source_host if c.source_type == MEMORY_HOST else c.source_device
    work.target = <uint64_t>c.target_host if c.target_type == MEMORY_HOST else c.target_device
    work.source += c.source_y * work.source_pitch + c.source_x
    work.target += c.target_y * work.target_pitch + c.target_x
    work.width = c.width
    work.height = c.height
    return submit(stream, &work, synchronous)


cdef public CUresult cuMemcpy2D_v2(const Copy2D* c) noexcept nogil:
    return copy_2d(c, NULL, True)


cdef public CUresult cuMemcpy2DUnaligned_v2(const Copy2D* c) noexcept nogil:
    return copy_2d(c, NULL, True)


cdef public CUresult cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) noexcept nogil:
    return copy_2d(c, stream, False)


cdef uint64_t origin(const Side3D* side, size_t width, size_t height, size_t slice_index) noexcept nogil:
    cdef uint64_t base = <uint64_t>side.host if side.type == MEMORY_HOST else side.device
    cdef uint64_t pitch = side.pitch if side.pitch else width
    return base + ((side.z + slice_index) * (side.height if side.height else height) + side.y) * pitch + side.x


cdef void take_slice(const Copy3D* c, size_t z, Work* work) noexcept nogil:
    memset(work, 0, sizeof(Work))
    work.data = DATA_COPY
    work.source = origin(&c.source, c.width, c.height, z)
    work.target = origin(&c.target, c.width, c.height, z)
    work.source_pitch = c.source.pitch if c.source.pitch else c.width
    work.target_pitch = c.target.pitch if c.target.pitch else c.width
    work.width = c.width
    work.height = c.height


cdef bint has_gaps(const Side3D* side, const Copy3D* c) noexcept nogil:
    return c.depth > 1 and side.height not in (0, c.height)


cdef public CUresult drv_copy_3d(const void* params, Work* work) noexcept nogil:
    """CUDA_MEMCPY3D in one piece."""
    cdef const Copy3D* c = <const Copy3D*>params
    if c == NULL or c.width * c.height * c.depth == 0:
        return INVALID_VALUE
    if c.source.type == MEMORY_ARRAY or c.target.type == MEMORY_ARRAY:
        return NOT_SUPPORTED
    if has_gaps(&c.source, c) or has_gaps(&c.target, c):
        return NOT_SUPPORTED
    take_slice(c, 0, work)
    work.height *= c.depth
    return SUCCESS


cdef CUresult copy_3d(const Copy3D* c, void* stream, bint synchronous) noexcept nogil:
    """Slice by slice."""
    cdef Work work
    cdef size_t z
    cdef CUresult result = SUCCESS
    if c == NULL:
        return INVALID_VALUE
    if c.source.type == MEMORY_ARRAY or c.target.type == MEMORY_ARRAY:
        return NOT_SUPPORTED
    for z in range(c.depth):
        take_slice(c, z, &work)
        result = submit(stream, &work, synchronous)
        if result != SUCCESS:
            break
    return result


cdef public CUresult cuMemcpy3D_v2(const Copy3D* c) noexcept nogil:
    return copy_3d(c, NULL, True)


cdef public CUresult cuMemcpy3DAsync_v2(const Copy3D* c, void* stream) noexcept nogil:
    return copy_3d(c, stream, False)


cdef public CUresult cuMemcpy3DPeer(const Copy3D* c) noexcept nogil:
    return copy_3d(c, NULL, True)


cdef public CUresult cuMemcpy3DPeerAsync(const Copy3D* c, void* stream) noexcept nogil:
    return copy_3d(c, stream, False)


# -- fills

cdef public CUresult cuMemsetD8_v2(uint64_t target, unsigned char value, size_t count) noexcept nogil:
    return fill(target, 0, value, 1, count, 1, NULL, True)


cdef public CUresult cuMemsetD16_v2(uint64_t target, unsigned short value, size_t count) noexcept nogil:
    return fill(target, 0, value, 2, count, 1, NULL, True)


cdef public CUresult cuMemsetD32_v2(uint64_t target, unsigned int value, size_t count) noexcept nogil:
    return fill(target, 0, value, 4, count, 1, NULL, True)


cdef public CUresult cuMemsetD8Async(uint64_t target, unsigned char value, size_t count,
                                     void* stream) noexcept nogil:
    return fill(target, 0, value, 1, count, 1, stream, False)


cdef public CUresult cuMemsetD16Async(uint64_t target, unsigned short value, size_t count,
                                      void* stream) noexcept nogil:
    return fill(target, 0, value, 2, count, 1, stream, False)


cdef public CUresult cuMemsetD32Async(uint64_t target, unsigned int value, size_t count,
                                      void* stream) noexcept nogil:
    return fill(target, 0, value, 4, count, 1, stream, False)


cdef public CUresult cuMemsetD2D8_v2(uint64_t target, size_t pitch, unsigned char value, size_t width,
                                     size_t height) noexcept nogil:
    return fill(target, pitch, value, 1, width, height, NULL, True)


cdef public CUresult cuMemsetD2D16_v2(uint64_t target, size_t pitch, unsigned short value, size_t width,
                                      size_t height) noexcept nogil:
    return fill(target, pitch, value, 2, width, height, NULL, True)


cdef public CUresult cuMemsetD2D32_v2(uint64_t target, size_t pitch, unsigned int value, size_t width,
                                      size_t height) noexcept nogil:
    return fill(target, pitch, value, 4, width, height, NULL, True)


cdef public CUresult cuMemsetD2D8Async(uint64_t target, size_t pitch, unsigned char value, size_t width,
                                       size_t height, void* stream) noexcept nogil:
    return fill(target, pitch, value, 1, width, height, stream, False)


cdef public CUresult cuMemsetD2D16Async(uint64_t target, size_t pitch, unsigned short value, size_t width,
                                        size_t height, void* stream) noexcept nogil:
    return fill(target, pitch, value, 2, width, height, stream, False)


cdef public CUresult cuMemsetD2D32Async(uint64_t target, size_t pitch, unsigned int value, size_t width,
                                        size_t height, void* stream) noexcept nogil:
    return fill(target, pitch, value, 4, width, height, stream, False)
