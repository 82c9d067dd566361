"""The vGPUs of a container. Its engine mounts the directory of each vGPU as ``/run/vgpu/here/ID``, read-only
(vgpu/integrations/container.py). A program without VGPU_ID has all of them, by the index of their GPUs. So a shell that
``docker exec`` starts, or ``env -i``, stays in the vGPU.
"""

from libc.string cimport memcpy, strcmp, strlen

from cython_ext.hook.attach.paths cimport append, well_formed

cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR:
        pass
    cdef struct dirent:
        char* d_name
    DIR* opendir(const char* name) noexcept
    dirent* readdir(DIR* directory) noexcept
    int closedir(DIR* directory) noexcept

cdef extern from "hook/connect.h" nogil:
    bint vgpu_exists(const char* path) noexcept
    long vgpu_read(const char* path, char* out, size_t capacity) noexcept

cdef enum:
    ID_BYTES = 14
    MOST_MOUNTED = 16        # MAX_GATES
    NO_GPU = 1 << 30


cdef inline const char* mounted_root() noexcept nogil:
    return b"/run/vgpu/here/"


cdef inline bint mounted_directory(char* path, size_t capacity, const char* vgpu_id) noexcept nogil:
    """Where the engine mounted the vGPU. 0: nowhere."""
    path[0] = 0
    return (
        append(path, capacity, mounted_root()) and append(path, capacity, vgpu_id)
        and well_formed(vgpu_id) and vgpu_exists(path)
    )


cdef inline bint is_mounted(const char* directory) noexcept nogil:
    """Whether this directory of a vGPU is an engine's mount."""
    cdef size_t i
    cdef const char* root = mounted_root()
    for i in range(strlen(root)):
        if directory[i] != root[i]:
            return 0
    return 1


cdef inline int mounted_gpu(const char* vgpu_id) noexcept nogil:
    """The index of its GPU, by the file ``gpu``; NO_GPU: that cannot be read."""
    cdef char[64] path
    cdef char[16] text
    cdef long size, i
    cdef int index = 0
    if not mounted_directory(path, sizeof(path), vgpu_id) or not append(path, sizeof(path), b"/gpu"):
        return NO_GPU
    size = vgpu_read(path, text, sizeof(text))
    for i in range(size):
        if not c'0' <= text[i] <= c'9' or i == 8:
            return index if i else NO_GPU
        index = 10 * index + text[i] - c'0'
    return index if size > 0 else NO_GPU


cdef inline void mounted_ids(char* ids, size_t capacity) noexcept nogil:
    """The ids of all mounted vGPUs, separated by commas, in the order of their GPUs; empty: there is none."""
    cdef char[MOST_MOUNTED][ID_BYTES] found
    cdef int[MOST_MOUNTED] gpus
    cdef int count = 0, at, gpu, i
    cdef dirent* entry
    cdef DIR* directory = opendir(mounted_root())
    ids[0] = 0
    if directory == NULL:
        return
    while count < MOST_MOUNTED:
        entry = readdir(directory)
        if entry == NULL:
            break
        if not well_formed(entry.d_name):
            continue
        gpu = mounted_gpu(entry.d_name)
        at = count
        while at > 0 and (gpus[at - 1] > gpu or (gpus[at - 1] == gpu and strcmp(found[at - 1], entry.d_name) > 0)):
            gpus[at] = gpus[at - 1]
            memcpy(found[at], found[at - 1], ID_BYTES)
            at -= 1
        gpus[at] = gpu
        memcpy(found[at], entry.d_name, ID_BYTES)
        count += 1
    closedir(directory)
    for i in range(count):
        if not ((i == 0 or append(ids, capacity, b",")) and append(ids, capacity, found[i])):
            break
