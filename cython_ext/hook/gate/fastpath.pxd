"""The hot path: every launch takes it while the vGPU's lease has no end, because the vGPU is alone or shares the GPU.

A thread announces its launch, then checks the lease. The announcement makes a revocation safe without a lock. The
revoking thread shuts the lease (``open_epoch`` = 0, or a new ``round``). It makes every thread execute a fence
(``fence_all``; track.pyx, all_outside). Then it reads ``inside`` of every thread. Where all are clear, each launch
that was let through has reached the driver, and no later one will be let through.

The hot path makes no system call and no store to a line that another thread writes. Where the kernel has membarrier,
it has no fence of its own. Reason: such a fence would wait for the driver's last write to the GPU.

``round`` and ``stream`` mean: the gate knows that this stream has work, and the process's want is published. They
change when the hook thread has seen that work drain, when the thread launches into another stream, or when a wait of it
ends in a vGPU with targets (logic/meter/steps.pxd). Then vgpu_enter (gate.pyx) publishes both again. Three kinds of
launches also go through vgpu_enter: one whose key the thread's meter does not know, one that is to be timed, and one
that the thread's allowance does not cover (logic/meter/meter.pxd).
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.state cimport Gate, Thread, vgpu_thread
from cython_ext.logic.meter.meter cimport meter_takes
from cython_ext.native cimport compiler_fence, fence, load32, store32


cdef inline void* named(void* stream, bint own) noexcept nogil:
    """Stream 0 by the handle of the default stream that is meant: the thread's own, or the legacy one."""
    if stream != NULL:
        return stream
    return <void*>2 if own else <void*>1


cdef inline Thread* announce(void* stream, uint64_t tag) noexcept nogil:
    """The thread's record, announced, if the thread may submit a launch of that key to ``stream`` now. The caller
    clears ``inside`` afterwards. Else NULL."""
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
