"""Simulated MPS: a directory with a marker file stands for the daemon, the environment for its settings."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport getenv, strtod, strtoull

from cython_ext.sim.state cimport SimGpu


cdef extern from "<sys/stat.h>" nogil:
    ctypedef struct stat_t "struct stat":
        uint64_t st_ino
        uint64_t st_dev
    int stat(const char* path, stat_t* result) noexcept


cdef inline uint64_t sim_mps_server(SimGpu* gpu) noexcept nogil:
    """A number for the MPS server this process would join; 0 if no simulated daemon serves its pipe directory."""
    cdef const char* folder = getenv(b"CUDA_MPS_PIPE_DIRECTORY")
    cdef char path[4096]
    cdef stat_t found
    if folder == NULL or folder[0] == 0:
        return 0
    snprintf(path, sizeof(path), b"%s/simulated-mps", folder)
    if stat(path, &found) != 0:
        return 0
    # Beyond every context number, and the same for every process that names this directory.
    return (found.st_dev << 40) ^ found.st_ino | <uint64_t>1 << 32


cdef inline uint32_t sim_granted_sms(uint32_t sms) noexcept nogil:
    """SMs granted for CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: rounded down to steps of 2, at least 8 (as on an H200)."""
    cdef const char* text = getenv(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    cdef double percent
    cdef uint32_t granted
    if text == NULL or text[0] == 0:
        return sms
    percent = strtod(text, NULL)
    if not 0 < percent <= 100:
        return sms
    granted = <uint32_t>(sms * percent / 100 + 1e-9) & ~<uint32_t>1
    return min(sms, max(<uint32_t>8, granted))


cdef inline uint64_t sim_mps_limit(uint32_t device) noexcept nogil:
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT ("0=8G,1=512M") for a device; 0: none."""
    cdef const char* at = getenv(b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    cdef char* end
    cdef uint64_t index, size
    while at != NULL and at[0] != 0:
        index = strtoull(at, &end, 10)
        if end == at or end[0] != 61:
            return 0
        size = strtoull(end + 1, &end, 10)
        if end[0] in (71, 103):
            size <<= 30
        elif end[0] in (77, 109):
            size <<= 20
        elif end[0] in (75, 107):
            size <<= 10
        if index == device:
            return size
        at = end
        while at[0] != 0 and at[0] != 44:
            at += 1
        if at[0] == 44:
            at += 1
    return 0
