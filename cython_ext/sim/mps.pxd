"""Simulated MPS: one process stands for daemon and server, and a file in the pipe directory names it. The environment
has its settings, as it was when the driver started. Later changes do not count (as on an H100).

As with the real MPS, without such a file the driver runs as if there were no MPS. Where the named process is dead, new
processes are refused (CUDA_ERROR_MPS_CONNECTION_FAILED), and its clients get errors from now on (share.pxd). A server
takes SIM_MPS_PROCESSES processes. After a fatal fault it takes none until the processes that the fault hit have ended.

The server holds a lock on the file for as long as it lives. A process of another PID namespace finds it by that lock.
"""

from libc.stdint cimport int16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport strtod, strtoull

from cython_ext.sim.lock cimport (
    F_OFD_GETLK, F_RDLCK, F_UNLCK, O_CLOEXEC, O_RDONLY, close, open, read, sim_byte_lock, sim_own_namespace,
)
from cython_ext.sim.share cimport sim_server_is_alive, sim_server_number
from cython_ext.sim.state cimport CONTEXT_ALIVE, SIM_CONTEXTS, SimContext, SimGpu


cdef extern from *:
    """
    #include <stdlib.h>
    /* The driver's setting. A process without the driver gets the environment's own value. */
    extern const char *drv_setting(const char *name) __attribute__((weak));
    static inline const char *sim_setting(const char *name) { return drv_setting ? drv_setting(name) : getenv(name); }
    """
    const char* sim_setting(const char* name) noexcept nogil


cdef enum:
    SIM_MPS_PROCESSES = 60      # of one server, as NVIDIA documents it

    # CUresult
    MPS_CONNECTION_FAILED = 805
    MPS_SERVER_NOT_READY = 807
    MPS_MAX_CLIENTS_REACHED = 808


cdef struct SimServer:
    uint64_t number         # 0: none is named
    uint64_t namespace      # of its pid
    bint alive


cdef inline void sim_mps_look(SimServer* server) noexcept nogil:
    """The server that the pipe directory names, dead or alive."""
    cdef const char* folder = sim_setting(b"CUDA_MPS_PIPE_DIRECTORY")
    cdef char path[4096]
    cdef char text[64]
    cdef char* end
    cdef ssize_t size
    cdef uint64_t pid
    cdef int16_t held = <int16_t>F_UNLCK
    cdef int fd
    server.number = server.namespace = 0
    server.alive = False
    if folder == NULL or folder[0] == 0:
        return
    snprintf(path, sizeof(path), b"%s/simulated-mps", folder)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return
    size = read(fd, text, sizeof(text) - 1)
    sim_byte_lock(fd, F_OFD_GETLK, <int16_t>F_RDLCK, 0, &held)
    close(fd)
    text[max(size, <ssize_t>0)] = 0
    pid = strtoull(text, &end, 10)
    server.number = sim_server_number(pid, strtoull(end, &end, 10))
    server.namespace = strtoull(end, NULL, 10)
    if server.namespace == 0:
        server.namespace = sim_own_namespace()
    if server.namespace == sim_own_namespace():
        server.alive = server.number != 0 and sim_server_is_alive(server.number)
    else:
        server.alive = server.number != 0 and held != F_UNLCK


cdef inline uint64_t sim_mps_server() noexcept nogil:
    """The number of the MPS server that this process joins; 0: none."""
    cdef SimServer server
    sim_mps_look(&server)
    return server.number if server.alive else 0


cdef inline int sim_mps_refusal(SimGpu* gpu, uint64_t server, uint32_t participant) noexcept nogil:
    """The error for one more process of a server; 0 if it may come. Under the lock."""
    cdef uint32_t i, k, processes = 0
    cdef SimContext* context
    for i in range(SIM_CONTEXTS):
        context = &gpu.contexts[i]
        if context.state != CONTEXT_ALIVE or context.server != server:
            continue
        if context.participant == participant:
            return 0
        if context.error != 0:
            return MPS_SERVER_NOT_READY
        k = 0
        while (k < i and (gpu.contexts[k].pid != context.pid or gpu.contexts[k].participant != context.participant
                          or gpu.contexts[k].server != server)):
            k += 1
        processes += k == i      # the first of its process
    return MPS_MAX_CLIENTS_REACHED if processes >= SIM_MPS_PROCESSES else 0


cdef inline uint32_t sim_granted_sms(uint32_t sms) noexcept nogil:
    """SMs granted for CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: rounded down to steps of 2, at least 8 (as on an H200)."""
    cdef const char* text = sim_setting(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
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
    cdef const char* at = sim_setting(b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
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
