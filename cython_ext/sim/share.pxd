"""How processes share a simulated GPU: the file, the participants, and the reaping of dead ones.

A GPU goes on while a process that uses it is stopped (SIGSTOP), wherever that process was stopped. So a waiter that
finds the lock held by a stopped process continues that process until it has left the lock, and stops it again there.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport getenv, strtoull
from libc.string cimport memset, strlen, strstr
from posix.signal cimport kill

from cython_ext.native cimport cas32, load32, load64, now_ns, rarely, store32, store64
from cython_ext.sim.engine cimport sim_advance
from cython_ext.sim.lock cimport (
    O_CLOEXEC, O_RDWR, SIM_HOLDER, SIM_PATIENCE_NS, SIM_PATH_BYTES, SIM_SEAT_BYTES, SimSeat, close, getpid, open,
    sim_begin_alone, sim_identify, sim_inode, sim_is_present, sim_leave_in_child, sim_own_namespace, sim_own_start,
    sim_read_file, sim_release, sim_seat, sim_seats_here, sim_start_in, sim_take_byte, sim_take_over, sim_try_lock,
    sim_wait_lock, sim_watches_forks,
)
from cython_ext.sim.queues cimport sim_fail_context, sim_kill_context, sim_recover
from cython_ext.sim.state cimport (
    CONTEXT_ALIVE, LIBRARY_CUDA, LIBRARY_NONE, SIM_CONTEXTS, SIM_NOWHERE, SIM_PARTICIPANTS, SIM_VERSION, SimContext,
    SimGpu, SimParticipant, sim_context,
)


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil) noexcept

cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR:
        pass
    struct dirent:
        char* d_name
    DIR* opendir(const char* path) noexcept
    dirent* readdir(DIR* folder) noexcept
    int closedir(DIR* folder) noexcept

cdef extern from "<signal.h>" nogil:
    int SIGCONT
    int SIGSTOP

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
    int64_t lseek(int fd, int64_t offset, int whence) noexcept


cdef enum:
    SIM_MAX_GPUS = 16
    SIM_LOOK_NS = 1000000       # one foreign process at most is checked per millisecond
    SIM_STOPPED_LOOKS = 10      # a waiter checks every n-th time whether the lock's holder is stopped
    SIM_GRACE_NS = 1000000      # a killed process's kernel leaves the SMs within that time
    SIM_AHEAD_NS = 1000000000   # a GPU further in the future than that has a damaged clock, or one from before a boot
    MPS_RPC_FAILURE = 806       # CUresult of everything asked of a server that died


cdef inline uint64_t sim_magic() noexcept nogil:
    return 0x55504773696d0a01ULL


# -- the processes behind participants

cdef inline char* sim_status_of(const char* name, char* text, size_t size) noexcept nogil:
    cdef char path[320]
    snprintf(path, sizeof(path), b"/proc/%.255s/status", name)
    sim_read_file(path, text, size)
    return text


cdef inline uint64_t sim_start_of(const char* name) noexcept nogil:
    """When the process /proc/name started (clock ticks since boot); 0 if there is none, or only its zombie."""
    cdef char path[320]
    cdef char text[1024]
    snprintf(path, sizeof(path), b"/proc/%.255s/stat", name)
    sim_read_file(path, text, sizeof(text))
    return sim_start_in(text)


cdef inline uint64_t sim_process_start(int pid) noexcept nogil:
    cdef char name[16]
    snprintf(name, sizeof(name), b"%d", pid)
    return sim_start_of(name)


cdef inline int sim_innermost_pid(char* status) noexcept nogil:
    """A process's pid in its own PID namespace, if that is not the one of /proc; else 0."""
    cdef char* at = strstr(status, b"\nNSpid:")
    cdef char* end
    cdef int pid = 0, count = 0
    if at == NULL:
        return 0
    at += 7
    while at[0] in (9, 32):
        pid = <int>strtoull(at, &end, 10)
        if end == at:
            return 0
        at = end
        count += 1
    return pid if count > 1 else 0


cdef inline int sim_search_pid(uint64_t namespace, int pid, uint64_t start) noexcept nogil:
    """The pid, in this process's PID namespace, of a process of another one; 0: it cannot be seen from here. -1: /proc
    cannot be read at present."""
    cdef DIR* folder = opendir(b"/proc")
    cdef dirent* entry
    cdef char text[4096]
    cdef char path[320]
    cdef uint64_t inode
    cdef int found = 0
    if folder == NULL:
        return -1
    entry = readdir(folder)
    while entry != NULL and found == 0:
        if 48 < entry.d_name[0] <= 57 and sim_start_of(entry.d_name) == start:
            if sim_innermost_pid(sim_status_of(entry.d_name, text, sizeof(text))) == pid:
                snprintf(path, sizeof(path), b"/proc/%.255s/ns/pid", <const char*>entry.d_name)
                inode = sim_inode(path)     # 0: another user's, which this one may not read
                if inode == namespace or inode == 0:
                    found = <int>strtoull(entry.d_name, NULL, 10)
        entry = readdir(folder)
    closedir(folder)
    return found


cdef inline int sim_pid_of(SimGpu* gpu, const SimParticipant* participant) noexcept nogil:
    """The pid of a participant here; 0 or less: none."""
    if participant.pid_namespace == sim_seat(gpu).pid_namespace:
        return participant.pid
    return sim_search_pid(participant.pid_namespace, participant.pid, participant.pid_start)


cdef inline int sim_context_pid(SimGpu* gpu, uint32_t index) noexcept nogil:
    """The pid of a context's process, in this process's PID namespace; 0: it cannot be seen from here. What was found
    out once holds for the context's life."""
    cdef SimContext* context = sim_context(gpu, index)
    cdef SimSeat* seat = sim_seat(gpu)
    cdef uint64_t known = load64(&seat.pids[index % SIM_CONTEXTS])
    cdef uint32_t generation = context.generation
    cdef int pid
    if context.pid_namespace == seat.pid_namespace:
        return context.pid
    if known >> 32 == generation:
        return <int><uint32_t>known
    pid = sim_search_pid(context.pid_namespace, context.pid, context.pid_start)
    if pid < 0:
        return 0
    store64(&seat.pids[index % SIM_CONTEXTS], <uint64_t>generation << 32 | <uint32_t>pid)
    return pid


cdef inline void sim_learn_pids(SimGpu* gpu) noexcept nogil:
    """Find those that are not known yet, before the lock is taken: /proc may be long."""
    cdef uint32_t i
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state == CONTEXT_ALIVE:
            sim_context_pid(gpu, i)


cdef inline bint sim_is_stopped(int pid) noexcept nogil:
    cdef char name[16]
    cdef char text[4096]
    cdef char* state
    snprintf(name, sizeof(name), b"%d", pid)
    state = strstr(sim_status_of(name, text, sizeof(text)), b"\nState:\t")
    return state != NULL and state[8] == 84  # T


cdef inline bint sim_is_alive(SimGpu* gpu, SimContext* context) noexcept nogil:
    return sim_is_present(gpu, context.participant)


cdef inline uint64_t sim_server_number(uint64_t pid, uint64_t start) noexcept nogil:
    """A simulated MPS server by the process that stands for it; beyond every context's number. 0 for no process."""
    return start << 22 | pid if 0 < pid < 1 << 22 else 0


cdef inline bint sim_server_is_alive(uint64_t server) noexcept nogil:
    """Of a server in this process's PID namespace."""
    return sim_process_start(<int>(server & 0x3FFFFF)) == server >> 22


cdef inline void sim_look_at(SimGpu* gpu, uint32_t index) noexcept nogil:
    """Bury a context's process if it is dead; a context that lost its MPS server gets errors. A participant of another
    PID namespace than the server's cannot see the server, and leaves that to others."""
    cdef SimContext* context = sim_context(gpu, index)
    if not sim_is_alive(gpu, context):
        sim_kill_context(gpu, index, SIM_GRACE_NS)
    elif (context.server != 0 and context.error == 0 and context.server_namespace == sim_seat(gpu).pid_namespace
          and not sim_server_is_alive(context.server)):
        sim_fail_context(gpu, index, MPS_RPC_FAILURE)


cdef inline void sim_reap(SimGpu* gpu) noexcept nogil:
    """Check every process that has a context here, and reap the dead ones."""
    cdef uint32_t i
    for i in range(SIM_CONTEXTS):
        if gpu.contexts[i].state == CONTEXT_ALIVE:
            sim_look_at(gpu, i)


cdef inline void sim_look_around(SimGpu* gpu, int64_t now) noexcept nogil:
    """Check one process, in turn: a dead one is found within milliseconds, at little cost for each caller."""
    cdef uint32_t k, i
    if 0 <= now - gpu.looked_ns < SIM_LOOK_NS:
        return
    gpu.looked_ns = now
    for k in range(SIM_CONTEXTS):
        i = (gpu.suspect + k) % SIM_CONTEXTS
        if gpu.contexts[i].state == CONTEXT_ALIVE:
            gpu.suspect = (i + 1) % SIM_CONTEXTS
            sim_look_at(gpu, i)
            return


cdef inline uint32_t sim_find_participant(SimGpu* gpu, const SimContext* context) noexcept nogil:
    """The driver of a context's process as a participant of this GPU, or SIM_NOWHERE. Under the lock."""
    cdef uint32_t i
    cdef SimParticipant* participant
    for i in range(SIM_PARTICIPANTS):
        participant = &gpu.participants[i]
        if (participant.library == LIBRARY_CUDA and participant.pid == context.pid
                and participant.pid_start == context.pid_start
                and participant.pid_namespace == context.pid_namespace and sim_is_present(gpu, i)):
            return i
    return SIM_NOWHERE


# -- the lock

cdef inline int sim_let_leave(SimGpu* gpu) noexcept nogil:
    """If the lock's holder is stopped, let it go on until it has left. One waiter does so at a time.

    A SIGCONT from elsewhere in the microseconds in which it leaves is lost. The answer: the holder's pid, if the waiter
    has to stop it again, because process 1 of a PID namespace cannot stop itself; else 0.
    """
    cdef uint32_t holder = load32(&gpu.lock) & SIM_HOLDER
    cdef uint32_t leaving = load32(&gpu.leaving)
    cdef int pid
    if not 0 < holder <= SIM_PARTICIPANTS:
        return 0
    pid = sim_pid_of(gpu, &gpu.participants[holder - 1])
    if pid <= 0 or not sim_is_stopped(pid):
        return 0
    if leaving != holder:
        if leaving != 0 and sim_is_present(gpu, leaving - 1) or not cas32(&gpu.leaving, leaving, holder):
            return 0
    # A waiter that died here is no harm: the next one continues the holder once more.
    if load32(&gpu.lock) & SIM_HOLDER != holder or not sim_is_stopped(pid) or kill(pid, SIGCONT) != 0:
        cas32(&gpu.leaving, holder, 0)
        return 0
    return pid if gpu.participants[holder - 1].pid == 1 else 0


cdef inline void sim_lock_as(SimGpu* gpu, uint32_t number) noexcept nogil:
    cdef uint32_t holder, looks = 0
    cdef int stopped = 0
    while not sim_wait_lock(gpu, number, now_ns() + SIM_PATIENCE_NS):
        holder = load32(&gpu.lock) & SIM_HOLDER
        if holder != 0 and not sim_is_present(gpu, holder - 1) and sim_take_over(gpu, number, holder):
            cas32(&gpu.leaving, holder, 0)
            sim_recover(gpu)
            break
        looks += 1
        if looks % SIM_STOPPED_LOOKS == 0:
            stopped = max(stopped, sim_let_leave(gpu))
    if stopped > 0:
        kill(stopped, SIGSTOP)


cdef inline bint sim_come(SimGpu* gpu) noexcept nogil:
    """Become a participant; what is left of the one that had this number before goes."""
    cdef SimSeat* seat = sim_seat(gpu)
    cdef SimParticipant* participant
    cdef uint32_t i, number
    sim_begin_alone(&seat.coming)
    number = seat.number
    if number == 0:
        seat.pid_namespace = sim_own_namespace()
        number = sim_take_byte(seat)
        if number != 0:
            if load32(&gpu.lock) & SIM_HOLDER == number:    # it died with the lock, which this process took by number
                sim_recover(gpu)
            else:
                sim_lock_as(gpu, number)
            cas32(&gpu.leaving, number, 0)
            for i in range(SIM_CONTEXTS):
                if gpu.contexts[i].state == CONTEXT_ALIVE and gpu.contexts[i].participant == number - 1:
                    sim_kill_context(gpu, i, SIM_GRACE_NS)
            participant = &gpu.participants[number - 1]
            participant.library = LIBRARY_NONE
            participant.pid = getpid()
            participant.pid_start = sim_own_start()
            participant.pid_namespace = seat.pid_namespace
            participant.library = seat.library
            sim_release(gpu)
            store32(&seat.number, number)
    store32(&seat.coming, 0)
    return number != 0


cdef inline bint sim_is_participant(SimGpu* gpu) noexcept nogil:
    """Whether it may be locked. The child of a fork becomes a participant here, if it has a descriptor left."""
    return load32(&sim_seat(gpu).number) != 0 or sim_come(gpu)


cdef inline void sim_lock(SimGpu* gpu) noexcept nogil:
    cdef SimSeat* seat = sim_seat(gpu)
    while rarely(load32(&seat.number) == 0):     # the child of a fork
        sim_come(gpu)
    if not sim_try_lock(gpu, seat.number, 0):
        sim_lock_as(gpu, seat.number)


cdef inline void sim_unlock(SimGpu* gpu) noexcept nogil:
    cdef uint32_t leaving = load32(&gpu.leaving)
    sim_release(gpu)
    if leaving != 0 and leaving == sim_seat(gpu).number and cas32(&gpu.leaving, leaving, 0):
        kill(getpid(), SIGSTOP)


cdef inline void sim_enter(SimGpu* gpu) noexcept nogil:
    """Lock, and bring the GPU to the present."""
    cdef int64_t now
    sim_lock(gpu)
    now = now_ns()
    if rarely(gpu.time_ns > now + SIM_AHEAD_NS):
        gpu.time_ns = now
    if rarely(gpu.switch_end_ns > gpu.time_ns + SIM_AHEAD_NS):
        gpu.switch_end_ns = gpu.time_ns
    if rarely(gpu.slice_end_ns > gpu.time_ns + SIM_AHEAD_NS):
        gpu.slice_end_ns = gpu.time_ns
    sim_advance(gpu, now)
    sim_look_around(gpu, now)


# -- the file

cdef inline void sim_unmap(SimGpu* gpu) noexcept nogil:
    """Leave, and forget the state."""
    cdef SimSeat* seat = sim_seat(gpu)
    cdef SimSeat** link = <SimSeat**>&sim_seats_here
    while link[0] != NULL and link[0] != seat:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = seat.next
    if seat.fd >= 0:
        close(seat.fd)
    munmap(seat, SIM_SEAT_BYTES + sizeof(SimGpu))


cdef inline SimGpu* sim_map_file(int fd) noexcept nogil:
    """The state in an open file, behind private pages; NULL if it is none of this version."""
    cdef char* base
    cdef SimGpu* gpu
    if lseek(fd, 0, 2) != sizeof(SimGpu):
        return NULL
    base = <char*>mmap(NULL, SIM_SEAT_BYTES + sizeof(SimGpu), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if base == MAP_FAILED:
        return NULL
    gpu = <SimGpu*>mmap(base + SIM_SEAT_BYTES, sizeof(SimGpu), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0)
    if (gpu == MAP_FAILED or gpu.magic != sim_magic() or gpu.version != SIM_VERSION
            or gpu.state_bytes != sizeof(SimGpu)):
        munmap(base, SIM_SEAT_BYTES + sizeof(SimGpu))
        return NULL
    return gpu


cdef inline SimGpu* sim_map(const char* folder, int index, uint32_t library) noexcept nogil:
    """The state of gpu `index` of a simulated node, mapped; NULL if there is none (of this version). This library is a
    participant from now on."""
    cdef char path[4096]
    cdef SimSeat* seat
    cdef SimGpu* gpu
    cdef int fd
    snprintf(path, SIM_PATH_BYTES, b"%s/gpu%d", folder, index)
    fd = open(path, O_RDWR | O_CLOEXEC)
    if fd < 0:
        return NULL
    gpu = sim_map_file(fd)
    if gpu == NULL:
        close(fd)
        return NULL
    seat = sim_seat(gpu)
    snprintf(seat.path, SIM_PATH_BYTES, b"%s", <const char*>path)
    sim_identify(fd, &seat.device, &seat.inode)
    close(fd)
    seat.library = library
    seat.fd = -1
    if not sim_watches_forks:
        pthread_atfork(NULL, NULL, sim_leave_in_child)
        (&sim_watches_forks)[0] = 1
    if not sim_come(gpu):
        munmap(seat, SIM_SEAT_BYTES + sizeof(SimGpu))
        return NULL
    seat.next = <SimSeat*>sim_seats_here
    (<SimSeat**>&sim_seats_here)[0] = seat
    return gpu


cdef inline int sim_map_all(SimGpu** gpus, uint32_t library) noexcept nogil:
    """Map every GPU of $VGPU_SIM_DIR, in order; their number. In a container (vgpu/integrations/container.py) they are
    found without a variable."""
    cdef const char* folder = getenv(b"VGPU_SIM_DIR")
    cdef int count = 0
    if folder == NULL or folder[0] == 0:
        folder = b"/run/vgpu/here/sim"
    while count < SIM_MAX_GPUS:
        gpus[count] = sim_map(folder, count, library)
        if gpus[count] == NULL:
            break
        count += 1
    return count
