"""A mutex that a thread holds for life, in memory that may be hostile: how ``Slot.alive`` announces a death.

It speaks the kernel's robust-futex protocol (owner's TID, FUTEX_WAITERS, FUTEX_OWNER_DIED in the first word of a
``pthread_mutex_t``), so the kernel announces a dead owner within 0.1 ms. The C library's own robust mutex is not
used. Reason: its unlock follows list pointers stored inside the mutex. Here any process of the vGPU may overwrite them,
and make the broker write at an address of a tenant's choice. This file reads only the one word from the page, bounds
every wait, and needs no symbol newer than any C library.

A TID counts within its PID namespace, and processes of several namespaces share a page. The kernel marks a word if the
dying thread has it on its list, or in ``list_op_pending``, and the word holds that thread's TID *as its own namespace
counts*. So a thread may have there only a word that it owns: another namespace's owner may have the same TID. A thread
that watches, or comes too late, never names the word to the kernel; ``robust_hold`` takes the word under a name that
no thread has, and only then names it.

TIDs are cached per thread: the child of a fork calls ``robust_forget`` first. The ledger's lock is of another kind:
logic/sync/section.pxd.
"""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from cython_ext.native cimport cas32, compiler_fence, exchange32, futex_wait, futex_wake, load32

cdef enum:
    ROBUST_LOCKED = 0
    ROBUST_OWNER_DIED = 1    # locked; whatever the word protects was left in the middle of something
    ROBUST_TIMEOUT = 2       # not locked

    ROBUST_FREE = 3          # robust_watch: no thread holds it
    ROBUST_UNAVAILABLE = 4   # the kernel keeps no robust list for this thread

    ROBUST_CLAIMED = 1 << 29         # in the place of a TID; the kernel gives none beyond 2²²


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
        robust_list* interrupted     # the pending entry of the code that a signal's handler interrupted
        robust_list* behind          # what follows the lock that robust_hold took on the thread's list
        uint32_t tid

    RobustThread* robust_thread "vgpu_robust_self"() noexcept      # NULL: no robust list
    void robust_forget "vgpu_robust_forget"() noexcept


cdef inline robust_list* robust_node(const RobustThread* thread, uint32_t* word) noexcept nogil:
    return <robust_list*>(<uintptr_t>word - <uintptr_t>thread.head.futex_offset)


cdef inline bint robust_is_held(uint32_t seen) noexcept nogil:
    """Whether the word, as it was seen, names an owner that lives."""
    return seen & FUTEX_TID_MASK != 0 and seen & FUTEX_OWNER_DIED == 0


cdef inline int robust_hold(uint32_t* word) noexcept nogil:
    """Hold the mutex until this thread dies. ``word`` begins a ``pthread_mutex_t``: its list node is used.

    ROBUST_LOCKED; ROBUST_TIMEOUT if another thread holds it; ROBUST_UNAVAILABLE.
    """
    cdef RobustThread* thread = robust_thread()
    cdef robust_list* node
    cdef uint32_t seen
    if thread == NULL:
        return ROBUST_UNAVAILABLE
    node = robust_node(thread, word)
    seen = load32(word)
    if seen & FUTEX_TID_MASK or not cas32(word, seen, ROBUST_CLAIMED | (seen & FUTEX_WAITERS)):
        return ROBUST_TIMEOUT
    thread.interrupted = thread.head.list_op_pending
    thread.head.list_op_pending = node
    compiler_fence()
    while True:
        seen = load32(word)
        if seen & FUTEX_TID_MASK != ROBUST_CLAIMED:      # scribbled on
            thread.head.list_op_pending = thread.interrupted
            return ROBUST_TIMEOUT
        if cas32(word, seen, thread.tid | (seen & FUTEX_WAITERS)):
            break
    thread.behind = node.next = thread.head.list.next
    compiler_fence()
    thread.head.list.next = node
    compiler_fence()
    thread.head.list_op_pending = thread.interrupted
    return ROBUST_LOCKED


cdef inline void robust_drop(uint32_t* word) noexcept nogil:
    """Release the mutex that ``robust_hold`` of this thread took last; no death is announced.

    The entry that is put back on the list comes from the thread's own memory, not from the page.
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
