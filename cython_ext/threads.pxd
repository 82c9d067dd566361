"""Native threads of servers and brokers: no Python in them, no signals for them."""

from libc.stdint cimport int64_t

from cython_ext.pages.layout cimport pthread_mutex_t


cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    int sigfillset(sigset_t* signals)
    const int SIG_SETMASK

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_attr_t:
        pass
    int pthread_create(pthread_t* thread, const pthread_attr_t* attr, void* (*main)(void*) noexcept nogil, void* arg)
    int pthread_join(pthread_t thread, void** result)
    pthread_t pthread_self()
    int pthread_setname_np(pthread_t thread, const char* name)
    int pthread_attr_init(pthread_attr_t* attr)
    int pthread_attr_destroy(pthread_attr_t* attr)
    int pthread_attr_setstacksize(pthread_attr_t* attr, size_t size)
    int pthread_sigmask(int how, const sigset_t* signals, sigset_t* before)
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attr)
    int pthread_mutex_destroy(pthread_mutex_t* mutex)
    int pthread_mutex_lock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long argument)
    const int PR_SET_TIMERSLACK

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initial, int flags)
    int eventfd_read(int descriptor, unsigned long* value)
    int eventfd_write(int descriptor, unsigned long value)
    const int EFD_NONBLOCK, EFD_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    int close_descriptor "close"(int descriptor)
    long sysconf(int name)
    const int _SC_NPROCESSORS_ONLN

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_nanosleep(int clock, int flags, const timespec* until, timespec* rest)
    const int CLOCK_MONOTONIC, TIMER_ABSTIME

cdef enum:
    STACK_BYTES = 64 * 1024      # they call nothing deep; glibc keeps thread-local storage here too


cdef inline bint may_spin() noexcept nogil:
    """Whether there are cores to spare for the last microseconds before a hand-over."""
    return sysconf(_SC_NPROCESSORS_ONLN) >= 4


cdef inline int start_thread(
    pthread_t* thread, void* (*main)(void*) noexcept nogil, void* argument
) noexcept nogil:
    """0 or an errno value. Signals stay with the threads of Python, which know what to do with them."""
    cdef pthread_attr_t attributes
    cdef sigset_t all_signals, before
    cdef int error
    sigfillset(&all_signals)
    pthread_attr_init(&attributes)
    pthread_attr_setstacksize(&attributes, STACK_BYTES)
    pthread_sigmask(SIG_SETMASK, &all_signals, &before)
    error = pthread_create(thread, &attributes, main, argument)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    pthread_attr_destroy(&attributes)
    return error


cdef inline void sleep_until(int64_t until_ns) noexcept nogil:
    cdef timespec until
    until.tv_sec = until_ns // 1_000_000_000
    until.tv_nsec = until_ns % 1_000_000_000
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)
