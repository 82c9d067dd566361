"""Launches into the driver's queue ahead of the lease, behind a word that the GPU waits for (logic/gate/prequeue.pxd).

The word is ``Slot.turn``: the newest epoch whose work may run. Each stream waits for it once per lease
(cuStreamWaitValue32, the same comparison as epoch_reached). The thread that first finds the lease begun advances the
word. It is a launching thread, the hook thread, or, if both are held up, the broker's relay. Advancing takes no call to
the driver. Reason: another thread of the application may hold the driver's lock while it waits for that very queue.

The hook queues ahead only in simple cases; else a launch waits in the gate. The mode is temporal. The process has one
vGPU, and the vGPU one process. No capture is open. Any thread can name the stream, and the stream is of the context in
which the word is registered. (Under MPS a killed client would leave its neighbours beside work that waits for ever.)
``vgpu_let_go`` ends the wait for the exit, a lost server, a removed vGPU and a context that dies. ``VGPU_AHEAD=0``
switches queueing ahead off.

Unless said otherwise the caller holds ``gate.lock``.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport getenv

from cython_ext.hook.gate.events cimport current_context
from cython_ext.hook.generated.driver cimport (
    real_cuMemHostGetDevicePointer_v2, real_cuMemHostRegister_v2, real_cuStreamWaitValue32_v2,
)
from cython_ext.hook.hook cimport (
    publish_prediction, vgpu_baton_over, vgpu_leave_behind, vgpu_log, vgpu_look, vgpu_mark, vgpu_mark_ahead,
    vgpu_publish_submission,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_SUCCESS, STREAM_OWN, WORD_NEW, WORD_NONE, WORD_READY, Gate,
    State, Stream, state,
)
from cython_ext.pages.layout cimport FOREVER_NS, GRANTS_STILL, MODE_TEMPORAL, Lease, Plan, epoch_reached
from cython_ext.logic.gate.prequeue cimport ahead_begins, ahead_release, ahead_submit, ahead_takes
from cython_ext.logic.gate.gate cimport GateState, lease_usable, plan_due_ns, plan_opens_ns
from cython_ext.logic.gate.plan cimport read_plan
from cython_ext.logic.gate.window cimport backlog_ns, marker_due
from cython_ext.native cimport cas32, futex_wait, load32, now_ns, store32

cdef enum:
    PAGE_BYTES = 4096
    HOST_REGISTER_DEVICEMAP = 2
    WAIT_VALUE_GEQ = 0
    SETTLE_LOOK_NS = 200_000     # the hook thread releases the queue; the wait finds that within this time


cdef bint word_ready(Gate* gate, const Stream* stream) noexcept nogil:
    """Whether the stream can wait for ``Slot.turn``. The first call registers the word in the stream's context, for the
    streams of that context alone. The registration ends with that context, even if streams elsewhere still wait."""
    cdef size_t page = <size_t>&gate.slot.turn & ~(<size_t>PAGE_BYTES - 1)
    cdef unsigned long long address = 0
    cdef const char* wish
    cdef int mode, result
    if gate.word_state == WORD_NEW and stream.context == current_context():
        gate.word_context = stream.context
        wish = getenv(b"VGPU_AHEAD")
        gate.word_state = WORD_NONE
        if wish == NULL or wish[0] != c'0':
            mode = relax()
            result = real_cuMemHostRegister_v2(<void*>page, PAGE_BYTES, HOST_REGISTER_DEVICEMAP)
            if (
                (result == CUDA_SUCCESS or result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
                and real_cuMemHostGetDevicePointer_v2(&address, <void*>page, 0) == CUDA_SUCCESS
            ):
                gate.word_address = address + (<size_t>&gate.slot.turn - page)
                gate.word_state = WORD_READY
            restore(mode)
        vgpu_log(b"word for work queued ahead: state, slot", gate.word_state, gate.slot_index)
    return gate.word_state == WORD_READY and stream.context == gate.word_context


cdef void advance(uint32_t* turn, uint32_t epoch) noexcept nogil:
    cdef uint32_t seen = load32(turn)
    while not epoch_reached(seen, epoch) and not cas32(turn, seen, epoch):
        seen = load32(turn)


cdef int64_t most_ns(const Gate* gate) noexcept nogil:
    """How much work may be queued ahead: at most the window, and at most half of the last lease's length."""
    return min(gate.window_ns, gate.length_ns / 2)


cdef bint possible(Gate* gate, const Stream* stream) noexcept nogil:
    return (
        gate.grants.mode == MODE_TEMPORAL
        and 0 < gate.length_ns < FOREVER_NS / 2
        and state().gate_count == 1
        and load32(&gate.activity.processes) == 1
        and load32(&state().captures) == 0
        and load32(&state().dying) == 0
        and stream.flags & STREAM_OWN == 0
        and not gate.untracked
        and not gate.lost
    )


cdef bint left_behind(Gate* gate) noexcept nogil:
    """Put an event behind the work of each stream. Reason: where two threads launch, the last marker is not the last
    in every stream. The streams cannot be queried once they wait for ``Slot.turn``. 0: not every stream got one."""
    cdef Stream* stream
    cdef bint done = 1
    cdef int mode = relax()
    cdef uint32_t i
    for i in range(gate.stream_count):
        stream = &gate.streams[i]
        if not stream.dirty:
            continue
        if stream.flags & STREAM_OWN or not vgpu_leave_behind(gate, stream):
            done = 0
            break
        stream.dirty = 0
    restore(mode)
    return done


cdef bint arm(Gate* gate, const Stream* stream) noexcept nogil:
    """Prepare for the first launch of a queue: events separate the work of the lease before, and the word is behind the
    epoch that is waited for. Where a marker may have come before its launch (``outrun``), only a query of the streams
    shows the drain of that lease. Streams that wait for the word cannot be queried. So the queue waits for the drain.
    """
    cdef uint32_t last = load32(&gate.slot.last_epoch)
    cdef uint32_t turn = load32(&gate.slot.turn)
    if gate.began_epoch != 0 or last == 0 or load32(&gate.submitting) or gate.outrun:
        return 0
    vgpu_mark(gate)
    if not ahead_begins(&gate.backlog) or not word_ready(gate, stream) or not left_behind(gate):
        return 0
    gate.turn = last + 1 + (last + 1 == 0)
    if epoch_reached(turn, gate.turn):
        return 0             # the queue was let go without a lease: only the next lease corrects the word
    if turn != last and not cas32(&gate.slot.turn, turn, last):
        return 0
    gate.over_markers = <int32_t>gate.backlog.count
    gate.ahead_stream = -1
    return 1


cdef bint held_back(Gate* gate, Stream* stream) noexcept nogil:
    """Make the stream wait for ``Slot.turn``, once per queue."""
    cdef int mode
    cdef bint done
    if stream.turn == gate.turn:
        return 1
    mode = relax()
    done = real_cuStreamWaitValue32_v2(stream.handle, gate.word_address, gate.turn, WAIT_VALUE_GEQ) == CUDA_SUCCESS
    restore(mode)
    if done:
        stream.turn = gate.turn
    else:
        gate.word_state = WORD_NONE
    return done


cdef public bint vgpu_queue_ahead(
    Gate* gate, int index, int64_t learned_ns, int64_t excess_ns, bint programmatic
) noexcept nogil:
    """Queue a launch without a lease into the stream at ``index``. 1: the launch may be submitted, and is counted.
    0: it must wait."""
    cdef Stream* stream = &gate.streams[index]
    cdef int64_t most = most_ns(gate)
    cdef bint turned = gate.ahead_stream != index
    vgpu_admit_release(gate)
    if load32(&gate.grants.flags) & GRANTS_STILL or not possible(gate, stream):
        return 0
    if not ahead_takes(&gate.ahead, &gate.backlog, learned_ns, excess_ns, most):
        return 0
    if not (word_ready(gate, stream) if gate.ahead.launches else arm(gate, stream)):
        return 0
    if marker_due(&gate.ahead.unmarked, turned, 0, programmatic, most):
        vgpu_mark_ahead(gate)
        if turned and gate.ahead.unmarked.launches:
            return 0
    if not held_back(gate, stream):
        return 0
    if gate.ahead.launches == 0:
        vgpu_log(b"queues ahead of epoch, behind ns", gate.turn, backlog_ns(&gate.backlog, now_ns()))
    gate.ahead_stream = index
    stream.dirty = 1
    ahead_submit(&gate.ahead, &gate.backlog, learned_ns, excess_ns)
    return 1


cdef void join(Gate* gate, int64_t now) noexcept nogil:
    """The work queued ahead is about to run: move it into the backlog."""
    gate.backlog.discard = not gate.lease_sampled
    ahead_release(&gate.ahead, &gate.backlog, now, epoch_reached(load32(&gate.slot.turn), gate.turn))
    gate.marked_stream = gate.ahead_stream
    gate.idle_since_ns = 0
    publish_prediction(gate)


cdef public void vgpu_release_ahead(Gate* gate, uint32_t epoch, int64_t now) noexcept nogil:
    """The lease of ``epoch`` has begun: release the work queued ahead. If another process of the vGPU has the baton
    now, the release comes later."""
    cdef uint32_t launches = gate.ahead.launches
    cdef int64_t work_ns = gate.ahead.work_ns
    if launches == 0 or vgpu_baton_over(gate, now) or not vgpu_publish_submission(gate, epoch, 0, now):
        return
    join(gate, now)
    # a lease that was returned and taken back is the one before: the word then advances to its successor's epoch
    advance(&gate.slot.turn, epoch if epoch_reached(epoch, gate.turn) else gate.turn)
    vgpu_log(b"released: launches, ns", launches, work_ns)


cdef public int64_t vgpu_turn_opens_ns(Gate* gate, const Plan* plan, int64_t now) noexcept nogil:
    """When the lease begins that work is queued ahead of, unless a GO comes before; FOREVER_NS: not known. Its due time
    goes into ``turn_due_ns``."""
    cdef GateState view
    gate.turn_due_ns = FOREVER_NS
    if gate.ahead.launches == 0:
        return FOREVER_NS
    vgpu_look(gate, now, &view)
    gate.turn_due_ns = plan_due_ns(plan, &view, 0)
    return plan_opens_ns(plan, &view)


cdef public void vgpu_open_turn(Gate* gate) noexcept nogil:
    """Advance the word alone, in the hook thread, while another thread has the lock. The backlog follows under the
    lock."""
    cdef GateState view
    cdef Plan plan
    cdef const Lease* lease
    cdef int64_t now = now_ns()
    cdef int i
    plan.current.epoch = plan.next.epoch = 0
    if gate.ahead.launches == 0 or vgpu_baton_over(gate, now) or not read_plan(gate.grants, &plan):
        return
    vgpu_look(gate, now, &view)
    for i in range(2):
        lease = &plan.current if i == 0 else &plan.next
        if (
            lease_usable(lease, &view) and epoch_reached(lease.epoch, gate.turn)
            and not epoch_reached(load32(&gate.slot.turn), lease.epoch)
        ):
            advance(&gate.slot.turn, lease.epoch)
            vgpu_log(b"opened without the lock: epoch, launches", lease.epoch, gate.ahead.launches)


cdef public void vgpu_give_turn(Gate* gate) noexcept nogil:
    """Advance the word alone, with or without a lease: the process ends, or no lease will come. The backlog follows
    under the lock."""
    if gate.ahead.launches:
        advance(&gate.slot.turn, gate.turn)


cdef public void vgpu_admit_release(Gate* gate) noexcept nogil:
    """Where the relay has advanced the word in a lease that is over now, the work runs. Move it into the backlog."""
    if gate.ahead.launches and epoch_reached(load32(&gate.slot.turn), gate.turn):
        vgpu_let_go(gate)


cdef public void vgpu_settle_ahead() noexcept nogil:
    """Wait for the lease that work is queued ahead of. The caller is about to call the driver, which would wait for
    that work and block every other thread meanwhile (cuMemFree, measured on an H200)."""
    cdef State* all = state()
    cdef Gate* gate
    cdef uint32_t change
    if all == NULL or all.gate_count != 1:
        return
    gate = &all.gates[0]
    while gate.ahead.launches and not all.stopping:
        change = load32(&gate.grants.change)
        if gate.ahead.launches:
            futex_wait(&gate.grants.change, change, now_ns() + SETTLE_LOOK_NS)


cdef public void vgpu_let_go(Gate* gate) noexcept nogil:
    """No lease will come for the work queued ahead, or the work may not wait for one: let it run."""
    if gate.ahead.launches == 0:
        return
    vgpu_log(b"let go: launches, ns", gate.ahead.launches, gate.ahead.work_ns)
    store32(&gate.slot.undrained, 1)
    join(gate, now_ns())
    advance(&gate.slot.turn, gate.turn)
