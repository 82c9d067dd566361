"""One process and its simulated GPUs: start-up, locks, its streams, and waiting for what they do."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, getenv, strtoul
from libc.string cimport memset, strcmp, strcpy, strlen, strncasecmp

from cython_ext.native cimport add32, load32, now_ns
from cython_ext.sim.cuda.driver cimport (
    CONTEXT_IS_DESTROYED, Context, CUresult, Device, Effect, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY,
    SUCCESS, Stream, drv_contexts, drv_serve, sim_sleep_until,
)
from cython_ext.sim.engine cimport sim_earliest
from cython_ext.sim.mps cimport MPS_CONNECTION_FAILED, SimServer, sim_mps_look
from cython_ext.sim.queues cimport sim_free_context, sim_has_room, sim_open_stream, sim_reached
from cython_ext.sim.share cimport SIM_MAX_GPUS, pthread_atfork, sim_enter, sim_map_all, sim_unlock
from cython_ext.sim.state cimport LIBRARY_CUDA, SIM_CONTEXTS, SIM_NOWHERE, SIM_QUEUE, SimContext, SimGpu


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t* m) noexcept
    int pthread_mutex_unlock(pthread_mutex_t* m) noexcept

cdef extern from *:
    """
    #include "sim/cuda/sim_native.h"
    static const char *const setting_names[3] = {
        "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    };
    __thread SimThread sim_thread;
    static pthread_mutex_t sim_process_mutex = PTHREAD_MUTEX_INITIALIZER;
    """
    pthread_mutex_t sim_process_mutex
    const char** setting_names

cdef extern from "<stdio.h>" nogil:
    int snprintf(char* text, size_t size, const char* form, ...) noexcept


cdef enum:
    FROZEN_LOOK_NS = 1_000_000
    POLL_NS = 50000             # how often to check whether another process has let it go on, at first ...
    POLL_MOST_NS = 1000000      # ... and after a long wait: 64 programs that wait would leave the host no time
    SPIN_NS = 5000              # a sleep shorter than this is not worth the system call

cdef SimGpu* gpus[16]           # all of the node
cdef Device devices[16]         # what CUDA_VISIBLE_DEVICES leaves, in its order
cdef int device_count
cdef CUresult init_result
cdef uint32_t initialised
cdef uint32_t forked
cdef Stream* streams
cdef Stream* unused
cdef uint32_t ids
cdef char[3][4096] settings
cdef bint[3] setting_there


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


cdef void note_settings() noexcept nogil:
    """Of MPS: read while the driver starts, and never again."""
    cdef const char* value
    cdef int i
    for i in range(3):
        value = getenv(setting_names[i])
        setting_there[i] = value != NULL and strlen(value) < sizeof(settings[0])
        if setting_there[i]:
            strcpy(settings[i], value)


cdef public const char* drv_setting(const char* name) noexcept nogil:
    """The value in the environment when the driver started; NULL: none."""
    cdef int i
    for i in range(3):
        if setting_there[i] and strcmp(name, setting_names[i]) == 0:
            return settings[i]
    return NULL


cdef public CUresult cuInit(unsigned int flags) noexcept nogil:
    global initialised, init_result, device_count
    cdef SimServer server
    if forked:
        return NOT_INITIALIZED
    if flags:
        return INVALID_VALUE
    pthread_mutex_lock(&sim_process_mutex)
    if not initialised:
        note_settings()
        device_count = choose_devices(sim_map_all(gpus, LIBRARY_CUDA))
        init_result = SUCCESS if device_count > 0 else NO_DEVICE
        sim_mps_look(&server)
        if server.number != 0 and not server.alive:
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


cdef public void drv_enter(SimGpu* gpu) noexcept nogil:
    """Lock the process and a GPU, which is then at the present."""
    pthread_mutex_lock(&sim_process_mutex)
    sim_enter(gpu)
    drv_serve(gpu)


cdef public void drv_leave(SimGpu* gpu) noexcept nogil:
    sim_unlock(gpu)
    pthread_mutex_unlock(&sim_process_mutex)


cdef public CUresult drv_begin(Context* context) noexcept nogil:
    """Lock the process and the context's GPU, which is then at the present. drv_end follows in any case. While the
    process is locked for a checkpoint, its calls wait here; where it was restored on another GPU, it goes there."""
    cdef SimGpu* gpu
    while True:
        drv_follow()
        gpu = context.gpu
        drv_enter(gpu)
        if context.gpu == gpu and gpu.contexts[context.slot].generation != context.generation:
            return CONTEXT_IS_DESTROYED     # this program closed the descriptor by which its context lives
        if context.gpu == gpu and not gpu.contexts[context.slot].frozen:
            return <CUresult>gpu.contexts[context.slot].error
        drv_leave(gpu)
        sim_sleep_until(now_ns() + FROZEN_LOOK_NS)


cdef public void drv_end(Context* context) noexcept nogil:
    drv_leave(context.gpu)


# -- restored on another GPU

cdef void follow(Context* context, SimContext* left) noexcept nogil:
    """Nothing of it was queued when it was checkpointed: its streams begin anew, and past work is reported as done."""
    cdef SimGpu* old = context.gpu
    cdef SimGpu* new = gpus[(left.moved_to - 1) % SIM_MAX_GPUS]
    cdef uint32_t slot = left.moved_slot % SIM_CONTEXTS, before = context.slot, number
    cdef Stream* stream = streams
    cdef int d
    sim_enter(old)
    drv_serve(old)
    sim_unlock(old)
    sim_enter(new)
    while stream != NULL:
        if stream.context == context:
            number = sim_open_stream(new, slot, stream.flags, stream.priority)
            if number == SIM_NOWHERE:
                new.contexts[slot].error = OUT_OF_MEMORY
            else:
                stream.gpu = new
                stream.slot = number
                stream.generation = new.streams[number].generation
        stream = stream.next
    sim_unlock(new)
    context.gpu = new
    context.slot = slot
    context.generation = new.contexts[slot].generation
    sim_enter(old)
    sim_free_context(old, before)
    sim_unlock(old)
    if devices[context.device].gpu != new:
        for d in range(device_count):
            if devices[d].gpu == new:
                devices[d].gpu = old
        devices[context.device].gpu = new


cdef public void drv_follow() noexcept nogil:
    """The restoring process may have put this process on other GPUs: its objects are of these from now on. Without
    locks."""
    cdef Context* context
    cdef SimContext* here
    pthread_mutex_lock(&sim_process_mutex)
    context = drv_contexts()
    while context != NULL:
        here = &context.gpu.contexts[context.slot]
        while load32(&here.moved_to):
            follow(context, here)
            here = &context.gpu.contexts[context.slot]
        context = context.next
    pthread_mutex_unlock(&sim_process_mutex)


# -- streams

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


# -- waiting

cdef CUresult wait_for(Context* context, SimGpu* gpu, uint32_t slot, uint32_t generation, uint64_t count,
                       Stream* room) noexcept nogil:
    """Sleep until `count` operations of a stream are done, or (room) its queue takes another one."""
    cdef CUresult result
    cdef int64_t at, now, pause = POLL_NS
    cdef bint done
    cdef uint64_t last
    while True:
        drv_enter(gpu)
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
        drv_leave(gpu)
        if result != SUCCESS or done:
            return result
        now = now_ns()
        # Nothing that takes time is before it: it waits for a host word, or for another process.
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
