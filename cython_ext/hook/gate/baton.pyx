"""The gate's side of the baton: whether this process of the vGPU may submit, and the wait until it may (theory:
logic/gate/baton.pxd).

Everything here is called with ``gate.lock`` held.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.hook.hook cimport vgpu_is_held_up, vgpu_look, vgpu_ring, vgpu_want, vgpu_was_held_up
from cython_ext.hook.state cimport Gate
from cython_ext.pages.layout cimport FOREVER_NS, Plan
from cython_ext.logic.gate.baton cimport LOST_NS, baton_names, baton_ours, baton_until_ns
from cython_ext.logic.gate.gate cimport GateState, lease_usable
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport futex_wait, futex_wake, load32, loadi64, now_ns, store64

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    LOOK_NS = 20_000_000     # only a change of the grants page (a removal, a lost server) is detected so late


cdef bint lost(Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """Whether the same foreign word has kept this process from a lease for so long that no relay passes the baton."""
    cdef GateState view
    vgpu_look(gate, now, &view)
    if gate.baton != gate.baton_foreign or not (lease_usable(&plan.current, &view) or lease_usable(&plan.next, &view)):
        gate.baton_foreign = gate.baton
        gate.baton_foreign_ns = now
    return now - gate.baton_foreign_ns > LOST_NS


cdef public bint vgpu_baton(Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """Read the baton: whether the process may submit, and until when (``baton_ours``, ``baton_until_ns``). ``plan``:
    without the baton's bound."""
    cdef uint32_t word = load32(&gate.activity.baton)
    cdef int64_t end_ns = loadi64(&gate.activity.baton_end_ns)
    gate.baton = load32(&gate.activity.baton)
    gate.baton_ours = gate.baton == word and baton_ours(word, end_ns, gate.slot_index, now)
    if gate.baton_ours:
        gate.baton_until_ns = baton_until_ns(word, end_ns)
        gate.baton_foreign = 0
        return 1
    gate.baton_until_ns = 0
    if load32(&gate.slot.want) == 0:
        gate.baton_foreign = 0       # only a process that wants is kept waiting
    elif lost(gate, plan, now):
        gate.baton_ours = 1
        gate.baton_until_ns = FOREVER_NS
    return gate.baton_ours


cdef public bint vgpu_baton_over(const Gate* gate, int64_t now) noexcept nogil:
    """Whether siblings wait for this process to drain, by the baton as last read."""
    return not gate.baton_ours or now >= gate.baton_until_ns


cdef public void vgpu_wait_for_baton(Gate* gate, int64_t now) noexcept nogil:
    """A sibling has the baton, or this process's turn is over: sleep until the word changes, for a while at most."""
    cdef uint32_t word = gate.baton
    vgpu_want(gate, now)
    store64(&gate.slot.gate_waits, gate.slot.gate_waits + 1)
    if load32(&gate.slot.undrained):
        futex_wake(&gate.grants.change, INT_MAX)     # the hook thread may be asleep, and siblings wait for the drain
    if loadi64(&gate.activity.baton_end_ns) == FOREVER_NS:
        vgpu_ring(gate)      # the relay has not read this want yet, or takes the process to be asleep
    gate.waiters += 1
    lock_release(&gate.lock)
    vgpu_is_held_up()
    futex_wait(&gate.activity.baton, word, now + LOOK_NS)
    vgpu_was_held_up()
    lock_acquire(&gate.lock)
    gate.waiters -= 1
    store64(&gate.slot.gate_wait_ns, gate.slot.gate_wait_ns + <uint64_t>(now_ns() - now))


cdef public void vgpu_wait_ahead(Gate* gate, int64_t now) noexcept nogil:
    """For the hook thread, while work is queued ahead, also without the lock. The application's threads wait for that
    work in the driver, so no thread is in the gate. Once for each turn of a sibling this reports that the process is
    awake. Reason: the relay passes over a process that slept through a turn, until its ``gate_waits`` grows."""
    cdef uint32_t word = load32(&gate.activity.baton)
    vgpu_want(gate, now)
    if word == 0 or word == gate.baton_reported or baton_names(word, gate.slot_index):
        return
    gate.baton_reported = word
    store64(&gate.slot.gate_waits, gate.slot.gate_waits + 1)
    if loadi64(&gate.activity.baton_end_ns) == FOREVER_NS:
        vgpu_ring(gate)
