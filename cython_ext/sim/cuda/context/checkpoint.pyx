"""Checkpoints of other processes (cuCheckpointProcess*): a locked one's calls of the driver wait, a checkpointed one
has nothing on the GPU. Contents live in the process, so nothing has to be copied; the time that takes is not modelled.
Under MPS it is refused, as by the real driver. It is refused with shared memory, too (not tried on a real one).

A process that is restored on another GPU gets its contexts there. The old contexts' remains name the new place, and go
once the process has followed (process.pyx).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp

from cython_ext.native cimport now_ns, store32
from cython_ext.sim.cuda.driver cimport (
    CUresult, ILLEGAL_STATE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, drv_device, drv_devices,
    drv_enter, drv_leave, drv_ready, sim_sleep_until,
)
from cython_ext.sim.queues cimport sim_memory_used, sim_open_context, sim_take_memory
from cython_ext.sim.share cimport sim_context_pid, sim_find_participant, sim_reap
from cython_ext.sim.shares cimport sim_holds_share
from cython_ext.sim.state cimport (
    CONTEXT_FREE, FROZEN_CHECKPOINTED, FROZEN_LOCKED, FROZEN_NOT, SIM_CONTEXTS, SIM_NOWHERE, SIM_SHARES, SIM_STREAMS,
    SimContext, SimGpu, sim_context, sim_owner,
)

cdef enum:
    LOOK_NS = 1_000_000


cdef public struct LockArguments:
    unsigned int timeout_ms
    unsigned int reserved


cdef public struct GpuPair:              # CUcheckpointGpuPair
    unsigned char old[16]
    unsigned char new[16]


cdef public struct RestoreArguments:     # CUcheckpointRestoreArgs
    const GpuPair* pairs
    unsigned int count
    char reserved[44]
    uint64_t reserved1


cdef bint is_of(SimGpu* gpu, uint32_t index, int pid) noexcept nogil:
    cdef const SimContext* context = sim_context(gpu, index)
    return context.state != CONTEXT_FREE and not context.moved_to and sim_context_pid(gpu, index) == pid


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
            if is_of(gpu, i, pid):
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
            if is_of(gpu, i, pid):
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
            if gpu.streams[i].context and is_of(gpu, sim_owner(&gpu.streams[i]), pid):
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


cdef bint shares_memory(int pid) noexcept nogil:
    """It has memory that other processes may have, too."""
    cdef SimGpu* gpu
    cdef int d, i, k
    cdef bint found = False
    for d in range(drv_devices()):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            for k in range(SIM_SHARES if is_of(gpu, i, pid) else 0):
                found = found or (gpu.shares[k].id != 0 and sim_holds_share(&gpu.shares[k], i))
        drv_leave(gpu)
    return found


cdef public CUresult cuCheckpointProcessCheckpoint(int pid, const void* arguments) noexcept nogil:
    cdef SimContext* context
    cdef SimGpu* gpu
    cdef CUresult result = NOT_SUPPORTED if shares_memory(pid) else move(pid, FROZEN_LOCKED, FROZEN_CHECKPOINTED)
    cdef int d, i
    for d in range(drv_devices() if result == SUCCESS else 0):
        gpu = drv_device(d).gpu
        drv_enter(gpu)
        for i in range(SIM_CONTEXTS):
            context = &gpu.contexts[i]
            if is_of(gpu, i, pid):
                context.saved_bytes = context.memory_bytes
                context.memory_bytes = context.resident_bytes = 0
        drv_leave(gpu)
    return result


cdef int device_of(const unsigned char* uuid) noexcept nogil:
    cdef int d
    for d in range(drv_devices()):
        if memcmp(drv_device(d).gpu.uuid, uuid, 16) == 0:
            return d
    return -1


cdef CUresult read_map(const RestoreArguments* arguments, int* target) noexcept nogil:
    """On which device each one's contexts are restored. A map has every GPU there is, once on either side: the real
    driver answers one that lacks some with INVALID_VALUE."""
    cdef uint32_t taken = 0
    cdef unsigned int i
    cdef int d, old, new
    for d in range(drv_devices()):
        target[d] = d if arguments == NULL or arguments.count == 0 else -1
    if arguments == NULL or arguments.count == 0:
        return SUCCESS
    if arguments.pairs == NULL or arguments.count != <unsigned int>drv_devices() or arguments.reserved1:
        return INVALID_VALUE
    for i in range(arguments.count):
        old = device_of(arguments.pairs[i].old)
        new = device_of(arguments.pairs[i].new)
        if old < 0 or new < 0 or target[old] >= 0 or taken >> new & 1:
            return INVALID_VALUE
        if drv_device(old).gpu.sms != drv_device(new).gpu.sms:
            return NOT_SUPPORTED         # another chip
        target[old] = new
        taken |= <uint32_t>1 << new
    return SUCCESS


cdef uint64_t saved_bytes(SimGpu* gpu, int pid) noexcept nogil:
    cdef uint64_t saved = 0
    cdef int i
    drv_enter(gpu)
    for i in range(SIM_CONTEXTS):
        if is_of(gpu, i, pid):
            saved += gpu.contexts[i].saved_bytes
    drv_leave(gpu)
    return saved


cdef bint fits(SimGpu* gpu, uint64_t size) noexcept nogil:
    cdef uint64_t used
    drv_enter(gpu)
    sim_reap(gpu)
    used = sim_memory_used(gpu)
    drv_leave(gpu)
    return used + size <= gpu.memory_bytes


cdef uint64_t origin_of(const SimGpu* gpu, int index) noexcept nogil:
    return <uint64_t>gpu.contexts[index].generation << 32 | (<uint64_t>gpu.index + 1) << 16 | <uint64_t>index


cdef bint is_begun(SimGpu* gpu, int index, int pid) noexcept nogil:
    """Whether it was made for a context that is still where it was: the restoring process was killed meanwhile."""
    cdef uint64_t origin = gpu.contexts[index].origin
    cdef int d, old = <int>(origin & 0xffff)
    cdef SimGpu* other
    for d in range(drv_devices() if origin else 0):
        other = drv_device(d).gpu
        if origin_of(other, old % SIM_CONTEXTS) == origin and is_of(other, old, pid):
            return 1
    return 0


cdef bint is_same(const SimContext* context, const SimContext* other) noexcept nogil:
    """Of one process."""
    return (context.state != CONTEXT_FREE and not context.moved_to and context.pid == other.pid
            and context.pid_start == other.pid_start and context.pid_namespace == other.pid_namespace)


cdef CUresult restore_there(SimGpu* gpu, int index, SimGpu* there) noexcept nogil:
    """Restore a checkpointed context on another GPU. A process that is killed meanwhile leaves one that is found again
    by where it comes from."""
    cdef SimContext old = gpu.contexts[index]
    cdef SimContext* new
    cdef uint64_t origin = origin_of(gpu, index)
    cdef uint32_t slot = 0, participant
    drv_enter(there)
    while slot < SIM_CONTEXTS and not (is_same(&there.contexts[slot], &old) and there.contexts[slot].origin == origin):
        slot += 1
    if slot == SIM_CONTEXTS:
        participant = sim_find_participant(there, &old)
        slot = SIM_NOWHERE
        if participant != SIM_NOWHERE:
            slot = sim_open_context(there, participant, &there.participants[participant], 0, old.sm_cap,
                                    old.memory_limit)
    if slot != SIM_NOWHERE:
        new = &there.contexts[slot]
        new.frozen = FROZEN_CHECKPOINTED
        new.origin = origin
        new.error = old.error
        new.managed_bytes = old.managed_bytes
        new.memory_bytes = 0
        sim_take_memory(there, slot, old.saved_bytes)
    drv_leave(there)
    if slot == SIM_NOWHERE:
        return OUT_OF_MEMORY
    drv_enter(gpu)
    gpu.contexts[index].saved_bytes = 0
    gpu.contexts[index].moved_slot = slot
    store32(&gpu.contexts[index].moved_to, there.index + 1)
    drv_leave(gpu)
    return SUCCESS


cdef public CUresult cuCheckpointProcessRestore(int pid, const RestoreArguments* arguments) noexcept nogil:
    """On the GPUs where it was, or on those that it is mapped to."""
    cdef int[16] target          # SIM_MAX_GPUS
    cdef bint[16][128] moves     # ... of SIM_CONTEXTS
    cdef uint32_t state = 0
    cdef CUresult result = state_of(pid, &state)
    cdef SimGpu* gpu
    cdef int d, i
    if result == SUCCESS:
        result = read_map(arguments, target)
    if result == SUCCESS and state != FROZEN_CHECKPOINTED:
        result = ILLEGAL_STATE
    for d in range(drv_devices() if result == SUCCESS else 0):
        if not fits(drv_device(target[d]).gpu, saved_bytes(drv_device(d).gpu, pid)):
            return OUT_OF_MEMORY
        for i in range(SIM_CONTEXTS):
            gpu = drv_device(d).gpu
            moves[d][i] = is_of(gpu, i, pid) and not is_begun(gpu, i, pid)
    for d in range(drv_devices() if result == SUCCESS else 0):
        gpu = drv_device(d).gpu
        for i in range(SIM_CONTEXTS):
            if moves[d][i] and target[d] != d:
                result = restore_there(gpu, i, drv_device(target[d]).gpu)
                if result != SUCCESS:
                    return result
            elif moves[d][i]:
                drv_enter(gpu)
                sim_take_memory(gpu, i, gpu.contexts[i].saved_bytes)
                gpu.contexts[i].saved_bytes = 0
                drv_leave(gpu)
    return move(pid, FROZEN_CHECKPOINTED, FROZEN_LOCKED) if result == SUCCESS else result


cdef public CUresult cuCheckpointProcessUnlock(int pid, const void* arguments) noexcept nogil:
    return move(pid, FROZEN_LOCKED, FROZEN_NOT)
