"""The simulated NVML: the processes that use a device. Each by its pid in the caller's PID namespace, as
the real one has it; a process that cannot be seen from there is not listed."""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.sim.engine cimport sim_load_ratio
from cython_ext.sim.nvml.handles cimport (
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NvmlResult, SUCCESS, VERSION_MISMATCH, sim_check, sim_look,
)
from cython_ext.sim.share cimport sim_context_pid, sim_learn_pids, sim_unlock
from cython_ext.sim.state cimport CONTEXT_FREE, FROZEN_CHECKPOINTED, SIM_CONTEXTS, SIM_WINDOW_NS, SimContext, SimGpu


cdef extern from *:
    """
    #include <time.h>
    #include <stdint.h>
    #pragma GCC visibility push(default)
    static inline int64_t sim_wall_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    """
    int64_t sim_wall_ns() noexcept nogil

cdef enum:
    MODE_COMPUTE = 0
    MODE_GRAPHICS = 1
    MODE_MPS = 2


# One process, all its contexts together.
cdef struct User:
    unsigned int pid
    unsigned long long memory_bytes
    unsigned int percent        # of the last window in which a kernel of it ran
    int64_t busy_ns


cdef NvmlResult users(SimGpu* gpu, User* found, uint32_t* count, int64_t* ended_us, bint mps_only) noexcept nogil:
    """At most SIM_CONTEXTS of them, and when the last whole window ended (wall clock)."""
    cdef uint32_t i, k
    cdef SimContext* context
    cdef int pid
    cdef NvmlResult result = sim_check(gpu)
    count[0] = 0
    if result == SUCCESS:
        sim_learn_pids(gpu)
        result = sim_look(gpu)
    if result != SUCCESS:
        return result
    ended_us[0] = (sim_wall_ns() - gpu.time_ns % SIM_WINDOW_NS) / 1000
    for i in range(SIM_CONTEXTS):
        context = &gpu.contexts[i]
        if context.state == CONTEXT_FREE or (mps_only and context.server == 0):
            continue
        pid = sim_context_pid(gpu, i)
        if pid == 0:
            continue
        k = 0
        while k < count[0] and found[k].pid != <unsigned int>pid:
            k += 1
        if k == count[0]:
            found[k].pid = pid
            found[k].memory_bytes = found[k].percent = 0
            found[k].busy_ns = 0
            count[0] += 1
        found[k].percent += <unsigned int>(100 * sim_load_ratio(&context.load, gpu.time_ns) + 0.5)
        found[k].percent = min(<unsigned int>100, found[k].percent)
        found[k].busy_ns += context.load.total_ns
        if context.frozen == FROZEN_CHECKPOINTED:
            found[k].pid = 0    # it has nothing on the card, and is not listed
        else:
            found[k].memory_bytes += context.memory_bytes
    sim_unlock(gpu)
    i = 0
    for k in range(count[0]):
        if found[k].pid != 0:
            found[i] = found[k]
            i += 1
    count[0] = i
    return SUCCESS


# -- lists of processes

cdef public struct ProcessInfo1:
    unsigned int pid
    unsigned long long used_bytes


cdef public struct ProcessInfo:
    unsigned int pid
    unsigned long long used_bytes
    unsigned int gpu_instance
    unsigned int compute_instance


cdef public struct ProcessDetail:
    unsigned int pid
    unsigned long long used_bytes
    unsigned int gpu_instance
    unsigned int compute_instance
    unsigned long long protected_bytes


cdef public struct ProcessDetailList:
    unsigned int version
    unsigned int mode
    unsigned int count
    ProcessDetail* processes


cdef NvmlResult processes(SimGpu* gpu, unsigned int* count, ProcessInfo* infos, ProcessInfo1* old,
                          bint mps_only) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef unsigned int room
    cdef int64_t ended_us
    cdef NvmlResult result
    if count == NULL:
        return INVALID_ARGUMENT
    result = users(gpu, found, &number, &ended_us, mps_only)
    if result != SUCCESS:
        return result
    room = count[0] if infos != NULL or old != NULL else 0
    count[0] = number
    if number > room:
        return INSUFFICIENT_SIZE
    for k in range(number):
        if old != NULL:
            old[k].pid = found[k].pid
            old[k].used_bytes = found[k].memory_bytes
        else:
            infos[k].pid = found[k].pid
            infos[k].used_bytes = found[k].memory_bytes
            infos[k].gpu_instance = infos[k].compute_instance = <unsigned int>-1
    return SUCCESS


cdef NvmlResult none(SimGpu* gpu, unsigned int* count) noexcept nogil:
    """Of what is not simulated: graphics, video."""
    if count == NULL:
        return INVALID_ARGUMENT
    count[0] = 0
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetComputeRunningProcesses(SimGpu* gpu, unsigned int* count,
                                                            ProcessInfo1* infos) noexcept nogil:
    return processes(gpu, count, NULL, infos, False)


cdef public NvmlResult nvmlDeviceGetComputeRunningProcesses_v2(SimGpu* gpu, unsigned int* count,
                                                               ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, NULL, False)


cdef public NvmlResult nvmlDeviceGetComputeRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                               ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, NULL, False)


cdef public NvmlResult nvmlDeviceGetMPSComputeRunningProcesses(SimGpu* gpu, unsigned int* count,
                                                               ProcessInfo1* infos) noexcept nogil:
    return processes(gpu, count, NULL, infos, True)


cdef public NvmlResult nvmlDeviceGetMPSComputeRunningProcesses_v2(SimGpu* gpu, unsigned int* count,
                                                                  ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, NULL, True)


cdef public NvmlResult nvmlDeviceGetMPSComputeRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                                  ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, NULL, True)


cdef public NvmlResult nvmlDeviceGetGraphicsRunningProcesses(SimGpu* gpu, unsigned int* count,
                                                             ProcessInfo1* infos) noexcept nogil:
    return none(gpu, count)


cdef public NvmlResult nvmlDeviceGetGraphicsRunningProcesses_v2(SimGpu* gpu, unsigned int* count,
                                                                ProcessInfo* infos) noexcept nogil:
    return none(gpu, count)


cdef public NvmlResult nvmlDeviceGetGraphicsRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                                ProcessInfo* infos) noexcept nogil:
    return none(gpu, count)


cdef public NvmlResult nvmlDeviceGetEncoderSessions(SimGpu* gpu, unsigned int* count, void* infos) noexcept nogil:
    return none(gpu, count)


cdef public NvmlResult nvmlDeviceGetFBCSessions(SimGpu* gpu, unsigned int* count, void* infos) noexcept nogil:
    return none(gpu, count)


cdef public NvmlResult nvmlDeviceGetRunningProcessDetailList(SimGpu* gpu, ProcessDetailList* list) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef unsigned int room
    cdef int64_t ended_us
    cdef NvmlResult result
    if list == NULL:
        return INVALID_ARGUMENT
    if list.version != (sizeof(ProcessDetailList) | 1 << 24):
        return VERSION_MISMATCH
    if list.mode > MODE_MPS:
        return INVALID_ARGUMENT
    result = users(gpu, found, &number, &ended_us, list.mode == MODE_MPS)
    if result != SUCCESS:
        return result
    if list.mode == MODE_GRAPHICS:
        number = 0
    room = list.count if list.processes != NULL else 0
    list.count = number
    if number > room:
        return INSUFFICIENT_SIZE
    for k in range(number):
        list.processes[k].pid = found[k].pid
        list.processes[k].used_bytes = found[k].memory_bytes
        list.processes[k].gpu_instance = list.processes[k].compute_instance = <unsigned int>-1
        list.processes[k].protected_bytes = 0
    return SUCCESS


# -- their load

cdef public struct ProcessSample:
    unsigned int pid
    unsigned long long time_us
    unsigned int sm
    unsigned int memory
    unsigned int encoder
    unsigned int decoder


cdef public struct ProcessLoad:
    unsigned long long time_us
    unsigned int pid
    unsigned int sm
    unsigned int memory
    unsigned int encoder
    unsigned int decoder
    unsigned int jpeg
    unsigned int optical_flow


cdef public struct ProcessLoadList:
    unsigned int version
    unsigned int count
    unsigned long long since_us
    ProcessLoad* processes


cdef NvmlResult busy(SimGpu* gpu, User* found, uint32_t* count, int64_t* ended_us,
                     unsigned long long since_us) noexcept nogil:
    """Those with work in the last window that ended after `since_us` (wall clock)."""
    cdef uint32_t k, kept = 0
    cdef NvmlResult result = users(gpu, found, count, ended_us, False)
    if result != SUCCESS:
        return result
    for k in range(count[0]):
        if found[k].percent != 0 and ended_us[0] > <int64_t>since_us:
            found[kept] = found[k]
            kept += 1
    count[0] = kept
    return SUCCESS if kept else <NvmlResult>NOT_FOUND


cdef public NvmlResult nvmlDeviceGetProcessUtilization(SimGpu* gpu, ProcessSample* samples, unsigned int* count,
                                                       unsigned long long since_us) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef unsigned int room
    cdef int64_t ended_us
    cdef NvmlResult result
    if count == NULL:
        return INVALID_ARGUMENT
    result = busy(gpu, found, &number, &ended_us, since_us)
    if result != SUCCESS:
        return result
    room = count[0] if samples != NULL else 0
    count[0] = number
    if number > room:
        return INSUFFICIENT_SIZE
    for k in range(number):
        samples[k].pid = found[k].pid
        samples[k].time_us = ended_us
        samples[k].sm = found[k].percent
        samples[k].memory = samples[k].encoder = samples[k].decoder = 0
    return SUCCESS


cdef public NvmlResult nvmlDeviceGetProcessesUtilizationInfo(SimGpu* gpu, ProcessLoadList* list) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef unsigned int room
    cdef int64_t ended_us
    cdef ProcessLoad* one
    cdef NvmlResult result
    if list == NULL:
        return INVALID_ARGUMENT
    if list.version != (sizeof(ProcessLoadList) | 1 << 24):
        return VERSION_MISMATCH
    result = busy(gpu, found, &number, &ended_us, list.since_us)
    if result != SUCCESS:
        return result
    room = list.count if list.processes != NULL else 0
    list.count = number
    if number > room:
        return INSUFFICIENT_SIZE
    for k in range(number):
        one = &list.processes[k]
        one.time_us = ended_us
        one.pid = found[k].pid
        one.sm = found[k].percent
        one.memory = one.encoder = one.decoder = one.jpeg = one.optical_flow = 0
    return SUCCESS


# -- accounts: of those that run; the real one keeps some of the dead

cdef public struct AccountingStats:
    unsigned int gpu_percent
    unsigned int memory_percent
    unsigned long long most_bytes
    unsigned long long time_ms
    unsigned long long start_us
    unsigned int is_running
    unsigned int[5] reserved


cdef public struct AccountingStats2:
    unsigned int pid
    unsigned int gpu_percent
    unsigned int memory_percent
    unsigned long long most_bytes
    unsigned int samples
    unsigned long long gpu_sum
    unsigned long long memory_sum
    unsigned long long time_ms
    unsigned long long start_us


cdef public NvmlResult nvmlDeviceGetAccountingMode(SimGpu* gpu, int* mode) noexcept nogil:
    if mode == NULL:
        return INVALID_ARGUMENT
    mode[0] = 1
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetAccountingPids(SimGpu* gpu, unsigned int* count, unsigned int* pids) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef unsigned int room
    cdef int64_t ended_us
    cdef NvmlResult result
    if count == NULL:
        return INVALID_ARGUMENT
    result = users(gpu, found, &number, &ended_us, False)
    if result != SUCCESS:
        return result
    room = count[0] if pids != NULL else 0
    count[0] = number
    if number > room:
        return INSUFFICIENT_SIZE
    for k in range(number):
        pids[k] = found[k].pid
    return SUCCESS


cdef public NvmlResult nvmlDeviceGetAccountingStats(SimGpu* gpu, unsigned int pid,
                                                    AccountingStats* stats) noexcept nogil:
    cdef User[128] found
    cdef uint32_t k, number
    cdef int64_t ended_us
    cdef NvmlResult result
    if stats == NULL:
        return INVALID_ARGUMENT
    result = users(gpu, found, &number, &ended_us, False)
    if result != SUCCESS:
        return result
    for k in range(number):
        if found[k].pid == pid:
            stats.gpu_percent = found[k].percent
            stats.memory_percent = 0
            stats.most_bytes = found[k].memory_bytes
            stats.time_ms = stats.start_us = 0
            stats.is_running = 1
            return SUCCESS
    return NOT_FOUND


cdef public NvmlResult nvmlDeviceGetAccountingStats_v2(SimGpu* gpu, AccountingStats2* stats) noexcept nogil:
    cdef AccountingStats plain
    cdef NvmlResult result
    if stats == NULL:
        return INVALID_ARGUMENT
    result = nvmlDeviceGetAccountingStats(gpu, stats.pid, &plain)
    if result == SUCCESS:
        stats.gpu_percent = plain.gpu_percent
        stats.most_bytes = plain.most_bytes
        stats.memory_percent = stats.samples = 0
        stats.gpu_sum = stats.memory_sum = stats.time_ms = stats.start_us = 0
    return result
