"""NVML as the vGPU's owner is to see it, in nvidia-smi too: the devices of its vGPUs, in the order of VGPU_ID, with the
vGPU's memory and its processes. A handle of the GPU where a vGPU was when the process began means the one where it is.

NVML needs no cuInit. Until there was one, the process is an observer: it gets the pages, but no slot.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, strcmp
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from cython_ext.hook.generated.driver cimport (
    real_nvmlDeviceGetComputeRunningProcesses, real_nvmlDeviceGetComputeRunningProcesses_v2,
    real_nvmlDeviceGetComputeRunningProcesses_v3, real_nvmlDeviceGetCount, real_nvmlDeviceGetCount_v2,
    real_nvmlDeviceGetGraphicsRunningProcesses, real_nvmlDeviceGetGraphicsRunningProcesses_v2,
    real_nvmlDeviceGetGraphicsRunningProcesses_v3, real_nvmlDeviceGetMPSComputeRunningProcesses,
    real_nvmlDeviceGetMPSComputeRunningProcesses_v2, real_nvmlDeviceGetMPSComputeRunningProcesses_v3,
    real_nvmlDeviceGetHandleByIndex, real_nvmlDeviceGetHandleByIndex_v2, real_nvmlDeviceGetHandleByUUID,
    real_nvmlDeviceGetIndex, real_nvmlDeviceGetMemoryInfo, real_nvmlDeviceGetMemoryInfo_v2,
    real_nvmlDeviceGetProcessUtilization, real_nvmlDeviceGetUUID,
)
from cython_ext.hook.hook cimport vgpu_attach, vgpu_look_again, vgpu_memory_reading
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, attached, state
from cython_ext.layout cimport MAX_PROCESSES, SLOT_FREE, Slot
from cython_ext.native cimport load32


cdef enum:
    NVML_SUCCESS = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    UUID_BYTES = 96


cdef struct Memory:          # nvmlMemory_t
    unsigned long long total, free, used


cdef struct MemoryV2:        # nvmlMemory_v2_t
    unsigned int version
    unsigned int pad
    unsigned long long total, reserved, free, used


cdef uint32_t known(Gate** gates) noexcept nogil:
    """The process's vGPUs; 0: none, NVML is as it is. Who cannot attach has been told why, and sees the machine."""
    if not attached() and (vgpu_attach(1) != CUDA_SUCCESS or state() == NULL):
        return 0
    cdef uint32_t i
    if attached():
        gates[0] = &state().gates[0]
        return state().gate_count
    gates[0] = &state().views[0]
    for i in range(state().view_count):
        vgpu_look_again(&gates[0][i])
    return state().view_count


cdef Gate* gate_of(void* device, unsigned int* index) noexcept nogil:
    cdef char[96] uuid
    cdef Gate* gates = NULL
    cdef uint32_t i, count = known(&gates)
    if count == 0 or real_nvmlDeviceGetUUID(device, uuid, UUID_BYTES) != NVML_SUCCESS:
        return NULL
    for i in range(count):
        if strcmp(gates[i].grants.gpu_uuid, uuid) == 0:
            index[0] = i
            return &gates[i]
    for i in range(count):
        if strcmp(gates[i].gpu_uuid, uuid) == 0:
            index[0] = i
            return &gates[i]
    return NULL


cdef void* here(const Gate* gate, void* device) noexcept nogil:
    """The GPU where the vGPU is, for a handle of where it was."""
    cdef void* moved = NULL
    if strcmp(gate.gpu_uuid, gate.grants.gpu_uuid) == 0:
        return device
    return moved if real_nvmlDeviceGetHandleByUUID(gate.grants.gpu_uuid, &moved) == NVML_SUCCESS else device


cdef inline int visible_count(int result, unsigned int* count) noexcept nogil:
    cdef Gate* gates = NULL
    cdef uint32_t visible
    if result == NVML_SUCCESS:
        visible = known(&gates)
        count[0] = visible if visible else count[0]
    return result


cdef public int nvmlDeviceGetCount(unsigned int* count) noexcept nogil:
    return visible_count(real_nvmlDeviceGetCount(count), count)


cdef public int nvmlDeviceGetCount_v2(unsigned int* count) noexcept nogil:
    return visible_count(real_nvmlDeviceGetCount_v2(count), count)


cdef public int nvmlDeviceGetHandleByIndex(unsigned int index, void** device) noexcept nogil:
    cdef Gate* gates = NULL
    cdef uint32_t count = known(&gates)
    if count == 0:
        return real_nvmlDeviceGetHandleByIndex(index, device)
    if index >= count:
        return NVML_ERROR_INVALID_ARGUMENT
    return real_nvmlDeviceGetHandleByUUID(gates[index].grants.gpu_uuid, device)


cdef public int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) noexcept nogil:
    cdef Gate* gates = NULL
    cdef uint32_t count = known(&gates)
    if count == 0:
        return real_nvmlDeviceGetHandleByIndex_v2(index, device)
    if index >= count:
        return NVML_ERROR_INVALID_ARGUMENT
    return real_nvmlDeviceGetHandleByUUID(gates[index].grants.gpu_uuid, device)


cdef public int nvmlDeviceGetIndex(void* device, unsigned int* index) noexcept nogil:
    cdef int result = real_nvmlDeviceGetIndex(device, index)
    if result == NVML_SUCCESS:
        gate_of(device, index)
    return result


# --- processes

cdef enum:
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_INSUFFICIENT_SIZE = 7
    MOST_PROCESSES = 4096
    INFO_BYTES = 24          # nvmlProcessInfo_v2_t, which _v2 and _v3 give; a pid is its first word
    INFO_V1_BYTES = 16
    SAMPLE_BYTES = 32        # nvmlProcessUtilizationSample_t


ctypedef int (*Listing)(void*, unsigned int*, void*) noexcept nogil


cdef bint is_inside(const Gate* gate, uint32_t pid) noexcept nogil:
    cdef const Slot* slot
    cdef int i
    for i in range(MAX_PROCESSES):
        slot = &gate.activity.slots[i]
        if slot.pid == pid and load32(&slot.state) != SLOT_FREE:
            return 1
    return 0


cdef int give(
    const Gate* gate, const char* every, unsigned int found, size_t size, unsigned int* count, void* infos
) noexcept nogil:
    """Of ``found`` entries that begin with a pid those of the vGPU, as many as the caller has room for."""
    cdef unsigned int room = count[0] if infos != NULL else 0, kept = 0, i
    for i in range(found):
        if is_inside(gate, (<uint32_t*>(every + i * size))[0]):
            if kept < room:
                memcpy(<char*>infos + kept * size, every + i * size, size)
            kept += 1
    count[0] = kept
    return NVML_ERROR_INSUFFICIENT_SIZE if kept > room else NVML_SUCCESS


cdef void* room_for(size_t size) noexcept nogil:
    cdef void* memory = mmap(NULL, MOST_PROCESSES * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    return NULL if memory == MAP_FAILED else memory


cdef int listed(Listing real, void* device, unsigned int* count, void* infos, size_t size) noexcept nogil:
    """The processes of the vGPU, of those that the driver lists. What others run on the GPU is nobody's business."""
    cdef unsigned int index, found = MOST_PROCESSES
    cdef Gate* gate = gate_of(device, &index)
    cdef void* every = room_for(size) if gate != NULL and count != NULL else NULL
    cdef int result
    if every == NULL:
        return real(device, count, infos)
    result = real(here(gate, device), &found, every)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>every, min(found, <unsigned int>MOST_PROCESSES), size, count, infos)
    munmap(every, MOST_PROCESSES * size)
    return result


cdef public int nvmlDeviceGetProcessUtilization(
    void* device, void* samples, unsigned int* count, unsigned long long since
) noexcept nogil:
    cdef unsigned int index, found = MOST_PROCESSES
    cdef Gate* gate = gate_of(device, &index)
    cdef void* every = room_for(SAMPLE_BYTES) if gate != NULL and count != NULL else NULL
    cdef int result
    if every == NULL:
        return real_nvmlDeviceGetProcessUtilization(device, samples, count, since)
    result = real_nvmlDeviceGetProcessUtilization(here(gate, device), every, &found, since)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>every, min(found, <unsigned int>MOST_PROCESSES), SAMPLE_BYTES, count, samples)
        result = NVML_ERROR_NOT_FOUND if count[0] == 0 else result
    munmap(every, MOST_PROCESSES * SAMPLE_BYTES)
    return result


cdef public int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses, device, count, infos, INFO_V1_BYTES)


cdef public int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses_v2, device, count, infos, INFO_BYTES)


cdef public int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses_v3, device, count, infos, INFO_BYTES)


cdef public int nvmlDeviceGetGraphicsRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses, device, count, infos, INFO_V1_BYTES)


cdef public int nvmlDeviceGetGraphicsRunningProcesses_v2(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses_v2, device, count, infos, INFO_BYTES)


cdef public int nvmlDeviceGetGraphicsRunningProcesses_v3(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses_v3, device, count, infos, INFO_BYTES)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses, device, count, infos, INFO_V1_BYTES)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses_v2(
    void* device, unsigned int* count, void* infos
) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses_v2, device, count, infos, INFO_BYTES)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses_v3(
    void* device, unsigned int* count, void* infos
) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses_v3, device, count, infos, INFO_BYTES)


# --- memory

cdef public int nvmlDeviceGetMemoryInfo(void* device, void* memory) noexcept nogil:
    cdef int result = real_nvmlDeviceGetMemoryInfo(device, memory)
    cdef Memory* shown = <Memory*>memory
    cdef unsigned int index
    cdef uint64_t total, free
    cdef Gate* gate
    if result == NVML_SUCCESS:
        gate = gate_of(device, &index)
        if gate != NULL:
            vgpu_memory_reading(gate, shown.total, shown.total, &total, &free)
            shown.total = total
            shown.free = free
            shown.used = total - free
    return result


cdef public int nvmlDeviceGetMemoryInfo_v2(void* device, void* memory) noexcept nogil:
    cdef int result = real_nvmlDeviceGetMemoryInfo_v2(device, memory)
    cdef MemoryV2* shown = <MemoryV2*>memory
    cdef unsigned int index
    cdef uint64_t total, free
    cdef Gate* gate
    if result == NVML_SUCCESS:
        gate = gate_of(device, &index)
        if gate != NULL:
            vgpu_memory_reading(gate, shown.total, shown.total, &total, &free)
            shown.total = total
            shown.reserved = 0
            shown.free = free
            shown.used = total - free
    return result
