"""How a process gets its vGPU: a short conversation with the broker at cuInit (broker_rpc.pyx), two mapped pages, and
nothing kept open.

Everything an application can do wrong ends here, in one line on stderr and a CUDA error: it never runs without limits
by accident.
"""

from libc.errno cimport EACCES, ECONNREFUSED, ECONNRESET, ENOENT, EPERM, EPIPE, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport getenv
from libc.string cimport memcpy, memset, strcmp, strlen

from cython_ext.hook.hook cimport (
    vgpu_contexts_move, vgpu_give_turn, vgpu_let_go, vgpu_log, vgpu_memory_after_fork, vgpu_memory_moves,
    vgpu_place_books, vgpu_ring, vgpu_say, vgpu_set_for_driver, vgpu_stands_aside, vgpu_start_thread, vgpu_take_slot,
)
from cython_ext.hook.attach.cores cimport usable_cores
from cython_ext.hook.attach.mounted cimport is_mounted, mounted_directory, mounted_ids
from cython_ext.hook.attach.paths cimport append, find_by_name, runtime_directory, well_formed
from cython_ext.hook.attach.reply cimport Reply, vgpu_converse, vgpu_unreachable
from cython_ext.hook.state cimport (
    CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS, MAX_GATES, WORD_NEW, Gate, State, state,
    vgpu_state_address,
)
from cython_ext.hook.attach.visible cimport choose_devices, hides_all_devices
from cython_ext.pages.layout cimport (
    FOREVER_NS, MODE_SPATIAL, SLOT_RESERVED, ActivityPage, GrantsPage, Slot, TracedActivity,
)
from cython_ext.logic.meter.durations cimport durations_init
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release, lock_soon
from cython_ext.logic.gate.window cimport backlog_init
from cython_ext.logic.memory.pieces cimport PIECE_BYTES, pieces_for
from cython_ext.native cimport cas64, fence_all, futex_wait, load32, now_ns, store32, store64

cdef extern from *:
    """
    #include "hook/connect.h"
    void *vgpu_state_address;
    """

cdef extern from "hook/connect.h" nogil:
    bint vgpu_is_kept(const char* directory) noexcept
    bint vgpu_exists(const char* path) noexcept
    bint vgpu_listens(const char* path) noexcept
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset) noexcept
    int madvise(void* address, size_t size, int advice) noexcept
    int munmap(void* address, size_t size) noexcept
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
        MADV_WIPEONFORK
    void* MAP_FAILED

cdef enum:
    DURATION_BYTES = 1 << 20     # about 8,000 keys
    BROKER_COMES_NS = 10_000_000_000     # as long as vgpuctl waits for a node
    BROKER_LOOK_NS = 100_000_000
    MISSING_NS = 5_000_000_000   # a node that starts anew makes directories of vGPUs sooner
    LOCKED_NS = 50_000       # another thread has the lock: usually for a microsecond
    CORES_TO_SPARE = 4       # with fewer, a spinning thread takes the time of the thread that it waits for
    OBSERVES = 1             # State.observer
    OBSERVES_NOT = 2


# --- state

cdef bint make_state() noexcept nogil:
    """The mapping behind state(), made by whichever thread comes first; a child of fork finds it zeroed."""
    cdef void* memory
    if vgpu_state_address != NULL:
        return 1
    memory = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        return 0
    madvise(memory, sizeof(State), MADV_WIPEONFORK)
    if not cas64(<uint64_t*>&vgpu_state_address, 0, <uint64_t>memory):
        munmap(memory, sizeof(State))
    return 1


# --- attaching

cdef void take_slot(Gate* gate, ActivityPage* activity, const Reply* reply) noexcept nogil:
    """Take the slot in which this process reports from now on."""
    gate.slot_index = <uint32_t>reply.slot
    gate.fences = not fence_all()
    gate.slot = &activity.slots[reply.slot]
    gate.ring = NULL
    if reply.activity_bytes >= sizeof(TracedActivity):
        gate.ring = &(<TracedActivity*>activity).rings[reply.slot][0]


cdef inline uint32_t answering(ActivityPage* activity, const Reply* reply) noexcept nogil:
    """The epoch of the broker that answered: by its reply, or for an older broker by the page."""
    return <uint32_t>reply.broker_epoch if reply.broker_epoch else load32(&activity.broker_epoch)


cdef bint node_listens(const Gate* gate) noexcept nogil:
    """Whether the node listens, by the vGPU's directory. The environment is the program's, which may change it during a
    read. A container has no socket of the node: there the mounted directory stands for it."""
    cdef char[272] control
    cdef size_t root
    if is_mounted(gate.directory):
        return vgpu_is_kept(gate.directory)
    root = strlen(gate.directory) - strlen(b"/vgpus/") - strlen(gate.vgpu_id)
    memcpy(control, gate.directory, root)
    control[root] = 0
    return append(control, sizeof(control), b"/control.sock") and vgpu_listens(control)


cdef bint broker_comes(const Gate* gate, int reason) noexcept nogil:
    """Whether the broker did not answer because it and the GPU Server have ended. The node starts the next ones."""
    return (
        (reason == ENOENT or reason == ECONNREFUSED or reason == ECONNRESET or reason == EPIPE)
        and vgpu_exists(gate.directory) and node_listens(gate)
    )


cdef int attach_one(Gate* gate, const char* vgpu_id, bint observer, Reply* reply) noexcept nogil:
    cdef int reason = 0
    cdef int64_t until_ns = now_ns() + <int64_t>BROKER_COMES_NS
    cdef uint32_t unchanging = 0
    cdef void* table
    memset(gate, 0, sizeof(Gate))
    gate.probe = -1
    gate.marked_stream = -1
    gate.device = -1
    if not well_formed(vgpu_id):
        vgpu_say(b"VGPU_ID=", vgpu_id, b" is not a vGPU's id (vgpu- and eight hex digits): vgpuctl ls shows them")
        return CUDA_ERROR_NO_DEVICE
    memcpy(gate.vgpu_id, vgpu_id, strlen(vgpu_id) + 1)
    if not mounted_directory(gate.directory, sizeof(gate.directory), vgpu_id) and not (
        runtime_directory(gate.directory, sizeof(gate.directory))
        and append(gate.directory, sizeof(gate.directory), b"/vgpus/")
        and append(gate.directory, sizeof(gate.directory), vgpu_id)
    ):
        vgpu_say(b"VGPU_RUNTIME_DIR is too long", b"", b"")
        return CUDA_ERROR_OPERATING_SYSTEM
    while not vgpu_converse(
        gate, b"observer" if observer else b"process", -1, reply, &reason, &gate.grants, &gate.activity
    ):
        if reason == 0:
            vgpu_say(vgpu_id, b": ", reply.error)
            return CUDA_ERROR_NO_DEVICE
        if not broker_comes(gate, reason):
            return vgpu_unreachable(vgpu_id, gate.directory, reason)
        if now_ns() > until_ns:
            vgpu_say(
                vgpu_id, b": its broker has ended, and none has taken its place within 10 s: ", b"vgpuctl logs says why"
            )
            return CUDA_ERROR_OPERATING_SYSTEM
        futex_wait(&unchanging, 0, now_ns() + <int64_t>BROKER_LOOK_NS)
    gate.gpu_index = <int>reply.gpu_index
    memcpy(gate.gpu_uuid, reply.gpu_uuid, strlen(reply.gpu_uuid) + 1)
    gate.window_ns = gate.grants.window_ns
    gate.generation = gate.grants.generation
    gate.broker_epoch = answering(gate.activity, reply)
    backlog_init(&gate.backlog)
    if observer:
        return CUDA_SUCCESS
    if reply.slot < 0:
        vgpu_say(vgpu_id, b": its broker gave no slot", b"")
        return CUDA_ERROR_OPERATING_SYSTEM
    take_slot(gate, gate.activity, reply)
    gate.ledger = vgpu_place_books(gate.activity, gate.slot_index)
    store32(&gate.slot.baton, 1)
    gate.baton_ours = 1      # until the first read
    gate.baton_until_ns = FOREVER_NS
    table = mmap(NULL, DURATION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if table == MAP_FAILED or not durations_init(&gate.durations, table, DURATION_BYTES) or not vgpu_start_thread(gate):
        vgpu_say(
            vgpu_id, b": no memory or no thread is left for its gate: ", b"raise ulimit -v and ulimit -u, or the "
            b"limits of this container"
        )
        return CUDA_ERROR_OPERATING_SYSTEM
    vgpu_log(b"attached slot, generation", gate.slot_index, gate.generation)
    return CUDA_SUCCESS


cdef inline void set_if_given(const char* name, const char* value) noexcept nogil:
    if value[0]:
        vgpu_set_for_driver(name, value, 0)


cdef void set_mps(const Gate* gate, const Reply* reply) noexcept nogil:
    """Set the MPS daemon that the driver uses. Where the vGPU has none, set a directory that does not exist, so that no
    daemon takes the process."""
    cdef char[256] nowhere
    nowhere[0] = 0
    if reply.pipe_directory[0]:
        vgpu_set_for_driver(b"CUDA_MPS_PIPE_DIRECTORY", reply.pipe_directory, 0)
    else:
        append(nowhere, sizeof(nowhere), gate.directory)
        append(nowhere, sizeof(nowhere), b"/no-mps")
        vgpu_set_for_driver(b"CUDA_MPS_PIPE_DIRECTORY", nowhere, 0)
    set_if_given(b"CUDA_MPS_LOG_DIRECTORY", reply.log_directory)
    set_if_given(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", reply.active_thread_percentage)
    if reply.pipe_directory[0] and not reply.active_thread_percentage[0]:
        vgpu_set_for_driver(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", NULL, 0)   # all SMs, whatever its environment says
    set_if_given(b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", reply.pinned_memory_limit)
    set_if_given(b"CUDA_MPS_CLIENT_PRIORITY", reply.client_priority)


cdef inline bint is_attached(const Gate* gate, const char* vgpu_id) noexcept nogil:
    """Whether an earlier cuInit attached the gate, and failed for another vGPU of the same list. The process has its
    slot, and its hook thread runs."""
    return load32(&gate.thread_state) == 1 and strcmp(gate.vgpu_id, vgpu_id) == 0


cdef int too_long() noexcept nogil:
    vgpu_say(b"VGPU_ID is too long: at most 16 ids, separated by commas", b"", b"")
    return CUDA_ERROR_NO_DEVICE


cdef int find_meant(State* all, const char* ids) noexcept nogil:
    """``all.meant_ids``: ``ids`` with an id in the place of each name."""
    cdef char[64] one
    cdef char[64] vgpu_id
    cdef uint32_t count = 0
    cdef size_t size
    all.meant_ids[0] = 0
    while ids[0]:
        size = 0
        while ids[size] and ids[size] != c',':
            size += 1
        if count == MAX_GATES or size >= sizeof(one):
            return too_long()
        memcpy(one, ids, size)
        one[size] = 0
        if not well_formed(one):
            if not find_by_name(one, vgpu_id, sizeof(vgpu_id)):
                vgpu_say(
                    b"VGPU_ID=", one, b" is neither a vGPU's id (vgpu- and eight hex digits) nor the name of one of "
                    b"yours: vgpuctl ls shows them"
                )
                return CUDA_ERROR_NO_DEVICE
            memcpy(one, vgpu_id, strlen(vgpu_id) + 1)
        if count:
            append(all.meant_ids, sizeof(all.meant_ids), b",")
        append(all.meant_ids, sizeof(all.meant_ids), one)
        count += 1
        ids += size + (ids[size] == c',')
    return CUDA_SUCCESS


cdef int attach_all(State* all, const char* ids, bint observer) noexcept nogil:
    cdef Reply reply
    cdef char[64] vgpu_id
    cdef uint32_t count = 0
    cdef size_t size
    cdef bint known, spatial
    cdef int error
    while ids[0]:
        size = 0
        while ids[size] and ids[size] != c',':
            size += 1
        if count == MAX_GATES or size >= sizeof(vgpu_id):
            return too_long()
        memcpy(vgpu_id, ids, size)
        vgpu_id[size] = 0
        known = not observer and is_attached(&all.gates[count], vgpu_id)
        error = CUDA_SUCCESS
        if not known:
            error = attach_one(&all.views[count] if observer else &all.gates[count], vgpu_id, observer, &reply)
        if error != CUDA_SUCCESS:
            return error
        if not observer:
            spatial = strcmp(reply.mode, b"spatial") == 0
            if known:
                spatial = load32(&all.gates[count].grants.mode) == MODE_SPATIAL
            if spatial and (count or ids[size]):
                vgpu_say(
                    vgpu_id, b" is on a GPU in spatial mode, and a process has one MPS daemon: ", b"list vGPUs of "
                    b"temporal GPUs, or one alone"
                )
                return CUDA_ERROR_NO_DEVICE
            if not known:
                set_mps(&all.gates[count], &reply)
        count += 1
        ids += size + (ids[size] == c',')
    if observer:
        all.view_count = count
    else:
        all.gate_count = count
    return CUDA_SUCCESS


cdef int settle_ids(State* all, const char* ids, bint observer) noexcept nogil:
    """What VGPU_ID is now counts, unless a vGPU has admitted the process under another: the thread of that gate runs,
    and its slot is the process's until it ends."""
    cdef uint32_t i
    if strcmp(ids, all.vgpu_ids) == 0:
        return CUDA_SUCCESS
    for i in range(MAX_GATES):
        if load32(&all.gates[i].thread_state) == 1:
            if not observer:
                vgpu_say(
                    b"VGPU_ID is another than when ", all.gates[i].vgpu_id, b" admitted this program: start it again"
                )
            return CUDA_ERROR_NO_DEVICE
    if strlen(ids) >= sizeof(all.vgpu_ids):
        return too_long()
    memcpy(all.vgpu_ids, ids, strlen(ids) + 1)
    store32(&all.observer, all.observer & OBSERVES)
    return CUDA_SUCCESS


cdef public int vgpu_attach(bint observer) noexcept nogil:
    """Attach the process to the vGPUs in VGPU_ID, once; without it, to those of its container. What cuInit is to
    return; CUDA_SUCCESS also where there is no vGPU.

    ``observer``: pages only, no slot, for NVML before cuInit; a later cuInit attaches in full.
    """
    cdef const char* ids = getenv(b"VGPU_ID")
    cdef char[256] mounted
    cdef State* all
    cdef long cores
    cdef int error = CUDA_SUCCESS
    cdef int saved = errno
    if ids == NULL or ids[0] == 0:
        mounted_ids(mounted, sizeof(mounted))
        (&errno)[0] = saved
        ids = mounted
    if (ids[0] == 0 and state() == NULL) or (not observer and hides_all_devices()) or vgpu_stands_aside(observer):
        return CUDA_SUCCESS
    if not make_state():
        vgpu_say(
            b"VGPU_ID=", ids, b": no memory is left for the hook's state: raise ulimit -v, or the memory limit of this "
            b"container"
        )
        return CUDA_ERROR_OPERATING_SYSTEM
    all = state()
    lock_acquire(&all.attach_lock)
    if not all.started:
        error = settle_ids(all, ids, observer)
    if error == CUDA_SUCCESS and observer and all.observer == OBSERVES_NOT:
        error = CUDA_ERROR_NO_DEVICE
    elif error == CUDA_SUCCESS and ids[0] != 0 and not all.attached and not (observer and all.observer):
        vgpu_memory_after_fork()
        cores = usable_cores()
        all.spins = cores >= CORES_TO_SPARE
        vgpu_log(b"cores, spins", cores, all.spins)
        error = find_meant(all, ids)
        if error == CUDA_SUCCESS:
            error = attach_all(all, all.meant_ids, observer)
        if error == CUDA_SUCCESS and not observer:
            error = choose_devices(all)
        if observer:
            store32(&all.observer, OBSERVES if error == CUDA_SUCCESS else OBSERVES_NOT)
        elif error == CUDA_SUCCESS:
            store32(&all.attached, 1)
    lock_release(&all.attach_lock)
    (&errno)[0] = saved
    return error


cdef bint move(Gate* gate, ActivityPage* activity, const Reply* reply) noexcept nogil:
    """Move to another activity page: take the slot there, and copy the old one's words. The caller holds gate.lock.

    The old page stays mapped, and its mutex held: a thread may be reading it.
    """
    cdef Slot* before = gate.slot
    cdef Slot* slot = &activity.slots[reply.slot]
    cdef uint32_t i
    store32(&slot.baton, 1)
    store64(&slot.away_bytes, gate.away_bytes)
    store32(&slot.imported_pieces, <uint32_t>(pieces_for(gate.imported_bytes) / PIECE_BYTES))
    store32(&slot.where, gate.where)
    if not vgpu_take_slot(slot):
        return 0
    store32(&gate.generation, 0)
    vgpu_memory_moves(gate, activity, <uint32_t>reply.slot)
    take_slot(gate, activity, reply)
    vgpu_contexts_move(gate)
    gate.word_state = WORD_NEW   # the GPU does not see the new page's yet, and no stream waits for it
    for i in range(gate.stream_count):
        gate.streams[i].turn = 0
    slot.want_since_ns = before.want_since_ns
    slot.predicted_end_ns = before.predicted_end_ns
    slot.unpredicted = before.unpredicted
    slot.drained_ns = before.drained_ns
    store32(&slot.last_epoch, before.last_epoch)
    store32(&slot.drained_epoch, before.drained_epoch)
    store32(&slot.undrained, before.undrained)
    store32(&slot.want, before.want)
    vgpu_ring(gate)
    return 1


cdef void look_for_removal(Gate* gate, int reason) noexcept nogil:
    """No broker answers. A vGPU may be removed before its new server's grants page reaches this process. Only its
    directory shows that: the directory is gone, though the node is there, or only a mount still shows it."""
    if (reason != ENOENT and reason != ECONNREFUSED) or vgpu_is_kept(gate.directory) or not (
        vgpu_exists(gate.directory) or node_listens(gate)
    ):
        gate.missing_ns = 0
    elif gate.missing_ns == 0:
        gate.missing_ns = now_ns()
    elif now_ns() - gate.missing_ns > <int64_t>MISSING_NS and not load32(&gate.gone):
        store32(&gate.gone, 1)
        vgpu_log(b"the vGPU was removed", 0, 0)


cdef public bint vgpu_reattach(Gate* gate) noexcept nogil:
    """After a restart of the server: get its new grants page, for the process's present slot. If the broker died with
    the server, get a new activity page, too. After a restart of the broker alone, the broker confirms the slot, which
    its predecessor may not have reported to the server. 0: not yet, or there is nothing new.

    Only the hook thread may call this, without gate.lock. The old grants page stays mapped: a thread may be reading it.
    """
    cdef Reply reply
    cdef GrantsPage* grants = NULL
    cdef ActivityPage* activity = NULL
    cdef int reason = 0
    cdef bint elsewhere, done
    if not vgpu_converse(gate, b"process", gate.slot_index, &reply, &reason, &grants, &activity):
        gate.barred = reason == EACCES or reason == EPERM or strcmp(reply.code, b"not-yours") == 0
        look_for_removal(gate, reason)
        return 0
    gate.barred = 0
    gate.missing_ns = 0
    store32(&gate.gone, 0)
    gate.broker_epoch = answering(activity, &reply)
    # in the page that the gate has, the process's slot is active
    elsewhere = reply.slot >= 0 and load32(&activity.slots[reply.slot].state) == SLOT_RESERVED
    done = elsewhere or (reply.slot == gate.slot_index and grants.generation != gate.grants.generation)
    if done:
        while not lock_soon(&gate.lock):     # the thread that has it may be in the driver, behind work queued ahead
            vgpu_give_turn(gate)
            futex_wait(&gate.grants.change, load32(&gate.grants.change), now_ns() + LOCKED_NS)
        vgpu_let_go(gate)
        if elsewhere:
            done = move(gate, activity, &reply)
        if done:
            gate.grants = grants
            gate.gpu_index = <int>reply.gpu_index    # it may have moved
            gate.began_epoch = 0
            gate.lost = 0
            gate.reported = 0
        lock_release(&gate.lock)
    if not (done and elsewhere):
        munmap(activity, reply.activity_bytes)
    if not done:
        munmap(grants, sizeof(GrantsPage))
        return 0
    vgpu_log(b"re-attached slot, generation", gate.slot_index, grants.generation)
    return 1


cdef public void vgpu_look_again(Gate* view) noexcept nogil:
    """An observer's pages are those of a server before, or of the GPU where its vGPU was: it gets those of now. The old
    ones stay mapped: a thread may be reading them."""
    cdef Reply reply
    cdef GrantsPage* grants = NULL
    cdef ActivityPage* activity = NULL
    cdef int reason = 0, saved = errno
    if load32(&view.activity.generation) == view.generation:
        return
    lock_acquire(&state().attach_lock)
    if load32(&view.activity.generation) != view.generation:
        if vgpu_converse(view, b"observer", -1, &reply, &reason, &grants, &activity):
            view.activity = activity
            view.grants = grants
            view.gpu_index = <int>reply.gpu_index
            view.generation = grants.generation
    lock_release(&state().attach_lock)
    (&errno)[0] = saved
