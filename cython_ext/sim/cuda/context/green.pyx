"""Green contexts: streams of their own over their device's primary context. That they have only a part of the SMs is
not modelled.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, Device, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, SUCCESS, Stream,
    drv_close_context, drv_device, drv_is_context, drv_open_context, drv_open_stream, drv_ready,
    drv_synchronize_context,
)
from cython_ext.sim.state cimport STREAM_NONBLOCKING

cdef enum:
    RESOURCE_SM = 1
    SMALLEST_SMS = 8
    DEFAULT_STREAM = 1      # CU_GREEN_CTX_...
    NONBLOCKING = 1         # CU_STREAM_...
    HANDLE = 1              # what a CUgreenCtx has that its CUcontext has not

cdef extern CUresult cuDevicePrimaryCtxRetain(Context** out, int index) noexcept nogil
cdef extern CUresult cuDevicePrimaryCtxRelease_v2(int index) noexcept nogil


cdef public struct Resource:        # CUdevResource
    int type
    unsigned char padding[92]
    unsigned int sms
    unsigned int smallest_sms
    unsigned int aligned_sms
    unsigned char oversize[36]


cdef Resource described             # what every descriptor stands for: all of them are of all SMs


cdef public CUresult cuDeviceGetDevResource(int index, Resource* resource, int type) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device == NULL:
        return INVALID_DEVICE
    if resource == NULL or type != RESOURCE_SM:
        return INVALID_VALUE
    memset(resource, 0, sizeof(Resource))
    resource.type = RESOURCE_SM
    resource.sms = device.gpu.sms
    resource.smallest_sms = resource.aligned_sms = SMALLEST_SMS
    return SUCCESS


cdef public CUresult cuDevResourceGenerateDesc(void** out, Resource* resources, unsigned int count) noexcept nogil:
    cdef unsigned int i
    if out == NULL or resources == NULL or count == 0:
        return INVALID_VALUE
    for i in range(count):
        if resources[i].type != RESOURCE_SM:
            return INVALID_VALUE
    out[0] = &described
    return SUCCESS


cdef Context* context_of(void* green) noexcept nogil:
    """NULL if there is none."""
    cdef Context* context = <Context*>(<uint64_t>green - HANDLE)
    return context if drv_is_context(context) and context.is_green else NULL


cdef public CUresult cuGreenCtxCreate(void** out, void* description, int index, unsigned int flags) noexcept nogil:
    cdef Context* context = NULL
    cdef CUresult result = drv_ready()
    if result == SUCCESS and (out == NULL or description != &described or flags != DEFAULT_STREAM):
        result = INVALID_VALUE
    if result == SUCCESS:
        result = cuDevicePrimaryCtxRetain(&context, index)
    if result != SUCCESS:
        return result
    result = drv_open_context(index, 0, False, &context)
    if result != SUCCESS:
        cuDevicePrimaryCtxRelease_v2(index)
        return result
    context.is_green = True
    out[0] = <void*>(<uint64_t>context + HANDLE)
    return SUCCESS


cdef public CUresult cuCtxFromGreenCtx(Context** out, void* green) noexcept nogil:
    cdef Context* context = context_of(green)
    if context == NULL:
        return INVALID_CONTEXT
    if out == NULL:
        return INVALID_VALUE
    out[0] = context
    return SUCCESS


cdef public CUresult cuGreenCtxStreamCreate(Stream** out, void* green, unsigned int flags,
                                            int priority) noexcept nogil:
    cdef Context* context = context_of(green)
    if context == NULL:
        return INVALID_CONTEXT
    if out == NULL or flags != NONBLOCKING:
        return INVALID_VALUE
    return drv_open_stream(context, STREAM_NONBLOCKING, max(-5, min(0, priority)), out)


cdef public CUresult cuGreenCtxDestroy(void* green) noexcept nogil:
    """It stays the current one of threads where it is, and they get errors."""
    cdef Context* context = context_of(green)
    cdef int index
    if context == NULL:
        return INVALID_CONTEXT
    index = context.device
    drv_synchronize_context(context)
    drv_close_context(context)
    return cuDevicePrimaryCtxRelease_v2(index)
