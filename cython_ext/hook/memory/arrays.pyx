"""CUDA arrays: charged for the size that the driver reports, which depends on its own layout of textures.

The driver reports it only for an array whose memory is mapped later (CUDA_ARRAY3D_DEFERRED_MAPPING). So the hook first
makes a twin of the same shape, queries it, and destroys it: the twin takes no memory. A program's own array of that
kind costs nothing before the program maps memory of cuMemCreate's, which is charged as such.
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuArray3DCreate, real_cuArray3DCreate_v2, real_cuArrayCreate, real_cuArrayCreate_v2, real_cuArrayDestroy,
    real_cuArrayGetMemoryRequirements, real_cuMipmappedArrayCreate, real_cuMipmappedArrayDestroy,
    real_cuMipmappedArrayGetMemoryRequirements,
)
from cython_ext.hook.hook cimport (
    vgpu_gate_here, vgpu_memory_forget, vgpu_memory_freed, vgpu_memory_settle, vgpu_reserve, vgpu_settle_ahead,
)
from cython_ext.hook.state cimport CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate
from cython_ext.pages.layout cimport KIND_OTHER
from cython_ext.logic.memory.alloctable cimport Block

cdef enum:
    SPARSE = 0x40
    DEFERRED = 0x80


cdef struct Shape:               # CUDA_ARRAY3D_DESCRIPTOR
    size_t width
    size_t height
    size_t depth
    int format
    unsigned int channels
    unsigned int flags


cdef struct FlatShape:           # CUDA_ARRAY_DESCRIPTOR
    size_t width
    size_t height
    int format
    unsigned int channels


cdef struct ShapeV1:             # their first versions
    unsigned int width
    unsigned int height
    unsigned int depth
    int format
    unsigned int channels
    unsigned int flags


cdef struct FlatShapeV1:
    unsigned int width
    unsigned int height
    int format
    unsigned int channels


cdef struct Requirements:        # CUDA_ARRAY_MEMORY_REQUIREMENTS
    size_t size
    size_t alignment
    unsigned int[4] reserved


cdef uint64_t asked_bytes(const Shape* shape, unsigned int levels) noexcept nogil:
    """The elements alone, where the driver does not report what it needs. A format that is not known here counts as if
    of four bytes, levels below the first as a third of it together."""
    cdef uint64_t element = 4
    if shape.format in (0x01, 0x08):
        element = 1
    elif shape.format in (0x02, 0x09, 0x10):
        element = 2
    element *= shape.channels * <uint64_t>shape.width * max(shape.height, <size_t>1) * max(shape.depth, <size_t>1)
    return element + element / 3 if levels > 1 else element


cdef uint64_t needed_bytes(const Gate* gate, const Shape* shape, unsigned int levels) noexcept nogil:
    """What an array of that shape takes from the card; ``levels``: 0, or of a mipmapped one."""
    cdef Shape later = shape[0]
    cdef Requirements needs
    cdef void* twin = NULL
    cdef bint answered
    if shape.flags & (DEFERRED | SPARSE):
        return 0
    vgpu_settle_ahead()      # a destruction may wait for what is queued, as a free does
    later.flags |= DEFERRED
    if levels:
        if real_cuMipmappedArrayCreate(&twin, &later, levels) != CUDA_SUCCESS:
            return asked_bytes(shape, levels)
        answered = real_cuMipmappedArrayGetMemoryRequirements(&needs, twin, gate.device) == CUDA_SUCCESS
        real_cuMipmappedArrayDestroy(twin)
    else:
        if real_cuArray3DCreate_v2(&twin, &later) != CUDA_SUCCESS:
            return asked_bytes(shape, levels)
        answered = real_cuArrayGetMemoryRequirements(&needs, twin, gate.device) == CUDA_SUCCESS
        real_cuArrayDestroy(twin)
    return needs.size if answered else asked_bytes(shape, levels)


ctypedef int (*Create)(void**, const void*) noexcept nogil


cdef int create(void** array, const void* descriptor, const Shape* shape, Create real) noexcept nogil:
    """``descriptor``, in the version that ``real`` takes, has the ``shape``."""
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t size = needed_bytes(gate, shape, 0) if gate != NULL else 0
    if size == 0:
        return real(array, descriptor)
    if not vgpu_reserve(gate, KIND_OTHER, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    return settled(gate, size, real(array, descriptor), array)


cdef inline int settled(Gate* gate, uint64_t size, int result, void** array) noexcept nogil:
    return vgpu_memory_settle(gate, KIND_OTHER, size, result, <uint64_t>array[0] if result == CUDA_SUCCESS else 0)


cdef inline Shape shape_of(
    size_t width, size_t height, size_t depth, int format, unsigned int channels, unsigned int flags
) noexcept nogil:
    cdef Shape shape
    shape.width, shape.height, shape.depth = width, height, depth
    shape.format, shape.channels, shape.flags = format, channels, flags
    return shape


cdef public int cuArray3DCreate_v2(void** array, const void* descriptor) noexcept nogil:
    if descriptor == NULL:
        return real_cuArray3DCreate_v2(array, NULL)
    return create(array, descriptor, <const Shape*>descriptor, real_cuArray3DCreate_v2)


cdef public int cuArrayCreate_v2(void** array, const void* descriptor) noexcept nogil:
    cdef const FlatShape* given = <const FlatShape*>descriptor
    cdef Shape shape
    if descriptor == NULL:
        return real_cuArrayCreate_v2(array, NULL)
    shape = shape_of(given.width, given.height, 0, given.format, given.channels, 0)
    return create(array, descriptor, &shape, real_cuArrayCreate_v2)


cdef public int cuArray3DCreate(void** array, const void* descriptor) noexcept nogil:
    cdef const ShapeV1* given = <const ShapeV1*>descriptor
    cdef Shape shape
    if descriptor == NULL:
        return real_cuArray3DCreate(array, NULL)
    shape = shape_of(given.width, given.height, given.depth, given.format, given.channels, given.flags)
    return create(array, descriptor, &shape, real_cuArray3DCreate)


cdef public int cuArrayCreate(void** array, const void* descriptor) noexcept nogil:
    cdef const FlatShapeV1* given = <const FlatShapeV1*>descriptor
    cdef Shape shape
    if descriptor == NULL:
        return real_cuArrayCreate(array, NULL)
    shape = shape_of(given.width, given.height, 0, given.format, given.channels, 0)
    return create(array, descriptor, &shape, real_cuArrayCreate)


cdef public int cuMipmappedArrayCreate(void** array, const void* descriptor, unsigned int levels) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here() if descriptor != NULL and levels else NULL
    cdef uint64_t size = needed_bytes(gate, <const Shape*>descriptor, levels) if gate != NULL else 0
    if size == 0:
        return real_cuMipmappedArrayCreate(array, descriptor, levels)
    if not vgpu_reserve(gate, KIND_OTHER, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    return settled(gate, size, real_cuMipmappedArrayCreate(array, descriptor, levels), array)


cdef public int cuArrayDestroy(void* array) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(<uint64_t>array, &block)
    vgpu_settle_ahead()
    return vgpu_memory_freed(real_cuArrayDestroy(array), known, &block)


cdef public int cuMipmappedArrayDestroy(void* array) noexcept nogil:
    cdef Block block
    cdef bint known = vgpu_memory_forget(<uint64_t>array, &block)
    vgpu_settle_ahead()
    return vgpu_memory_freed(real_cuMipmappedArrayDestroy(array), known, &block)
