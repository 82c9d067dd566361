"""Contexts: created and primary ones, and each thread's stack of current contexts."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memset

from cython_ext.sim.cuda.driver cimport (
    CONTEXT_IS_DESTROYED, Context, CUresult, Device, drv_begin, drv_device, drv_end, drv_follow, drv_forget_context,
    drv_lock, drv_next_id, drv_open_stream, drv_ready, drv_synchronize_context, drv_unlock, drv_wake_agent,
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, MARK_CONTEXT, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, sim_thread,
)
from cython_ext.sim.queues cimport sim_free_context, sim_open_context, sim_take_memory
from cython_ext.sim.lock cimport sim_seat
from cython_ext.sim.mps cimport (
    MPS_SERVER_NOT_READY, SimServer, sim_granted_sms, sim_mps_limit, sim_mps_look, sim_mps_refusal,
)
from cython_ext.sim.share cimport sim_enter, sim_reap, sim_unlock
from cython_ext.sim.state cimport SIM_NOWHERE, STREAM_LEGACY, SimGpu

cdef Context* contexts          # alive
cdef Context* unused            # destroyed: kept, so that stale handles are recognised


cdef public Context* drv_contexts() noexcept nogil:
    return contexts


cdef public bint drv_is_context(Context* context) noexcept nogil:
    cdef Context* c = contexts
    while c != NULL and c != context:
        c = c.next
    return c != NULL


cdef public Context* drv_current() noexcept nogil:
    return <Context*>sim_thread.stack[sim_thread.depth - 1] if sim_thread.depth else NULL


cdef public CUresult drv_current_context(Context** context) noexcept nogil:
    """The calling thread's context, if there is one that is alive."""
    cdef CUresult result = drv_ready()
    context[0] = drv_current()
    if result != SUCCESS:
        return result
    if context[0] == NULL:
        return INVALID_CONTEXT
    return SUCCESS if context[0].mark == MARK_CONTEXT else CONTEXT_IS_DESTROYED


cdef public CUresult drv_open_context(int index, unsigned int flags, bint primary, Context** out) noexcept nogil:
    global contexts, unused
    cdef Device* device = drv_device(index)
    cdef SimGpu* gpu
    cdef Context* context
    cdef uint32_t slot, participant, generation = 0
    cdef SimServer named
    cdef uint64_t server
    cdef CUresult result
    if device == NULL:
        return INVALID_DEVICE
    drv_follow()
    gpu = device.gpu
    sim_mps_look(&named)
    server = named.number if named.alive else 0
    sim_enter(gpu)
    participant = sim_seat(gpu).number - 1
    result = <CUresult>sim_mps_refusal(gpu, server, participant) if server else SUCCESS
    if result == <CUresult>MPS_SERVER_NOT_READY:
        sim_reap(gpu)            # the processes that the fault has hit may have ended by now
        result = <CUresult>sim_mps_refusal(gpu, server, participant)
    if result != SUCCESS:
        sim_unlock(gpu)
        return result
    slot = sim_open_context(gpu, participant, &gpu.participants[participant], server,
                            sim_granted_sms(gpu.sms) if server else 0, sim_mps_limit(gpu.index) if server else 0)
    if slot != SIM_NOWHERE:
        gpu.contexts[slot].server_namespace = named.namespace
        generation = gpu.contexts[slot].generation
    if slot != SIM_NOWHERE and not sim_take_memory(gpu, slot, gpu.context_bytes):
        # Dead processes may still hold what this call needs.
        sim_reap(gpu)
        if not sim_take_memory(gpu, slot, gpu.context_bytes):
            sim_free_context(gpu, slot)
            slot = SIM_NOWHERE
    sim_unlock(gpu)
    if slot == SIM_NOWHERE:
        return OUT_OF_MEMORY
    drv_lock()
    context = unused
    if context != NULL:
        unused = context.next
        memset(context, 0, sizeof(Context))
    else:
        context = <Context*>calloc(1, sizeof(Context))
    context.mark = MARK_CONTEXT
    context.id = drv_next_id()
    context.device = index
    context.slot = slot
    context.generation = generation
    context.flags = flags
    context.is_primary = primary
    context.gpu = gpu
    context.limits[0] = 1024            # stack
    context.limits[1] = 1 << 20         # printf FIFO
    context.limits[2] = 8 << 20         # malloc heap
    context.limits[3] = 2
    context.limits[4] = 2048
    context.limits[5] = 64
    context.next = contexts
    contexts = context
    # The agent belongs to the process that makes the context, as the real driver's threads do. Begun by a call of a
    # child that shares this memory, it would be that child's thread, and keep it from ending.
    drv_wake_agent()
    drv_unlock()
    result = drv_open_stream(context, STREAM_LEGACY, 0, &context.legacy)
    if result != SUCCESS:
        drv_close_context(context)
        return result
    out[0] = context
    return SUCCESS


cdef public void drv_close_context(Context* context) noexcept nogil:
    global contexts, unused
    cdef Context** link
    drv_forget_context(context)
    drv_begin(context)
    if context.gpu.contexts[context.slot].generation == context.generation:
        sim_free_context(context.gpu, context.slot)
    context.mark = 0
    drv_end(context)
    drv_lock()
    link = &contexts
    while link[0] != NULL and link[0] != context:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = context.next
    context.next = unused
    unused = context
    drv_unlock()


# -- created contexts

cdef public CUresult cuCtxCreate_v2(Context** out, unsigned int flags, int device) noexcept nogil:
    cdef CUresult result = drv_ready()
    if result == SUCCESS:
        result = drv_open_context(device, flags, False, out)
    if result == SUCCESS:
        result = cuCtxPushCurrent_v2(out[0])
    return result


cdef public CUresult cuCtxCreate_v3(Context** out, void* affinity, int count, unsigned int flags,
                                    int device) noexcept nogil:
    return NOT_SUPPORTED if count else cuCtxCreate_v2(out, flags, device)


cdef public CUresult cuCtxCreate_v4(Context** out, void* params, unsigned int flags, int device) noexcept nogil:
    return cuCtxCreate_v2(out, flags, device)


cdef public CUresult cuGLCtxCreate_v2(Context** out, unsigned int flags, int device) noexcept nogil:
    """A context like any other: the simulation draws nothing."""
    return cuCtxCreate_v2(out, flags, device)


cdef public CUresult cuCtxDestroy_v2(Context* context) noexcept nogil:
    if not drv_is_context(context) or context.is_primary or context.is_green:
        return INVALID_CONTEXT
    drv_synchronize_context(context)
    if sim_thread.depth and sim_thread.stack[sim_thread.depth - 1] == context:
        sim_thread.depth -= 1
    drv_close_context(context)
    return SUCCESS


cdef public CUresult cuCtxAttach(Context** out, unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS and (out == NULL or flags != 0):
        result = INVALID_VALUE
    if result == SUCCESS:
        context.attached += 1
        out[0] = context
    return result


cdef public CUresult cuCtxDetach(Context* context) noexcept nogil:
    """Only of the current context; its creator is the last of its users."""
    if context == NULL or context != drv_current() or not drv_is_context(context):
        return INVALID_CONTEXT
    if context.attached:
        context.attached -= 1
        return SUCCESS
    return cuCtxDestroy_v2(context)


cdef public CUresult cuCtxPushCurrent_v2(Context* context) noexcept nogil:
    if not drv_is_context(context):
        return INVALID_CONTEXT
    if sim_thread.depth == 64:
        return INVALID_VALUE
    sim_thread.stack[sim_thread.depth] = context
    sim_thread.depth += 1
    return SUCCESS


cdef public CUresult cuCtxPopCurrent_v2(Context** out) noexcept nogil:
    if sim_thread.depth == 0:
        return INVALID_CONTEXT
    sim_thread.depth -= 1
    if out != NULL:
        out[0] = <Context*>sim_thread.stack[sim_thread.depth]
    return SUCCESS


cdef public CUresult cuCtxSetCurrent(Context* context) noexcept nogil:
    cdef CUresult result = drv_ready()
    if result != SUCCESS:
        return result
    if context != NULL and not drv_is_context(context):
        return INVALID_CONTEXT
    if sim_thread.depth:
        sim_thread.depth -= 1
    return SUCCESS if context == NULL else cuCtxPushCurrent_v2(context)


cdef public CUresult cuCtxGetCurrent(Context** out) noexcept nogil:
    cdef CUresult result = drv_ready()
    if result == SUCCESS:
        out[0] = drv_current()
    return result


cdef public CUresult cuCtxGetDevice(int* device) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        device[0] = context.device
    return result


cdef public CUresult cuCtxGetDevice_v2(int* device, Context* context) noexcept nogil:
    if context == NULL:
        return cuCtxGetDevice(device)
    if not drv_is_context(context):
        return INVALID_CONTEXT
    device[0] = context.device
    return SUCCESS


cdef public CUresult cuCtxGetFlags(unsigned int* flags) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        flags[0] = context.flags
    return result


cdef public CUresult cuCtxSetFlags(unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        context.flags = flags
    return result


cdef public CUresult cuCtxGetId(Context* context, unsigned long long* number) noexcept nogil:
    cdef CUresult result = SUCCESS
    if context == NULL:
        result = drv_current_context(&context)
    elif not drv_is_context(context):
        result = INVALID_CONTEXT
    if result == SUCCESS:
        number[0] = context.id
    return result


cdef public CUresult cuCtxGetApiVersion(Context* context, unsigned int* version) noexcept nogil:
    version[0] = 3020
    return SUCCESS


cdef public CUresult cuCtxGetLimit(size_t* value, int limit) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS and not 0 <= limit < 16:
        result = INVALID_VALUE
    if result == SUCCESS:
        value[0] = context.limits[limit]
    return result


cdef public CUresult cuCtxSetLimit(int limit, size_t value) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS and not 0 <= limit < 16:
        result = INVALID_VALUE
    if result == SUCCESS:
        context.limits[limit] = value
    return result


cdef public CUresult cuCtxGetCacheConfig(int* config) noexcept nogil:
    config[0] = 0
    return SUCCESS


cdef public CUresult cuCtxSetCacheConfig(int config) noexcept nogil:
    return SUCCESS


cdef public CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) noexcept nogil:
    if least != NULL:
        least[0] = 0
    if greatest != NULL:
        greatest[0] = -5
    return SUCCESS


cdef public CUresult cuCtxSynchronize() noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    return drv_synchronize_context(context) if result == SUCCESS else result


cdef public CUresult cuCtxSynchronize_v2(Context* context) noexcept nogil:
    if context == NULL:
        return cuCtxSynchronize()
    return drv_synchronize_context(context) if drv_is_context(context) else INVALID_CONTEXT


# -- primary contexts

cdef public CUresult cuDevicePrimaryCtxRetain(Context** out, int index) noexcept nogil:
    cdef CUresult result = drv_ready()
    cdef Device* device = drv_device(index)
    if result != SUCCESS:
        return result
    if device == NULL:
        return INVALID_DEVICE
    if device.primary == NULL:
        result = drv_open_context(index, device.primary_flags, True, &device.primary)
        if result != SUCCESS:
            return result
    device.retained += 1
    out[0] = device.primary
    return SUCCESS


cdef public CUresult cuDevicePrimaryCtxRelease_v2(int index) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device == NULL:
        return INVALID_DEVICE
    if device.retained == 0:
        return INVALID_CONTEXT
    device.retained -= 1
    return cuDevicePrimaryCtxReset_v2(index) if device.retained == 0 else SUCCESS


cdef public CUresult cuDevicePrimaryCtxReset_v2(int index) noexcept nogil:
    cdef Device* device = drv_device(index)
    cdef Context* context
    if device == NULL:
        return INVALID_DEVICE
    context = device.primary
    device.primary = NULL
    device.retained = 0
    if context != NULL:
        drv_synchronize_context(context)
        drv_close_context(context)
    return SUCCESS


cdef public CUresult cuDevicePrimaryCtxSetFlags_v2(int index, unsigned int flags) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device == NULL:
        return INVALID_DEVICE
    device.primary_flags = flags
    if device.primary != NULL:
        device.primary.flags = flags
    return SUCCESS


cdef public CUresult cuDevicePrimaryCtxGetState(int index, unsigned int* flags, int* active) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device == NULL:
        return INVALID_DEVICE
    flags[0] = device.primary_flags
    active[0] = device.primary != NULL
    return SUCCESS
