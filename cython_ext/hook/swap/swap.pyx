"""A vGPU's memory leaves the card and comes back (--oversubscribe swap), as its grants page demands (GRANTS_AWAY).

The hook thread moves it while the vGPU gets no lease: chunk by chunk into the store (store.pyx) and back to the same
addresses. Meanwhile *touching* it has to wait. A call that reads, writes, makes or frees such memory without a lease
(copies between host and device, small fills, cuMemAlloc, cuMemFree) goes through ``vgpu_touch`` (residency_guard.pyx).

The hook thread first sets ``Gate.away``. Then it waits, for a bounded time, for all work of the contexts that use the
memory. From then on nothing uses it, and chunks go one after the other. The hook thread copies a chunk, and gives its
physical memory back as soon as the copy is complete. So chunks of a vGPU that leaves and of one that comes pass each
other, with little room on either side. Where neither the store nor the card has room just now, the move pauses and goes
on a millisecond later. Coming back, a chunk keeps its place in the store until the card has it whole.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.hook.generated.driver cimport (
    real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuCtxRecordEvent, real_cuEventCreate,
    real_cuEventDestroy_v2, real_cuEventQuery, real_cuEventRecord, real_cuMemcpyDtoHAsync_v2,
    real_cuMemcpyHtoDAsync_v2, real_cuMemsetD8Async, real_cuStreamCreate, real_cuStreamDestroy_v2,
    real_cuStreamSynchronize, real_cuStreamWaitEvent,
)
from cython_ext.hook.hook cimport (
    vgpu_contexts_of_returned, vgpu_drop_all_returned, vgpu_furnish, vgpu_hash_chunks, vgpu_is_clean, vgpu_keep,
    vgpu_log, vgpu_note_copy, vgpu_overwrite, vgpu_place_of, vgpu_renew_store, vgpu_ring, vgpu_room_for_run, vgpu_store,
    vgpu_stored, vgpu_strip, vgpu_trim_drained_pools,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_SWAPPABLE, CHUNK_AWAY, CHUNK_FIXED, CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, StoredPiece,
    is_removed, state,
)
from cython_ext.pages.layout cimport (
    GRANTS_AWAY, GRANTS_LOSS_RUN, GRANTS_PASSED, GRANTS_PRESENT, GRANTS_SWAPPABLE, KIND_DEVICE, MAX_PROCESSES,
    SLOT_AWAY, SLOT_FAILED_BACK, SLOT_KEPT_AWAY, SLOT_MOVING, SLOT_RESIDENT, SLOT_RESULT_SHIFT, SLOT_STUCK, Slot,
)
from cython_ext.logic.memory.alloctable cimport AllocTable, Block
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release, lock_soon
from cython_ext.logic.memory.physical cimport Mapping, Physical, PhysicalBook
from cython_ext.logic.memory.piece_hash cimport PART_BYTES, bytes_of, first_run, without_run
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.native cimport (
    exchange32, fence, futex_wait, futex_wake, load32, load64, now_ns, store32, store64, storei64,
)

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    COPY_LOOK_NS = 50_000
    POLL_NS = 100_000            # between two polls for threads that touch, and for the queues to drain
    DRAIN_NS = 2_000_000_000     # ... at most: a stream that waits for the host may wait for a thread held here
    AGAIN_NS = 500_000_000       # a move that was not possible is tried again after that
    GO_ON_NS = 1_000_000         # a move that waits for room goes on
    MOMENT_NS = 10_000_000       # ... and stays ready for so long, because the vGPU that leaves goes on, too
    STORE_NS = 5_000_000_000     # ... but not for longer than that: in the store, which may be growing
    CARD_NS = 1_000_000_000      # ... nor than that: on the card, where there should be some
    BATCH_CHUNKS = 8             # with copies, are copied together ...
    BATCH_MOST = 64              # ... and with those that need none
    CONTEXTS = 16                # that use a process's memory; one place more shows that there are more


# --- the door

cdef inline bint is_at_work(const Gate* gate) noexcept nogil:
    """Under a lease, or with work of one that is over."""
    return (
        load32(&gate.grants.open_epoch) != 0 or load32(&gate.slot.undrained) != 0 or load32(&gate.submitting) != 0
        or gate.began_epoch != 0 or gate.over_epoch != 0 or gate.ahead.launches != 0
    )


cdef void open_door(Gate* gate) noexcept nogil:
    exchange32(&gate.away, 0)
    futex_wake(&gate.away, INT_MAX)


cdef bint lock_door(Gate* gate) noexcept nogil:
    """From here on no thread begins to touch, nor launches. 0: a thread does just now. A launch that was decided under
    the gate's lock is counted as work, or reads ``Gate.away``."""
    cdef bint at_rest
    if not lock_soon(&gate.lock):
        return 0
    at_rest = not is_at_work(gate)
    if at_rest:
        exchange32(&gate.away, 1)
    lock_release(&gate.lock)
    return at_rest


cdef bint shut_door(Gate* gate) noexcept nogil:
    """0: a thread goes on touching, in the driver for a long time."""
    cdef int64_t until = now_ns() + DRAIN_NS
    fence()
    while load32(&gate.touching):
        if now_ns() > until or load32(&state().stopping):
            return 0
        futex_wait(&gate.away, 1, now_ns() + POLL_NS)
    return 1


cdef bint has_drained(void* context, int64_t until) noexcept nogil:
    """All work of the context, in a bounded time. A driver older than CUDA 12.5 cannot be asked."""
    cdef void* event = NULL
    cdef int result
    if real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return 0
    result = real_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if result == CUDA_SUCCESS:
        result = real_cuCtxRecordEvent(context, event)
        while result == CUDA_SUCCESS:
            result = real_cuEventQuery(event)
            if result != CUDA_ERROR_NOT_READY or now_ns() > until or load32(&state().stopping):
                break
            result = CUDA_SUCCESS
            futex_wait(&state().stopping, 0, now_ns() + POLL_NS)
        real_cuEventDestroy_v2(event)
    real_cuCtxPopCurrent_v2(&context)
    return result == CUDA_SUCCESS


cdef uint32_t add_context(void* context, void** contexts, uint32_t count) noexcept nogil:
    cdef uint32_t k = 0
    while k < count and contexts[k] != context:
        k += 1
    if context != NULL and k == count and count <= CONTEXTS:
        contexts[count] = context
        count += 1
    return count


cdef uint32_t add_contexts(const Gate* gate, const AllocTable* table, void** contexts, uint32_t count) noexcept nogil:
    cdef uint64_t i
    for i in range(table.capacity):
        if table.blocks[i].address and table.blocks[i].flags & BLOCK_SWAPPABLE:
            if &state().gates[table.blocks[i].flags & BLOCK_GATE] == gate:
                count = add_context(<void*>table.blocks[i].aux, contexts, count)
    return count


cdef uint32_t add_contexts_of_program(const PhysicalBook* book, void** contexts, uint32_t count) noexcept nogil:
    cdef const Physical* physical
    cdef const Mapping* mapping
    cdef uint64_t i
    for i in range(book.handles.capacity):
        if book.handles.blocks[i].address == 0:
            continue
        physical = <const Physical*>book.handles.blocks[i].aux
        count = add_context(physical.context, contexts, count)
        mapping = physical.mappings
        while mapping != NULL:
            count = add_context(mapping.context, contexts, count)
            mapping = mapping.next
    return count


cdef uint32_t add_contexts_of_streams(Gate* gate, void** contexts, uint32_t count) noexcept nogil:
    """Memory that the program maps is used from any of them. A thread that has the lock launches just now."""
    cdef uint32_t i
    if not lock_soon(&gate.lock):
        return count
    for i in range(gate.stream_count):
        if gate.streams[i].handle != NULL:
            count = add_context(gate.streams[i].context, contexts, count)
    lock_release(&gate.lock)
    return count


cdef uint32_t add_contexts_of_returned(void** contexts, uint32_t count) noexcept nogil:
    cdef void* found[17]
    cdef uint32_t i
    for i in range(vgpu_contexts_of_returned(found, CONTEXTS + 1)):
        count = add_context(found[i], contexts, count)
    return count


cdef uint32_t contexts_of(Gate* gate, void** contexts) noexcept nogil:
    """Those that made, mapped or may use memory that can leave the card; CONTEXTS + 1: more than that."""
    cdef uint32_t count
    cdef bint program
    lock_acquire(&state().memory_lock)
    count = add_contexts(gate, &state().allocations, contexts, 0)
    count = add_contexts(gate, &state().doomed, contexts, count)
    count = add_contexts_of_program(&state().physical, contexts, count)
    program = state().physical.handles.count != 0 or load64(&state().ordered_bytes) != 0
    lock_release(&state().memory_lock)
    count = add_contexts_of_returned(contexts, count)
    return add_contexts_of_streams(gate, contexts, count) if program else count


cdef public void* vgpu_context_for_copies(Gate* gate) noexcept nogil:
    """A context that uses the memory; NULL: there is none, or there are too many to know."""
    cdef void* contexts[17]
    cdef uint32_t count = contexts_of(gate, contexts)
    return contexts[0] if 0 < count <= CONTEXTS else NULL


# --- moving, under chunks_lock

cdef enum Outcome:
    DONE                     # all of it is where it is to be
    WAITS                    # for others to leave
    FULL                     # there should be room
    FAILED


cdef struct Batch:
    # chunks whose copies are under way
    uint32_t count
    uint32_t copied          # of these, chunks with a copy
    uint64_t clean_bytes     # of these, what is not copied
    uint64_t[64] indexes     # in Gate.chunks
    void* event              # behind the copies


cdef struct Mover:
    # one go of the hook thread, in a context that is current
    void* stream             # of the copies; NULL: nothing had room yet
    void* fills              # stream of the fills; NULL: there was none yet
    void* filled             # event behind the fills that the next copies need
    uint64_t at              # index of the next chunk
    Batch[2] batches         # one is filled while the other is copied


cdef inline bint succeeds(Gate* gate, int result) noexcept nogil:
    """Keeps the result that fails a move."""
    if result != CUDA_SUCCESS:
        gate.move_result = result
    return result == CUDA_SUCCESS


cdef bint open_mover(Gate* gate, Mover* mover) noexcept nogil:
    return mover.stream != NULL or (
        succeeds(gate, real_cuEventCreate(&mover.batches[0].event, CU_EVENT_DISABLE_TIMING))
        and succeeds(gate, real_cuEventCreate(&mover.batches[1].event, CU_EVENT_DISABLE_TIMING))
        and succeeds(gate, real_cuStreamCreate(&mover.stream, CU_STREAM_NON_BLOCKING))
    )


cdef inline bint open_fills(Gate* gate, Mover* mover) noexcept nogil:
    return mover.fills != NULL or (
        succeeds(gate, real_cuEventCreate(&mover.filled, CU_EVENT_DISABLE_TIMING))
        and succeeds(gate, real_cuStreamCreate(&mover.fills, CU_STREAM_NON_BLOCKING))
    )


cdef void quiesce(Mover* mover) noexcept nogil:
    """Nothing that the mover has begun uses any memory from here on."""
    if mover.fills != NULL:
        real_cuStreamSynchronize(mover.fills)
    if mover.stream != NULL:
        real_cuStreamSynchronize(mover.stream)


cdef void close_mover(Mover* mover) noexcept nogil:
    cdef int i
    for i in range(2):
        if mover.batches[i].event != NULL:
            real_cuEventDestroy_v2(mover.batches[i].event)
    if mover.filled != NULL:
        real_cuEventDestroy_v2(mover.filled)
    if mover.fills != NULL:
        real_cuStreamDestroy_v2(mover.fills)
    if mover.stream != NULL:
        real_cuStreamDestroy_v2(mover.stream)


cdef Block* next_chunk(Gate* gate, Mover* mover, bint away) noexcept nogil:
    """The next chunk that is swapped out, or is not; NULL: there is none."""
    cdef Block* chunk
    while mover.at < gate.chunks.capacity:
        chunk = &gate.chunks.blocks[mover.at]
        if chunk.address and (chunk.flags & CHUNK_AWAY != 0) == away and chunk.flags & CHUNK_FIXED == 0:
            return chunk
        mover.at += 1
    return NULL


cdef int copy(Gate* gate, uint64_t place, uint8_t* stored, uint64_t size, bint out, void* stream) noexcept nogil:
    gate.swap_copies += 1
    gate.swap_copied_bytes += size
    if out:
        return real_cuMemcpyDtoHAsync_v2(stored, place, size, stream)
    return real_cuMemcpyHtoDAsync_v2(place, stored, size, stream)


cdef int copy_parts(
    Gate* gate, uint64_t place, uint8_t* stored, uint64_t parts, bint out, void* stream
) noexcept nogil:
    """Begin the copies of these parts of a piece. Parts that follow each other are one copy."""
    cdef int result = CUDA_SUCCESS
    cdef uint64_t first, count = first_run(parts, &first), at
    while count and result == CUDA_SUCCESS:
        at = first * PART_BYTES
        result = copy(gate, place + at, stored + at, count * PART_BYTES, out, stream)
        parts = without_run(parts, first, count)
        count = first_run(parts, &first)
    return result


cdef int copy_out(
    Gate* gate, const Block* chunk, uint64_t place, void* stream, uint64_t* copied_bytes
) noexcept nogil:
    """Begin the copies of the chunk's pieces that are not clean."""
    cdef StoredPiece stored
    cdef uint64_t at = 0, piece, parts
    cdef int result = CUDA_SUCCESS
    while result == CUDA_SUCCESS and at < chunk.bytes:
        piece = chunk.address + at
        if not vgpu_is_clean(gate, piece):
            if not vgpu_stored(gate, piece, &stored):
                return CUDA_ERROR_NOT_FOUND
            parts = vgpu_overwrite(gate, piece)
            copied_bytes[0] += bytes_of(parts)
            result = copy_parts(gate, place + at, stored.memory, parts, 1, stream)
        at += PIECE_BYTES
    return result


cdef uint64_t run_with_zeros(Gate* gate, uint64_t address, uint64_t end) noexcept nogil:
    """How many bytes from ``address`` on, and before ``end``, are pieces of which parts left as zeros."""
    cdef StoredPiece stored
    cdef uint64_t size = 0
    while address + size < end and vgpu_stored(gate, address + size, &stored) and stored.parts != UINT64_MAX:
        size += PIECE_BYTES
    return size


cdef bint fill_zeros(Gate* gate, const Block* chunk, uint64_t place, Mover* mover) noexcept nogil:
    """Begin to fill the chunk's pieces of which parts left as zeros. The copies that follow wait for that. Fills have a
    stream of their own. Reason: the driver fills by a kernel, which may wait for a turn of its context. In a turn, all
    fills that are queued run."""
    cdef uint64_t at = 0, size
    cdef bint well = 1, filled = 0
    while well and at < chunk.bytes:
        size = run_with_zeros(gate, chunk.address + at, chunk.address + chunk.bytes)
        if size:
            well = open_fills(gate, mover) and succeeds(gate, real_cuMemsetD8Async(place + at, 0, size, mover.fills))
            filled = 1
        at += max(size, <uint64_t>PIECE_BYTES)
    if well and filled:
        well = succeeds(gate, real_cuEventRecord(mover.filled, mover.fills))
        well = well and succeeds(gate, real_cuStreamWaitEvent(<uint64_t>mover.stream, <uint64_t>mover.filled, 0))
    return well


cdef uint64_t whole_run(Gate* gate, uint64_t address, uint64_t end, const StoredPiece* first) noexcept nogil:
    """How many bytes from ``address`` on, and before ``end``, are one copy: pieces that left whole and are neighbours
    in the store."""
    cdef StoredPiece stored
    cdef uint64_t size = PIECE_BYTES, most = min(end - address, vgpu_room_for_run(gate, first.memory))
    while size < most and vgpu_stored(gate, address + size, &stored):
        if stored.parts != UINT64_MAX or stored.memory != first.memory + size:
            break
        size += PIECE_BYTES
    return size


cdef int copy_in(
    Gate* gate, const Block* chunk, uint64_t place, void* stream, uint64_t* copied_bytes
) noexcept nogil:
    """Begin the copies of the chunk's parts that were copied out."""
    cdef StoredPiece stored
    cdef uint64_t at = 0, size, end = chunk.address + chunk.bytes
    cdef int result = CUDA_SUCCESS
    while result == CUDA_SUCCESS and at < chunk.bytes:
        if not vgpu_stored(gate, chunk.address + at, &stored):
            return CUDA_ERROR_NOT_FOUND
        if stored.parts == UINT64_MAX:
            size = whole_run(gate, chunk.address + at, end, &stored)
            copied_bytes[0] += size
            result = copy(gate, place + at, stored.memory, size, 0, stream)
        else:
            size = PIECE_BYTES
            copied_bytes[0] += bytes_of(stored.parts)
            result = copy_parts(gate, place + at, stored.memory, stored.parts, 0, stream)
        at += size
    return result


cdef bint copy_chunk(Gate* gate, Block* chunk, bint out, Mover* mover, Batch* batch) noexcept nogil:
    """Begin its copies."""
    cdef uint64_t place = vgpu_place_of(gate, chunk), copied_bytes = 0
    cdef int result
    if place == 0:
        return 0
    if out:
        result = copy_out(gate, chunk, place, mover.stream, &copied_bytes)
    elif not fill_zeros(gate, chunk, place, mover):
        return 0
    else:
        result = copy_in(gate, chunk, place, mover.stream, &copied_bytes)
    batch.copied += copied_bytes != 0
    batch.clean_bytes += chunk.bytes - copied_bytes
    return succeeds(gate, result)


cdef bint has_copied(Gate* gate, const Batch* batch) noexcept nogil:
    cdef int result = real_cuEventQuery(batch.event)
    while result == CUDA_ERROR_NOT_READY:
        if load32(&state().stopping):
            return 0
        futex_wait(&state().stopping, 0, now_ns() + COPY_LOOK_NS)
        result = real_cuEventQuery(batch.event)
    return succeeds(gate, result)


cdef inline void count_away(Gate* gate, int64_t bytes) noexcept nogil:
    gate.away_bytes += bytes
    store64(&gate.slot.away_bytes, gate.away_bytes)


cdef void settle_out(Gate* gate, Batch* batch, bint well) noexcept nogil:
    """The copies are complete, or are not."""
    cdef Block* chunk
    cdef uint64_t at
    cdef uint32_t i
    for i in range(batch.count):
        chunk = &gate.chunks.blocks[batch.indexes[i]]
        if not well:
            vgpu_keep(gate, chunk)
            continue
        at = 0
        while at < chunk.bytes:
            vgpu_note_copy(gate, chunk.address + at)
            at += PIECE_BYTES
        vgpu_strip(chunk)
        chunk.flags |= CHUNK_AWAY
        count_away(gate, chunk.bytes)
    if well and batch.count:
        gate.clean_bytes += batch.clean_bytes
    batch.count = 0


cdef void settle_in(Gate* gate, Batch* batch, bint well) noexcept nogil:
    cdef Block* chunk
    cdef uint32_t i
    for i in range(batch.count):
        chunk = &gate.chunks.blocks[batch.indexes[i]]
        if well:
            chunk.flags &= ~<uint32_t>CHUNK_AWAY
            vgpu_keep(gate, chunk)
        else:
            vgpu_strip(chunk)
            count_away(gate, chunk.bytes)
    batch.count = 0


cdef bint may_come(const Gate* gate, uint64_t size) noexcept nogil:
    """Whether the vGPU may have so much more of what can be moved on the card, while it comes."""
    cdef const Slot* slot
    cdef uint64_t limit = load64(&gate.grants.present_bytes), here = size, owned
    cdef int i
    if limit == 0 or gate.open or gate.lost or is_removed(gate):
        return 1
    for i in range(MAX_PROCESSES):
        slot = &gate.activity.slots[i]
        owned = load64(&slot.committed_bytes[KIND_DEVICE])
        here += owned - min(owned, load64(&slot.away_bytes))
    return here <= limit


cdef int prepare(Gate* gate, Block* chunk, bint out) noexcept nogil:
    """Room for it where it goes: in the store, or on the card."""
    cdef unsigned long long handle
    cdef int64_t began_ns
    cdef int result
    if out:
        return DONE if vgpu_store(gate, chunk) else FULL
    if not may_come(gate, chunk.bytes):
        return WAITS
    count_away(gate, -<int64_t>chunk.bytes)
    began_ns = now_ns()
    result = vgpu_furnish(gate, chunk, &handle)
    gate.mapping_ns += now_ns() - began_ns
    if result != CUDA_SUCCESS:
        count_away(gate, chunk.bytes)
        if result == CUDA_ERROR_OUT_OF_MEMORY:
            return FULL
        gate.move_result = result
        return FAILED
    chunk.aux = handle
    return DONE


cdef int fill(Gate* gate, Mover* mover, Batch* batch, bint out) noexcept nogil:
    """Begin the copies of some chunks. DONE: there is none left."""
    cdef Block* chunk
    cdef int outcome = DONE
    batch.copied, batch.clean_bytes = 0, 0
    while batch.copied < BATCH_CHUNKS and batch.count < BATCH_MOST:
        chunk = next_chunk(gate, mover, not out)
        if chunk == NULL:
            break
        outcome = prepare(gate, chunk, out)
        if outcome != DONE:
            break
        batch.indexes[batch.count] = mover.at
        batch.count += 1
        mover.at += 1
        if not open_mover(gate, mover) or not copy_chunk(gate, chunk, out, mover, batch):
            outcome = FAILED
            break
    if mover.stream != NULL and batch.count and not succeeds(gate, real_cuEventRecord(batch.event, mover.stream)):
        outcome = FAILED
    return outcome


cdef bint has_arrived(Gate* gate, Mover* mover, const Batch* batch) noexcept nogil:
    """0: its copies failed, or the process ends; then nothing uses their places any more."""
    cdef int64_t began_ns = now_ns()
    cdef bint well = has_copied(gate, batch)
    if not well:
        quiesce(mover)
    gate.copying_ns += now_ns() - began_ns
    return well


cdef void settle(Gate* gate, Batch* batch, bint out, bint well) noexcept nogil:
    if out:
        settle_out(gate, batch, well)
    else:
        settle_in(gate, batch, well)


cdef bint waits_a_moment(const Gate* gate, uint32_t flags) noexcept nogil:
    """For the vGPUs that leave meanwhile. 0: the room does not come at once, or it is to move the other way."""
    if now_ns() - gate.move_went_ns > MOMENT_NS or load32(&gate.grants.flags) != flags:
        return 0
    futex_wait(&state().stopping, 0, now_ns() + COPY_LOOK_NS)
    return load32(&state().stopping) == 0


cdef bint complete(Gate* gate, Mover* mover, uint32_t turn, bint out) noexcept nogil:
    """Wait for the copies of a batch, if it has any. 0: they failed."""
    cdef Batch* batch = &mover.batches[turn]
    cdef bint well
    if batch.count == 0:
        return 1
    well = has_arrived(gate, mover, batch)
    settle(gate, batch, out, well)
    gate.move_went_ns = now_ns()
    return well


cdef inline bint leaves_gaps(const Gate* gate) noexcept nogil:
    """Whether the vGPU that leaves copies a batch only once the last one has left, because another vGPU comes.
    Reason: a mapping that becomes accessible waits for copies from the card, 1 ms each (H200)."""
    return load32(&gate.grants.flags) & GRANTS_PASSED != 0


cdef int carry(Gate* gate, bint out) noexcept nogil:
    """As many chunks as there is room for now. The caller has a context current."""
    cdef Mover mover
    cdef Batch* batch
    cdef uint32_t turn = 0, flags = load32(&gate.grants.flags)
    cdef bint well = 1
    cdef int outcome = DONE
    memset(&mover, 0, sizeof(Mover))
    gate.store_stage = 0
    while outcome == DONE or outcome == WAITS:
        batch = &mover.batches[turn]
        outcome = fill(gate, &mover, batch, out)
        if batch.count == 0 and mover.batches[1 - turn].count == 0:
            if outcome == WAITS and waits_a_moment(gate, flags):
                continue
            break
        turn = 1 - turn
        well = complete(gate, &mover, turn, out)
        if well and outcome != FAILED and out and leaves_gaps(gate):
            well = complete(gate, &mover, 1 - turn, out)
        if not well:
            outcome = FAILED
    if outcome == FAILED:
        quiesce(&mover)      # nothing may be using what is taken back
    for turn in range(2):
        if outcome == FAILED:
            settle(gate, &mover.batches[turn], out, 0)
        elif not complete(gate, &mover, turn, out):
            outcome = FAILED
    close_mover(&mover)
    return outcome


cdef void report_place(Gate* gate, uint32_t where) noexcept nogil:
    """Where it is now."""
    gate.where = where
    storei64(&gate.slot.moved_ns, now_ns() - gate.move_began_ns)
    storei64(&gate.slot.pinned_ns, gate.pinning_ns)
    if where == SLOT_AWAY:
        store32(&gate.slot.clean_blocks, <uint32_t>(gate.clean_bytes / PIECE_BYTES))
    store64(&gate.slot.away_bytes, gate.away_bytes)
    store32(&gate.slot.where, where)
    gate.move_began_ns = 0
    vgpu_ring(gate)
    vgpu_log(b"moved, away bytes", where, gate.away_bytes)
    vgpu_log(b"... in ns; of the store to pin", gate.slot.moved_ns, gate.pinning_ns)
    vgpu_log(b"... in mappings; in waits for copies", gate.mapping_ns, gate.copying_ns)
    vgpu_log(b"... copied bytes; by copies", gate.swap_copied_bytes, gate.swap_copies)


cdef void begin(Gate* gate) noexcept nogil:
    if gate.move_began_ns == 0:
        gate.move_began_ns = gate.move_went_ns = now_ns()
        gate.pinning_ns = gate.mapping_ns = gate.copying_ns = 0
        gate.swap_copied_bytes = gate.swap_copies = 0


cdef int drain(Gate* gate) noexcept nogil:
    """Behind the shut door: nothing uses the memory any more, and it is known in which context to copy it."""
    cdef void* contexts[17]
    cdef uint32_t count = contexts_of(gate, contexts), i
    cdef int64_t until = now_ns() + DRAIN_NS
    if count > CONTEXTS or (count == 0 and gate.chunks.count):
        return FAILED
    gate.away_context = contexts[0] if count else NULL
    for i in range(count):
        if not has_drained(contexts[i], until):
            return FAILED
        if contexts[i] == gate.hasher.context:
            gate.away_context = contexts[i]      # the kernel is loaded there
    return DONE


cdef void hash_in_context(Gate* gate) noexcept nogil:
    """From here on until the door opens nothing writes the memory."""
    cdef void* context = gate.away_context
    gate.hashes.count = 0
    if gate.chunks.count == 0 or real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS:
        return
    lock_acquire(&gate.chunks_lock)
    vgpu_hash_chunks(gate, context)
    lock_release(&gate.chunks_lock)
    real_cuCtxPopCurrent_v2(&context)


cdef int carry_in_context(Gate* gate, bint out) noexcept nogil:
    cdef void* context = gate.away_context
    cdef int outcome
    if gate.chunks.count == 0:
        return DONE
    if not out and gate.away_bytes and not may_come(gate, PIECE_BYTES):
        return WAITS
    if not succeeds(gate, real_cuCtxPushCurrent_v2(context)):
        return FAILED
    lock_acquire(&gate.chunks_lock)
    if out:
        vgpu_renew_store(gate)
    outcome = carry(gate, out)
    lock_release(&gate.chunks_lock)
    real_cuCtxPopCurrent_v2(&context)
    return outcome


cdef int patient(const Gate* gate, int outcome, int64_t most_ns) noexcept nogil:
    """Where there should be room, it is not waited for longer than that: FULL."""
    return WAITS if outcome == FULL and now_ns() - gate.move_went_ns <= most_ns else outcome


cdef int leave(Gate* gate) noexcept nogil:
    cdef int outcome
    begin(gate)
    if gate.where == SLOT_RESIDENT:
        if not lock_door(gate):
            return WAITS
        if not shut_door(gate):
            open_door(gate)
            return FAILED
        store32(&gate.slot.where, SLOT_MOVING)
        if drain(gate) != DONE:
            open_door(gate)
            return FAILED
        gate.where = SLOT_MOVING
        vgpu_drop_all_returned()
        vgpu_trim_drained_pools()
        hash_in_context(gate)
    store32(&gate.slot.where, SLOT_MOVING)
    outcome = carry_in_context(gate, 1)
    if outcome == DONE:
        report_place(gate, SLOT_AWAY)
    # a store whose server has ended does not grow
    return patient(gate, outcome, STORE_NS if gate.heir.page == NULL else 0)


cdef int come_back(Gate* gate) noexcept nogil:
    cdef int outcome
    begin(gate)
    gate.where = SLOT_MOVING
    store32(&gate.slot.where, SLOT_MOVING)
    outcome = carry_in_context(gate, 0)
    if outcome == DONE:
        report_place(gate, SLOT_RESIDENT)
        open_door(gate)
    return patient(gate, outcome, CARD_NS)


cdef public int64_t vgpu_move(Gate* gate) noexcept nogil:
    """By the hook thread, without locks: move the memory to where the grants page demands. The result is the latest
    time of the next call; 0: no time is set."""
    cdef uint32_t flags = load32(&gate.grants.flags)
    cdef bint out = flags & GRANTS_AWAY != 0, back = flags & GRANTS_PRESENT != 0 or is_removed(gate)
    cdef uint32_t aim
    cdef int mode, outcome
    if flags & GRANTS_SWAPPABLE == 0:
        return 0
    if is_removed(gate):
        gate.hashes.count = 0        # threads of a removed vGPU may write what is still on the card
    if gate.open or (gate.lost and flags & GRANTS_LOSS_RUN):
        back = 1
    if back:
        out = 0
    if not (out or back):
        return 0
    aim = SLOT_AWAY if out else SLOT_RESIDENT
    if gate.aim != aim:
        gate.aim, gate.move_began_ns, gate.move_after_ns = aim, 0, 0
        if out:
            gate.clean_bytes = 0
    if gate.where == aim:
        if load32(&gate.slot.where) != aim:      # it was stuck on the other way
            store32(&gate.slot.where, aim)
            vgpu_ring(gate)
        return 0
    if gate.where == SLOT_RESIDENT and is_at_work(gate):
        return now_ns() + POLL_NS
    if now_ns() < gate.move_after_ns:
        return gate.move_after_ns
    store32(&gate.moving, 1)
    fence()
    if load32(&state().stopping):
        store32(&gate.moving, 0)
        return 0
    if is_removed(gate):
        # No thread waits for the memory of a vGPU that was removed, so threads may write what is still on the card.
        gate.hashes.count = 0
    if load32(&gate.touching) and (is_removed(gate) or (out and gate.where != SLOT_RESIDENT)):
        store32(&gate.moving, 0)
        return now_ns() + GO_ON_NS
    mode = relax()
    gate.move_result = 0
    if not out:
        outcome = come_back(gate)
    elif load32(&state().captures):      # asked for its drain, a context would break those that are open
        outcome = FAILED
    else:
        outcome = leave(gate)
    restore(mode)
    exchange32(&gate.moving, 0)
    futex_wake(&gate.moving, INT_MAX)
    if outcome == DONE:
        return now_ns()          # the fast path opens with the next step
    if outcome == WAITS:
        return now_ns() + GO_ON_NS
    if out:
        store32(&gate.slot.where, SLOT_STUCK)
    elif outcome == FULL or gate.move_result == CUDA_ERROR_OUT_OF_MEMORY:
        store32(&gate.slot.where, SLOT_KEPT_AWAY)
    else:
        store32(&gate.slot.where, SLOT_FAILED_BACK | <uint32_t>gate.move_result << SLOT_RESULT_SHIFT)
    vgpu_ring(gate)
    gate.move_began_ns = 0
    gate.move_after_ns = now_ns() + AGAIN_NS
    return gate.move_after_ns
