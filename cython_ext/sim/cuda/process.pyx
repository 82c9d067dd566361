"""One process and its simulated GPUs: start-up, locks, waiting, and the thread that stands in for the GPU's own hand.

A GPU works on when nobody calls the driver. Its state does so by itself, being computed when somebody looks; but
words in this process's memory can only be written, watched and called from here. So a process that uses such
operations gets an *agent*, a thread that looks whenever the next of them can be due.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, getenv, strtoul
from libc.string cimport memset, strlen, strncasecmp

from cython_ext.native cimport add32, fence, futex_wait, futex_wake, load32, now_ns
from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, Device, EFFECT_EVENT, EFFECT_HOST, EFFECT_INTERVAL, EFFECT_NONE,
    EFFECT_REMOTE, EFFECT_WAIT, EFFECT_WRITE, Effect, Event, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, SUCCESS,
    Stream, WIDE_WORD, sim_sleep_until, sim_start_thread,
)
from cython_ext.sim.engine cimport sim_earliest, sim_held_back, sim_settle
from cython_ext.sim.mps cimport MPS_CONNECTION_FAILED, sim_mps_named, sim_mps_server
from cython_ext.sim.queues cimport sim_close_stream, sim_has_room, sim_reached
from cython_ext.sim.share cimport pthread_mutex_lock, pthread_mutex_unlock, sim_enter, sim_map_all, sim_unlock
from cython_ext.sim.state cimport OP_EXTERNAL, SIM_QUEUE, SimGpu, SimOp, SimStream, pthread_mutex_t, sim_op


cdef extern from *:
    """
    #include "sim/cuda/sim_native.h"
    __thread SimThread sim_thread;
    static pthread_mutex_t sim_process_mutex = PTHREAD_MUTEX_INITIALIZER;
    """
    pthread_mutex_t sim_process_mutex

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil) noexcept

cdef extern from "<stdio.h>" nogil:
    int snprintf(char* text, size_t size, const char* form, ...) noexcept


cdef enum:
    POLL_NS = 50000             # how often to look whether somebody else has let a stream go on, at first ...
    POLL_MOST_NS = 1000000      # ... and after a long wait: 64 programs that wait would leave the host no time
    POLL_OTHERS_NS = 250000     # the same, where it is another GPU that lets it go on
    POLLS = 8                   # of our own words, for one look at what the GPU has done meanwhile
    SPIN_NS = 5000              # a sleep shorter than this is not worth the system call
    HOST_BATCH = 16

ctypedef volatile uint64_t volatile_u64
ctypedef void (*HostFunction)(void* user) noexcept nogil
ctypedef void (*Callback)(void* stream, int status, void* user) noexcept nogil

cdef struct HostCall:
    void* function
    void* user
    bint callback           # of cuStreamAddCallback: it is told the stream and the result
    void* handle
    Stream* stream
    uint32_t generation
    uint64_t ordinal

# What the agent has to look after.
cdef struct Agenda:
    int64_t due_ns          # the earliest time at which something is known to be due; INT64_MAX: none
    bint word               # a stream waits for a word in memory,
    bint remote             # for another GPU,
    bint held               # or for what time alone does not tell

cdef SimGpu* gpus[16]           # all of the node
cdef Device devices[16]         # what CUDA_VISIBLE_DEVICES leaves, in its order
cdef int device_count
cdef CUresult init_result
cdef uint32_t initialised
cdef uint32_t forked
cdef Stream* streams
cdef Stream* unused
cdef uint32_t ids
cdef uint32_t agent_started
cdef uint32_t agent_word
cdef uint64_t agent_released    # operations that a word in memory, or another GPU, has let go on; under the locks


# -- start

cdef void in_child() noexcept nogil:
    """CUDA does not survive fork: the child is refused, as by the real driver."""
    global forked
    forked = 1


cdef bint names_uuid(const char* text, size_t length, SimGpu* gpu) noexcept nogil:
    """Whether text is GPU-… and a prefix of this GPU's UUID."""
    cdef char uuid[64]
    cdef unsigned char* u = gpu.uuid
    snprintf(uuid, sizeof(uuid),
             b"GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             <int>u[0], <int>u[1], <int>u[2], <int>u[3], <int>u[4], <int>u[5], <int>u[6], <int>u[7], <int>u[8],
             <int>u[9], <int>u[10], <int>u[11], <int>u[12], <int>u[13], <int>u[14], <int>u[15])
    return length > 4 and length <= strlen(uuid) and strncasecmp(text, uuid, length) == 0


cdef int choose_devices(int count) noexcept nogil:
    """CUDA_VISIBLE_DEVICES: indices or UUID prefixes; the first that names nothing, or repeats, ends the list."""
    cdef const char* at = getenv(b"CUDA_VISIBLE_DEVICES")
    cdef char* end
    cdef size_t length
    cdef uint32_t taken = 0
    cdef int chosen = 0, i
    if at == NULL:
        for i in range(count):
            devices[i].gpu = gpus[i]
        return count
    while at[0] != 0 and chosen < count:
        while at[0] == 32:
            at += 1
        length = 0
        while at[length] != 0 and at[length] != 44:
            length += 1
        i = <int>strtoul(at, &end, 10)
        if end == at or at[0] == 45 or (end[0] != 0 and end[0] != 44 and end[0] != 32):
            i = 0
            while i < count and not names_uuid(at, length, gpus[i]):
                i += 1
        if i >= count or taken >> i & 1:
            break
        taken |= <uint32_t>1 << i
        devices[chosen].gpu = gpus[i]
        chosen += 1
        at += length
        if at[0] == 44:
            at += 1
    return chosen


cdef public CUresult cuInit(unsigned int flags) noexcept nogil:
    global initialised, init_result, device_count
    if forked:
        return NOT_INITIALIZED
    if flags:
        return INVALID_VALUE
    pthread_mutex_lock(&sim_process_mutex)
    if not initialised:
        device_count = choose_devices(sim_map_all(gpus))
        init_result = SUCCESS if device_count > 0 else NO_DEVICE
        if sim_mps_named() != 0 and sim_mps_server() == 0:
            init_result = <CUresult>MPS_CONNECTION_FAILED
        pthread_atfork(NULL, NULL, in_child)
        initialised = 1
    pthread_mutex_unlock(&sim_process_mutex)
    return init_result


cdef public CUresult drv_ready() noexcept nogil:
    if not initialised or forked:
        return NOT_INITIALIZED
    return init_result


cdef public int drv_devices() noexcept nogil:
    return device_count


cdef public Device* drv_device(int index) noexcept nogil:
    return &devices[index] if 0 <= index < device_count else NULL


cdef public uint32_t drv_next_id() noexcept nogil:
    return add32(&ids, 1) + 1


# -- locks

cdef public void drv_lock() noexcept nogil:
    pthread_mutex_lock(&sim_process_mutex)


cdef public void drv_unlock() noexcept nogil:
    pthread_mutex_unlock(&sim_process_mutex)


cdef void enter(SimGpu* gpu) noexcept nogil:
    pthread_mutex_lock(&sim_process_mutex)
    sim_enter(gpu)
    serve(gpu, NULL, NULL)


cdef void leave(SimGpu* gpu) noexcept nogil:
    sim_unlock(gpu)
    pthread_mutex_unlock(&sim_process_mutex)


cdef public CUresult drv_begin(Context* context) noexcept nogil:
    """Lock the process and the context's GPU, which is then at the present. drv_end follows in any case."""
    enter(context.gpu)
    return <CUresult>context.gpu.contexts[context.slot].error


cdef public void drv_end(Context* context) noexcept nogil:
    leave(context.gpu)


# -- the process's own side of operations

cdef public Stream* drv_streams() noexcept nogil:
    return streams


cdef public Stream* drv_new_stream() noexcept nogil:
    """An empty one, in the list of this process's streams."""
    global streams, unused
    cdef Stream* stream = unused
    cdef Effect* effects
    if stream != NULL:
        unused = stream.next
        effects = stream.effects
        memset(stream, 0, sizeof(Stream))
        stream.effects = effects
    else:
        stream = <Stream*>calloc(1, sizeof(Stream))
        stream.effects = <Effect*>calloc(SIM_QUEUE, sizeof(Effect))
    stream.next = streams
    streams = stream
    return stream


cdef public void drv_drop_stream(Stream* stream) noexcept nogil:
    global streams, unused
    cdef Stream** link = &streams
    while link[0] != NULL and link[0] != stream:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = stream.next
        stream.mark = 0
        stream.next = unused
        unused = stream


cdef void deliver(Stream* stream) noexcept nogil:
    """Bring the process's memory up to what the GPU has finished in this stream."""
    cdef SimStream* shared = &stream.gpu.streams[stream.slot]
    cdef Effect* effect
    cdef SimOp* op
    cdef Event* event
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
    global agent_released
    cdef Stream* stream = streams
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
                agent_released += 1
                sim_settle(gpu)
                deliver(stream)
            if agenda != NULL:
                find_due(stream, agenda)
            if stream.closing and shared.head == shared.tail:
                sim_close_stream(gpu, stream.slot)
                drv_drop_stream(stream)
        stream = following
    return called


# -- waiting

cdef CUresult wait_for(Context* context, SimGpu* gpu, uint32_t slot, uint32_t generation, uint64_t count,
                       Stream* room) noexcept nogil:
    """Sleep until `count` operations of a stream are done, or (room) its queue takes another one."""
    cdef CUresult result
    cdef int64_t at, now, pause = POLL_NS
    cdef bint done
    cdef uint64_t last
    while True:
        enter(gpu)
        result = <CUresult>context.gpu.contexts[context.slot].error
        if room != NULL:
            done = sim_has_room(gpu, slot)
        else:
            done = sim_reached(gpu, slot, generation, count)
        at = 0
        if not done:
            # A full queue is refilled a quarter at a time.
            last = gpu.streams[slot].head + SIM_QUEUE / 4 if room != NULL else count - 1
            at = sim_earliest(gpu, slot, last, 4)
        leave(gpu)
        if result != SUCCESS or done:
            return result
        now = now_ns()
        # Nothing that takes time stands before it: it waits for a host word or somebody else's turn.
        if at <= now + SPIN_NS:
            at = now + pause
            pause = min(pause + (pause >> 4), <int64_t>POLL_MOST_NS)
        sim_sleep_until(at)


cdef public CUresult drv_wait(Context* context, SimGpu* gpu, uint32_t slot, uint32_t generation,
                              uint64_t count) noexcept nogil:
    return wait_for(context, gpu, slot, generation, count, NULL)


cdef public CUresult drv_wait_room(Stream* stream) noexcept nogil:
    """Called without locks by a thread whose launch found the queue full."""
    return wait_for(stream.context, stream.gpu, stream.slot, stream.generation, 0, stream)


# -- the agent

cdef void find_due(Stream* stream, Agenda* agenda) noexcept nogil:
    """What the first operation of this stream that needs the agent waits for."""
    cdef SimStream* shared = &stream.gpu.streams[stream.slot]
    cdef uint64_t i = shared.delivered
    cdef uint32_t kind
    cdef int64_t at
    while i < shared.tail:
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
    enter(gpu)
    if stream.generation == call.generation and gpu.streams[stream.slot].head == call.ordinal:
        sim_op(gpu, stream.slot, call.ordinal).released = 1
        sim_settle(gpu)
        serve(gpu, NULL, NULL)
    leave(gpu)


cdef bint word_has_come() noexcept nogil:
    """Whether one of our streams waits for a word that is there now. Without the lock that all processes share: nobody
    else can let that stream go on."""
    cdef Stream* stream
    cdef SimStream* shared
    cdef bint come = 0
    pthread_mutex_lock(&sim_process_mutex)
    stream = streams
    while stream != NULL and not come:
        shared = &stream.gpu.streams[stream.slot]
        if shared.head < shared.tail and stream.effects[shared.head % SIM_QUEUE].kind == EFFECT_WAIT:
            come = is_satisfied(&stream.effects[shared.head % SIM_QUEUE])
        stream = stream.next
    pthread_mutex_unlock(&sim_process_mutex)
    return come


cdef void rest(uint32_t word, const Agenda* agenda, int64_t poll_ns) noexcept nogil:
    """Until the agent is woken, something is due, a word has come, or somebody else may have let a stream go on."""
    cdef int64_t now = now_ns()
    cdef int64_t until = agenda.due_ns
    cdef int64_t at
    if agenda.remote:
        until = min(until, now + min(poll_ns, <int64_t>POLL_OTHERS_NS))
    elif agenda.held:
        until = min(until, now + poll_ns)
    elif agenda.word:
        until = min(until, now + POLLS * poll_ns)
    while now < until and load32(&agent_word) == word:
        at = min(until, now + poll_ns) if agenda.word else until
        if at > now + POLL_NS:
            futex_wait(&agent_word, word, at)
        else:
            sim_sleep_until(at)
        if agenda.word and word_has_come():
            return
        now = now_ns()


cdef void* run_agent(void* unused) noexcept nogil:
    """While nothing happens it looks less and less often: at last, after 1/256 of the time passed."""
    cdef HostCall calls[16]
    cdef Agenda agenda
    cdef int i, k, called
    cdef uint32_t word, woken = 0
    cdef uint64_t released = 0
    cdef int64_t poll_ns, quiet_since_ns = now_ns()
    agenda.remote = 0
    while True:
        word = load32(&agent_word)
        if word != woken or agent_released != released:
            quiet_since_ns = now_ns()
        woken, released = word, agent_released
        if agenda.remote:        # what others wait for is to be of now
            for i in range(device_count):
                enter(devices[i].gpu)
                leave(devices[i].gpu)
        agenda.due_ns = INT64_MAX
        agenda.word = agenda.remote = agenda.held = 0
        for i in range(device_count):
            pthread_mutex_lock(&sim_process_mutex)
            sim_enter(devices[i].gpu)
            called = serve(devices[i].gpu, calls, &agenda)
            leave(devices[i].gpu)
            for k in range(called):
                call_host(devices[i].gpu, &calls[k])
            if called:
                agenda.due_ns = 0
                quiet_since_ns = now_ns()
        poll_ns = max(<int64_t>POLL_NS, min((now_ns() - quiet_since_ns) >> 8, <int64_t>POLL_MOST_NS))
        rest(word, &agenda, poll_ns)


cdef public void drv_wake_agent() noexcept nogil:
    """An operation was queued that only this process can carry out. Under the locks."""
    global agent_started
    add32(&agent_word, 1)
    if not agent_started:
        agent_started = 1
        sim_start_thread(run_agent)
    else:
        futex_wake(&agent_word, 1)
