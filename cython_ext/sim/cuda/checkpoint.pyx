"""Checkpoints of other processes (cuCheckpointProcess*): a locked one's calls of the driver wait, a checkpointed one
has nothing on the GPU. Contents live in the process, so nothing has to be copied; the time that takes is not modelled.
Under MPS it is refused, as by the real driver.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.native cimport now_ns
from cython_ext.sim.cuda.driver cimport (
    CUresult, ILLEGAL_STATE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, drv_device, drv_devices,
    drv_enter, drv_leave, drv_ready, sim_sleep_until,
)
from cython_ext.sim.queues cimport sim_memory_used, sim_take_memory
from cython_ext.sim.share cimport sim_reap
from cython_ext.sim.state cimport (
    CONTEXT_FREE, FROZEN_CHECKPOINTED, FROZEN_LOCKED, FROZEN_NOT, SIM_CONTEXTS, SIM_STREAMS, SimContext, SimGpu,
)

cdef enum:
    LOOK_NS = 1_000_000


cdef public struct LockArguments:
    unsigned int timeout_ms
    unsigned int reserved


cdef bint is_of(const SimContext* context, int pid) noexcept nogil:
    return context.state != CONTEXT_FREE and context.pid == pid


cdef CUresult state_of(int pid, uint32_t* state) noexcept nogil:
    """Of all its contexts, which are in the same one."""
    cdef CUresult result = drv_ready()
    cdef SimGpu* gpu
    cdef int d, i
    cdef bint found = False
    if result != SUCCESS:
        return result
    result = INVALID_VALUE
    for d in range(drv_devices()):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            if is_of(&gpu.contexts[i], pid):
                found = True
                state[0] = gpu.contexts[i].frozen
                result = NOT_SUPPORTED if gpu.contexts[i].server else SUCCESS
        drv_leave(gpu)
    return result if found else INVALID_VALUE


cdef CUresult move(int pid, uint32_t before, uint32_t after) noexcept nogil:
    """All its contexts from one state into another, if they are in that."""
    cdef uint32_t state = 0
    cdef CUresult result = state_of(pid, &state)
    cdef SimGpu* gpu
    cdef int d, i
    if result == SUCCESS and state != before:
        result = ILLEGAL_STATE
    for d in range(drv_devices() if result == SUCCESS else 0):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            if is_of(&gpu.contexts[i], pid):
                gpu.contexts[i].frozen = after
        drv_leave(gpu)
    return result


cdef bint is_drained(int pid) noexcept nogil:
    cdef SimGpu* gpu
    cdef int d, i
    cdef bint drained = True
    for d in range(drv_devices()):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_STREAMS):
            if gpu.streams[i].context and is_of(&gpu.contexts[gpu.streams[i].context - 1], pid):
                drained = drained and gpu.streams[i].head == gpu.streams[i].tail
        drv_leave(gpu)
    return drained


cdef public CUresult cuCheckpointProcessGetState(int pid, int* state) noexcept nogil:
    cdef uint32_t found = 0
    cdef CUresult result = state_of(pid, &found)
    if result == SUCCESS:
        state[0] = <int>found
    return result


cdef public CUresult cuCheckpointProcessLock(int pid, const LockArguments* arguments) noexcept nogil:
    """Its calls wait from now on; what it has queued is waited for."""
    cdef int64_t until = now_ns() + arguments.timeout_ms * <int64_t>1_000_000 if arguments != NULL else 0
    cdef CUresult result = move(pid, FROZEN_NOT, FROZEN_LOCKED)
    while result == SUCCESS and not is_drained(pid):
        if arguments != NULL and arguments.timeout_ms and now_ns() > until:
            move(pid, FROZEN_LOCKED, FROZEN_NOT)
            result = NOT_READY
        else:
            sim_sleep_until(now_ns() + LOOK_NS)
    return result


cdef public CUresult cuCheckpointProcessCheckpoint(int pid, const void* arguments) noexcept nogil:
    cdef SimContext* context
    cdef SimGpu* gpu
    cdef CUresult result = move(pid, FROZEN_LOCKED, FROZEN_CHECKPOINTED)
    cdef int d, i
    for d in range(drv_devices() if result == SUCCESS else 0):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            context = &gpu.contexts[i]
            if is_of(context, pid):
                context.saved_bytes = context.memory_bytes
                context.memory_bytes = context.resident_bytes = 0
        drv_leave(gpu)
    return result


cdef bint fits(SimGpu* gpu, int pid) noexcept nogil:
    cdef uint64_t needed = 0, used
    cdef int i
    drv_enter(gpu)
    sim_reap(gpu)
    for i in range(SIM_CONTEXTS):
        if is_of(&gpu.contexts[i], pid):
            needed += gpu.contexts[i].saved_bytes
    used = sim_memory_used(gpu)
    drv_leave(gpu)
    return used + needed <= gpu.memory_bytes


cdef public CUresult cuCheckpointProcessRestore(int pid, const void* arguments) noexcept nogil:
    """On the GPUs where it was."""
    cdef uint32_t state = 0
    cdef CUresult result = state_of(pid, &state)
    cdef SimGpu* gpu
    cdef int d, i
    if result == SUCCESS and state != FROZEN_CHECKPOINTED:
        result = ILLEGAL_STATE
    for d in range(drv_devices() if result == SUCCESS else 0):
        if not fits(drv_device(d).gpu, pid):
            return OUT_OF_MEMORY
    for d in range(drv_devices() if result == SUCCESS else 0):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            if is_of(&gpu.contexts[i], pid):
                sim_take_memory(gpu, i, gpu.contexts[i].saved_bytes)
                gpu.contexts[i].saved_bytes = 0
        drv_leave(gpu)
    return move(pid, FROZEN_CHECKPOINTED, FROZEN_LOCKED) if result == SUCCESS else result


cdef public CUresult cuCheckpointProcessUnlock(int pid, const void* arguments) noexcept nogil:
    return move(pid, FROZEN_LOCKED, FROZEN_NOT)
