"""The application's threads: their records and counters, whether they are in the driver, and at which vGPU's gate."""

from libc.stdint cimport UINT32_MAX, int64_t, uint32_t, uint64_t

from cython_ext.hook.gate.fastpath cimport announce
from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxGetDevice, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuStreamGetCtx,
)
from cython_ext.hook.hook cimport vgpu_captures_end_with, vgpu_capturing, vgpu_context_came
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, State, Thread, attached, state, vgpu_thread
from cython_ext.pages.layout cimport ActivityPage
from cython_ext.logic.meter.demand cimport waits_begin, waits_end
from cython_ext.logic.meter.steps cimport STEP_DECODE, STEP_PREFILL, steps_begin, steps_end
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.meter.meter cimport meter_promised_ns, meter_spent_ns, meter_turns, usage_settle
from cython_ext.logic.gate.window cimport backlog_busy_ns
from cython_ext.native cimport add32, add64, fence, load32, load64, now_ns, rarely, store32, store64

cdef extern from *:
    """
    #include "hook/hook_native.h"
    __thread void *vgpu_thread __attribute__((tls_model("initial-exec")));
    __thread int vgpu_may_cease __attribute__((tls_model("initial-exec")));
    """

cdef extern from "hook/hook_native.h" nogil:
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset) noexcept
    int madvise(void* address, size_t size, int advice) noexcept
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
        MADV_WIPEONFORK
    void* MAP_FAILED
    void vgpu_set_thread(void* record) noexcept
    ctypedef struct vgpu_thread_key:
        pass
    void vgpu_make_thread_key(vgpu_thread_key* key, void (*released)(void*) noexcept nogil) noexcept
    void vgpu_at_thread_exit(const vgpu_thread_key* key, void* record) noexcept

cdef enum:
    DEFAULT_HANDLES = 2              # 1 legacy, 2 the thread's own: every context has them
    OF_CONTEXT = 1 << 12             # turns such a handle into one that no stream has: no address is so low

cdef vgpu_thread_key thread_key      # under threads_lock until it is made


cdef void* current_context() noexcept nogil:
    cdef void* context = NULL
    real_cuCtxGetCurrent(&context)
    return context


cdef void leave_gate(Thread* thread) noexcept nogil:
    """Add the thread's counts to the gate that they were counted for. The caller holds ``threads_lock``."""
    if thread.gate != NULL:
        thread.gate.past_launches += thread.launches
        thread.gate.past_graph_launches += thread.graph_launches
        thread.gate.past_spent_ns += <uint64_t>meter_spent_ns(&thread.meter)
    store64(&thread.launches, 0)
    store64(&thread.graph_launches, 0)
    meter_turns(&thread.meter, <uint64_t>now_ns())
    thread.stream = NULL
    thread.gate = NULL


cdef void release_thread(void* record) noexcept nogil:
    """At the end of an application thread its record becomes free for the next one. A later destructor of the same
    thread that calls the hook gets another record."""
    cdef Thread* thread = <Thread*>record
    cdef State* all = state()
    vgpu_set_thread(NULL)
    store32(&thread.inside, 0)
    store32(&thread.calling, 0)
    vgpu_captures_end_with(thread)
    lock_acquire(&all.threads_lock)
    leave_gate(thread)
    store32(&thread.taken, 0)
    lock_release(&all.threads_lock)


cdef Thread* fresh_record(State* all) noexcept nogil:
    """A new record, now among ``all.threads``; NULL: no memory. The caller holds ``threads_lock``."""
    cdef Thread* thread
    thread = <Thread*>mmap(NULL, sizeof(Thread), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if thread == MAP_FAILED:
        return NULL
    madvise(thread, sizeof(Thread), MADV_WIPEONFORK)
    thread.next = all.threads
    fence()                          # a thread that walks the list needs no lock
    all.threads = thread
    return thread


cdef public Thread* vgpu_claim_thread() noexcept nogil:
    """This thread's record, made at its first launch (and anew in the child of a fork, where it was wiped)."""
    cdef State* all = state()
    cdef Thread* thread = <Thread*>vgpu_thread
    if thread != NULL and load32(&thread.taken):
        return thread
    lock_acquire(&all.threads_lock)
    thread = all.threads
    while thread != NULL and load32(&thread.taken):
        thread = thread.next
    if thread == NULL:
        thread = fresh_record(all)
    if thread == NULL:
        lock_release(&all.threads_lock)
        return NULL
    store32(&thread.taken, 1)
    vgpu_make_thread_key(&thread_key, release_thread)
    lock_release(&all.threads_lock)
    vgpu_set_thread(thread)
    vgpu_at_thread_exit(&thread_key, thread)
    return thread


cdef public Gate* vgpu_gate_here() noexcept nogil:
    """The gate of the device of the thread's current context; NULL if the process has no vGPU there."""
    cdef State* all = state()
    cdef int device = -1
    cdef unsigned int i
    if not attached() or all.stopping:
        return NULL
    if all.gate_count == 1:
        return &all.gates[0]
    if real_cuCtxGetDevice(&device) != CUDA_SUCCESS:
        return NULL
    for i in range(all.gate_count):
        if all.gates[i].device == device:
            return &all.gates[i]
    return NULL


cdef public Gate* vgpu_gate_of_stream(void* stream) noexcept nogil:
    """The gate of the stream's (normalised) device, which need not be that of the current context."""
    cdef void* context = NULL
    cdef Gate* gate
    if (
        not attached() or state().gate_count == 1 or <size_t>stream <= DEFAULT_HANDLES
        or real_cuStreamGetCtx(stream, &context) != CUDA_SUCCESS
        or real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS
    ):
        return vgpu_gate_here()
    gate = vgpu_gate_here()
    real_cuCtxPopCurrent_v2(&context)
    return gate


# --- several vGPUs in a process

cdef public void* vgpu_context_of_stream(void* stream) noexcept nogil:
    """The context of a stream (normalised) if it is not the current one, else NULL. Where the process has one vGPU, the
    result is NULL, since no caller needs the context."""
    cdef void* context = NULL
    if (
        not attached() or state().gate_count == 1 or <size_t>stream <= DEFAULT_HANDLES or vgpu_capturing(stream)
        or real_cuStreamGetCtx(stream, &context) != CUDA_SUCCESS or context == current_context()
    ):
        return NULL
    return context


cdef inline void* name_in_context(void* stream) noexcept nogil:
    """What ``Thread.stream`` is for a stream (normalised) where the process has several vGPUs. A default stream belongs
    to whichever context is current. The fast path does not ask for that context, so it must not know the stream."""
    return <void*>(<size_t>stream | OF_CONTEXT) if <size_t>stream <= DEFAULT_HANDLES else stream


cdef public Thread* vgpu_announce_in_context(void* stream, uint64_t tag) noexcept nogil:
    """``announce`` for a default stream of a process with several vGPUs: the driver is asked for the context."""
    cdef Thread* thread = <Thread*>vgpu_thread
    if thread == NULL or <size_t>stream > DEFAULT_HANDLES or not attached() or state().gate_count == 1:
        return NULL
    return announce(name_in_context(stream), tag) if thread.context == current_context() else NULL


cdef public void vgpu_know_stream(Gate* gate, Thread* thread, void* stream) noexcept nogil:
    """The gate knows that the stream has work: the thread's next launches there are let through by ``announce``. The
    caller holds ``gate.lock``."""
    thread.stream = stream if state().gate_count == 1 else name_in_context(stream)
    thread.context = current_context()
    thread.round = gate.round


cdef public void vgpu_context_turned() noexcept nogil:
    """After a change of the current context: the default stream of another context is not the one that is known."""
    cdef Thread* thread = <Thread*>vgpu_thread
    if thread != NULL and <size_t>thread.stream <= DEFAULT_HANDLES and thread.context != current_context():
        thread.stream = NULL


cdef public void vgpu_context_made(int device) noexcept nogil:
    """The process has made a context other than a device's primary one. From here on the hook asks the driver for the
    context of an allocation."""
    if attached():
        store32(&state().contexts, 1)
    vgpu_context_came(device)
    vgpu_context_turned()


# --- in the driver

cdef public unsigned int* vgpu_calling() noexcept nogil:
    """The counter that this thread advances while it is in the driver. Every call does so, except for launches, which
    the gate lets through (generate_hook.py). No fence: the hook thread reads it again later. NULL: the process has no
    vGPU."""
    cdef Thread* thread = <Thread*>vgpu_thread
    if rarely(thread == NULL or not load32(&thread.taken)):
        thread = vgpu_claim_thread() if attached() else NULL
    return NULL if thread == NULL else &thread.calling


cdef public void vgpu_begins_to_wait() noexcept nogil:
    """A call that waits for the GPU is about to be made (generate_hook.py)."""
    if attached():
        waits_begin(&state().waits, now_ns())


cdef public void vgpu_waited() noexcept nogil:
    """... and is over. With it a step may be."""
    cdef int64_t now
    if attached() and state().waits.threads:
        now = now_ns()
        waits_end(&state().waits, now)
        step_ends(now)


cdef public void vgpu_is_held_up() noexcept nogil:
    """The thread stops at a gate."""
    vgpu_begins_to_wait()
    waits_begin(&state().held_up, now_ns())


cdef public void vgpu_was_held_up() noexcept nogil:
    waits_end(&state().held_up, now_ns())
    if attached() and state().waits.threads:
        waits_end(&state().waits, now_ns())


# --- steps and prefills

cdef inline uint64_t spent_ns(const Thread* thread) noexcept nogil:
    """What the thread's launches took by themselves, under leases with and without an end."""
    return <uint64_t>meter_spent_ns(&thread.meter) + thread.tracked_ns


cdef public void vgpu_step_begins(Thread* thread) noexcept nogil:
    """The calling thread's first launch after a wait (``Steps.waited``) begins a step, or continues one."""
    steps_begin(&thread.steps, now_ns(), spent_ns(thread))


cdef void step_ends(int64_t now) noexcept nogil:
    """A wait for the GPU is over: count the step or the prefill that ended with it, against the vGPU's targets. The
    thread's next launch goes through the gate, which dates the next step."""
    cdef Thread* thread = <Thread*>vgpu_thread
    cdef Gate* gate = NULL if thread == NULL else thread.gate
    cdef ActivityPage* page
    cdef int64_t lasted_ns = 0
    cdef uint32_t tpot_us, ttft_us
    cdef int kind
    if gate == NULL:
        return
    tpot_us = load32(&gate.grants.tpot_us)
    ttft_us = load32(&gate.grants.ttft_us)
    if tpot_us == 0 and ttft_us == 0:
        thread.steps.began_ns = 0    # later targets do not judge it
        return
    page = gate.activity
    kind = steps_end(&thread.steps, now, spent_ns(thread), &lasted_ns)
    thread.stream = NULL
    if kind == STEP_DECODE and tpot_us != 0:
        add32(&page.tpot_attained if lasted_ns <= 1000 * <int64_t>tpot_us else &page.tpot_missed, 1)
        store32(&page.tpot_mean_us, moved(load32(&page.tpot_mean_us), lasted_ns))
    elif kind == STEP_PREFILL and ttft_us != 0:
        add32(&page.ttft_attained if lasted_ns <= 1000 * <int64_t>ttft_us else &page.ttft_missed, 1)
        store32(&page.ttft_last_us, moved(0, lasted_ns))


cdef inline uint32_t moved(uint32_t mean_us, int64_t lasted_ns) noexcept nogil:
    """A moving average with one value more, of microseconds; 0: there was none."""
    cdef int64_t lasted_us = min(lasted_ns / 1000, <int64_t>UINT32_MAX)
    return <uint32_t>(lasted_us if mean_us == 0 else (15 * <int64_t>mean_us + lasted_us) / 16)


cdef public bint vgpu_is_calling() noexcept nogil:
    """Whether any thread is in the driver."""
    cdef State* all = state()
    cdef bint found = 0
    cdef Thread* thread
    lock_acquire(&all.threads_lock)
    thread = all.threads
    while thread != NULL and not found:
        found = load32(&thread.calling) != 0
        thread = thread.next
    lock_release(&all.threads_lock)
    return found


# --- counting

cdef public void vgpu_turn_to(Gate* gate, Thread* thread) noexcept nogil:
    """From now on the thread counts for this gate. The caller holds ``gate.lock``."""
    if thread.gate != gate:
        lock_acquire(&state().threads_lock)
        leave_gate(thread)
        thread.gate = gate
        lock_release(&state().threads_lock)


cdef public void vgpu_count_launch(Gate* gate, Thread* thread) noexcept nogil:
    """One launch off the fast path. The caller holds ``gate.lock``."""
    vgpu_turn_to(gate, thread)
    thread.launches += 1


cdef public void vgpu_count_copy(Gate* gate, uint64_t size_bytes) noexcept nogil:
    """A copy between host and device."""
    add64(&gate.copies, 1)
    add64(&gate.copied_bytes, size_bytes)


cdef public void vgpu_publish_counts(Gate* gate) noexcept nogil:
    """Publish the counts in the slot. The caller holds ``gate.lock``."""
    cdef State* all = state()
    cdef uint64_t launches, graphs, spent_ns
    cdef int64_t promised_ns = 0
    cdef Thread* thread
    lock_acquire(&all.threads_lock)
    launches = gate.past_launches
    graphs = gate.past_graph_launches
    spent_ns = gate.past_spent_ns
    thread = all.threads
    while thread != NULL:
        if thread.gate == gate:
            launches += load64(&thread.launches)
            graphs += load64(&thread.graph_launches)
            spent_ns += <uint64_t>meter_spent_ns(&thread.meter)
            promised_ns += meter_promised_ns(&thread.meter)
        thread = thread.next
    lock_release(&all.threads_lock)
    gate.promised_ns = promised_ns
    usage_settle(&gate.usage, spent_ns, backlog_busy_ns(&gate.backlog), not gate.backlog.busy)
    store64(&gate.slot.busy_ns, gate.usage.used_ns)
    store64(&gate.slot.launches, launches)
    store64(&gate.slot.graph_launches, graphs)
    store64(&gate.slot.copies, load64(&gate.copies))
    store64(&gate.slot.copied_bytes, load64(&gate.copied_bytes))
