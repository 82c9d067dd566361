"""A thread of the process pins host memory before the process's memory has to leave the card for the first time.

The GPU Server gets the store its memory (``gpuserver/runtime/memory/swapping.py::grow_ahead``). This thread pins as
much of it as the process owns, one part after the other, and reserves the blocks. Where the store stays too small, it
pins parts whose blocks others reserve or keep, too. A part takes 10 ms in the driver, in
which other calls of the process may have to wait. So the thread rests between two parts, and much longer while the GPU
has work of the process.

It is not the hook thread, which a lease's end does not wait for.
"""

from libc.stdint cimport int64_t, uint64_t

from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.generated.driver cimport real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2
from cython_ext.hook.hook cimport (
    vgpu_context_for_copies, vgpu_load_hasher, vgpu_pin_next, vgpu_pinned_blocks, vgpu_reserve_no_more_than,
    vgpu_touched, vgpu_try_touch,
)
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, is_removed, is_swappable, state
from cython_ext.logic.memory.store cimport BLOCK_BYTES
from cython_ext.native cimport (
    cas32, exchange32, fence, futex_wait, futex_wake, load32, load64, now_ns, store32, store64,
)
from cython_ext.pages.layout cimport KIND_DEVICE

cdef extern from "hook/hook_native.h" nogil:
    bint vgpu_spawn(void* (*run)(void*) noexcept nogil, void* argument) noexcept
    void vgpu_prepare_thread() noexcept

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    LOOK_NS = 500_000_000        # between two checks whether more is owned, or the store has grown
    REST_NS = 2_000_000          # between two parts ...
    BUSY_FACTOR = 10             # ... and as a multiple of what the last one took, while the process uses the GPU


cdef inline bint is_busy(const Gate* gate) noexcept nogil:
    return load32(&gate.slot.undrained) != 0


cdef inline uint64_t owned_blocks(const Gate* gate) noexcept nogil:
    return (load64(&gate.slot.committed_bytes[KIND_DEVICE]) + BLOCK_BYTES - 1) / BLOCK_BYTES


cdef bint lacks(Gate* gate) noexcept nogil:
    """Whether the process owns more than it has pinned. It reports what it has, and gives back what is too much."""
    cdef uint64_t owned = owned_blocks(gate), pinned
    vgpu_reserve_no_more_than(gate, owned)
    pinned = vgpu_pinned_blocks(gate)
    store64(&gate.slot.pinned_bytes, pinned * BLOCK_BYTES)
    return pinned < owned


cdef bint pin_one(Gate* gate) noexcept nogil:
    """1: it has pinned a part, and there may be more."""
    cdef void* context
    cdef bint more = 0
    cdef int mode
    if not lacks(gate):
        return 0
    context = vgpu_context_for_copies(gate)
    if context == NULL:
        return 0
    mode = relax()
    if real_cuCtxPushCurrent_v2(context) == CUDA_SUCCESS:
        if gate.hasher.context == NULL:
            vgpu_load_hasher(gate, context)
        more = vgpu_pin_next(gate, owned_blocks(gate))
        real_cuCtxPopCurrent_v2(&context)
    restore(mode)
    return more


cdef int64_t step(Gate* gate) noexcept nogil:
    """How long to rest. No context is destroyed, and no memory moves, while it is in the driver."""
    cdef int64_t began_ns = now_ns()
    cdef bint more = 0
    if not is_swappable(gate) or is_removed(gate):
        return LOOK_NS
    store32(&gate.pinning, 1)
    fence()
    if not (load32(&state().stopping) or load32(&state().dying) or load32(&state().captures)):
        if vgpu_try_touch(gate):
            more = pin_one(gate)
            vgpu_touched(gate)
    exchange32(&gate.pinning, 0)
    futex_wake(&gate.pinning, INT_MAX)
    if not more:
        return LOOK_NS
    return BUSY_FACTOR * (now_ns() - began_ns) if is_busy(gate) else REST_NS


cdef void* run(void* argument) noexcept nogil:
    cdef Gate* gate = <Gate*>argument
    vgpu_prepare_thread()
    while not load32(&state().stopping):
        futex_wait(&state().stopping, 0, now_ns() + step(gate))
    return NULL


cdef public void vgpu_pin_ahead(Gate* gate) noexcept nogil:
    """Start the thread, once. Without it, parts are pinned when they are first used."""
    if load32(&gate.pins_ahead) == 0 and cas32(&gate.pins_ahead, 0, 1):
        vgpu_spawn(run, gate)
