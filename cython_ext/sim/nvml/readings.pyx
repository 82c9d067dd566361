"""The simulated NVML: what a device reads at present, and who uses it."""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.sim.engine cimport sim_load_ratio
from cython_ext.sim.queues cimport sim_memory_used
from cython_ext.sim.nvml.handles cimport (
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, NvmlResult, SUCCESS, VERSION_MISMATCH, sim_check,
)
from cython_ext.sim.share cimport sim_context_pid, sim_enter, sim_learn_pids, sim_reap, sim_unlock
from cython_ext.sim.state cimport (
    CONTEXT_FREE, FROZEN_CHECKPOINTED, SIM_CONTEXTS, SIM_WINDOW_NS, SimContext, SimGpu,
)


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
    CLOCK_GRAPHICS = 0
    CLOCK_SM = 1
    CLOCK_MEM = 2
    CLOCK_VIDEO = 3
    IDLE_MILLIWATTS = 75000
    FULL_MILLIWATTS = 700000


cdef NvmlResult look(SimGpu* gpu) noexcept nogil:
    """Lock a device that is at the present and free of the dead. Unlock it after SUCCESS."""
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        sim_enter(gpu)
        sim_reap(gpu)
    return result


cdef NvmlResult look_at_processes(SimGpu* gpu) noexcept nogil:
    """``look``, and every pid is known then: as the real driver's, of the caller's PID namespace. A process that cannot
    be seen from there is not listed."""
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        sim_learn_pids(gpu)
    return look(gpu)


# -- memory

cdef public struct MemoryInfo:
    unsigned long long total
    unsigned long long free
    unsigned long long used

cdef public struct MemoryInfo2:
    unsigned int version
    unsigned long long total
    unsigned long long reserved
    unsigned long long free
    unsigned long long used


cdef public NvmlResult nvmlDeviceGetMemoryInfo(SimGpu* gpu, MemoryInfo* info) noexcept nogil:
    cdef NvmlResult result = look(gpu)
    if result == SUCCESS:
        info.total = gpu.memory_bytes
        info.used = sim_memory_used(gpu)
        info.free = info.total - info.used
        sim_unlock(gpu)
    return result


cdef public NvmlResult nvmlDeviceGetMemoryInfo_v2(SimGpu* gpu, MemoryInfo2* info) noexcept nogil:
    cdef MemoryInfo plain
    cdef NvmlResult result
    if info.version != (sizeof(MemoryInfo2) | 2 << 24):
        return VERSION_MISMATCH
    result = nvmlDeviceGetMemoryInfo(gpu, &plain)
    if result == SUCCESS:
        info.total = plain.total
        info.free = plain.free
        info.used = plain.used
        info.reserved = 0
    return result


# -- load

cdef public struct Utilization:
    unsigned int gpu
    unsigned int memory


cdef public NvmlResult nvmlDeviceGetUtilizationRates(SimGpu* gpu, Utilization* rates) noexcept nogil:
    """Percent of the last quarter of a second in which a kernel ran."""
    cdef NvmlResult result = look(gpu)
    if result == SUCCESS:
        rates.gpu = <unsigned int>(100 * sim_load_ratio(&gpu.load, gpu.time_ns) + 0.5)
        rates.memory = 0
        sim_unlock(gpu)
    return result


cdef public struct ProcessSample:
    unsigned int pid
    unsigned long long time_us
    unsigned int sm
    unsigned int memory
    unsigned int encoder
    unsigned int decoder


cdef public NvmlResult nvmlDeviceGetProcessUtilization(SimGpu* gpu, ProcessSample* samples, unsigned int* count,
                                                       unsigned long long since_us) noexcept nogil:
    """One sample for each process with work in the last window that ended after `since_us` (wall clock)."""
    cdef uint32_t i, k, found = 0
    cdef unsigned int percent, room = count[0]
    cdef int64_t ended_us
    cdef int pid
    cdef NvmlResult result = look_at_processes(gpu)
    if result != SUCCESS:
        return result
    ended_us = (sim_wall_ns() - gpu.time_ns % SIM_WINDOW_NS) / 1000
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state == CONTEXT_FREE or ended_us <= <int64_t>since_us:
            continue
        percent = <unsigned int>(100 * sim_load_ratio(&gpu.contexts[i].load, gpu.time_ns) + 0.5)
        pid = sim_context_pid(gpu, i)
        if percent == 0 or pid == 0:
            continue
        k = 0
        while samples != NULL and k < min(found, room) and samples[k].pid != <unsigned int>pid:
            k += 1
        if samples != NULL and k < min(found, room):
            samples[k].sm = min(<unsigned int>100, samples[k].sm + percent)
            continue
        if samples != NULL and found < room:
            samples[found].pid = pid
            samples[found].time_us = ended_us
            samples[found].sm = percent
            samples[found].memory = samples[found].encoder = samples[found].decoder = 0
        found += 1
    sim_unlock(gpu)
    count[0] = found
    if found == 0:
        return NOT_FOUND
    return INSUFFICIENT_SIZE if samples == NULL or found > room else SUCCESS


# -- processes

cdef public struct ProcessInfo:
    unsigned int pid
    unsigned long long used_bytes
    unsigned int gpu_instance
    unsigned int compute_instance


cdef NvmlResult processes(SimGpu* gpu, unsigned int* count, ProcessInfo* infos, bint mps_only) noexcept nogil:
    cdef uint32_t i, k, found = 0
    cdef unsigned int room = count[0]
    cdef ProcessInfo all[128]
    cdef SimContext* context
    cdef int pid
    cdef NvmlResult result = look_at_processes(gpu)
    if result != SUCCESS:
        return result
    for i in range(SIM_CONTEXTS):
        context = &gpu.contexts[i]
        if context.state == CONTEXT_FREE or context.frozen == FROZEN_CHECKPOINTED:
            continue
        if mps_only and context.server == 0:
            continue
        pid = sim_context_pid(gpu, i)
        if pid == 0:
            continue
        k = 0
        while k < found and all[k].pid != <unsigned int>pid:
            k += 1
        if k == found:
            all[k].pid = pid
            all[k].used_bytes = 0
            all[k].gpu_instance = all[k].compute_instance = <unsigned int>-1
            found += 1
        all[k].used_bytes += context.memory_bytes
    sim_unlock(gpu)
    count[0] = found
    if found > room:
        return INSUFFICIENT_SIZE
    for k in range(found):
        infos[k] = all[k]
    return SUCCESS


cdef public NvmlResult nvmlDeviceGetComputeRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                               ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, False)


cdef public NvmlResult nvmlDeviceGetComputeRunningProcesses_v2(SimGpu* gpu, unsigned int* count,
                                                               ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, False)


cdef public NvmlResult nvmlDeviceGetMPSComputeRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                                  ProcessInfo* infos) noexcept nogil:
    return processes(gpu, count, infos, True)


cdef public NvmlResult nvmlDeviceGetGraphicsRunningProcesses_v3(SimGpu* gpu, unsigned int* count,
                                                                ProcessInfo* infos) noexcept nogil:
    count[0] = 0
    return sim_check(gpu)


# -- the card

cdef public NvmlResult nvmlDeviceGetComputeMode(SimGpu* gpu, int* mode) noexcept nogil:
    mode[0] = 0  # default: shared
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetPersistenceMode(SimGpu* gpu, int* mode) noexcept nogil:
    mode[0] = 1
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetMigMode(SimGpu* gpu, unsigned int* current, unsigned int* pending) noexcept nogil:
    return NOT_SUPPORTED


cdef public NvmlResult nvmlDeviceGetCudaComputeCapability(SimGpu* gpu, int* major, int* minor) noexcept nogil:
    major[0] = 9
    minor[0] = 0
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetArchitecture(SimGpu* gpu, unsigned int* architecture) noexcept nogil:
    architecture[0] = 9
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetBrand(SimGpu* gpu, int* brand) noexcept nogil:
    brand[0] = 14
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetNumGpuCores(SimGpu* gpu, unsigned int* cores) noexcept nogil:
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        cores[0] = 128 * gpu.sms
    return result


cdef public NvmlResult nvmlDeviceGetPerformanceState(SimGpu* gpu, int* state) noexcept nogil:
    state[0] = 0
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetPowerUsage(SimGpu* gpu, unsigned int* milliwatts) noexcept nogil:
    """Between idle and full, in proportion to the load."""
    cdef Utilization rates
    cdef NvmlResult result = nvmlDeviceGetUtilizationRates(gpu, &rates)
    if result == SUCCESS:
        milliwatts[0] = IDLE_MILLIWATTS + (FULL_MILLIWATTS - IDLE_MILLIWATTS) / 100 * rates.gpu
    return result


cdef public NvmlResult nvmlDeviceGetEnforcedPowerLimit(SimGpu* gpu, unsigned int* milliwatts) noexcept nogil:
    milliwatts[0] = FULL_MILLIWATTS
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetPowerManagementLimit(SimGpu* gpu, unsigned int* milliwatts) noexcept nogil:
    return nvmlDeviceGetEnforcedPowerLimit(gpu, milliwatts)


cdef public NvmlResult nvmlDeviceGetTemperature(SimGpu* gpu, int sensor, unsigned int* celsius) noexcept nogil:
    cdef Utilization rates
    cdef NvmlResult result = nvmlDeviceGetUtilizationRates(gpu, &rates)
    if result == SUCCESS:
        celsius[0] = 30 + 30 * rates.gpu / 100
    return result


cdef public struct Temperature:
    unsigned int version
    int sensor
    int celsius


cdef public NvmlResult nvmlDeviceGetTemperatureV(SimGpu* gpu, Temperature* reading) noexcept nogil:
    cdef unsigned int celsius = 0
    cdef NvmlResult result = nvmlDeviceGetTemperature(gpu, reading.sensor, &celsius)
    reading.celsius = <int>celsius
    return result


cdef public NvmlResult nvmlDeviceGetFanSpeed(SimGpu* gpu, unsigned int* percent) noexcept nogil:
    return NOT_SUPPORTED


cdef public NvmlResult nvmlDeviceGetMaxClockInfo(SimGpu* gpu, int kind, unsigned int* mhz) noexcept nogil:
    if not CLOCK_GRAPHICS <= kind <= CLOCK_VIDEO:
        return INVALID_ARGUMENT
    mhz[0] = 3201 if kind == CLOCK_MEM else 1545 if kind == CLOCK_VIDEO else 1980
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetClockInfo(SimGpu* gpu, int kind, unsigned int* mhz) noexcept nogil:
    return nvmlDeviceGetMaxClockInfo(gpu, kind, mhz)
