"""The functions that the modules of the hook call in each other. The state that they share: state.pxd."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from cython_ext.hook.state cimport Prediction, Gate, Pass, Pooled, State, StoredPiece, Stream, Thread, state
from cython_ext.pages.layout cimport ActivityPage, Plan, Slot
from cython_ext.logic.memory.alloctable cimport Block
from cython_ext.logic.memory.physical cimport Properties
from cython_ext.logic.meter.durations cimport Duration, LaunchKey
from cython_ext.logic.gate.gate cimport GateState
from cython_ext.logic.meter.meter cimport Timing
from cython_ext.logic.memory.pools cimport PoolDue
from cython_ext.logic.gate.window cimport backlog_end_ns, backlog_unpredicted
from cython_ext.native cimport loadi64, rarely, store32, storei64


cdef extern:
    # symbol_lookup.pyx
    void* vgpu_wrapper_of(void* address) noexcept nogil
    bint vgpu_stands_aside(bint nvml) noexcept nogil
    # report.pyx
    void vgpu_say(const char* what, const char* detail, const char* advice) noexcept nogil
    void vgpu_log(const char* what, int64_t a, int64_t b) noexcept nogil
    # attach.pyx: attach reports a failure itself, and returns cuInit's result (CUDA_SUCCESS without VGPU_ID)
    int vgpu_attach(bint observer) noexcept nogil
    bint vgpu_reattach(Gate* gate) noexcept nogil
    void vgpu_look_again(Gate* view) noexcept nogil
    # environment.pyx
    bint vgpu_set_for_driver(const char* name, const char* value, bint stays) noexcept nogil
    int vgpu_lend_environment(bint* lent) noexcept nogil
    void vgpu_return_environment() noexcept nogil
    # partition.pyx
    int vgpu_check_partition(int error) noexcept nogil
    # monitor_thread.pyx
    bint vgpu_start_thread(Gate* gate) noexcept nogil
    bint vgpu_take_slot(Slot* slot) noexcept nogil           # only the hook thread may
    void vgpu_stop_at_exit() noexcept nogil
    # app_threads.pyx
    Thread* vgpu_claim_thread() noexcept nogil
    Gate* vgpu_gate_here() noexcept nogil
    Gate* vgpu_gate_of_stream(void* stream) noexcept nogil
    void* vgpu_context_of_stream(void* stream) noexcept nogil
    Thread* vgpu_announce_in_context(void* stream, uint64_t tag) noexcept nogil
    void vgpu_count_copy(Gate* gate, uint64_t size_bytes) noexcept nogil
    unsigned int* vgpu_calling() noexcept nogil
    bint vgpu_is_calling() noexcept nogil
    void vgpu_begins_to_wait() noexcept nogil
    void vgpu_waited() noexcept nogil
    void vgpu_is_held_up() noexcept nogil
    void vgpu_was_held_up() noexcept nogil
    void vgpu_step_begins(Thread* thread) noexcept nogil
    void vgpu_context_turned() noexcept nogil
    void vgpu_context_made(int device) noexcept nogil
    # ... the caller holds gate.lock
    void vgpu_know_stream(Gate* gate, Thread* thread, void* stream) noexcept nogil
    void vgpu_count_launch(Gate* gate, Thread* thread) noexcept nogil
    void vgpu_turn_to(Gate* gate, Thread* thread) noexcept nogil
    void vgpu_publish_counts(Gate* gate) noexcept nogil
    # gate.pyx
    int vgpu_enter(Pass* launch, void* stream, LaunchKey* key, int manner) noexcept nogil
    void vgpu_leave(Pass* launch, int result) noexcept nogil
    # prediction.pyx; the caller holds gate.lock
    const Duration* vgpu_recollect(Gate* gate, LaunchKey* key) noexcept nogil
    void vgpu_foresee(
        Gate* gate, LaunchKey* key, uint64_t after, bint counted, Prediction* foreseen
    ) noexcept nogil
    # doorbell.pyx
    void vgpu_ring(Gate* gate) noexcept nogil
    # ... the caller holds gate.lock
    void vgpu_want(Gate* gate, int64_t now) noexcept nogil
    bint vgpu_publish_submission(Gate* gate, uint32_t epoch, bint takes, int64_t now) noexcept nogil
    # transfers.pyx, and wrappers.pyx the last: before the call, as vgpu_enter does; ``own``: stream 0 is the thread's
    # own; ``waits``: LAUNCH_WAITS
    int vgpu_fill(
        Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes, uint64_t row_bytes
    ) noexcept nogil
    int vgpu_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil
    int vgpu_copy_between(
        Pass* work, void* stream, bint own, bint waits, uint64_t target, uint64_t source, uint64_t size_bytes
    ) noexcept nogil
    int vgpu_host_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil
    int vgpu_touching(Pass* work, void* stream, bint own, bint waits) noexcept nogil
    int vgpu_peer_copy(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil
    int vgpu_copy_2d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil
    int vgpu_copy_3d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil
    int vgpu_peer_copy_3d(Pass* work, void* stream, bint own, bint waits, const void* copy) noexcept nogil
    int vgpu_copy_batch(
        Pass* work, void* stream, bint own, bint waits, const void* targets, const void* sources,
        const size_t* sizes_bytes, size_t count
    ) noexcept nogil
    int vgpu_copy_3d_batch(
        Pass* work, void* stream, bint own, bint waits, const void* copies, size_t count
    ) noexcept nogil
    int vgpu_fabric_copies(
        Pass* work, void* stream, bint own, bint waits, const void* copies, size_t count
    ) noexcept nogil
    int vgpu_prefetch(Pass* work, void* stream, bint own, bint waits, uint64_t size_bytes) noexcept nogil
    int vgpu_prefetch_batch(
        Pass* work, void* stream, bint own, bint waits, const size_t* sizes_bytes, size_t count
    ) noexcept nogil
    int vgpu_grid(
        Pass* work, void* stream, bint own, bint waits, void* function, unsigned int width, unsigned int height
    ) noexcept nogil
    # leases.pyx; the caller holds gate.lock
    void vgpu_look(const Gate* gate, int64_t now, GateState* view) noexcept nogil
    uint32_t vgpu_spent_epoch(const Gate* gate) noexcept nogil
    void vgpu_begin(Gate* gate, const Plan* plan, int64_t now) noexcept nogil
    bint vgpu_end(Gate* gate, const Plan* plan, int64_t now) noexcept nogil
    void vgpu_take(Gate* gate, uint32_t epoch, int64_t work_ns) noexcept nogil
    bint vgpu_go_follows(const Gate* gate, const Plan* plan, const GateState* view) noexcept nogil
    bint vgpu_siblings_run(const Gate* gate) noexcept nogil
    # prequeue.pyx; the caller holds gate.lock
    bint vgpu_queue_ahead(
        Gate* gate, int stream, int64_t learned_ns, int64_t excess_ns, bint programmatic
    ) noexcept nogil
    void vgpu_release_ahead(Gate* gate, uint32_t epoch, int64_t now) noexcept nogil
    void vgpu_let_go(Gate* gate) noexcept nogil
    void vgpu_admit_release(Gate* gate) noexcept nogil
    void vgpu_give_turn(Gate* gate) noexcept nogil           # without gate.lock
    void vgpu_settle_ahead() noexcept nogil                  # without gate.lock
    void vgpu_open_turn(Gate* gate) noexcept nogil           # without gate.lock
    int64_t vgpu_turn_opens_ns(Gate* gate, const Plan* plan, int64_t now) noexcept nogil
    # baton.pyx; the caller holds gate.lock
    bint vgpu_baton(Gate* gate, const Plan* plan, int64_t now) noexcept nogil
    bint vgpu_baton_over(const Gate* gate, int64_t now) noexcept nogil
    void vgpu_wait_for_baton(Gate* gate, int64_t now) noexcept nogil
    void vgpu_wait_ahead(Gate* gate, int64_t now) noexcept nogil
    # track.pyx; the caller holds gate.lock
    int vgpu_stream_index(Gate* gate, void* handle) noexcept nogil
    void vgpu_mark(Gate* gate) noexcept nogil
    void vgpu_mark_ahead(Gate* gate) noexcept nogil
    void vgpu_mark_launch(Gate* gate, int index, void* handle) noexcept nogil
    void vgpu_collect(Gate* gate, int64_t now_ns) noexcept nogil
    bint vgpu_drained(Gate* gate, int64_t now_ns, bint anywhere) noexcept nogil
    bint vgpu_may_be_spared(const Gate* gate, int stream) noexcept nogil
    void vgpu_drained_as_predicted(Gate* gate, int64_t now_ns) noexcept nogil
    int vgpu_sample_begin(
        Gate* gate, const LaunchKey* key, int stream, bint empty, bint cold, int64_t least_ns
    ) noexcept nogil
    int vgpu_sample_metered(
        Gate* gate, const LaunchKey* key, int stream, const Timing* timing, bint first
    ) noexcept nogil
    bint vgpu_sample_end(Gate* gate, int sample, int stream) noexcept nogil
    void vgpu_sample_void(Gate* gate, int sample) noexcept nogil
    bint vgpu_leave_behind(Gate* gate, Stream* stream) noexcept nogil
    void vgpu_outdate_probe(Gate* gate) noexcept nogil
    void vgpu_leave_all_behind(Gate* gate) noexcept nogil
    # trace.pyx; the caller holds gate.lock
    void vgpu_trace_idle(Gate* gate, int64_t since_ns) noexcept nogil
    void vgpu_trace_busy(Gate* gate) noexcept nogil
    void vgpu_trace_launch(Gate* gate, const LaunchKey* key, int64_t lasted_ns, int64_t now) noexcept nogil
    void vgpu_trace_drain(Gate* gate, uint32_t epoch) noexcept nogil
    # teardown.pyx; the caller holds no lock
    void vgpu_forget(uint64_t handle) noexcept nogil
    void vgpu_graph_updated(void* graph) noexcept nogil
    void* vgpu_capture_begins(void* stream) noexcept nogil
    void vgpu_capture_began(void* stream, void* context) noexcept nogil
    void vgpu_capture_ended(void* stream, bint well) noexcept nogil
    void vgpu_captures_end_with(Thread* thread) noexcept nogil
    bint vgpu_capturing(void* stream) noexcept nogil
    void vgpu_stream_dies(void* stream) noexcept nogil
    void vgpu_context_dies(void* context) noexcept nogil
    void vgpu_context_died(void* context, bint dead) noexcept nogil
    void vgpu_green_context_died(void* context, void* primary, bint dead) noexcept nogil
    # pools.pyx
    void vgpu_settle_pools() noexcept nogil
    void vgpu_pool_found(void** pool, const void* place, int type) noexcept nogil
    void vgpu_trim_pools() noexcept nogil
    void vgpu_trim_drained_pools() noexcept nogil
    void vgpu_pool_attribute(void* pool, int which, void* value) noexcept nogil
    void vgpu_pool_set(void* pool, int which, const void* value) noexcept nogil
    void vgpu_pool_trimmed(size_t keep) noexcept nogil
    void vgpu_pooled(unsigned long long pointer, Pooled* pooled) noexcept nogil
    void vgpu_pooled_freed(const Pooled* pooled) noexcept nogil
    int vgpu_pool_begin(uint64_t pool, uint64_t size) noexcept nogil
    bint vgpu_pool_end(uint64_t pool, uint64_t size, bint limited) noexcept nogil
    # graphmemory.pyx
    bint vgpu_ask_graphs(const Gate* gate, uint64_t* taken, uint64_t* used) noexcept nogil
    void vgpu_trim_graphs(Gate* gate) noexcept nogil
    int vgpu_graph_goes(bint own, void* executable, void* stream, Gate** gate) noexcept nogil
    void vgpu_graph_went(Gate* gate) noexcept nogil
    int vgpu_graph_takes(bint own, void* executable, void* stream) noexcept nogil
    void vgpu_graph_dies(void* executable) noexcept nogil

    # implicit.pyx
    void vgpu_context_came(int device) noexcept nogil
    void vgpu_contexts_move(Gate* gate) noexcept nogil
    void vgpu_await_charge(Gate* gate) noexcept nogil
    # shared.pyx
    void vgpu_exported(uint64_t handle) noexcept nogil
    void vgpu_imported_mapped(Block* block, uint64_t end) noexcept nogil
    void vgpu_handle_gone(const Block* block) noexcept nogil
    # quota.pyx
    bint vgpu_fits(const Gate* gate, uint64_t size) noexcept nogil
    bint vgpu_card_has(const Gate* gate, uint64_t size) noexcept nogil
    bint vgpu_reserve_now(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    bint vgpu_reserve(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    bint vgpu_reserve_more(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    bint vgpu_pay(Gate* gate, uint32_t kind, const PoolDue* due, bint limited) noexcept nogil
    void vgpu_charge(Gate* gate, uint64_t size) noexcept nogil
    void vgpu_commit(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    void vgpu_cancel(Gate* gate, uint64_t size) noexcept nogil
    void vgpu_release(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    void vgpu_share(Gate* gate, uint32_t kind, uint64_t size) noexcept nogil
    void vgpu_memory_after_fork() noexcept nogil
    uint64_t vgpu_place_books(ActivityPage* page, uint32_t slot_index) noexcept nogil
    void vgpu_memory_moves(Gate* gate, ActivityPage* activity, uint32_t slot_index) noexcept nogil
    bint vgpu_memory_reading(
        const Gate* gate, uint64_t card_total, uint64_t card_free, uint64_t* total, uint64_t* free
    ) noexcept nogil
    # memory.pyx
    void vgpu_memory_of_context_died(void* context) noexcept nogil
    void vgpu_memory_inherited(void* context, void* heir) noexcept nogil
    void vgpu_memory_of_primary(int device, void* context) noexcept nogil
    void vgpu_describe(Gate* gate, uint32_t kind, uint64_t address, uint64_t size, Block* block) noexcept nogil
    int vgpu_memory_settle(
        Gate* gate, uint32_t kind, uint64_t reserved, int result, uint64_t address
    ) noexcept nogil
    int vgpu_allocate_managed(
        Gate* gate, unsigned long long* pointer, size_t size, unsigned int flags
    ) noexcept nogil
    void vgpu_note(const Block* block) noexcept nogil
    void vgpu_note_linear(Gate* gate, uint64_t reserved, uint64_t address, uint64_t size) noexcept nogil
    bint vgpu_memory_forget(uint64_t address, Block* block) noexcept nogil
    int vgpu_memory_freed(int result, bint known, const Block* block) noexcept nogil
    # swappable.pyx
    int vgpu_allocate_swappable(
        Gate* gate, unsigned long long* pointer, size_t size, void* context, uint32_t flags
    ) noexcept nogil
    void vgpu_doom(const Block* block) noexcept nogil
    int vgpu_free_swappable(const Block* block) noexcept nogil
    void vgpu_drop_swappable(const Block* block) noexcept nogil
    # stream_ordered.pyx
    int vgpu_allocate_ordered(
        Gate* gate, unsigned long long* pointer, size_t size, void* stream, bint own
    ) noexcept nogil
    int vgpu_free_ordered(const Block* block, void* stream, bint own) noexcept nogil
    void vgpu_drop_returned(Gate* gate, uint64_t keep) noexcept nogil
    void vgpu_drop_all_returned() noexcept nogil
    void vgpu_shrink_returned(uint64_t reserved) noexcept nogil
    bint vgpu_await_returned(Gate* gate, uint64_t size) noexcept nogil
    uint32_t vgpu_contexts_of_returned(void** contexts, uint32_t most) noexcept nogil
    void vgpu_returned_of_context_died(void* context, void* heir) noexcept nogil
    void vgpu_ordered_comes(const Block* block) noexcept nogil
    void vgpu_ordered_gone(const Block* block) noexcept nogil
    void vgpu_ordered_totals(uint64_t* used, uint64_t* used_peak, uint64_t* reserved_peak) noexcept nogil
    void vgpu_ordered_peaks_reset(bint reserved) noexcept nogil
    void* vgpu_context_named(void* stream) noexcept nogil
    # chunks.pyx
    int vgpu_furnish(Gate* gate, Block* chunk, unsigned long long* handle) noexcept nogil
    void vgpu_strip(Block* chunk) noexcept nogil
    uint64_t vgpu_place_of(const Gate* gate, Block* chunk) noexcept nogil
    int vgpu_make_chunks(Gate* gate, uint64_t size, const Properties* properties, uint64_t* address) noexcept nogil
    void vgpu_unmake_chunks(Gate* gate, uint64_t address, uint64_t size, uint32_t kind) noexcept nogil
    int vgpu_make_with_room(
        Gate* gate, uint64_t size, int (*make)(Gate*, void*) noexcept nogil, void* asked
    ) noexcept nogil
    # attributes.pyx
    bint vgpu_is_swappable_linear(uint64_t address) noexcept nogil
    # program_memory.pyx
    bint vgpu_create_physical(
        Gate* gate, unsigned long long* handle, size_t size, const void* properties, unsigned long long flags,
        int* result
    ) noexcept nogil
    bint vgpu_release_physical(uint64_t handle, int* result) noexcept nogil
    bint vgpu_retain_physical(unsigned long long* handle, uint64_t address, int* result) noexcept nogil
    bint vgpu_physical_properties(void* properties, uint64_t handle, int* result) noexcept nogil
    bint vgpu_map_physical(
        uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags, int* result
    ) noexcept nogil
    bint vgpu_unmap_physical(uint64_t address, size_t size, int* result) noexcept nogil
    bint vgpu_share_range(
        void* handle, uint64_t address, size_t size, int type, unsigned long long flags, int* result
    ) noexcept nogil
    int vgpu_check_map_infos(const void* infos, unsigned int count) noexcept nogil
    int vgpu_check_multicast(uint64_t handle) noexcept nogil
    void vgpu_physical_of_context_died(const void* context, void* heir) noexcept nogil   # under memory_lock
    # store.pyx
    bint vgpu_map_store(Gate* gate, int fd) noexcept nogil
    void vgpu_renew_store(Gate* gate) noexcept nogil
    bint vgpu_store(Gate* gate, const Block* chunk) noexcept nogil
    void vgpu_unstore(Gate* gate, const Block* chunk) noexcept nogil
    bint vgpu_stored(Gate* gate, uint64_t address, StoredPiece* found) noexcept nogil
    uint64_t vgpu_room_for_run(const Gate* gate, const uint8_t* memory) noexcept nogil
    uint64_t vgpu_pinned_blocks(Gate* gate) noexcept nogil
    bint vgpu_pin_next(Gate* gate, uint64_t owned) noexcept nogil
    void vgpu_reserve_no_more_than(Gate* gate, uint64_t owned) noexcept nogil
    void vgpu_forget_pins(Gate* gate) noexcept nogil
    void vgpu_keep(Gate* gate, const Block* chunk) noexcept nogil
    bint vgpu_is_clean(Gate* gate, uint64_t address) noexcept nogil
    uint64_t vgpu_overwrite(Gate* gate, uint64_t address) noexcept nogil
    void vgpu_note_copy(Gate* gate, uint64_t address) noexcept nogil
    # piece_hash.pyx
    void vgpu_load_hasher(Gate* gate, void* context) noexcept nogil
    void vgpu_hash_chunks(Gate* gate, void* context) noexcept nogil
    void vgpu_forget_hasher(Gate* gate, const void* context) noexcept nogil
    # pin_ahead.pyx
    void vgpu_pin_ahead(Gate* gate) noexcept nogil
    # residency_guard.pyx
    void vgpu_touch(Gate* gate) noexcept nogil
    void vgpu_touched(Gate* gate) noexcept nogil
    bint vgpu_await_room(Gate* gate, uint64_t size, int64_t since, int64_t* vain_ns) noexcept nogil
    bint vgpu_try_touch(Gate* gate) noexcept nogil
    # swap.pyx
    void* vgpu_context_for_copies(Gate* gate) noexcept nogil
    int64_t vgpu_move(Gate* gate) noexcept nogil             # without gate.lock; the hook thread


cdef inline Gate* gate_here() noexcept nogil:
    """``vgpu_gate_here``, on the spot where the process has one vGPU."""
    cdef State* all = state()
    if all != NULL and all.attached and all.gate_count == 1 and not all.stopping:
        return &all.gates[0]
    return vgpu_gate_here()


cdef inline void publish_prediction(Gate* gate) noexcept nogil:
    """Publish until when the GPU has work of this process, and whether that is known. A reader never finds a void end
    without ``unpredicted`` beside it. The caller holds gate.lock."""
    cdef bint unpredicted = gate.untracked or backlog_unpredicted(&gate.backlog)
    if unpredicted:
        store32(&gate.slot.unpredicted, 1)
    storei64(&gate.slot.predicted_end_ns, backlog_end_ns(&gate.backlog))
    if not unpredicted:
        store32(&gate.slot.unpredicted, 0)


cdef inline void charge_contexts(Gate* gate) noexcept nogil:
    """Before an allocation is reserved, charge what the vGPU's contexts have taken (implicit.pyx). The caller holds no
    lock."""
    if gate != NULL and rarely(
        gate.primary_known == 0 or loadi64(&gate.activity.context_ns) > loadi64(&gate.grants.implicit_ns)
    ):
        vgpu_await_charge(gate)
