"""The leases of a vGPU as one process sees them: which it has begun, started early or spent, and how the backlog
follows them.

The caller holds gate.lock.
"""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.hook.hook cimport vgpu_log, vgpu_release_ahead, vgpu_ring
from cython_ext.hook.state cimport Gate
from cython_ext.pages.layout cimport FOREVER_NS, LEASE_ON_GO, SLOT_ACTIVE, Lease, Plan, epoch_past, epoch_reached
from cython_ext.logic.gate.gate cimport TAKE_MOST_NS, GateState, lease_usable
from cython_ext.logic.gate.window cimport backlog_begin, backlog_finish
from cython_ext.native cimport load32


cdef public uint32_t vgpu_spent_epoch(const Gate* gate) noexcept nogil:
    """The newest lease that this process has drained or closed; 0: none. It takes no more work of the process, even if
    it has got another end, or none, since."""
    cdef uint32_t drained = load32(&gate.slot.drained_epoch)
    return drained if gate.closed_epoch == 0 or epoch_past(drained, gate.closed_epoch) else gate.closed_epoch


cdef public void vgpu_look(const Gate* gate, int64_t now, GateState* view) noexcept nogil:
    """The words by which logic/gate/gate.pxd judges a lease, into ``view``."""
    view.now_ns = now
    view.go_epoch = load32(&gate.grants.go_epoch)
    view.returned_epoch = load32(&gate.activity.returned_epoch)
    view.drained_epoch = vgpu_spent_epoch(gate)
    view.free_epoch = load32(&gate.grants.free_epoch) if not gate.lost and gate.ahead.launches == 0 else 0
    view.taken_ns = gate.taken_ns if gate.taken_epoch == view.free_epoch else 0
    view.take_most_ns = min(<int64_t>TAKE_MOST_NS, gate.window_ns) / max(load32(&gate.activity.processes), <uint32_t>1)


cdef inline bint slept_through(const Gate* gate, const Lease* lease, const GateState* view) noexcept nogil:
    """Whether the lease had GO and was over before any thread of the process woke for it, and no thread has reported
    that."""
    return (
        lease.epoch != 0
        and view.now_ns >= lease.end_ns
        and lease.flags & LEASE_ON_GO and epoch_reached(view.go_epoch, lease.epoch)
        and not epoch_reached(view.returned_epoch, lease.epoch)
        and not epoch_past(view.drained_epoch, lease.epoch)
        and lease.epoch != gate.over_epoch and lease.epoch != gate.missed_epoch
    )


cdef public void vgpu_begin(Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """Begin the lease that is usable now in the backlog, if it is a new one, and note its present end."""
    cdef GateState view
    cdef const Lease* lease
    cdef int i
    vgpu_look(gate, now, &view)
    for i in range(2):
        lease = &plan.current if i == 0 else &plan.next
        if lease.epoch != 0 and lease.epoch == gate.began_epoch:
            gate.lease_end_ns = lease.end_ns
            if gate.ahead.launches and lease_usable(lease, &view):
                vgpu_release_ahead(gate, lease.epoch, now)       # at an earlier step the lease was about to go back
        elif lease_usable(lease, &view):
            if gate.began_epoch:         # the vGPU's next lease follows without a gap
                gate.over_epoch = gate.began_epoch
                gate.over_end_ns = gate.lease_end_ns
                gate.over_markers = -1
            gate.began_epoch = lease.epoch
            gate.lease_end_ns = lease.end_ns
            gate.lease_sampled = epoch_reached(view.go_epoch, lease.epoch) != 0
            gate.lease_unused = 1
            backlog_begin(&gate.backlog, now if lease.flags & LEASE_ON_GO else lease.start_ns)
            if gate.taken_epoch == lease.epoch:
                gate.backlog.refilling = 0       # its first work has run already
            vgpu_log(b"lease begins", lease.epoch, lease.end_ns)
            vgpu_release_ahead(gate, lease.epoch, now)
            vgpu_log(b"lease has GO since ns, flags", lease.start_ns, lease.flags)
            if lease.end_ns < FOREVER_NS:
                vgpu_ring(gate)          # the relay will be awake at its end
        elif slept_through(gate, lease, &view):
            gate.missed_epoch = lease.epoch
            vgpu_ring(gate)              # the relay may not know that it began, and will report that it is over


cdef public void vgpu_take(Gate* gate, uint32_t epoch, int64_t work_ns) noexcept nogil:
    """Note that work of that length goes to the GPU before GO is given (an early start)."""
    if gate.taken_epoch != epoch:
        gate.taken_epoch = epoch
        gate.taken_ns = 0
        gate.lease_sampled = 1
        vgpu_log(b"takes epoch, ns", epoch, work_ns)
    gate.taken_ns += work_ns


cdef public bint vgpu_go_follows(const Gate* gate, const Plan* plan, const GateState* view) noexcept nogil:
    """Whether this process has started the next lease early. Then no work is queued ahead of another lease."""
    return gate.taken_epoch != 0 and gate.taken_epoch == plan.current.epoch != view.go_epoch


cdef bint over(const Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """Whether the lease that began has ended, was returned, or is in no plan any more."""
    return (
        now >= gate.lease_end_ns
        or epoch_reached(load32(&gate.activity.returned_epoch), gate.began_epoch)
        or epoch_reached(gate.closed_epoch, gate.began_epoch)
        or (plan.current.epoch != gate.began_epoch and plan.next.epoch != gate.began_epoch)
    )


cdef public bint vgpu_end(Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """End the lease in the backlog where it is over: 1; 0 if none is over."""
    if gate.began_epoch == 0 or not over(gate, plan, now):
        return 0
    gate.over_epoch = gate.began_epoch
    gate.over_end_ns = gate.lease_end_ns
    gate.over_markers = -1
    gate.length_ns = gate.lease_end_ns - gate.backlog.lease_ns
    gate.began_epoch = 0
    backlog_finish(&gate.backlog, now)
    vgpu_log(b"lease ends", gate.over_epoch, gate.over_end_ns)
    return 1


cdef public bint vgpu_siblings_run(const Gate* gate) noexcept nogil:
    """Whether another process of the vGPU has work on the device: then timings mean nothing."""
    cdef uint32_t i
    if load32(&gate.activity.processes) <= 1:
        return 0
    for i in range(64):
        if (
            i != gate.slot_index
            and load32(&gate.activity.slots[i].state) == SLOT_ACTIVE
            and load32(&gate.activity.slots[i].undrained)
        ):
            return 1
    return 0
