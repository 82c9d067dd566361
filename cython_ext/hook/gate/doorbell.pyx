"""The reports to the broker's relay, in the slot and by the doorbell: the process wants a lease, or has work that runs
under one. The other side: merge.pxd.
"""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.hook.state cimport Gate
from cython_ext.pages.layout cimport Slot, epoch_reached
from cython_ext.logic.gate.baton cimport baton_undated
from cython_ext.native cimport add32, exchange32, fence, futex_wake, load32, store32, storei64


cdef public void vgpu_ring(Gate* gate) noexcept nogil:
    """Wake the broker's relay: a word in the slot changed that the relay waits for."""
    add32(&gate.activity.doorbell, 1)
    futex_wake(&gate.activity.doorbell, 1)


cdef public void vgpu_want(Gate* gate, int64_t now) noexcept nogil:
    """Publish that the process wants a lease, if the slot does not show that already."""
    if load32(&gate.slot.want) == 0:
        storei64(&gate.slot.want_since_ns, now)
        exchange32(&gate.slot.want, 1)
        vgpu_ring(gate)


cdef public bint vgpu_publish_submission(Gate* gate, uint32_t epoch, bint takes, int64_t now) noexcept nogil:
    """Publish in the slot that work runs under ``epoch``, before it does. 0: the vGPU has just given that lease back,
    the baton was passed on, or (``takes``) the GPU is not free any more and GO was not given.

    Dekker's rule with the relay: the relay stores returned_epoch, fences, and reads the process's want. The gate stores
    that want, fences, and reads returned_epoch. The baton's word and ``undrained`` follow the same rule.
    """
    cdef Slot* slot = gate.slot
    cdef uint32_t before = load32(&slot.undrained)
    store32(&slot.undrained, 1)
    vgpu_want(gate, now)
    fence()
    if (
        epoch_reached(load32(&gate.activity.returned_epoch), epoch)
        or load32(&gate.activity.baton) != gate.baton
        or (takes and load32(&gate.grants.free_epoch) != epoch != load32(&gate.grants.go_epoch))
    ):
        store32(&slot.undrained, before)
        return 0
    gate.lease_unused = 0
    gate.baton_used = gate.baton
    if not before and baton_undated(gate.baton_until_ns):
        vgpu_ring(gate)
    if load32(&slot.last_epoch) != epoch or (takes and not before):
        storei64(&slot.first_submit_ns, now)
        store32(&slot.last_epoch, epoch)
    storei64(&slot.last_submit_ns, now)
    return 1
