"""NVML as the vGPU's owner is to see it, in nvidia-smi too: the devices of its vGPUs, in the order of VGPU_ID, with the
vGPU's memory.

NVML needs no cuInit. Until there was one, the process is an observer: it gets the pages, but no slot.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport strcmp

from cython_ext.hook.generated.driver cimport (
    real_nvmlDeviceGetCount, real_nvmlDeviceGetCount_v2, real_nvmlDeviceGetHandleByIndex,
    real_nvmlDeviceGetHandleByIndex_v2, real_nvmlDeviceGetHandleByUUID, real_nvmlDeviceGetIndex,
    real_nvmlDeviceGetMemoryInfo, real_nvmlDeviceGetMemoryInfo_v2, real_nvmlDeviceGetUUID,
)
from cython_ext.hook.hook cimport CUDA_SUCCESS, Gate, attached, state, vgpu_attach, vgpu_memory_reading


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
    if attached():
        gates[0] = &state().gates[0]
        return state().gate_count
    gates[0] = &state().views[0]
    return state().view_count


cdef Gate* gate_of(void* device, unsigned int* index) noexcept nogil:
    cdef char[96] uuid
    cdef Gate* gates = NULL
    cdef uint32_t i, count = known(&gates)
    if count == 0 or real_nvmlDeviceGetUUID(device, uuid, UUID_BYTES) != NVML_SUCCESS:
        return NULL
    for i in range(count):
        if strcmp(gates[i].gpu_uuid, uuid) == 0:
            index[0] = i
            return &gates[i]
    return NULL


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
    return real_nvmlDeviceGetHandleByUUID(gates[index].gpu_uuid, device)


cdef public int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) noexcept nogil:
    cdef Gate* gates = NULL
    cdef uint32_t count = known(&gates)
    if count == 0:
        return real_nvmlDeviceGetHandleByIndex_v2(index, device)
    if index >= count:
        return NVML_ERROR_INVALID_ARGUMENT
    return real_nvmlDeviceGetHandleByUUID(gates[index].gpu_uuid, device)


cdef public int nvmlDeviceGetIndex(void* device, unsigned int* index) noexcept nogil:
    cdef int result = real_nvmlDeviceGetIndex(device, index)
    if result == NVML_SUCCESS:
        gate_of(device, index)
    return result


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
