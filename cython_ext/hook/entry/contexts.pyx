"""The wrappers of contexts that die: destroyed, detached from, reset or released; and of primary ones that come to be.
What becomes of what the hook knew: teardown.pyx.
"""

from libc.stdint cimport uint32_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxDestroy, real_cuCtxDestroy_v2, real_cuCtxDetach, real_cuCtxFromGreenCtx, real_cuCtxGetCurrent,
    real_cuCtxGetDevice, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuDevicePrimaryCtxGetState,
    real_cuDevicePrimaryCtxRelease, real_cuDevicePrimaryCtxRelease_v2, real_cuDevicePrimaryCtxReset,
    real_cuDevicePrimaryCtxReset_v2, real_cuDevicePrimaryCtxRetain, real_cuGreenCtxDestroy,
)
from cython_ext.hook.hook cimport (
    vgpu_context_came, vgpu_context_died, vgpu_context_dies, vgpu_green_context_died, vgpu_memory_of_primary,
)
from cython_ext.hook.state cimport CUDA_SUCCESS, attached, state
from cython_ext.native cimport store32

cdef enum:
    NO_DEVICE = -1

# --- created contexts

cdef public int cuCtxDestroy(void* context) noexcept nogil:
    cdef int result
    vgpu_context_dies(context)
    result = real_cuCtxDestroy(context)
    vgpu_context_died(context, result == CUDA_SUCCESS)
    return result


cdef public int cuCtxDestroy_v2(void* context) noexcept nogil:
    cdef int result
    vgpu_context_dies(context)
    result = real_cuCtxDestroy_v2(context)
    vgpu_context_died(context, result == CUDA_SUCCESS)
    return result


cdef inline bint is_gone(void* context) noexcept nogil:
    """Whether the context that was current is not any more. It may lie in the thread's stack twice."""
    cdef void* current = NULL
    cdef int device
    return (
        real_cuCtxGetCurrent(&current) != CUDA_SUCCESS or current != context
        or real_cuCtxGetDevice(&device) != CUDA_SUCCESS
    )


cdef public int cuCtxDetach(void* context) noexcept nogil:
    """The current context loses one user, and dies with the last."""
    cdef int result
    vgpu_context_dies(context)
    result = real_cuCtxDetach(context)
    vgpu_context_died(context, result == CUDA_SUCCESS and is_gone(context))
    return result


# --- primary contexts

cdef inline bint is_active(int device) noexcept nogil:
    cdef unsigned int flags
    cdef int active = 0
    return real_cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS and active


cdef public int cuDevicePrimaryCtxRetain(void** context, int device) noexcept nogil:
    cdef bint there = not attached() or is_active(device)
    cdef int result = real_cuDevicePrimaryCtxRetain(context, device)
    if result == CUDA_SUCCESS and not there:
        vgpu_context_came(device)
    return result


cdef inline void forget_primary(int device) noexcept nogil:
    """Forget the primary context: the next one may be made without a call that the hook intercepts."""
    cdef uint32_t i
    for i in range(state().gate_count):
        if state().gates[i].device == device:
            store32(&state().gates[i].primary_known, 0)


cdef inline void* primary_dies(int device) noexcept nogil:
    """The device's primary context, which may be about to end; NULL: there is none. cudart gets it by a private table,
    so it is asked for here, not remembered from a retain."""
    cdef void* context = NULL
    if not attached() or not is_active(device) or real_cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS:
        return NULL
    real_cuDevicePrimaryCtxRelease_v2(device)
    vgpu_context_dies(context)
    return context


cdef inline int primary_died(int result, int device, void* context) noexcept nogil:
    cdef bint dead
    if context != NULL:
        dead = result == CUDA_SUCCESS and not is_active(device)
        if dead:
            vgpu_memory_of_primary(device, context)
            forget_primary(device)
        vgpu_context_died(context, dead)
    return result


cdef public int cuDevicePrimaryCtxRelease(int device) noexcept nogil:
    cdef void* context = primary_dies(device)
    return primary_died(real_cuDevicePrimaryCtxRelease(device), device, context)


cdef public int cuDevicePrimaryCtxRelease_v2(int device) noexcept nogil:
    cdef void* context = primary_dies(device)
    return primary_died(real_cuDevicePrimaryCtxRelease_v2(device), device, context)


cdef public int cuDevicePrimaryCtxReset(int device) noexcept nogil:
    cdef void* context = primary_dies(device)
    return primary_died(real_cuDevicePrimaryCtxReset(device), device, context)


cdef public int cuDevicePrimaryCtxReset_v2(int device) noexcept nogil:
    cdef void* context = primary_dies(device)
    return primary_died(real_cuDevicePrimaryCtxReset_v2(device), device, context)


# --- green contexts: a part of the SMs, which holds its device's primary context

cdef inline int device_of(void* context) noexcept nogil:
    cdef int device = NO_DEVICE
    if real_cuCtxPushCurrent_v2(context) == CUDA_SUCCESS:
        real_cuCtxGetDevice(&device)
        real_cuCtxPopCurrent_v2(&context)
    return device


cdef public int cuGreenCtxDestroy(void* green) noexcept nogil:
    """The primary context dies with it if it has no other holder."""
    cdef void* context = NULL
    cdef void* primary
    cdef int device, result
    if not attached() or real_cuCtxFromGreenCtx(&context, green) != CUDA_SUCCESS:
        return real_cuGreenCtxDestroy(green)
    device = device_of(context)
    primary = primary_dies(device)
    vgpu_context_dies(context)
    result = real_cuGreenCtxDestroy(green)
    vgpu_green_context_died(context, primary, result == CUDA_SUCCESS)
    return primary_died(result, device, primary)
