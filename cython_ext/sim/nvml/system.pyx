"""The simulated NVML: start-up, versions, and finding devices.

Like the real one it knows every GPU of the node and cares for no CUDA_VISIBLE_DEVICES. Handles are the mapped states.
"""

from libc.stdio cimport snprintf
from libc.stdlib cimport strtoul
from libc.string cimport memcpy, memset, strcasecmp, strchr, strlen

from cython_ext.sim.nvml.handles cimport (
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, LIBRARY_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, NvmlResult, SUCCESS,
    UNINITIALIZED, UNKNOWN,
)
from cython_ext.sim.lock cimport O_CLOEXEC, O_RDONLY, close, open, read
from cython_ext.sim.share cimport sim_is_participant, sim_map_all
from cython_ext.sim.state cimport LIBRARY_NVML, SimGpu


cdef extern from *:
    """
    #pragma GCC visibility push(default)
    """

cdef SimGpu* gpus[16]
cdef int count
cdef int users


cdef public NvmlResult nvmlInitWithFlags(unsigned int flags) noexcept nogil:
    global count, users
    if users == 0 and count == 0:
        count = sim_map_all(gpus, LIBRARY_NVML)
    if count == 0:
        return LIBRARY_NOT_FOUND
    users += 1
    return SUCCESS


cdef public NvmlResult nvmlInit_v2() noexcept nogil:
    return nvmlInitWithFlags(0)


cdef public NvmlResult nvmlInit() noexcept nogil:
    return nvmlInitWithFlags(0)


cdef public NvmlResult nvmlShutdown() noexcept nogil:
    """The states stay mapped: handles of a program that starts NVML again are the same."""
    global users
    if users == 0:
        return UNINITIALIZED
    users -= 1
    return SUCCESS


cdef public NvmlResult sim_check(SimGpu* gpu) noexcept nogil:
    cdef int i
    if users == 0:
        return UNINITIALIZED
    for i in range(count):
        if gpus[i] == gpu:
            return SUCCESS if sim_is_participant(gpu) else UNKNOWN
    return INVALID_ARGUMENT


cdef public const char* nvmlErrorString(int result) noexcept nogil:
    if result == SUCCESS:
        return b"Success"
    if result == UNINITIALIZED:
        return b"Uninitialized"
    if result == INVALID_ARGUMENT:
        return b"Invalid Argument"
    if result == NOT_SUPPORTED:
        return b"Not Supported"
    if result == 4:
        return b"Insufficient Permissions"
    if result == NOT_FOUND:
        return b"Not Found"
    if result == INSUFFICIENT_SIZE:
        return b"Insufficient Size"
    if result == LIBRARY_NOT_FOUND:
        return b"No simulated GPU: VGPU_SIM_DIR names no folder with one"
    return b"Unknown Error"


cdef NvmlResult put(char* target, unsigned int size, const char* text) noexcept nogil:
    if size <= strlen(text):
        return INSUFFICIENT_SIZE
    snprintf(target, size, b"%s", text)
    return SUCCESS


cdef public NvmlResult nvmlSystemGetDriverVersion(char* version, unsigned int size) noexcept nogil:
    return put(version, size, b"580.159.03") if users else UNINITIALIZED


cdef public NvmlResult nvmlSystemGetNVMLVersion(char* version, unsigned int size) noexcept nogil:
    return put(version, size, b"13.580.159.03") if users else UNINITIALIZED


cdef public NvmlResult nvmlSystemGetCudaDriverVersion_v2(int* version) noexcept nogil:
    version[0] = 13000
    return SUCCESS


cdef public NvmlResult nvmlSystemGetCudaDriverVersion(int* version) noexcept nogil:
    return nvmlSystemGetCudaDriverVersion_v2(version)


cdef public NvmlResult nvmlSystemGetProcessName(unsigned int pid, char* name, unsigned int size) noexcept nogil:
    cdef char path[64]
    cdef ssize_t length
    cdef int fd
    snprintf(path, sizeof(path), b"/proc/%u/cmdline", pid)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return NOT_FOUND
    length = read(fd, name, size - 1)
    close(fd)
    name[max(length, <ssize_t>0)] = 0
    return SUCCESS


# -- devices

cdef public NvmlResult nvmlDeviceGetCount_v2(unsigned int* number) noexcept nogil:
    number[0] = count
    return SUCCESS if users else UNINITIALIZED


cdef public NvmlResult nvmlDeviceGetCount(unsigned int* number) noexcept nogil:
    return nvmlDeviceGetCount_v2(number)


cdef public NvmlResult nvmlDeviceGetHandleByIndex_v2(unsigned int index, SimGpu** gpu) noexcept nogil:
    if users == 0:
        return UNINITIALIZED
    if index >= <unsigned int>count:
        return INVALID_ARGUMENT
    gpu[0] = gpus[index]
    return SUCCESS


cdef public NvmlResult nvmlDeviceGetHandleByIndex(unsigned int index, SimGpu** gpu) noexcept nogil:
    return nvmlDeviceGetHandleByIndex_v2(index, gpu)


cdef void write_uuid(SimGpu* gpu, char* text) noexcept nogil:
    cdef int i, at = snprintf(text, 5, b"GPU-")
    for i in range(16):
        if i in (4, 6, 8, 10):
            text[at] = 45
            at += 1
        at += snprintf(text + at, 3, b"%02x", <int>gpu.uuid[i])


cdef public NvmlResult nvmlDeviceGetHandleByUUID(const char* uuid, SimGpu** gpu) noexcept nogil:
    cdef char text[64]
    cdef int i
    if users == 0:
        return UNINITIALIZED
    for i in range(count):
        write_uuid(gpus[i], text)
        if strcasecmp(text, uuid) == 0:
            gpu[0] = gpus[i]
            return SUCCESS
    return NOT_FOUND


cdef public NvmlResult nvmlDeviceGetHandleByPciBusId_v2(const char* text, SimGpu** gpu) noexcept nogil:
    """[domain:]bus:device.function, in hexadecimal."""
    cdef const char* bus = strchr(text, 58)
    cdef int i
    if users == 0:
        return UNINITIALIZED
    bus = text if bus == NULL or strchr(bus + 1, 58) == NULL else bus + 1
    for i in range(count):
        if strtoul(bus, NULL, 16) == gpus[i].pci_bus:
            gpu[0] = gpus[i]
            return SUCCESS
    return NOT_FOUND


cdef public NvmlResult nvmlDeviceGetHandleByPciBusId(const char* text, SimGpu** gpu) noexcept nogil:
    return nvmlDeviceGetHandleByPciBusId_v2(text, gpu)


cdef public NvmlResult nvmlDeviceGetIndex(SimGpu* gpu, unsigned int* index) noexcept nogil:
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        index[0] = gpu.index
    return result


cdef public NvmlResult nvmlDeviceGetMinorNumber(SimGpu* gpu, unsigned int* minor) noexcept nogil:
    return nvmlDeviceGetIndex(gpu, minor)


cdef public NvmlResult nvmlDeviceGetName(SimGpu* gpu, char* name, unsigned int size) noexcept nogil:
    cdef NvmlResult result = sim_check(gpu)
    cdef char[96] text
    if result == SUCCESS:
        memcpy(text, gpu.name, 96)
        text[95] = 0         # the file may hold anything
        result = put(name, size, text)
    return result


cdef public NvmlResult nvmlDeviceGetUUID(SimGpu* gpu, char* uuid, unsigned int size) noexcept nogil:
    cdef char text[64]
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        write_uuid(gpu, text)
        result = put(uuid, size, text)
    return result


cdef public NvmlResult nvmlDeviceGetSerial(SimGpu* gpu, char* serial, unsigned int size) noexcept nogil:
    return NOT_SUPPORTED


cdef public struct PciInfo:
    char legacy_bus_id[16]
    unsigned int domain
    unsigned int bus
    unsigned int device
    unsigned int device_id
    unsigned int subsystem_id
    char bus_id[32]


cdef public NvmlResult nvmlDeviceGetPciInfo_v3(SimGpu* gpu, PciInfo* info) noexcept nogil:
    cdef NvmlResult result = sim_check(gpu)
    if result == SUCCESS:
        memset(info, 0, sizeof(PciInfo))
        info.bus = gpu.pci_bus
        info.device_id = 0x233510de
        snprintf(info.legacy_bus_id, 16, b"0000:%02X:00.0", gpu.pci_bus)
        snprintf(info.bus_id, 32, b"00000000:%02X:00.0", gpu.pci_bus)
    return result


cdef public NvmlResult nvmlDeviceGetPciInfo_v2(SimGpu* gpu, PciInfo* info) noexcept nogil:
    return nvmlDeviceGetPciInfo_v3(gpu, info)
