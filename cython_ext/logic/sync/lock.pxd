"""A futex mutex for the threads of one process: one word, zero is unlocked, uncontended one compare-and-swap each way.

States as in U. Drepper, "Futexes Are Tricky" (mutex 2): 0 unlocked, 1 locked, 2 locked and a thread may sleep.
A child of fork inherits the word as some other thread left it: it calls ``lock_reset`` before its first use.
"""

from libc.stdint cimport INT64_MAX, uint32_t

from cython_ext.native cimport cas32, exchange32, futex_wait, futex_wake, load32, pause, rarely, store32

cdef enum:
    LOCK_SPINS = 100


cdef inline bint lock_soon(uint32_t* word) noexcept nogil:
    """Spin for the lock, as ``lock_acquire`` does before it sleeps. Whether the caller has it."""
    cdef int _spin
    for _spin in range(LOCK_SPINS):
        if load32(word) == 0 and cas32(word, 0, 1):
            return 1
        pause()
    return 0


cdef inline void lock_wait(uint32_t* word) noexcept nogil:
    if lock_soon(word):
        return
    while exchange32(word, 2) != 0:
        futex_wait(word, 2, INT64_MAX)


cdef inline void lock_acquire(uint32_t* word) noexcept nogil:
    if rarely(not cas32(word, 0, 1)):
        lock_wait(word)


cdef inline bint lock_try(uint32_t* word) noexcept nogil:
    return cas32(word, 0, 1)


cdef inline void lock_release(uint32_t* word) noexcept nogil:
    if rarely(exchange32(word, 0) == 2):
        futex_wake(word, 1)


cdef inline void lock_reset(uint32_t* word) noexcept nogil:
    """Only in the child of a fork, where no other thread exists."""
    store32(word, 0)
