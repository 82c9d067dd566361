"""Devices: what a program learns about a simulated GPU before it uses it."""

from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.stdlib cimport strtoul
from libc.string cimport memcpy

from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, Device, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED, SUCCESS, drv_current_context, drv_device, drv_devices, drv_follow, drv_is_context,
    drv_ready,
)
from cython_ext.sim.mps cimport sim_granted_sms, sim_mps_server


cdef CUresult find(int index, Device** device) noexcept nogil:
    cdef CUresult result = drv_ready()
    drv_follow()
    device[0] = drv_device(index)
    if result != SUCCESS:
        return result
    return SUCCESS if device[0] != NULL else INVALID_DEVICE


cdef public CUresult cuDriverGetVersion(int* version) noexcept nogil:
    version[0] = 13000
    return SUCCESS


cdef public CUresult cuDeviceGetCount(int* count) noexcept nogil:
    count[0] = drv_devices()
    return drv_ready()


cdef public CUresult cuDeviceGet(int* device, int ordinal) noexcept nogil:
    cdef Device* found
    device[0] = ordinal
    return find(ordinal, &found)


cdef public CUresult cuDeviceGetName(char* name, int length, int index) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        snprintf(name, length, b"%s", device.gpu.name)
    return result


cdef public CUresult cuDeviceGetUuid_v2(unsigned char* uuid, int index) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        memcpy(uuid, device.gpu.uuid, 16)
    return result


cdef public CUresult cuDeviceGetUuid(unsigned char* uuid, int index) noexcept nogil:
    return cuDeviceGetUuid_v2(uuid, index)


cdef public CUresult cuDeviceTotalMem_v2(size_t* size, int index) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        size[0] = device.gpu.memory_bytes
    return result


cdef public CUresult cuDeviceGetPCIBusId(char* text, int length, int index) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        snprintf(text, length, b"0000:%02X:00.0", device.gpu.pci_bus)
    return result


cdef public CUresult cuDeviceGetByPCIBusId(int* index, const char* text) noexcept nogil:
    """[domain:]bus:device.function, in hexadecimal."""
    cdef const char* at = text
    cdef const char* bus = text
    cdef int colons = 0, i
    while at[0] != 0:
        if at[0] == 58:
            colons += 1
            if colons == 1:
                bus = at + 1
        at += 1
    if colons < 2:
        bus = text
    for i in range(drv_devices()):
        if drv_device(i).gpu.pci_bus == strtoul(bus, NULL, 16):
            index[0] = i
            return SUCCESS
    return INVALID_DEVICE


cdef public CUresult cuDeviceComputeCapability(int* major, int* minor, int index) noexcept nogil:
    major[0] = 9
    minor[0] = 0
    return SUCCESS if drv_device(index) != NULL else INVALID_DEVICE


cdef int attribute_value(Device* device, int attribute) noexcept nogil:
    """CU_DEVICE_ATTRIBUTE_*, the values of an H200; what is not listed is 0, "not supported"."""
    if attribute in (1, 2, 3):              # threads per block, block x and y
        return 1024
    if attribute == 4:
        return 64
    if attribute == 5:
        return 2147483647
    if attribute in (6, 7):
        return 65535
    if attribute == 8:                      # shared memory per block
        return 49152
    if attribute == 9:                      # constant memory
        return 65536
    if attribute == 10:                     # warp
        return 32
    if attribute == 11:
        return 2147483647
    if attribute in (12, 82):               # registers per block, per SM
        return 65536
    if attribute == 13:                     # kHz
        return 1980000
    if attribute == 14:
        return 512
    if attribute == 16:                     # SMs: what MPS grants is what the process sees
        if sim_mps_server():
            return <int>sim_granted_sms(device.gpu.sms)
        return <int>device.gpu.sms
    if attribute == 133:                    # contexts are shared by MPS
        return sim_mps_server() != 0
    if attribute == 33:
        return <int>device.gpu.pci_bus
    if attribute == 36:                     # memory clock
        return 3201000
    if attribute == 37:                     # bus width
        return 6144
    if attribute == 38:                     # L2
        return 62914560
    if attribute == 39:                     # threads per SM
        return 2048
    if attribute == 40:                     # copy engines
        return 2
    if attribute == 75:                     # compute capability
        return 9
    if attribute in (81, 97):               # shared memory per SM, per block with opt-in
        return 233472 if attribute == 81 else 232448
    if attribute == 106:                    # blocks per SM
        return 32
    if attribute == 108:
        return 134217728
    if attribute == 109:
        return 134217728
    if attribute == 111:                    # reserved shared memory per block
        return 1024
    # Yes to: overlap, host mapping, concurrent kernels, unified addressing, stream priorities, L1 caches, managed
    # memory, pageable access queries, compute preemption, stream memory operations, cooperative launch, host
    # registration, virtual memory management, memory pools.
    if attribute in (15, 19, 31, 41, 78, 79, 80, 83, 89, 90, 91, 93, 94, 95, 98, 99, 102, 103, 115, 122, 124):
        return 1
    if attribute == 119:                    # handle types of pools: POSIX file descriptors
        return 1
    return 0


cdef public CUresult cuDeviceGetAttribute(int* value, int attribute, int index) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS and not 0 < attribute < 512:
        result = INVALID_VALUE
    if result == SUCCESS:
        value[0] = attribute_value(device, attribute)
    return result


cdef public struct DeviceProperties:
    int threads_per_block
    int block[3]
    int grid[3]
    int shared_bytes
    int constant_bytes
    int warp
    int pitch
    int registers
    int clock
    int texture_alignment


cdef public CUresult cuDeviceGetProperties(DeviceProperties* properties, int index) noexcept nogil:
    cdef Device* device
    cdef int* value = &properties.threads_per_block
    cdef int i
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        for i in range(14):
            value[i] = attribute_value(device, i + 1)
    return result


cdef public CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t* width, int format, unsigned channels,
                                                        int index) noexcept nogil:
    width[0] = 268435456
    return SUCCESS


cdef public CUresult cuDeviceGetExecAffinitySupport(int* value, int kind, int index) noexcept nogil:
    value[0] = 0
    return SUCCESS


# -- peers: every simulated GPU of a node reaches every other one

cdef public CUresult cuDeviceCanAccessPeer(int* value, int index, int peer) noexcept nogil:
    cdef Device* device
    cdef CUresult result = find(index, &device)
    if result == SUCCESS:
        result = find(peer, &device)
    value[0] = index != peer
    return result


cdef public CUresult cuDeviceGetP2PAttribute(int* value, int attribute, int index, int peer) noexcept nogil:
    if index == peer:
        return INVALID_DEVICE
    return cuDeviceCanAccessPeer(value, index, peer)


cdef public CUresult cuCtxEnablePeerAccess(Context* peer, unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if not drv_is_context(peer) or peer.device == context.device:
        return INVALID_CONTEXT
    if drv_device(context.device).peers >> peer.device & 1:
        return PEER_ACCESS_ALREADY_ENABLED
    drv_device(context.device).peers |= <uint32_t>1 << peer.device
    return SUCCESS


cdef public CUresult cuCtxDisablePeerAccess(Context* peer) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if not drv_is_context(peer) or not drv_device(context.device).peers >> peer.device & 1:
        return PEER_ACCESS_NOT_ENABLED
    drv_device(context.device).peers &= ~(<uint32_t>1 << peer.device)
    return SUCCESS
