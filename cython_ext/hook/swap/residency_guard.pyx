"""The guard of memory that can leave the card. A thread that touches it without a lease waits until it is on the card,
and wants the GPU meanwhile.

``Gate.touching`` counts such threads. The hook thread, which moves the memory, sets ``Gate.away`` first and waits until
no thread touches it (swap.pyx).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.hook.hook cimport vgpu_ring, vgpu_want
from cython_ext.hook.state cimport Gate, is_removed, is_swappable, state
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport add32, fence, futex_wait, load32, load64, now_ns, store64

cdef enum:
    LOOK_NS = 50_000_000         # a thread that waits to touch polls that often
    ROOM_NS = 60_000_000_000     # a wait for room lasts until other vGPUs leave, which hold the card for a turn each
    VAIN_NS = 500_000_000        # ... but no longer once the server has reported for so long that it is in vain
    ROOM_LOOK_NS = 5_000_000     # ... and tries again that often


cdef inline bint is_worth_a_wait(const Gate* gate) noexcept nogil:
    """Whether the memory may still come back. No thread waits in a process that ends, or in a vGPU that was removed."""
    return load32(&state().stopping) == 0 and not is_removed(gate)


cdef inline bint is_shut(const Gate* gate) noexcept nogil:
    """In a vGPU that was removed, only while the hook thread moves the memory."""
    return load32(&gate.away) != 0 and (
        is_worth_a_wait(gate) or (load32(&gate.moving) != 0 and load32(&state().stopping) == 0)
    )


cdef void wait_until_back(Gate* gate) noexcept nogil:
    lock_acquire(&gate.lock)
    gate.waiters += 1
    while is_shut(gate):
        vgpu_want(gate, now_ns())        # repeatedly: the process may have another slot by now
        lock_release(&gate.lock)
        futex_wait(&gate.away, 1, now_ns() + LOOK_NS)
        lock_acquire(&gate.lock)
    gate.waiters -= 1
    lock_release(&gate.lock)


cdef public void vgpu_touch(Gate* gate) noexcept nogil:
    """Its memory is on the card from here on until ``vgpu_touched``, unless the process ends."""
    if not is_swappable(gate):
        return
    add32(&gate.touching, 1)
    fence()
    while is_shut(gate):
        add32(&gate.touching, <uint32_t>-1)
        wait_until_back(gate)
        add32(&gate.touching, 1)
        fence()


cdef public bint vgpu_try_touch(Gate* gate) noexcept nogil:
    """As ``vgpu_touch``, without a wait. 0: its memory moves, or is away."""
    add32(&gate.touching, 1)
    fence()
    if load32(&gate.away) == 0:
        return 1
    add32(&gate.touching, <uint32_t>-1)
    return 0


cdef public void vgpu_touched(Gate* gate) noexcept nogil:
    if is_swappable(gate):
        add32(&gate.touching, <uint32_t>-1)


cdef bint is_in_vain(const Gate* gate, uint64_t size, int64_t* vain_ns) noexcept nogil:
    """The server has reported it all the while. Reason: at one moment its figures may have the allocation as made."""
    cdef uint64_t spare = load64(&gate.grants.spare_bytes)
    cdef int64_t now = now_ns()
    if spare == 0 or size <= spare:
        vain_ns[0] = 0
        return 0
    if vain_ns[0] == 0:
        vain_ns[0] = now
    return now - vain_ns[0] > <int64_t>VAIN_NS


cdef public bint vgpu_await_room(Gate* gate, uint64_t size, int64_t since, int64_t* vain_ns) noexcept nogil:
    """The card has had no room for ``size`` more since then. Report that to the GPU Server, which swaps other vGPUs
    out. The caller does not touch: its own memory may have to leave. ``vain_ns``: of this wait; 0 at its begin. 0: no
    room came."""
    cdef bint waits = now_ns() - since < <int64_t>ROOM_NS and is_worth_a_wait(gate)
    if waits and not is_in_vain(gate, size, vain_ns):
        store64(&gate.slot.room_bytes, size)
        lock_acquire(&gate.lock)
        gate.waiters += 1
        vgpu_want(gate, now_ns())
        lock_release(&gate.lock)
        vgpu_ring(gate)
        futex_wait(&state().stopping, 0, now_ns() + ROOM_LOOK_NS)
        lock_acquire(&gate.lock)
        gate.waiters -= 1
        lock_release(&gate.lock)
        return 1
    store64(&gate.slot.room_bytes, 0)
    return 0
