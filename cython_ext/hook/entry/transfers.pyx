"""Fills, copies and prefetches: the gate holds those within the GPU as a launch; those to or from the host are counted.

The wrappers of generated/calls.pyx call these functions before the driver (client_hook/symbols.py has a row for each).
CUDA_SUCCESS: vgpu_leave follows. Else the result is the error to return.

A copy between host and device runs on a copy engine beside other vGPUs' kernels, and programs wait for it: holding it
for a lease would hold every ``.item()`` for a round. Which one a copy is, the driver knows where the call does not say.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.gate.fastpath cimport announce, named
from cython_ext.hook.generated.driver cimport real_cuPointerGetAttribute
from cython_ext.hook.hook cimport vgpu_capturing, vgpu_count_copy, vgpu_enter, vgpu_gate_here, vgpu_touch
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CUDA_SUCCESS, LAUNCH_WAITS, PASS_ANNOUNCED, PASS_PLAIN, PASS_TOUCHING, Gate, Pass, attached, is_swappable,
    state,
)
from cython_ext.logic.meter.durations cimport WORK_COPY, WORK_FILL, WORK_PEER_COPY, WORK_PREFETCH, LaunchKey
from cython_ext.logic.meter.meter cimport key_tag
from cython_ext.logic.meter.transfers cimport SMALL_BYTES, transfer_key, trifle_passes
from cython_ext.native cimport load32, now_ns

cdef enum:
    # CUmemorytype
    MEMORY_HOST = 1
    MEMORY_DEVICE = 2
    MEMORY_ARRAY = 3             # on the device
    MEMORY_UNIFIED = 4           # the address decides
    POINTER_MEMORY_TYPE = 2      # CU_POINTER_ATTRIBUTE_...
    OPERAND_POINTER = 1          # CU_MEMCPY_OPERAND_TYPE_...
    LARGEST_ELEMENT_BYTES = 16   # of an array: 4 channels of 32 bits
    MOST_OF_A_BATCH = 1 << 20    # a longer one is not read here: the driver may refuse it


cdef struct Side2D:
    size_t x, y
    int kind                     # MEMORY_*
    void* host
    uint64_t device
    void* array
    size_t pitch


cdef struct Copy2D:              # CUDA_MEMCPY2D
    Side2D source, target
    size_t width_bytes, height


cdef struct Side3D:
    size_t x, y, z, level
    int kind                     # MEMORY_*
    void* host
    uint64_t device
    void* array
    void* context                # of CUDA_MEMCPY3D_PEER; else reserved
    size_t pitch, height


cdef struct Copy3D:              # CUDA_MEMCPY3D, CUDA_MEMCPY3D_PEER
    Side3D source, target
    size_t width_bytes, height, depth


cdef struct Operand:             # CUmemcpy3DOperand
    int kind                     # OPERAND_POINTER, or an array
    uint64_t address
    uint64_t[3] rest


cdef struct CopyOfBatch:         # CUDA_MEMCPY3D_BATCH_OP
    Operand source, target
    size_t width, height, depth  # in elements: of the array's where one is concerned, else bytes
    int order
    unsigned int flags


cdef struct FabricOperand:       # CUfabricCpyOperand
    int kind
    uint64_t[2] place            # an address, or an endpoint and where in it


cdef struct FabricCopy:          # CUDA_FABRIC_COPY_BATCH_OP
    FabricOperand source, target
    size_t size_bytes
    unsigned int flags


# --- which memory

cdef bint on_device(uint64_t address) noexcept nogil:
    cdef unsigned int kind = 0
    return (
        real_cuPointerGetAttribute(&kind, POINTER_MEMORY_TYPE, address) == CUDA_SUCCESS and kind == MEMORY_DEVICE
    )


cdef bint both_on_device(uint64_t a, uint64_t b) noexcept nogil:
    cdef int mode = relax()
    cdef bint both = on_device(a) and on_device(b)
    restore(mode)
    return both


cdef bint is_device_side(int kind, uint64_t address) noexcept nogil:
    return kind != MEMORY_HOST and (kind != MEMORY_UNIFIED or both_on_device(address, address))


# --- the two ways

cdef void touching(Pass* work, Gate* gate) noexcept nogil:
    """Without a lease: memory that can leave the card has to be there, and stay until the driver was called."""
    work.kind = PASS_PLAIN
    if gate != NULL and is_swappable(gate):
        vgpu_touch(gate)
        work.kind = PASS_TOUCHING
        work.gate = gate


cdef int gated(
    Pass* work, void* stream, bint waits, uint32_t kind, uint64_t size_bytes, uint64_t row_bytes
) noexcept nogil:
    cdef LaunchKey key = transfer_key(kind, size_bytes, row_bytes)
    cdef Gate* gate
    work.kind = PASS_ANNOUNCED
    work.sample = -1
    work.thread = announce(stream, key_tag(&key))
    if work.thread != NULL:
        return CUDA_SUCCESS
    if size_bytes <= SMALL_BYTES:
        gate = vgpu_gate_here()
        if gate == NULL or size_bytes == 0 or (
            load32(&gate.grants.open_epoch) == 0 and trifle_passes(&gate.trifles, now_ns())
        ):
            touching(work, gate)
            return CUDA_SUCCESS
    return vgpu_enter(work, stream, &key, LAUNCH_WAITS if waits else 0)


cdef Gate* count_copy(void* stream, uint64_t size_bytes) noexcept nogil:
    """The gate that the copy belongs to; NULL: none, or the copy is captured."""
    cdef Gate* gate = vgpu_gate_here() if attached() and not vgpu_capturing(stream) else NULL
    if gate != NULL:
        vgpu_count_copy(gate, size_bytes)
    return gate


cdef int counted(Pass* work, void* stream, uint64_t size_bytes) noexcept nogil:
    touching(work, count_copy(stream, size_bytes))
    return CUDA_SUCCESS


cdef int let_through(Pass* work, void* stream, bint waits, uint64_t inside_bytes, Gate* gate) noexcept nogil:
    """Copies as one unit, some of which cross to the host and were counted, for ``gate``. With a lease, all is there.
    """
    if inside_bytes:
        return gated(work, stream, waits, WORK_COPY, inside_bytes, 0)
    touching(work, gate)
    return CUDA_SUCCESS


cdef int within(
    Pass* work, void* stream, bint waits, uint32_t kind, uint64_t size_bytes, uint64_t row_bytes, bint inside
) noexcept nogil:
    """``inside``: both sides are memory of a GPU."""
    if inside:
        return gated(work, stream, waits, kind, size_bytes, row_bytes)
    return counted(work, stream, size_bytes)


# --- what the wrappers ask

cdef public int vgpu_fill(
    Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes, uint64_t row_bytes
) noexcept nogil:
    return gated(work, named(stream, own), waits, WORK_FILL, size_bytes, row_bytes)


cdef public int vgpu_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil:
    """Between two places of the device."""
    return gated(work, named(stream, own), waits, WORK_COPY, size_bytes, 0)


cdef public int vgpu_copy_between(
    Pass* work, void* stream, bint own, bint waits, uint64_t target, uint64_t source, uint64_t size_bytes
) noexcept nogil:
    """Between two places anywhere."""
    cdef bint inside = attached() and both_on_device(target, source)
    return within(work, named(stream, own), waits, WORK_COPY, size_bytes, 0, inside)


cdef public int vgpu_host_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil:
    return counted(work, named(stream, own), size_bytes)


cdef public int vgpu_touching(Pass* work, void* stream, bint own, bint waits) noexcept nogil:
    """Words that a stream reads or writes, wherever they are."""
    work.kind = PASS_PLAIN
    if attached() and state().swappable and not vgpu_capturing(named(stream, own)):
        touching(work, vgpu_gate_here())
    return CUDA_SUCCESS


cdef public int vgpu_peer_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil:
    """From the memory of one GPU to another's: gated where it is submitted, the other one's vGPU is not asked."""
    return gated(work, named(stream, own), waits, WORK_PEER_COPY, size_bytes, 0)


cdef public int vgpu_copy_2d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil:
    cdef const Copy2D* c = <const Copy2D*>copy
    cdef bint inside
    work.kind = PASS_PLAIN
    if c == NULL or not attached():
        return CUDA_SUCCESS
    inside = is_device_side(c.source.kind, c.source.device) and is_device_side(c.target.kind, c.target.device)
    return within(work, named(stream, own), waits, WORK_COPY, c.width_bytes * c.height, c.width_bytes, inside)


cdef int box(Pass* work, void* stream, bint own, bint waits, uint32_t kind, const Copy3D* c) noexcept nogil:
    cdef bint inside
    work.kind = PASS_PLAIN
    if c == NULL or not attached():
        return CUDA_SUCCESS
    inside = is_device_side(c.source.kind, c.source.device) and is_device_side(c.target.kind, c.target.device)
    return within(
        work, named(stream, own), waits, kind, c.width_bytes * c.height * c.depth, c.width_bytes, inside
    )


cdef public int vgpu_copy_3d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil:
    return box(work, stream, own, waits, WORK_COPY, <const Copy3D*>copy)


cdef public int vgpu_peer_copy_3d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil:
    return box(work, stream, own, waits, WORK_PEER_COPY, <const Copy3D*>copy)


cdef public int vgpu_copy_batch(
    Pass* work, void* stream, bint own, bint waits, const void* targets, const void* sources,
    const size_t* sizes_bytes, size_t count
) noexcept nogil:
    """Many copies as one unit; those that cross to the host are counted."""
    cdef uint64_t inside_bytes = 0
    cdef Gate* gate = NULL
    cdef size_t i
    work.kind = PASS_PLAIN
    if targets == NULL or sources == NULL or sizes_bytes == NULL or not attached():
        return CUDA_SUCCESS
    if count > MOST_OF_A_BATCH:
        return let_through(work, named(stream, own), waits, count, NULL)
    for i in range(count):
        if both_on_device((<const uint64_t*>targets)[i], (<const uint64_t*>sources)[i]):
            inside_bytes += sizes_bytes[i]
        else:
            gate = count_copy(named(stream, own), sizes_bytes[i])
    return let_through(work, named(stream, own), waits, inside_bytes, gate)


cdef bint is_device_operand(const Operand* operand) noexcept nogil:
    return operand.kind != OPERAND_POINTER or both_on_device(operand.address, operand.address)


cdef public int vgpu_copy_3d_batch(
    Pass* work, void* stream, bint own, bint waits, const void* copies, size_t count
) noexcept nogil:
    """Of an array only the driver knows how large its elements are: they count as the largest."""
    cdef const CopyOfBatch* c = <const CopyOfBatch*>copies
    cdef uint64_t size_bytes, inside_bytes = 0
    cdef Gate* gate = NULL
    cdef bint inside
    cdef size_t i
    work.kind = PASS_PLAIN
    if c == NULL or not attached():
        return CUDA_SUCCESS
    if count > MOST_OF_A_BATCH:
        return let_through(work, named(stream, own), waits, count, NULL)
    for i in range(count):
        size_bytes = c[i].width * c[i].height * c[i].depth
        if c[i].source.kind != OPERAND_POINTER or c[i].target.kind != OPERAND_POINTER:
            size_bytes *= LARGEST_ELEMENT_BYTES
        inside = is_device_operand(&c[i].source) and is_device_operand(&c[i].target)
        if inside:
            inside_bytes += size_bytes
        else:
            gate = count_copy(named(stream, own), size_bytes)
    return let_through(work, named(stream, own), waits, inside_bytes, gate)


cdef public int vgpu_fabric_copies(
    Pass* work, void* stream, bint own, bint waits, const void* copies, size_t count
) noexcept nogil:
    """Between memory here and that of other machines' GPUs, as one unit."""
    cdef uint64_t size_bytes = 0
    cdef size_t i
    work.kind = PASS_PLAIN
    if copies == NULL or not attached():
        return CUDA_SUCCESS
    if count > MOST_OF_A_BATCH:
        return gated(work, named(stream, own), waits, WORK_PEER_COPY, count, 0)
    for i in range(count):
        size_bytes += (<const FabricCopy*>copies)[i].size_bytes
    return gated(work, named(stream, own), waits, WORK_PEER_COPY, size_bytes, 0)


cdef public int vgpu_prefetch(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil:
    return gated(work, named(stream, own), waits, WORK_PREFETCH, size_bytes, 0)


cdef public int vgpu_prefetch_batch(
    Pass* work, void* stream, bint own, bint waits, const size_t* sizes_bytes, size_t count
) noexcept nogil:
    cdef uint64_t size_bytes = 0
    cdef size_t i
    work.kind = PASS_PLAIN
    if sizes_bytes == NULL or not attached():
        return CUDA_SUCCESS
    if count > MOST_OF_A_BATCH:
        return gated(work, named(stream, own), waits, WORK_PREFETCH, count, 0)
    for i in range(count):
        size_bytes += sizes_bytes[i]
    return gated(work, named(stream, own), waits, WORK_PREFETCH, size_bytes, 0)
