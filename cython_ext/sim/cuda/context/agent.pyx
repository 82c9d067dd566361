"""What a simulated GPU does in this process's memory: it writes and watches words, and calls functions, when due.

A GPU works on when no thread calls the driver. The simulated state does so by itself, since each reader computes it.
But only this process can write and watch words in its memory, and call its functions. Two kinds of threads do that: the
threads that call the driver, and the *agent*. The agent is a thread that a process with such operations gets. It polls
whenever the next operation can be due.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t

from cython_ext.native cimport add32, fence, futex_wait, futex_wake, load32, now_ns
from cython_ext.sim.cuda.driver cimport (
    EFFECT_EVENT, EFFECT_HOST, EFFECT_INTERVAL, EFFECT_NONE, EFFECT_REMOTE, EFFECT_WAIT, EFFECT_WRITE, Effect, Event,
    SUCCESS, Stream, WIDE_WORD, drv_device, drv_devices, drv_drop_stream, drv_enter, drv_leave, drv_lock, drv_streams,
    drv_unlock, sim_sleep_until, sim_start_thread,
)
from cython_ext.sim.engine cimport sim_earliest, sim_held_back, sim_settle
from cython_ext.sim.queues cimport sim_close_stream, sim_reached
from cython_ext.sim.share cimport sim_enter
from cython_ext.sim.state cimport OP_EXTERNAL, SIM_QUEUE, SimGpu, SimOp, SimStream, sim_op


cdef enum:
    POLL_NS = 50000             # how often to check whether another process has let a stream go on, at first ...
    POLL_MOST_NS = 1000000      # ... and after a long wait: 64 programs that wait would leave the host no time
    POLL_OTHERS_NS = 250000     # the same, where it is another GPU that lets it go on
    POLLS = 8                   # of this process's own words, for one read of the GPU's progress
    HOST_BATCH = 16

ctypedef volatile uint64_t volatile_u64
ctypedef void (*HostFunction)(void* user) noexcept nogil
ctypedef void (*Callback)(void* stream, int status, void* user) noexcept nogil

cdef struct HostCall:
    void* function
    void* user
    bint callback           # of cuStreamAddCallback: it gets the stream and the result
    void* handle
    Stream* stream
    uint32_t generation
    uint64_t ordinal

# What the agent has to do.
cdef struct Agenda:
    int64_t due_ns          # the earliest time at which something is known to be due; INT64_MAX: none
    bint word               # a stream waits for a word in memory,
    bint remote             # for another GPU,
    bint held               # or for something that time alone does not show

cdef uint32_t started
cdef uint32_t woken
cdef uint64_t let_go            # operations that a word in memory, or another GPU, has let go on; under the locks


# -- effects

cdef void deliver(Stream* stream) noexcept nogil:
    """Bring the process's memory up to what the GPU has finished in this stream."""
    cdef SimStream* shared = &stream.gpu.streams[stream.slot]
    cdef Effect* effect
    cdef SimOp* op
    cdef Event* event
    if shared.head - shared.delivered > SIM_QUEUE:
        shared.delivered = shared.head
    while shared.delivered < shared.head:
        effect = &stream.effects[shared.delivered % SIM_QUEUE]
        if effect.kind != EFFECT_NONE:
            op = sim_op(stream.gpu, stream.slot, shared.delivered)
            if effect.kind == EFFECT_EVENT:
                event = <Event*>effect.event
                event.pending -= 1
                event.time_ns = op.end_ns
            elif effect.kind == EFFECT_INTERVAL:
                (<int64_t*>effect.address)[0] = op.start_ns
                (<int64_t*>effect.address)[1] = op.end_ns
            elif effect.kind == EFFECT_WRITE:
                fence()
                if effect.flags & WIDE_WORD:
                    (<uint64_t*>effect.address)[0] = effect.value
                else:
                    (<uint32_t*>effect.address)[0] = <uint32_t>effect.value
            effect.kind = EFFECT_NONE
        shared.delivered += 1


cdef bint is_satisfied(Effect* effect) noexcept nogil:
    """CU_STREAM_WAIT_VALUE_*: greater or equal (cyclic), equal, and, nor."""
    cdef uint64_t word, mask = <uint64_t>-1
    cdef int condition = effect.flags & 3
    if effect.flags & WIDE_WORD:
        word = (<volatile_u64*>effect.address)[0]
    else:
        word = load32(<uint32_t*>effect.address)
        mask = 0xffffffff
    if condition == 0:
        word = (word - effect.value) & mask
        return word <= mask >> 1
    if condition == 1:
        return word == (effect.value & mask)
    if condition == 2:
        return (word & effect.value) != 0
    return (~(word | effect.value) & mask) != 0


cdef bint may_release(Effect* effect) noexcept nogil:
    cdef SimGpu* other
    if effect.kind == EFFECT_WAIT:
        return is_satisfied(effect)
    if effect.kind == EFFECT_REMOTE:
        other = <SimGpu*>effect.event
        return sim_reached(other, <uint32_t>effect.flags, <uint32_t>effect.value, effect.address)
    return False


cdef int serve(SimGpu* gpu, HostCall* calls, Agenda* agenda) noexcept nogil:
    """Deliver effects and release streams of this process on one GPU; under both locks.

    With `calls` (the agent): the host functions that are due go there; their number is the answer, and what else needs
    a hand goes into `agenda`.
    """
    global let_go
    cdef Stream* stream = drv_streams()
    cdef SimStream* shared
    cdef SimOp* op
    cdef Effect* effect
    cdef Stream* following
    cdef int called = 0
    while stream != NULL:
        following = stream.next
        if stream.gpu == gpu:
            shared = &gpu.streams[stream.slot]
            deliver(stream)
            while shared.head < shared.tail:
                op = sim_op(gpu, stream.slot, shared.head)
                effect = &stream.effects[shared.head % SIM_QUEUE]
                if op.kind != OP_EXTERNAL or op.released or sim_held_back(gpu, stream.slot, op):
                    break
                if effect.kind == EFFECT_HOST and calls != NULL and called < HOST_BATCH:
                    calls[called].function = effect.function
                    calls[called].callback = effect.flags
                    calls[called].handle = <void*>effect.value
                    calls[called].user = <void*>effect.address
                    calls[called].stream = stream
                    calls[called].generation = stream.generation
                    calls[called].ordinal = shared.head
                    called += 1
                if not may_release(effect):
                    break
                op.released = 1
                let_go += 1
                sim_settle(gpu)
                deliver(stream)
            if agenda != NULL:
                find_due(stream, agenda)
            if stream.closing and shared.head == shared.tail:
                sim_close_stream(gpu, stream.slot)
                drv_drop_stream(stream)
        stream = following
    return called


cdef public void drv_serve(SimGpu* gpu) noexcept nogil:
    """Deliver effects and release streams of this process on one GPU; under both locks."""
    serve(gpu, NULL, NULL)


# -- the agent

cdef void find_due(Stream* stream, Agenda* agenda) noexcept nogil:
    """What the first operation of this stream that needs the agent waits for."""
    cdef SimStream* shared = &stream.gpu.streams[stream.slot]
    cdef uint64_t i = shared.delivered, end = min(shared.tail, shared.delivered + SIM_QUEUE)
    cdef uint32_t kind
    cdef int64_t at
    while i < end:
        kind = stream.effects[i % SIM_QUEUE].kind
        if kind in (EFFECT_WRITE, EFFECT_WAIT, EFFECT_HOST, EFFECT_REMOTE):
            at = sim_earliest(stream.gpu, stream.slot, i, 4)
            if at > stream.gpu.time_ns:
                agenda.due_ns = min(agenda.due_ns, at)
            elif kind == EFFECT_WAIT and i == shared.head:
                agenda.word = 1
            elif kind == EFFECT_REMOTE:
                agenda.remote = 1
            else:
                agenda.held = 1
            return
        i += 1


cdef void call_host(SimGpu* gpu, HostCall* call) noexcept nogil:
    cdef Stream* stream = call.stream
    if call.callback:
        (<Callback>call.function)(call.handle, SUCCESS, call.user)
    else:
        (<HostFunction>call.function)(call.user)
    drv_enter(gpu)
    if stream.generation == call.generation and gpu.streams[stream.slot].head == call.ordinal:
        sim_op(gpu, stream.slot, call.ordinal).released = 1
        sim_settle(gpu)
        serve(gpu, NULL, NULL)
    drv_leave(gpu)


cdef bint word_has_come() noexcept nogil:
    """Whether a stream of this process waits for a word that is there now. Without the lock that all processes share:
    no other process can let that stream go on."""
    cdef Stream* stream
    cdef SimStream* shared
    cdef bint come = 0
    drv_lock()
    stream = drv_streams()
    while stream != NULL and not come:
        shared = &stream.gpu.streams[stream.slot]
        if shared.head < shared.tail and stream.effects[shared.head % SIM_QUEUE].kind == EFFECT_WAIT:
            come = is_satisfied(&stream.effects[shared.head % SIM_QUEUE])
        stream = stream.next
    drv_unlock()
    return come


cdef void rest(uint32_t word, const Agenda* agenda, int64_t poll_ns) noexcept nogil:
    """Sleep until the agent is woken, an operation is due, a word has come, or another process may have let a stream go
    on."""
    cdef int64_t now = now_ns()
    cdef int64_t until = agenda.due_ns
    cdef int64_t at
    if agenda.remote:
        until = min(until, now + min(poll_ns, <int64_t>POLL_OTHERS_NS))
    elif agenda.held:
        until = min(until, now + poll_ns)
    elif agenda.word:
        until = min(until, now + POLLS * poll_ns)
    while now < until and load32(&woken) == word:
        at = min(until, now + poll_ns) if agenda.word else until
        if at > now + POLL_NS:
            futex_wait(&woken, word, at)
        else:
            sim_sleep_until(at)
        if agenda.word and word_has_come():
            return
        now = now_ns()


cdef void* run_agent(void* unused) noexcept nogil:
    """While nothing happens, the agent polls less and less often: at last, after 1/256 of the time passed."""
    cdef HostCall calls[16]
    cdef Agenda agenda
    cdef int i, k, called
    cdef uint32_t word, last = 0
    cdef uint64_t released = 0
    cdef int64_t poll_ns, quiet_since_ns = now_ns()
    agenda.remote = 0
    while True:
        word = load32(&woken)
        if word != last or let_go != released:
            quiet_since_ns = now_ns()
        last, released = word, let_go
        if agenda.remote:        # what others wait for is to be of now
            for i in range(drv_devices()):
                drv_enter(drv_device(i).gpu)
                drv_leave(drv_device(i).gpu)
        agenda.due_ns = INT64_MAX
        agenda.word = agenda.remote = agenda.held = 0
        for i in range(drv_devices()):
            drv_lock()
            sim_enter(drv_device(i).gpu)
            called = serve(drv_device(i).gpu, calls, &agenda)
            drv_leave(drv_device(i).gpu)
            for k in range(called):
                call_host(drv_device(i).gpu, &calls[k])
            if called:
                agenda.due_ns = 0
                quiet_since_ns = now_ns()
        poll_ns = max(<int64_t>POLL_NS, min((now_ns() - quiet_since_ns) >> 8, <int64_t>POLL_MOST_NS))
        rest(word, &agenda, poll_ns)


cdef public void drv_wake_agent() noexcept nogil:
    """An operation was queued that only this process can carry out. Under the locks."""
    global started
    add32(&woken, 1)
    if not started:
        started = 1
        sim_start_thread(run_agent)
    else:
        futex_wake(&woken, 1)
