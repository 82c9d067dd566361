"""The simulated NVML: what a device reads at present."""

from cython_ext.sim.engine cimport sim_load_ratio
from cython_ext.sim.queues cimport sim_memory_used
from cython_ext.sim.nvml.handles cimport (
    INVALID_ARGUMENT, NOT_SUPPORTED, NvmlResult, SUCCESS, VERSION_MISMATCH, sim_check,
)
from cython_ext.sim.share cimport sim_enter, sim_reap, sim_unlock
from cython_ext.sim.state cimport SimGpu


cdef extern from *:
    """
    #pragma GCC visibility push(default)
    """

cdef enum:
    CLOCK_GRAPHICS = 0
    CLOCK_SM = 1
    CLOCK_MEM = 2
    CLOCK_VIDEO = 3
    IDLE_MILLIWATTS = 75000
    FULL_MILLIWATTS = 700000


cdef public NvmlResult sim_look(SimGpu* gpu) noexcept nogil:
    """Lock a device that is at the present and free of the dead. Unlock it after SUCCESS."""
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        sim_enter(gpu)
        sim_reap(gpu)
    return result


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
    cdef NvmlResult result = sim_look(gpu) if info != NULL else <NvmlResult>INVALID_ARGUMENT
    if result == SUCCESS:
        info.total = gpu.memory_bytes
        info.used = sim_memory_used(gpu)
        info.free = info.total - info.used
        sim_unlock(gpu)
    return result


cdef public NvmlResult nvmlDeviceGetMemoryInfo_v2(SimGpu* gpu, MemoryInfo2* info) noexcept nogil:
    cdef MemoryInfo plain
    cdef NvmlResult result
    if info == NULL:
        return INVALID_ARGUMENT
    if info.version != (sizeof(MemoryInfo2) | 2 << 24):
        return VERSION_MISMATCH
    result = nvmlDeviceGetMemoryInfo(gpu, &plain)
    if result == SUCCESS:
        info.total = plain.total
        info.free = plain.free
        info.used = plain.used
        info.reserved = 0
    return result


cdef public NvmlResult nvmlDeviceGetBAR1MemoryInfo(SimGpu* gpu, MemoryInfo* info) noexcept nogil:
    """The window through which the host sees the card: nothing maps it here."""
    if info == NULL:
        return INVALID_ARGUMENT
    info.total = info.free = gpu.memory_bytes if sim_check(gpu) == SUCCESS else 0
    info.used = 0
    return sim_check(gpu)


cdef public NvmlResult nvmlDeviceGetConfComputeProtectedMemoryUsage(SimGpu* gpu, MemoryInfo* info) noexcept nogil:
    """As of a card in confidential mode, where all memory is protected."""
    return nvmlDeviceGetMemoryInfo(gpu, info)


# -- load

cdef public struct Utilization:
    unsigned int gpu
    unsigned int memory


cdef public NvmlResult nvmlDeviceGetUtilizationRates(SimGpu* gpu, Utilization* rates) noexcept nogil:
    """Percent of the last quarter of a second in which a kernel ran."""
    cdef NvmlResult result = sim_look(gpu)
    if result == SUCCESS:
        rates.gpu = <unsigned int>(100 * sim_load_ratio(&gpu.load, gpu.time_ns) + 0.5)
        rates.memory = 0
        sim_unlock(gpu)
    return result


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
