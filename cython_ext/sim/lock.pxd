"""The participants of a simulated GPU, and the lock of its file. Both work across PID namespaces.

A library that maps the file is a *participant*. It opens the file once more, and holds a write lock of that open file
description on one byte of it. The kernel drops this lock at the last close: when the process ends or becomes another
program. Nothing that is specific to a PID namespace takes part, as the byte's offset is the participant's name.

The file's lock is one futex word with the holder's number. A waiter whose holder's byte is free holds a read lock on
that byte, so that no new participant gets this name, and takes the word over. A query for a read lock finds write
locks alone: that read lock makes no participant look alive.

The child of a fork inherits the open file description. ``sim_leave_in_child`` closes it there, and the child's first
call makes the child a participant of its own.

What a process knows of its mapping lies on private pages before the mapped state (``SimSeat``).
"""

from libc.stdint cimport int16_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport strtoull
from libc.string cimport memchr, memset, strlen, strrchr

from cython_ext.native cimport cas32, exchange32, futex_wait, futex_wake, load32, now_ns, pause, store32
from cython_ext.sim.state cimport SIM_PARTICIPANTS, SimGpu


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    /* The C library's fstat and stat have other names since glibc 2.33. */
    static inline int sim_fstat(int fd, struct stat *found) { return (int)syscall(SYS_fstat, fd, found); }
    /* Its result, l_type: what another open file description holds of one byte, if that excludes ours. */
    static inline int sim_byte_lock(int fd, int command, short type, int64_t byte, short *found) {
        struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
        int result = fcntl(fd, command, &lock);
        if (found) *found = lock.l_type;
        return result;
    }
    /* Of a namespace, by the text of its link, "pid:[4026531836]"; 0: it cannot be read. */
    static inline uint64_t sim_inode(const char *path) {
        char text[64];
        ssize_t got = readlink(path, text, sizeof(text) - 1);
        text[got < 0 ? 0 : got] = 0;
        return strchr(text, '[') ? strtoull(strchr(text, '[') + 1, NULL, 10) : 0;
    }
    static inline int sim_is_file(int fd, uint64_t device, uint64_t inode) {
        struct stat found;
        return sim_fstat(fd, &found) == 0 && (uint64_t)found.st_dev == device && found.st_ino == inode;
    }
    static inline void sim_identify(int fd, uint64_t *device, uint64_t *inode) {
        struct stat found;
        *device = *inode = 0;
        if (sim_fstat(fd, &found) == 0) { *device = found.st_dev; *inode = found.st_ino; }
    }
    static void *sim_seats_here; /* the first SimSeat of this module */
    static int sim_watches_forks;
    """
    int F_OFD_SETLK, F_OFD_GETLK, F_WRLCK, F_RDLCK, F_UNLCK
    void* sim_seats_here
    int sim_watches_forks
    int sim_byte_lock(int fd, int command, int16_t type, int64_t byte, int16_t* found) noexcept nogil
    uint64_t sim_inode(const char* path) noexcept nogil
    bint sim_is_file(int fd, uint64_t device, uint64_t inode) noexcept nogil
    void sim_identify(int fd, uint64_t* device, uint64_t* inode) noexcept nogil

cdef extern from "<fcntl.h>" nogil:
    int O_RDONLY
    int O_RDWR
    int O_CLOEXEC
    int open(const char* path, int flags, ...) noexcept

cdef extern from "<unistd.h>" nogil:
    ssize_t read(int fd, void* buffer, size_t size) noexcept
    int close(int fd) noexcept
    int getpid() noexcept


cdef enum:
    SIM_SEAT_BYTES = 65536          # a page of any machine
    SIM_PATH_BYTES = 4096
    SIM_WAITERS = 0x80000000
    SIM_HOLDER = 0xffff             # of the lock's word
    SIM_SPINS = 100
    SIM_PATIENCE_NS = 2000000       # a waiter checks that often whether the holder has died, or is stopped


# What this process knows of one mapped GPU: private, in front of the shared state.
cdef struct SimSeat:
    uint32_t number         # index of the participant + 1; 0: it is none, as in the child of a fork
    uint32_t coming         # a thread makes it a participant
    uint32_t busy           # a thread takes a dead one's lock over
    uint32_t library
    int fd
    uint64_t device         # of the file: the program may have closed the descriptor, and reused its number
    uint64_t inode
    uint64_t pid_namespace
    SimSeat* next
    uint64_t[128] pids      # by context: generation << 32 | pid in this process's PID namespace (share.pxd)
    char[4096] path


cdef inline SimSeat* sim_seat(SimGpu* gpu) noexcept nogil:
    return <SimSeat*>(<char*>gpu - SIM_SEAT_BYTES)


# -- processes

cdef inline ssize_t sim_read_file(const char* path, char* text, size_t size) noexcept nogil:
    """A small file as a string; its length, 0 if there is none."""
    cdef ssize_t got
    cdef int fd = open(path, O_RDONLY | O_CLOEXEC)
    text[0] = 0
    if fd < 0:
        return 0
    got = read(fd, text, size - 1)
    close(fd)
    if got < 0:
        got = 0
    text[got] = 0
    return got


cdef inline uint64_t sim_start_in(char* stat) noexcept nogil:
    """The start time (clock ticks since boot) in a process's /proc stat; 0 if that is of none, or of a zombie."""
    cdef char* field = strrchr(stat, 41)  # the name may hold anything, blanks and brackets too: count from its end
    cdef int _
    if field == NULL or field[1] == 0 or field[2] in (90, 88):  # Z, X
        return 0
    field += 2
    for _ in range(19):
        field = <char*>memchr(field, 32, strlen(field))
        if field == NULL:
            return 0
        field += 1
    return strtoull(field, NULL, 10)


cdef inline uint64_t sim_own_start() noexcept nogil:
    cdef char text[1024]
    sim_read_file(b"/proc/self/stat", text, sizeof(text))
    return sim_start_in(text)


cdef inline uint64_t sim_own_namespace() noexcept nogil:
    """The inode of this process's PID namespace; 0 without /proc."""
    return sim_inode(b"/proc/self/ns/pid")


# -- participants

cdef inline int64_t sim_byte_of(uint32_t index) noexcept nogil:
    """Behind the state, where nothing is mapped."""
    return <int64_t>sizeof(SimGpu) + index


cdef inline bint sim_is_present(SimGpu* gpu, uint32_t index) noexcept nogil:
    """Whether a participant lives and is still the program that came."""
    cdef SimSeat* seat = sim_seat(gpu)
    cdef int16_t found = <int16_t>F_UNLCK
    if index + 1 == seat.number:
        return True
    if index >= SIM_PARTICIPANTS:
        return False
    if (not sim_is_file(seat.fd, seat.device, seat.inode)
            or sim_byte_lock(seat.fd, F_OFD_GETLK, <int16_t>F_RDLCK, sim_byte_of(index), &found) != 0):
        return True             # this program has closed the descriptor: it takes nothing away from another one
    return found != F_UNLCK


cdef inline void sim_begin_alone(uint32_t* word) noexcept nogil:
    """Among the threads of this process, until they store 0 there."""
    while not cas32(word, 0, 1):
        pause()


cdef inline bint sim_take_over(SimGpu* gpu, uint32_t number, uint32_t holder) noexcept nogil:
    """Whether the lock of a holder that has died belongs to this participant now."""
    cdef SimSeat* seat = sim_seat(gpu)
    cdef uint32_t word
    cdef bint taken = False
    cdef int64_t byte = sim_byte_of(holder - 1)
    if holder == number or not sim_is_file(seat.fd, seat.device, seat.inode):
        return False
    sim_begin_alone(&seat.busy)
    if holder > SIM_PARTICIPANTS or sim_byte_lock(seat.fd, F_OFD_SETLK, <int16_t>F_RDLCK, byte, NULL) == 0:
        word = load32(&gpu.lock)
        taken = word & SIM_HOLDER == holder and cas32(&gpu.lock, word, number | SIM_WAITERS)
        if holder <= SIM_PARTICIPANTS:
            sim_byte_lock(seat.fd, F_OFD_SETLK, <int16_t>F_UNLCK, byte, NULL)
    store32(&seat.busy, 0)
    return taken


cdef inline uint32_t sim_take_byte(SimSeat* seat) noexcept nogil:
    """Open the file and hold a byte of it that no other participant holds: this participant's number. 0: the file
    cannot be opened, is another one by now, or has no byte left."""
    cdef uint32_t index
    seat.fd = open(seat.path, O_RDWR | O_CLOEXEC)
    if seat.fd < 0:
        return 0
    if sim_is_file(seat.fd, seat.device, seat.inode):
        for index in range(SIM_PARTICIPANTS):
            if sim_byte_lock(seat.fd, F_OFD_SETLK, <int16_t>F_WRLCK, sim_byte_of(index), NULL) == 0:
                return index + 1
    close(seat.fd)
    seat.fd = -1
    return 0


cdef inline void sim_leave_in_child() noexcept nogil:
    """After a fork: the parent's open file descriptions live no longer than the parent. Without locks."""
    cdef SimSeat* seat = <SimSeat*>sim_seats_here
    while seat != NULL:
        if seat.fd >= 0 and sim_is_file(seat.fd, seat.device, seat.inode):
            close(seat.fd)
        seat.fd = -1
        seat.number = seat.busy = seat.coming = 0
        memset(seat.pids, 0, sizeof(seat.pids))
        seat = seat.next


# -- the lock

cdef inline bint sim_try_lock(SimGpu* gpu, uint32_t number, uint32_t waiters) noexcept nogil:
    cdef uint32_t word = load32(&gpu.lock)
    return word & SIM_HOLDER == 0 and cas32(&gpu.lock, word, number | waiters | (word & SIM_WAITERS))


cdef inline bint sim_wait_lock(SimGpu* gpu, uint32_t number, int64_t until_ns) noexcept nogil:
    """Whether the lock was free, or became so until then."""
    cdef uint32_t word, waiters = 0
    cdef int spins = 0
    while True:
        if sim_try_lock(gpu, number, waiters):
            return True
        word = load32(&gpu.lock)
        if word & SIM_HOLDER == 0:
            continue
        if spins < SIM_SPINS:
            spins += 1
            pause()
            continue
        if now_ns() >= until_ns:
            return False
        if word & SIM_WAITERS or cas32(&gpu.lock, word, word | SIM_WAITERS):
            futex_wait(&gpu.lock, word | SIM_WAITERS, until_ns)
            waiters = SIM_WAITERS       # other threads may sleep behind this one: its release wakes one


cdef inline void sim_release(SimGpu* gpu) noexcept nogil:
    if exchange32(&gpu.lock, 0) & SIM_WAITERS:
        futex_wake(&gpu.lock, 1)
