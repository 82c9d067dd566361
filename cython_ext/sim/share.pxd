"""How processes share a simulated GPU: the file, its robust mutex, and the burial of the dead.

A GPU goes on while a process that uses it is stopped (SIGSTOP), wherever that process was stopped. So whoever finds
the mutex held by a stopped process lets that process go on until it has left, and stop again there.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport getenv, strtoull
from libc.string cimport memchr, strlen, strrchr, strstr
from posix.signal cimport kill
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from cython_ext.native cimport cas32, load32, now_ns
from cython_ext.sim.engine cimport sim_advance
from cython_ext.sim.queues cimport sim_fail_context, sim_kill_context, sim_recover
from cython_ext.sim.state cimport (
    CONTEXT_ALIVE, SIM_CONTEXTS, SIM_VERSION, SimContext, SimGpu, pthread_mutex_t,
)


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutexattr_t:
        pass
    int PTHREAD_PROCESS_SHARED
    int PTHREAD_MUTEX_ROBUST
    int pthread_mutexattr_init(pthread_mutexattr_t* a) noexcept
    int pthread_mutexattr_destroy(pthread_mutexattr_t* a) noexcept
    int pthread_mutexattr_setpshared(pthread_mutexattr_t* a, int shared) noexcept
    int pthread_mutexattr_setrobust(pthread_mutexattr_t* a, int robust) noexcept
    int pthread_mutex_init(pthread_mutex_t* m, pthread_mutexattr_t* a) noexcept
    int pthread_mutex_lock(pthread_mutex_t* m) noexcept
    int pthread_mutex_trylock(pthread_mutex_t* m) noexcept
    int pthread_mutex_timedlock(pthread_mutex_t* m, const timespec* until) noexcept
    int pthread_mutex_unlock(pthread_mutex_t* m) noexcept
    int pthread_mutex_consistent(pthread_mutex_t* m) noexcept

cdef extern from *:
    """
    /* The thread that holds a mutex of the GNU C library; 0 if none. */
    static inline int sim_mutex_owner(pthread_mutex_t *m) { return m->__data.__owner; }
    """
    int sim_mutex_owner(pthread_mutex_t* m) noexcept nogil

cdef extern from "<signal.h>" nogil:
    int SIGCONT
    int SIGSTOP

cdef extern from "<errno.h>" nogil:
    int EBUSY
    int EOWNERDEAD
    int ETIMEDOUT

cdef extern from "<fcntl.h>" nogil:
    int O_RDONLY
    int O_RDWR
    int O_CLOEXEC
    int open(const char* path, int flags, ...) noexcept

cdef extern from "<sys/mman.h>" nogil:
    int PROT_NONE
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    int MAP_NORESERVE
    int MAP_FIXED
    int MADV_DONTNEED
    void* MAP_FAILED
    void* mmap(void* at, size_t size, int prot, int flags, int fd, int64_t offset) noexcept
    int munmap(void* at, size_t size) noexcept
    int mprotect(void* at, size_t size, int prot) noexcept
    int madvise(void* at, size_t size, int advice) noexcept

cdef extern from "<unistd.h>" nogil:
    ssize_t read(int fd, void* buffer, size_t size) noexcept
    int64_t lseek(int fd, int64_t offset, int whence) noexcept
    int close(int fd) noexcept
    int getpid() noexcept


cdef enum:
    SIM_MAX_GPUS = 16
    SIM_LOOK_NS = 1000000       # one foreign process at most is looked at per millisecond
    SIM_PATIENCE_NS = 20000000  # whoever waits for the mutex looks whether its holder is stopped
    SIM_GRACE_NS = 1000000      # a killed process's kernel leaves the SMs within that time
    MPS_RPC_FAILURE = 806       # CUresult of everything asked of a server that died


cdef inline uint64_t sim_magic() noexcept nogil:
    return 0x55504773696d0a01ULL


cdef inline SimGpu* sim_map(const char* folder, int index) noexcept nogil:
    """The state of gpu `index` of a simulated node, mapped; NULL if there is none (of this version)."""
    cdef char path[4096]
    cdef int fd
    cdef SimGpu* gpu
    snprintf(path, sizeof(path), b"%s/gpu%d", folder, index)
    fd = open(path, O_RDWR | O_CLOEXEC)
    if fd < 0:
        return NULL
    if lseek(fd, 0, 2) != sizeof(SimGpu):
        close(fd)
        return NULL
    gpu = <SimGpu*>mmap(NULL, sizeof(SimGpu), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
    close(fd)
    if gpu == MAP_FAILED:
        return NULL
    if gpu.magic != sim_magic() or gpu.version != SIM_VERSION or gpu.state_bytes != sizeof(SimGpu):
        munmap(gpu, sizeof(SimGpu))
        return NULL
    return gpu


cdef inline int sim_map_all(SimGpu** gpus) noexcept nogil:
    """Map every GPU of $VGPU_SIM_DIR, in order; their number."""
    cdef const char* folder = getenv(b"VGPU_SIM_DIR")
    cdef int count = 0
    if folder == NULL or folder[0] == 0:
        return 0
    while count < SIM_MAX_GPUS:
        gpus[count] = sim_map(folder, count)
        if gpus[count] == NULL:
            break
        count += 1
    return count


cdef inline void sim_init_mutex(SimGpu* gpu) noexcept nogil:
    cdef pthread_mutexattr_t attributes
    pthread_mutexattr_init(&attributes)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
    pthread_mutex_init(&gpu.mutex, &attributes)
    pthread_mutexattr_destroy(&attributes)


cdef inline ssize_t sim_read_proc(int pid, const char* name, char* text, size_t size) noexcept nogil:
    """A file of the process (or thread) in /proc, as a string; its length, 0 if there is no such process."""
    cdef char path[64]
    cdef ssize_t got
    cdef int fd
    snprintf(path, sizeof(path), b"/proc/%d/%s", pid, name)
    fd = open(path, O_RDONLY | O_CLOEXEC)
    text[0] = 0
    if fd < 0:
        return 0
    got = read(fd, text, size - 1)
    close(fd)
    if got < 0:
        got = 0
    text[got] = 0
    return got


cdef inline char* sim_state_of(int pid, char* text, size_t size) noexcept nogil:
    """The state of a process (or thread) in its /proc stat, and what follows it; NULL if there is none."""
    cdef char* field
    if sim_read_proc(pid, b"stat", text, size) == 0:
        return NULL
    field = strrchr(text, 41)  # the name may hold anything, blanks and brackets too: count from its end
    return field + 2 if field != NULL and field[1] != 0 else NULL


cdef inline uint64_t sim_process_start(int pid) noexcept nogil:
    """When the process started (clock ticks since boot); 0 if there is none, or only its zombie."""
    cdef char text[1024]
    cdef char* field = sim_state_of(pid, text, sizeof(text))
    cdef int _
    if field == NULL or field[0] in (90, 88):  # Z, X
        return 0
    for _ in range(19):
        field = <char*>memchr(field, 32, strlen(field))
        if field == NULL:
            return 0
        field += 1
    return strtoull(field, NULL, 10)


cdef inline bint sim_is_alive(SimContext* context) noexcept nogil:
    return sim_process_start(context.pid) == context.pid_start


cdef inline uint64_t sim_server_number(uint64_t pid, uint64_t start) noexcept nogil:
    """A simulated MPS server by the process that stands for it; beyond every context's number. 0 for no process."""
    return start << 22 | pid if 0 < pid < 1 << 22 else 0


cdef inline bint sim_server_is_alive(uint64_t server) noexcept nogil:
    return sim_process_start(<int>(server & 0x3FFFFF)) == server >> 22


cdef inline void sim_look_at(SimGpu* gpu, uint32_t index) noexcept nogil:
    """Bury a context's process if it is dead; whoever lost its MPS server gets errors."""
    cdef SimContext* context = &gpu.contexts[index]
    if not sim_is_alive(context):
        sim_kill_context(gpu, index, SIM_GRACE_NS)
    elif context.server != 0 and context.error == 0 and not sim_server_is_alive(context.server):
        sim_fail_context(gpu, index, MPS_RPC_FAILURE)


cdef inline void sim_reap(SimGpu* gpu) noexcept nogil:
    """Look at every process that has a context here."""
    cdef uint32_t i
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state == CONTEXT_ALIVE:
            sim_look_at(gpu, i)


cdef inline void sim_look_around(SimGpu* gpu, int64_t now) noexcept nogil:
    """Look at one process, in turn, so that a dead one is found within milliseconds and nobody pays much."""
    cdef uint32_t k, i
    if now - gpu.looked_ns < SIM_LOOK_NS:
        return
    gpu.looked_ns = now
    for k in range(SIM_CONTEXTS):
        i = (gpu.suspect + k) % SIM_CONTEXTS
        if gpu.contexts[i].state == CONTEXT_ALIVE:
            gpu.suspect = (i + 1) % SIM_CONTEXTS
            sim_look_at(gpu, i)
            return


cdef inline int sim_thread_group(int tid) noexcept nogil:
    """The process that a thread belongs to; 0 if there is no such thread."""
    cdef char text[2048]
    cdef char* line
    sim_read_proc(tid, b"status", text, sizeof(text))
    line = strstr(text, b"\nTgid:")
    return <int>strtoull(line + 6, NULL, 10) if line != NULL else 0


cdef inline bint sim_is_stopped(int tid) noexcept nogil:
    cdef char text[1024]
    cdef char* state = sim_state_of(tid, text, sizeof(text)) if tid else NULL
    return state != NULL and state[0] == 84  # T


cdef inline void sim_let_leave(SimGpu* gpu) noexcept nogil:
    """If the mutex's holder is stopped, let it go on until it has left. One waiter does so at a time.

    A SIGCONT from elsewhere in the microseconds in which it leaves is lost.
    """
    cdef int tid = sim_mutex_owner(&gpu.mutex)
    cdef int pid = sim_thread_group(tid) if sim_is_stopped(tid) else 0
    if pid == 0 or not cas32(&gpu.leaving, 0, <uint32_t>pid):
        return
    if sim_mutex_owner(&gpu.mutex) != tid or not sim_is_stopped(tid) or kill(pid, SIGCONT) != 0:
        cas32(&gpu.leaving, <uint32_t>pid, 0)


cdef inline void sim_lock(SimGpu* gpu) noexcept nogil:
    cdef timespec until
    cdef int result = pthread_mutex_trylock(&gpu.mutex)
    while result in (EBUSY, ETIMEDOUT):
        clock_gettime(CLOCK_REALTIME, &until)
        until.tv_nsec += SIM_PATIENCE_NS
        if until.tv_nsec >= 1000000000:
            until.tv_nsec -= 1000000000
            until.tv_sec += 1
        result = pthread_mutex_timedlock(&gpu.mutex, &until)
        if result == ETIMEDOUT:
            sim_let_leave(gpu)
    if result == EOWNERDEAD:
        gpu.leaving = 0  # it, or whoever let it go on, is gone
        sim_recover(gpu)
        pthread_mutex_consistent(&gpu.mutex)


cdef inline void sim_unlock(SimGpu* gpu) noexcept nogil:
    cdef uint32_t leaving = load32(&gpu.leaving)
    pthread_mutex_unlock(&gpu.mutex)
    if leaving != 0 and leaving == <uint32_t>getpid() and cas32(&gpu.leaving, leaving, 0):
        kill(<int>leaving, SIGSTOP)


cdef inline void sim_enter(SimGpu* gpu) noexcept nogil:
    """Lock, and bring the GPU to the present."""
    cdef int64_t now
    sim_lock(gpu)
    now = now_ns()
    sim_advance(gpu, now)
    sim_look_around(gpu, now)
