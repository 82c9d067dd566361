"""The hot path: what every launch goes through while the vGPU holds an open-ended lease and nobody competes.

Announce, then check. The announcement makes a revocation safe without a lock: whoever shuts the lease (``open_epoch`` =
0, or a new ``round``), has every thread execute a fence (``fence_all``; track.pyx, all_outside) and then finds
``inside`` clear in all of them knows that each launch let through before has reached the driver, and that none will be
let through after. No system call, no store to a line that another thread writes; and no fence of its own where the
kernel has membarrier: it would wait for the driver's last write to the GPU.

``round`` and ``stream`` stand for "the gate knows that this stream has work, and its want is published"; they change
when the hook thread has seen that work drain, or the thread turns to another stream. Then vgpu_enter (gate.pyx) says so
again. A launch of a key that the thread's meter does not know, or that is to be timed, goes there, too; and so does the
one with which the thread's allowance is used up (logic/meter.pxd).
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.state cimport Gate, Thread, vgpu_thread
from cython_ext.logic.meter cimport meter_takes
from cython_ext.native cimport compiler_fence, fence, load32, store32


cdef inline void* named(void* stream, bint own) noexcept nogil:
    """Stream 0 by its other name, which says whose default stream is meant."""
    if stream != NULL:
        return stream
    return <void*>2 if own else <void*>1


cdef inline Thread* announce(void* stream, uint64_t tag) noexcept nogil:
    """The thread's record, announced, if it may submit a launch of that key to ``stream`` now; clear ``inside``
    afterwards. Else NULL."""
    cdef Thread* thread = <Thread*>vgpu_thread
    cdef Gate* gate
    if thread == NULL or thread.gate == NULL:
        return NULL
    gate = thread.gate
    store32(&thread.inside, 1)
    if gate.fences:
        fence()
    else:
        compiler_fence()
    if (
        load32(&gate.grants.open_epoch) != 0
        and load32(&gate.activity.generation) == gate.generation
        and load32(&gate.activity.baton) == gate.baton_open
        and thread.round == load32(&gate.round)
        and thread.stream == stream
        and meter_takes(&thread.meter, tag, 0)
    ):
        thread.launches += 1
        return thread
    store32(&thread.inside, 0)
    return NULL
