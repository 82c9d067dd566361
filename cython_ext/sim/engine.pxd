"""The engine: a discrete-event simulation of one GPU. Each caller that reads the state advances it to "now".

Pure: a function of the state and the time it is given. It reads no clock, takes no lock and knows no process.

* Streams are FIFO queues. The legacy stream and the blocking streams of its context wait for each other by the
  order of submission.
* SMs belong to one *group* at a time: a context, or all contexts of one MPS server. Groups with kernels take turns
  of ``slice_ns``; a switch costs ``switch_ns`` (``idle_switch_ns`` if the group that leaves has nothing running).
  Their values are an H100's: ``benchmarks/micro/slicing.py`` compares scenes of both.
* Within a group SMs are divided max-min fairly between contexts, each limited by its ``sm_cap``; within a context
  kernels get SMs by priority and age, the leftover policy of the hardware. A kernel runs at got/needed of its speed.
* Two copy engines, one for each direction, each serving one copy at a time, run beside the kernels.
"""

from libc.math cimport ceil
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.sim.queues cimport sim_set_busy, sim_next_busy, sim_free_context, sim_fail_context, sim_reached
from cython_ext.sim.state cimport (
    CONTEXT_ALIVE, CONTEXT_DYING, CONTEXT_FREE, OP_COPY_IN, OP_COPY_OUT, OP_EXTERNAL, OP_KERNEL, OP_MARK, OP_WAIT,
    SIM_CONTEXTS, SIM_GRIDS, SIM_NOWHERE, SIM_QUEUE, SIM_STREAMS, SIM_WINDOW_NS, SIM_WORDS, STREAM_LEGACY,
    STREAM_NONBLOCKING, SimContext, SimGpu, SimLoad, SimOp, SimStream, sim_context, sim_op, sim_owner, sim_stream,
)


cdef enum:
    SIM_STEPS = 1 << 22     # of one advance. More, or so many without progress, take numbers that make no sense
    SIM_STANDING_STEPS = 4096


cdef struct SimRunning:
    uint32_t stream
    uint32_t context
    SimOp* op
    double sms              # granted


# What runs from gpu.time_ns until until_ns.
cdef struct SimPlan:
    int64_t until_ns
    uint32_t kernels        # the first `running` of them run
    uint32_t running
    SimRunning kernel[128]
    SimOp* copy[2]


# -- what is done

cdef inline bint sim_held_back(SimGpu* gpu, uint32_t index, SimOp* op) noexcept nogil:
    """Whether the legacy stream's order holds the head of this stream back."""
    cdef SimStream* stream = &gpu.streams[index]
    cdef SimStream* other
    cdef uint32_t i
    if stream.flags & STREAM_NONBLOCKING:
        return False
    if not stream.flags & STREAM_LEGACY:
        i = sim_context(gpu, sim_owner(stream)).legacy
        if i == SIM_NOWHERE:
            return False
        other = sim_stream(gpu, i)
        return other.head < other.tail and sim_op(gpu, i, other.head).seq < op.seq
    i = sim_next_busy(gpu, 0)
    while i != SIM_NOWHERE:
        other = &gpu.streams[i]
        if (i != index and other.context == stream.context and not other.flags & STREAM_NONBLOCKING
                and sim_op(gpu, i, other.head).seq < op.seq):
            return True
        i = sim_next_busy(gpu, i + 1)
    return False


cdef inline bint sim_finished(SimGpu* gpu, SimOp* op) noexcept nogil:
    if op.kind == OP_WAIT:
        return sim_reached(gpu, op.wait_stream, op.wait_generation, op.wait_ordinal)
    if op.kind == OP_EXTERNAL:
        return op.released != 0
    return op.kind == OP_MARK or (op.start_ns != 0 and op.remaining_ns <= 0)


cdef inline void sim_empty(SimGpu* gpu, uint32_t index) noexcept nogil:
    gpu.streams[index].head = gpu.streams[index].tail
    sim_set_busy(gpu, index, False)


cdef inline bint sim_complete(SimGpu* gpu, uint32_t index) noexcept nogil:
    """Complete the head of a stream if it is finished."""
    cdef SimStream* stream = &gpu.streams[index]
    cdef SimOp* op = sim_op(gpu, index, stream.head)
    cdef uint32_t i
    if stream.tail - stream.head - 1 >= SIM_QUEUE:      # no queue can be so long, nor a busy one empty
        sim_empty(gpu, index)
        return True
    if not sim_finished(gpu, op) or sim_held_back(gpu, index, op):
        return False
    if op.failed != 0:
        sim_fail_context(gpu, sim_owner(stream), op.failed)
        sim_empty(gpu, index)
        return True
    if op.start_ns == 0:
        op.start_ns = gpu.time_ns
    op.end_ns = gpu.time_ns
    stream.head += 1
    if stream.head < stream.tail:
        return True
    sim_set_busy(gpu, index, False)
    if sim_context(gpu, sim_owner(stream)).state == CONTEXT_DYING:
        i = sim_next_busy(gpu, 0)
        while i != SIM_NOWHERE and gpu.streams[i].context != stream.context:
            i = sim_next_busy(gpu, i + 1)
        if i == SIM_NOWHERE:
            sim_free_context(gpu, sim_owner(stream))
    return True


cdef inline void sim_settle(SimGpu* gpu) noexcept nogil:
    """Complete everything that takes no more time, in any order that dependencies allow."""
    cdef bint changed = True
    cdef uint32_t i
    while changed:
        changed = False
        i = sim_next_busy(gpu, 0)
        while i != SIM_NOWHERE:
            while gpu.busy[i >> 6] >> (i & 63) & 1 and sim_complete(gpu, i):
                changed = True
            i = sim_next_busy(gpu, i + 1)


# -- what runs

cdef inline void sim_add_kernel(SimGpu* gpu, SimPlan* plan, uint32_t stream, SimOp* op) noexcept nogil:
    """Keep the candidates sorted by priority, then age: the order in which SMs are given."""
    cdef uint32_t at = plan.kernels
    cdef int priority = gpu.streams[stream].priority
    if at == SIM_GRIDS:
        return
    while at > 0 and (gpu.streams[plan.kernel[at - 1].stream].priority > priority
                      or (gpu.streams[plan.kernel[at - 1].stream].priority == priority
                          and plan.kernel[at - 1].op.seq > op.seq)):
        plan.kernel[at] = plan.kernel[at - 1]
        at -= 1
    plan.kernel[at].stream = stream
    plan.kernel[at].context = sim_owner(&gpu.streams[stream])
    plan.kernel[at].op = op
    plan.kernel[at].sms = 0
    plan.kernels += 1


cdef inline void sim_collect(SimGpu* gpu, SimPlan* plan) noexcept nogil:
    """The kernels that could run, and the copy that each engine serves."""
    cdef uint32_t i = sim_next_busy(gpu, 0)
    cdef SimOp* op
    cdef int engine
    plan.kernels = plan.running = 0
    plan.copy[0] = plan.copy[1] = NULL
    while i != SIM_NOWHERE:
        op = sim_op(gpu, i, gpu.streams[i].head)
        if op.kind in (OP_KERNEL, OP_COPY_IN, OP_COPY_OUT) and not sim_held_back(gpu, i, op):
            if op.kind == OP_KERNEL:
                sim_add_kernel(gpu, plan, i, op)
            else:
                engine = 0 if op.kind == OP_COPY_IN else 1
                if plan.copy[engine] == NULL:
                    plan.copy[engine] = op
                elif plan.copy[engine].start_ns == 0 and (op.start_ns != 0 or op.seq < plan.copy[engine].seq):
                    plan.copy[engine] = op
        i = sim_next_busy(gpu, i + 1)


cdef inline uint64_t sim_next_group(SimGpu* gpu, SimPlan* plan) noexcept nogil:
    """The group after the active one, in cyclic order of group numbers, among those with kernels."""
    cdef uint64_t first = 0, after = 0, group
    cdef uint32_t k
    for k in range(plan.kernels):
        group = gpu.contexts[plan.kernel[k].context].group
        if first == 0 or group < first:
            first = group
        if group > gpu.active_group and (after == 0 or group < after):
            after = group
    return after if after != 0 else first


cdef inline bint sim_choose_group(SimGpu* gpu, SimPlan* plan) noexcept nogil:
    """Give the SMs to a group; whether another one waits for them too."""
    cdef bint present = False, waiting = False
    cdef uint32_t k
    for k in range(plan.kernels):
        if gpu.contexts[plan.kernel[k].context].group == gpu.active_group:
            present = True
        else:
            waiting = True
    if waiting and gpu.time_ns >= gpu.switch_end_ns and (not present or gpu.time_ns >= gpu.slice_end_ns):
        gpu.switch_end_ns = gpu.time_ns
        if present:
            gpu.switch_end_ns += gpu.switch_ns
        elif gpu.active_group != 0:
            gpu.switch_end_ns += gpu.idle_switch_ns
        gpu.slice_end_ns = gpu.switch_end_ns + gpu.slice_ns
        gpu.active_group = sim_next_group(gpu, plan)
        waiting = False
        for k in range(plan.kernels):
            if gpu.contexts[plan.kernel[k].context].group != gpu.active_group:
                waiting = True
    return waiting


cdef inline void sim_share_sms(SimGpu* gpu, SimPlan* plan) noexcept nogil:
    """Divide the SMs: max-min fair between contexts up to their caps, then by order within each."""
    cdef double wanted[128]
    cdef double granted[128]
    cdef double free = gpu.sms, level
    cdef uint32_t k, c, open
    cdef SimRunning* kernel
    for k in range(plan.kernels):
        wanted[plan.kernel[k].context] = granted[plan.kernel[k].context] = 0
    for k in range(plan.kernels):
        c = plan.kernel[k].context
        if gpu.contexts[c].group == gpu.active_group:
            wanted[c] += plan.kernel[k].op.sms
            if wanted[c] > gpu.contexts[c].sm_cap:
                wanted[c] = gpu.contexts[c].sm_cap
    # Raise all levels together; a context that has enough leaves the rest to the others.
    while free > 1e-6:
        open = 0
        for k in range(plan.kernels):
            c = plan.kernel[k].context
            if sim_first_of(plan, k) and wanted[c] - granted[c] > 1e-6:
                open += 1
        if open == 0:
            break
        level = free / open
        for k in range(plan.kernels):
            c = plan.kernel[k].context
            if sim_first_of(plan, k) and wanted[c] - granted[c] > 1e-6:
                if wanted[c] - granted[c] < level:
                    free -= wanted[c] - granted[c]
                    granted[c] = wanted[c]
                else:
                    free -= level
                    granted[c] += level
    for k in range(plan.kernels):
        kernel = &plan.kernel[k]
        kernel.sms = kernel.op.sms if kernel.op.sms < granted[kernel.context] else granted[kernel.context]
        granted[kernel.context] -= kernel.sms


cdef inline bint sim_first_of(SimPlan* plan, uint32_t k) noexcept nogil:
    """Whether kernel k is the first of its context in the plan."""
    cdef uint32_t i
    for i in range(k):
        if plan.kernel[i].context == plan.kernel[k].context:
            return False
    return True


cdef inline int64_t sim_whole_ns(double ns) noexcept nogil:
    """Rounded up, but not for what is only an error of rounding itself."""
    cdef int64_t whole = <int64_t>ceil(ns - 1e-4)
    return whole if whole > 0 else 0


cdef inline void sim_plan(SimGpu* gpu, int64_t now, SimPlan* plan) noexcept nogil:
    """Decide what runs from gpu.time_ns on, and until when that stays true."""
    cdef bint waiting
    cdef uint32_t k
    cdef SimRunning* kernel
    cdef int64_t end
    sim_collect(gpu, plan)
    waiting = sim_choose_group(gpu, plan)
    plan.until_ns = (gpu.time_ns / SIM_WINDOW_NS + 1) * SIM_WINDOW_NS
    if now < plan.until_ns:
        plan.until_ns = now
    if plan.kernels and gpu.time_ns < gpu.switch_end_ns:
        if gpu.switch_end_ns < plan.until_ns:
            plan.until_ns = gpu.switch_end_ns
    elif plan.kernels:
        plan.running = plan.kernels
        if waiting and gpu.slice_end_ns < plan.until_ns:
            plan.until_ns = gpu.slice_end_ns
        sim_share_sms(gpu, plan)
        for k in range(plan.kernels):
            kernel = &plan.kernel[k]
            if kernel.sms <= 0:
                continue
            if kernel.op.start_ns == 0:
                kernel.op.start_ns = gpu.time_ns
            end = gpu.time_ns + sim_whole_ns(kernel.op.remaining_ns * kernel.op.sms / kernel.sms)
            if end < plan.until_ns:
                plan.until_ns = end
    for k in range(2):
        if plan.copy[k] != NULL:
            if plan.copy[k].start_ns == 0:
                plan.copy[k].start_ns = gpu.time_ns
            end = gpu.time_ns + sim_whole_ns(plan.copy[k].remaining_ns)
            if end < plan.until_ns:
                plan.until_ns = end


# -- time passes

cdef inline void sim_account(SimLoad* load, int64_t time_ns, int64_t spent_ns) noexcept nogil:
    cdef int64_t window = time_ns / SIM_WINDOW_NS
    if window != load.window:
        load.before_ns = load.now_ns if window == load.window + 1 else 0
        load.now_ns = 0
        load.window = window
    load.now_ns += spent_ns
    load.total_ns += spent_ns


cdef inline double sim_load_ratio(SimLoad* load, int64_t time_ns) noexcept nogil:
    """Part of the last whole window in which there was work (0 to 1)."""
    cdef int64_t window = time_ns / SIM_WINDOW_NS
    if window == load.window:
        return <double>load.before_ns / SIM_WINDOW_NS
    if window == load.window + 1:
        return <double>load.now_ns / SIM_WINDOW_NS
    return 0


cdef inline void sim_progress(SimGpu* gpu, SimPlan* plan) noexcept nogil:
    cdef int64_t spent = plan.until_ns - gpu.time_ns
    cdef uint32_t k
    cdef SimRunning* kernel
    cdef bint any_kernel = False
    for k in range(plan.running):
        kernel = &plan.kernel[k]
        if kernel.sms <= 0:
            continue
        any_kernel = True
        gpu.sm_ns += kernel.sms * spent
        gpu.contexts[kernel.context].sm_ns += kernel.sms * spent
        if sim_first_of(plan, k):
            sim_account(&gpu.contexts[kernel.context].load, gpu.time_ns, spent)
        kernel.op.remaining_ns -= spent * kernel.sms / kernel.op.sms
        if kernel.op.remaining_ns < 1e-3:
            kernel.op.remaining_ns = 0
    if any_kernel:
        sim_account(&gpu.load, gpu.time_ns, spent)
    for k in range(2):
        if plan.copy[k] != NULL:
            gpu.copy_ns[k] += spent
            plan.copy[k].remaining_ns -= spent
            if plan.copy[k].remaining_ns < 1e-3:
                plan.copy[k].remaining_ns = 0
    gpu.time_ns = plan.until_ns


cdef inline void sim_advance(SimGpu* gpu, int64_t now) noexcept nogil:
    """Bring the GPU to the time `now` (ns). A `now` in its past changes nothing but what takes no time."""
    cdef SimPlan plan
    cdef uint32_t steps = 0, standing = 0
    sim_settle(gpu)
    while gpu.time_ns < now:
        if sim_next_busy(gpu, 0) == SIM_NOWHERE or steps == SIM_STEPS or standing == SIM_STANDING_STEPS:
            gpu.time_ns = now
            return
        sim_plan(gpu, now, &plan)
        steps += 1
        standing = 0 if plan.until_ns > gpu.time_ns else standing + 1
        sim_progress(gpu, &plan)
        sim_settle(gpu)


cdef inline int64_t sim_earliest(SimGpu* gpu, uint32_t index, uint64_t ordinal, int depth) noexcept nogil:
    """No operation `ordinal` of this stream can be done before the answer: its queue run alone, at full rate.

    A bound, not a forecast: a waiting thread sleeps until then and asks again. Beside n competitors the rest shrinks
    by a fixed factor each time, so a wait costs a handful of wakes however long it is.
    """
    cdef SimStream* stream = sim_stream(gpu, index)
    cdef SimContext* context = sim_context(gpu, sim_owner(stream))
    cdef double total = 0
    cdef int64_t since = gpu.time_ns, other
    cdef uint64_t i = stream.head, end = min(stream.tail, stream.head + SIM_QUEUE)
    cdef SimOp* op
    while i <= ordinal and i < end:
        op = sim_op(gpu, index, i)
        if op.kind == OP_KERNEL and op.sms > context.sm_cap:
            total += op.remaining_ns * op.sms / context.sm_cap
        elif op.kind == OP_WAIT and depth > 0 and not sim_finished(gpu, op):
            other = sim_earliest(gpu, op.wait_stream, op.wait_ordinal - 1, depth - 1)
            if other > since + <int64_t>total:
                total = other - since
        else:
            total += op.remaining_ns
        i += 1
    return since + sim_whole_ns(total)
