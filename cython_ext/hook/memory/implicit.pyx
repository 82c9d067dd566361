"""The memory that contexts take of the card is charged before any other. No call requests it, and only NVML shows it.

A process that makes a context writes down when (``ActivityPage.context_ns``, one word for all processes of a vGPU) and
rings. The relay passes that on, and the server reads NVML at once. The server writes the result into the grants page,
and behind that when the reading began (``implicit_ns``). Until this is newer than that word, a thread that allocates
waits: some milliseconds once per context, and not for ever. Without a server, or a broker, it goes on with the last
known charge.

cudart gets a device's primary context by a private table. So the hook checks for that context at each allocation until
it finds one.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport real_cuDevicePrimaryCtxGetState
from cython_ext.hook.hook cimport vgpu_log, vgpu_ring
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, attached, is_removed, state
from cython_ext.native cimport cas64, futex_wait, load32, loadi64, now_ns, store32, storei64

cdef enum:
    PATIENCE_NS = 1_000_000_000  # milliseconds are enough where the host is not busy, or the broker being replaced
    SILENT_NS = 200_000_000      # a server that lives shows it twice as often
    LOOK_NS = 100_000            # a waiting thread polls that often
    FUTURE_NS = 1_000_000_000    # a time so far in the future was not read from a clock


cdef void note(Gate* gate) noexcept nogil:
    """There is a context, by now. Of several that are noted at once the last one counts."""
    cdef int64_t now = now_ns()
    cdef int64_t* word = &gate.activity.context_ns
    cdef int64_t known = loadi64(word)
    while not now <= known < now + <int64_t>FUTURE_NS and not cas64(<uint64_t*>word, <uint64_t>known, <uint64_t>now):
        known = loadi64(word)
    vgpu_ring(gate)


cdef public void vgpu_context_came(int device) noexcept nogil:
    """The driver has just made one there."""
    cdef uint32_t i
    if attached():
        for i in range(state().gate_count):
            if state().gates[i].device == device:
                note(&state().gates[i])


cdef public void vgpu_contexts_move(Gate* gate) noexcept nogil:
    """To another activity page, which knows of none."""
    note(gate)


cdef bint has_primary(const Gate* gate) noexcept nogil:
    cdef unsigned int flags
    cdef int active = 0
    return real_cuDevicePrimaryCtxGetState(gate.device, &flags, &active) == CUDA_SUCCESS and active


cdef public void vgpu_await_charge(Gate* gate) noexcept nogil:
    """Wait until all present contexts are charged, for as long as a server may be about to charge them."""
    cdef int64_t newest, began, now
    if not load32(&gate.primary_known) and has_primary(gate):
        note(gate)
        store32(&gate.primary_known, 1)  # after the note: a reader of this word reads the note, too
    newest = loadi64(&gate.activity.context_ns)
    if newest <= loadi64(&gate.grants.implicit_ns) or newest == loadi64(&gate.unanswered_ns):
        return
    began = now_ns()
    while loadi64(&gate.grants.implicit_ns) < newest:
        if load32(&state().stopping) or is_removed(gate):
            return
        now = now_ns()
        if now - began > PATIENCE_NS or now - max(began, loadi64(&gate.grants.alive_ns)) > SILENT_NS:
            storei64(&gate.unanswered_ns, newest)
            break
        futex_wait(&state().stopping, 0, now + LOOK_NS)
    vgpu_log(b"waited for the charge of contexts, ns, implicit", now_ns() - began, gate.grants.implicit_bytes)
