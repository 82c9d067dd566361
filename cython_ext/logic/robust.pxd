"""A robust futex mutex whose memory may be hostile: what the ledger and ``Slot.alive`` are locked with.

It speaks the kernel's robust-futex protocol (owner's TID, FUTEX_WAITERS, FUTEX_OWNER_DIED in the first word of a
``pthread_mutex_t``), so the kernel announces a dead owner within 0.1 ms. The C library's own robust mutex is not
used: its unlock follows list pointers stored inside the mutex, which here any process of the vGPU may overwrite, and
would have the broker write where a tenant says. Here nothing but the one word is read from the page, every wait is
bounded, and no symbol newer than any C library is needed.

A section is announced through ``list_op_pending`` of the thread's robust list, which the kernel treats on death
exactly like a held mutex; so a section must be short, and a thread holds one at a time. ``Slot.alive`` is held for
life and goes on the list.

TIDs are cached per thread: the child of a fork calls ``robust_forget`` first.
"""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from cython_ext.native cimport cas32, compiler_fence, exchange32, futex_wait, futex_wake, load32, now_ns, pause, rarely

cdef enum:
    ROBUST_LOCKED = 0
    ROBUST_OWNER_DIED = 1    # locked; whatever the word protects was left in the middle of something
    ROBUST_TIMEOUT = 2       # not locked

    ROBUST_FREE = 3          # robust_watch: nobody holds it
    ROBUST_UNAVAILABLE = 4   # the kernel keeps no robust list for this thread

    ROBUST_SPINS = 100
    ROBUST_LOOK_NS = 20_000_000      # a waiter that was woken and then stopped must not keep the others asleep


cdef extern from "vgpu_native.h" nogil:
    const uint32_t FUTEX_WAITERS, FUTEX_OWNER_DIED, FUTEX_TID_MASK
    const int ETIMEDOUT, INT_MAX

    struct robust_list:
        robust_list* next
    struct robust_list_head:
        robust_list list
        long futex_offset
        robust_list* list_op_pending

    ctypedef struct RobustThread "vgpu_robust_thread":
        robust_list_head* head
        robust_list* interrupted     # the pending entry of whoever we interrupted in a signal handler
        robust_list* behind          # what follows the lock that robust_hold took on the thread's list
        uint32_t tid

    RobustThread* robust_thread "vgpu_robust_self"() noexcept      # NULL: no robust list
    void robust_forget "vgpu_robust_forget"() noexcept


cdef inline robust_list* robust_node(const RobustThread* thread, uint32_t* word) noexcept nogil:
    return <robust_list*>(<uintptr_t>word - <uintptr_t>thread.head.futex_offset)


cdef inline int robust_take(uint32_t* word, uint32_t tid, int64_t until_ns) noexcept nogil:
    cdef uint32_t seen, waiters = 0
    cdef int64_t look_ns
    cdef int spins = 0
    while True:
        seen = load32(word)
        if not seen & FUTEX_TID_MASK:
            if cas32(word, seen, tid | waiters | (seen & FUTEX_WAITERS)):
                return ROBUST_OWNER_DIED if seen & FUTEX_OWNER_DIED else ROBUST_LOCKED
            continue
        if spins < ROBUST_SPINS:
            spins += 1
            pause()
            continue
        look_ns = now_ns()
        if look_ns >= until_ns:
            return ROBUST_TIMEOUT
        if seen & FUTEX_WAITERS or cas32(word, seen, seen | FUTEX_WAITERS):
            futex_wait(word, seen | FUTEX_WAITERS, min(until_ns, look_ns + ROBUST_LOOK_NS))
            waiters = FUTEX_WAITERS      # others may sleep behind us: our release must look


cdef inline bint robust_try(uint32_t* word) noexcept nogil:
    """Take it if it is free, and nobody died with it. 0: ``robust_lock`` tells."""
    cdef RobustThread* thread = robust_thread()
    if rarely(thread == NULL):
        return 0
    thread.interrupted = thread.head.list_op_pending
    thread.head.list_op_pending = robust_node(thread, word)
    compiler_fence()
    if not rarely(not cas32(word, 0, thread.tid)):
        return 1
    thread.head.list_op_pending = thread.interrupted
    return 0


cdef inline int robust_lock(uint32_t* word, int64_t until_ns) noexcept nogil:
    """ROBUST_LOCKED, ROBUST_OWNER_DIED (locked too) or, not locked, ROBUST_TIMEOUT or ROBUST_UNAVAILABLE."""
    cdef RobustThread* thread = robust_thread()
    cdef int result
    if thread == NULL:
        return ROBUST_UNAVAILABLE
    thread.interrupted = thread.head.list_op_pending
    thread.head.list_op_pending = robust_node(thread, word)
    compiler_fence()
    result = robust_take(word, thread.tid, until_ns)
    if result == ROBUST_TIMEOUT:
        thread.head.list_op_pending = thread.interrupted
    return result


cdef inline void robust_unlock(uint32_t* word) noexcept nogil:
    cdef RobustThread* thread = robust_thread()
    if rarely(exchange32(word, 0) & FUTEX_WAITERS != 0):
        futex_wake(word, 1)
    compiler_fence()
    thread.head.list_op_pending = thread.interrupted


cdef inline int robust_hold(uint32_t* word) noexcept nogil:
    """Hold the mutex until this thread dies. ``word`` begins a ``pthread_mutex_t``: its list node is used.

    ROBUST_LOCKED; ROBUST_TIMEOUT if somebody else holds it; ROBUST_UNAVAILABLE.
    """
    cdef RobustThread* thread = robust_thread()
    cdef robust_list* node
    cdef uint32_t seen
    if thread == NULL:
        return ROBUST_UNAVAILABLE
    node = robust_node(thread, word)
    thread.interrupted = thread.head.list_op_pending
    thread.head.list_op_pending = node
    compiler_fence()
    seen = load32(word)
    if seen & FUTEX_TID_MASK or not cas32(word, seen, thread.tid | (seen & FUTEX_WAITERS)):
        thread.head.list_op_pending = thread.interrupted
        return ROBUST_TIMEOUT
    thread.behind = node.next = thread.head.list.next
    compiler_fence()
    thread.head.list.next = node
    compiler_fence()
    thread.head.list_op_pending = thread.interrupted
    return ROBUST_LOCKED


cdef inline void robust_drop(uint32_t* word) noexcept nogil:
    """Let go of what ``robust_hold`` of this thread took last; no death is announced.

    What is put back on the list comes from memory of our own, not from the page.
    """
    cdef RobustThread* thread = robust_thread()
    if thread == NULL or thread.head.list.next != robust_node(thread, word):
        return
    thread.head.list.next = thread.behind
    compiler_fence()
    if exchange32(word, 0) & FUTEX_WAITERS:
        futex_wake(word, INT_MAX)


cdef inline int robust_watch(uint32_t* word, int64_t until_ns) noexcept nogil:
    """Wait for the holder's death, never locking: ROBUST_OWNER_DIED, ROBUST_FREE, or ROBUST_TIMEOUT (it lives)."""
    cdef uint32_t seen
    while True:
        seen = load32(word)
        if seen & FUTEX_OWNER_DIED:
            return ROBUST_OWNER_DIED
        if not seen & FUTEX_TID_MASK:
            return ROBUST_FREE
        if seen & FUTEX_WAITERS or cas32(word, seen, seen | FUTEX_WAITERS):
            if futex_wait(word, seen | FUTEX_WAITERS, until_ns) == ETIMEDOUT:
                return ROBUST_TIMEOUT
