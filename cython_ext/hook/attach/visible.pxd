"""Which devices the process sees: those of its vGPUs, and of these what its own CUDA_VISIBLE_DEVICES selects.

The application's list counts the vGPUs' devices, as in a container that was given only these: ``0`` is the first id in
VGPU_ID. A UUID, or a unique beginning of one, means the vGPU on that GPU. As in CUDA, the first entry that means
nothing ends the list. Slurm and Ray count the machine's GPUs: a program with one vGPU may also name the index of its
GPU.

The driver finds the list that results from it while it starts; the program and its children keep their own.

vGPUs move. A program that has asked CUDA for its device's UUID may start others with that in their list, and
``VGPU_DEVICES`` goes with it: on which GPUs the vGPUs were then, in the order of VGPU_ID.
"""

from libc.stdlib cimport getenv
from libc.string cimport memcpy, strchr, strcmp, strlen, strncmp

from cython_ext.hook.hook cimport vgpu_say, vgpu_set_for_driver
from cython_ext.hook.state cimport CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS, State


cdef inline bint hides_all_devices() noexcept nogil:
    """Whether the application wants no GPU at all: then it gets no vGPU either."""
    cdef const char* list = getenv(b"CUDA_VISIBLE_DEVICES")
    return list != NULL and (list[0] == 0 or list[0] == c'-')


cdef inline int former_gate(const State* all, const char* entry, size_t size) noexcept nogil:
    """The gate of the vGPU that was on that GPU when the program that handed its list on started; -1: none was."""
    cdef const char* at = getenv(b"VGPU_DEVICES")
    cdef int index = 0
    while at != NULL and at[0] != 0 and index < <int>all.gate_count:
        if strncmp(at, entry, size) == 0:
            return index
        at = strchr(at, c',')
        if at != NULL:
            at += 1
        index += 1
    return -1


cdef inline int selected_gate(const State* all, const char* entry, size_t size) noexcept nogil:
    """The gate that one entry of the list means, or -1."""
    cdef int number = 0, found = -1
    cdef unsigned int i
    if size > 4 and strncmp(entry, b"GPU-", 4) == 0:
        for i in range(all.gate_count):
            if strlen(all.gates[i].gpu_uuid) >= size and strncmp(all.gates[i].gpu_uuid, entry, size) == 0:
                found = i if found < 0 else -2
        return found if found != -1 else former_gate(all, entry, size)
    if size == 0 or size > 3:
        return -1
    for i in range(size):
        if not c'0' <= entry[i] <= c'9':
            return -1
        number = 10 * number + entry[i] - c'0'
    if all.gate_count == 1 and number == all.gates[0].gpu_index:
        return 0
    return number if number < <int>all.gate_count else -1


cdef inline void name_devices(const State* all) noexcept nogil:
    cdef char[1024] names        # MAX_GATES UUIDs of 40 characters
    cdef size_t size, length = 0
    cdef unsigned int i
    for i in range(all.gate_count):
        size = strlen(all.gates[i].gpu_uuid)
        if length + size + 2 > sizeof(names):
            return
        if length:
            names[length] = c','
            length += 1
        memcpy(names + length, all.gates[i].gpu_uuid, size)
        length += size
    names[length] = 0
    vgpu_set_for_driver(b"VGPU_DEVICES", names, 1)


cdef inline int choose_devices(State* all) noexcept nogil:
    """What the driver's CUDA_VISIBLE_DEVICES is to be, and with it which ordinal belongs to which gate."""
    cdef char[1024] chosen
    cdef const char* own = getenv(b"CUDA_VISIBLE_DEVICES")
    cdef const char* entry = own
    cdef size_t size, length = 0
    cdef int device = 0, index
    cdef unsigned int i, k
    for i in range(all.gate_count):
        for k in range(i):
            if strcmp(all.gates[i].gpu_uuid, all.gates[k].gpu_uuid) == 0:
                vgpu_say(
                    all.gates[i].vgpu_id, b" is on the same GPU as another id in VGPU_ID", b": list vGPUs of different "
                    b"GPUs"
                )
                return CUDA_ERROR_NO_DEVICE
    i = 0
    while True:
        if own == NULL:
            if i == all.gate_count:
                break
            index = i
            i += 1
        else:
            size = 0
            while entry[size] and entry[size] != c',':
                size += 1
            index = selected_gate(all, entry, size)
            entry += size + (entry[size] == c',')
            if index < 0 or all.gates[index].device >= 0:
                break
        all.gates[index].device = device
        device += 1
        size = strlen(all.gates[index].gpu_uuid)
        if length + size + 2 > sizeof(chosen):
            return CUDA_ERROR_OPERATING_SYSTEM
        if length:
            chosen[length] = c','
            length += 1
        memcpy(chosen + length, all.gates[index].gpu_uuid, size)
        length += size
    chosen[length] = 0
    if device == 0:
        vgpu_say(
            b"CUDA_VISIBLE_DEVICES=", own, b" selects none of the devices in VGPU_ID, counted from 0: unset it, or set "
            b"it to 0"
        )
        return CUDA_ERROR_NO_DEVICE
    vgpu_set_for_driver(b"CUDA_VISIBLE_DEVICES", chosen, 0)
    name_devices(all)
    return CUDA_SUCCESS
