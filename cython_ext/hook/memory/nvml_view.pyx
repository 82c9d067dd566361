"""NVML as the vGPU's owner is to see it, in nvidia-smi too: the devices of its vGPUs, in the order of VGPU_ID, with the
vGPU's memory and its processes. A handle of the GPU where a vGPU was when the process began means the one where it is.

NVML needs no cuInit. Until there was one, the process is an observer: it gets the pages, but no slot.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport strtoull
from libc.string cimport memchr, memcpy, memset, strcmp, strlen, strrchr
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from cython_ext.hook.generated.driver cimport (
    real_nvmlDeviceGetAccountingPids, real_nvmlDeviceGetAccountingStats, real_nvmlDeviceGetAccountingStats_v2,
    real_nvmlDeviceGetConfComputeProtectedMemoryUsage, real_nvmlDeviceGetEncoderSessions,
    real_nvmlDeviceGetFBCSessions, real_nvmlDeviceGetProcessesUtilizationInfo,
    real_nvmlDeviceGetRunningProcessDetailList,
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
from cython_ext.pages.layout cimport MAX_PROCESSES, SLOT_FREE, Slot
from cython_ext.native cimport load32


cdef enum:
    NVML_SUCCESS = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_UNKNOWN = 999
    UUID_BYTES = 96


cdef struct Memory:          # nvmlMemory_t
    unsigned long long total, free, used


cdef struct MemoryV2:        # nvmlMemory_v2_t
    unsigned int version
    unsigned int pad
    unsigned long long total, reserved, free, used


cdef uint32_t known(Gate** gates) noexcept nogil:
    """The process's vGPUs; 0: none, NVML is as it is. A process that cannot attach has got the reason on stderr, and
    sees the whole machine."""
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
    """The GPU where the vGPU is, for a handle of where it was; of another GPU (``gate`` NULL) the handle itself."""
    cdef void* moved = NULL
    if gate == NULL or strcmp(gate.gpu_uuid, gate.grants.gpu_uuid) == 0:
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
    DETAIL_BYTES = 32        # nvmlProcessDetail_v1_t
    UTILIZATION_BYTES = 40   # nvmlProcessUtilizationInfo_v1_t
    ACCOUNT_BYTES = 512      # more than nvmlAccountingStats_t has, in any version
    ENCODER_BYTES = 32       # nvmlEncoderSessionInfo_t
    CAPTURE_BYTES = 48       # nvmlFBCSessionInfo_t
    PID_SECOND = 4           # where the pid is, in the last two
    PID_THIRD = 8            # ... and behind a time stamp
    LIST_V1 = 24 | 1 << 24   # version of the next two structures
    INITIAL_PID_NAMESPACE = 0xEFFFFFFC


cdef struct DetailList:      # nvmlProcessDetailList_v1_t
    unsigned int version, mode, count
    void* entries


cdef struct UtilizationList:  # nvmlProcessesUtilizationInfo_v1_t
    unsigned int version, count
    unsigned long long since
    void* entries


cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdlib.h>
    #include <unistd.h>
    /* The inode of this process's PID namespace; 0 without /proc. By the link's text, for stat moved in glibc 2.33. */
    static uint64_t vgpu_pid_namespace(void) {
        char text[64];
        ssize_t got = readlink("/proc/self/ns/pid", text, sizeof(text) - 1);
        text[got < 0 ? 0 : got] = 0;
        return got > 5 ? strtoull(text + 5, NULL, 10) : 0;
    }
    static long vgpu_read_file(const char *path, char *text, size_t size) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        long got = file < 0 ? -1 : read(file, text, size);
        if (file >= 0) close(file);
        return got;
    }
    """
    uint64_t vgpu_pid_namespace() noexcept nogil
    long vgpu_read_file(const char* path, char* text, size_t size) noexcept nogil


ctypedef int (*Listing)(void*, unsigned int*, void*) noexcept nogil


cdef uint64_t started(uint32_t pid) noexcept nogil:
    """The start time of a process, as /proc has it here; 0: there is none."""
    cdef char[32] path
    cdef char[1024] text
    cdef char* field
    cdef long got
    cdef int _
    snprintf(path, sizeof(path), b"/proc/%u/stat", pid)
    got = vgpu_read_file(path, text, sizeof(text) - 1)
    text[max(got, <long>0)] = 0
    field = strrchr(text, 41)    # the end of the name
    for _ in range(20):
        field = <char*>memchr(field, 32, strlen(field)) if field != NULL else NULL
        if field != NULL:
            field += 1
    return strtoull(field, NULL, 10) if field != NULL else 0


cdef bint is_inside(const Gate* gate, uint32_t pid) noexcept nogil:
    """Whether a process is one of the vGPU's. The broker knows it by the node's pid. In a container the driver may
    report another pid, that of the container's PID namespace. The start time is the same there."""
    cdef const Slot* slot
    cdef uint64_t start
    cdef int i
    for i in range(MAX_PROCESSES):
        slot = &gate.activity.slots[i]
        if slot.pid == pid and load32(&slot.state) != SLOT_FREE:
            return 1
    if vgpu_pid_namespace() in (0, INITIAL_PID_NAMESPACE):
        return 0
    start = started(pid)
    for i in range(MAX_PROCESSES):
        slot = &gate.activity.slots[i]
        if start and slot.start_time == start and load32(&slot.state) != SLOT_FREE and started(slot.pid) != start:
            return 1
    return 0


cdef int give(
    const Gate* gate, const char* every, unsigned int found, size_t size, size_t offset, unsigned int* count,
    void* infos
) noexcept nogil:
    """Of ``found`` entries with a pid at ``offset`` those of the vGPU, as many as the caller has room for. Of another
    GPU than the vGPU's (``gate`` NULL) there are none."""
    cdef unsigned int room = count[0] if infos != NULL else 0, kept = 0, i
    for i in range(found if gate != NULL else 0):
        if is_inside(gate, (<uint32_t*>(every + i * size + offset))[0]):
            if kept < room:
                memcpy(<char*>infos + kept * size, every + i * size, size)
            kept += 1
    count[0] = kept
    return NVML_ERROR_INSUFFICIENT_SIZE if kept > room else NVML_SUCCESS


cdef void* room_for(size_t size) noexcept nogil:
    cdef void* memory = mmap(NULL, MOST_PROCESSES * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    return NULL if memory == MAP_FAILED else memory


cdef bint is_limited() noexcept nogil:
    """Whether this process has a vGPU. Then no list that it gets is the driver's own, of whatever GPU."""
    cdef Gate* gates = NULL
    return known(&gates) != 0


cdef int listed(
    Listing real, void* device, unsigned int* count, void* infos, size_t size, size_t offset
) noexcept nogil:
    """The vGPU's processes among those that the driver lists. The view hides processes of other vGPUs."""
    cdef unsigned int index, found = MOST_PROCESSES
    cdef Gate* gate
    cdef void* every
    cdef int result
    if count == NULL or not is_limited():
        return real(device, count, infos)
    gate = gate_of(device, &index)
    every = room_for(size)
    if every == NULL:
        return NVML_ERROR_UNKNOWN
    result = real(here(gate, device), &found, every)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>every, min(found, <unsigned int>MOST_PROCESSES), size, offset, count, infos)
    munmap(every, MOST_PROCESSES * size)
    return result


cdef public int nvmlDeviceGetRunningProcessDetailList(void* device, void* list) noexcept nogil:
    cdef DetailList* asked = <DetailList*>list
    cdef DetailList all
    cdef unsigned int index
    cdef Gate* gate
    cdef int result
    if list == NULL or asked.version != LIST_V1 or not is_limited():
        return real_nvmlDeviceGetRunningProcessDetailList(device, list)
    gate = gate_of(device, &index)
    all = asked[0]
    all.count = MOST_PROCESSES
    all.entries = room_for(DETAIL_BYTES)
    if all.entries == NULL:
        return NVML_ERROR_UNKNOWN
    result = real_nvmlDeviceGetRunningProcessDetailList(here(gate, device), &all)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>all.entries, min(all.count, <unsigned int>MOST_PROCESSES), DETAIL_BYTES, 0,
                      &asked.count, asked.entries)
    munmap(all.entries, MOST_PROCESSES * DETAIL_BYTES)
    return result


cdef public int nvmlDeviceGetProcessesUtilizationInfo(void* device, void* list) noexcept nogil:
    cdef UtilizationList* asked = <UtilizationList*>list
    cdef UtilizationList all
    cdef unsigned int index
    cdef Gate* gate
    cdef int result
    if list == NULL or asked.version != LIST_V1 or not is_limited():
        return real_nvmlDeviceGetProcessesUtilizationInfo(device, list)
    gate = gate_of(device, &index)
    all = asked[0]
    all.count = MOST_PROCESSES
    all.entries = room_for(UTILIZATION_BYTES)
    if all.entries == NULL:
        return NVML_ERROR_UNKNOWN
    result = real_nvmlDeviceGetProcessesUtilizationInfo(here(gate, device), &all)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>all.entries, min(all.count, <unsigned int>MOST_PROCESSES), UTILIZATION_BYTES,
                      PID_THIRD, &asked.count, asked.entries)
        result = NVML_ERROR_NOT_FOUND if asked.count == 0 else result
    munmap(all.entries, MOST_PROCESSES * UTILIZATION_BYTES)
    return result


cdef public int nvmlDeviceGetAccountingPids(void* device, unsigned int* count, unsigned int* pids) noexcept nogil:
    """Those that the driver has accounts of and that are in the vGPU now."""
    return listed(<Listing>real_nvmlDeviceGetAccountingPids, device, count, pids, sizeof(unsigned int), 0)


cdef bint is_hidden(void* device, unsigned int pid) noexcept nogil:
    cdef unsigned int index
    cdef Gate* gate
    if not is_limited():
        return 0
    gate = gate_of(device, &index)
    return gate == NULL or not is_inside(gate, pid)


cdef public int nvmlDeviceGetAccountingStats(void* device, unsigned int pid, void* stats) noexcept nogil:
    """Of a process outside of the vGPU there is no account. The driver still checks what it was given."""
    cdef char[ACCOUNT_BYTES] unseen
    cdef int result
    if not is_hidden(device, pid):
        return real_nvmlDeviceGetAccountingStats(device, pid, stats)
    result = real_nvmlDeviceGetAccountingStats(device, pid, NULL if stats == NULL else unseen)
    return NVML_ERROR_NOT_FOUND if result == NVML_SUCCESS else result


cdef public int nvmlDeviceGetAccountingStats_v2(void* device, void* stats) noexcept nogil:
    """As above; the structure begins with the pid."""
    cdef char[ACCOUNT_BYTES] unseen
    cdef int result
    if stats == NULL or not is_hidden(device, (<unsigned int*>stats)[0]):
        return real_nvmlDeviceGetAccountingStats_v2(device, stats)
    memset(unseen, 0, ACCOUNT_BYTES)
    (<unsigned int*>unseen)[0] = (<unsigned int*>stats)[0]
    result = real_nvmlDeviceGetAccountingStats_v2(device, unseen)
    return NVML_ERROR_NOT_FOUND if result == NVML_SUCCESS else result


cdef public int nvmlDeviceGetEncoderSessions(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetEncoderSessions, device, count, infos, ENCODER_BYTES, PID_SECOND)


cdef public int nvmlDeviceGetFBCSessions(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetFBCSessions, device, count, infos, CAPTURE_BYTES, PID_SECOND)


cdef public int nvmlDeviceGetProcessUtilization(
    void* device, void* samples, unsigned int* count, unsigned long long since
) noexcept nogil:
    cdef unsigned int index, found = MOST_PROCESSES
    cdef Gate* gate
    cdef void* every
    cdef int result
    if count == NULL or not is_limited():
        return real_nvmlDeviceGetProcessUtilization(device, samples, count, since)
    gate = gate_of(device, &index)
    every = room_for(SAMPLE_BYTES)
    if every == NULL:
        return NVML_ERROR_UNKNOWN
    result = real_nvmlDeviceGetProcessUtilization(here(gate, device), every, &found, since)
    if result == NVML_SUCCESS:
        result = give(gate, <const char*>every, min(found, <unsigned int>MOST_PROCESSES), SAMPLE_BYTES, 0, count,
                      samples)
        result = NVML_ERROR_NOT_FOUND if count[0] == 0 else result
    munmap(every, MOST_PROCESSES * SAMPLE_BYTES)
    return result


cdef public int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses, device, count, infos, INFO_V1_BYTES, 0)


cdef public int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses_v2, device, count, infos, INFO_BYTES, 0)


cdef public int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetComputeRunningProcesses_v3, device, count, infos, INFO_BYTES, 0)


cdef public int nvmlDeviceGetGraphicsRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses, device, count, infos, INFO_V1_BYTES, 0)


cdef public int nvmlDeviceGetGraphicsRunningProcesses_v2(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses_v2, device, count, infos, INFO_BYTES, 0)


cdef public int nvmlDeviceGetGraphicsRunningProcesses_v3(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetGraphicsRunningProcesses_v3, device, count, infos, INFO_BYTES, 0)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses(void* device, unsigned int* count, void* infos) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses, device, count, infos, INFO_V1_BYTES, 0)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses_v2(
    void* device, unsigned int* count, void* infos
) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses_v2, device, count, infos, INFO_BYTES, 0)


cdef public int nvmlDeviceGetMPSComputeRunningProcesses_v3(
    void* device, unsigned int* count, void* infos
) noexcept nogil:
    return listed(real_nvmlDeviceGetMPSComputeRunningProcesses_v3, device, count, infos, INFO_BYTES, 0)


# --- memory

cdef int shown_memory(int result, void* device, void* memory) noexcept nogil:
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


cdef public int nvmlDeviceGetMemoryInfo(void* device, void* memory) noexcept nogil:
    return shown_memory(real_nvmlDeviceGetMemoryInfo(device, memory), device, memory)


cdef public int nvmlDeviceGetConfComputeProtectedMemoryUsage(void* device, void* memory) noexcept nogil:
    """Of a card in confidential mode: all memory of its programs."""
    return shown_memory(real_nvmlDeviceGetConfComputeProtectedMemoryUsage(device, memory), device, memory)


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
