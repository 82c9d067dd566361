"""Hashes and zeros of the pieces of a vGPU's memory, found on the GPU (piece_hash.ptx) before it leaves the card.

The hook thread computes them behind the shut door: nothing uses the memory any more. A piece whose copy in the store
has the same hash is not copied again. All pieces are hashed in one go. Reason: other contexts have the GPU in turns of
some milliseconds, in which a kernel may have to wait, and 20 GB take 5 ms (H200).

Where the driver does not load the kernel, or the kernel is wrong about a sample, every piece is copied. The sample goes
with the first pieces. Reason: data that the kernel takes for zeros would be lost.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.hook.generated.driver cimport (
    real_cuEventCreate, real_cuEventDestroy_v2, real_cuEventQuery, real_cuEventRecord, real_cuLaunchKernel,
    real_cuMemHostAlloc, real_cuModuleGetFunction, real_cuModuleLoadData, real_cuStreamCreate,
    real_cuStreamDestroy_v2, real_cuStreamSynchronize,
)
from cython_ext.hook.hook cimport vgpu_log, vgpu_place_of
from cython_ext.hook.state cimport (
    CHUNK_AWAY, CHUNK_FIXED, CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, Gate,
    Hasher, state,
)
from cython_ext.logic.memory.alloctable cimport Block, alloc_insert
from cython_ext.logic.memory.piece_hash cimport HASH_LANES, PART_BYTES, PARTS, PieceHash, piece_hash
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.native cimport futex_wait, load32, now_ns

cdef extern from "hook/generated/piece_hash.h" nogil:
    const char[] VGPU_PIECE_HASH

cdef enum:
    LAUNCH_PIECES = 256          # as many addresses fit the kernel's parameters
    HASHED_AT_ONCE = 4096        # 8 GiB, which take 2 ms (H200)
    SAMPLE = 0                   # instead of an address in Gate.chunks
    FOR_ALL_CONTEXTS = 1         # CU_MEMHOSTALLOC_PORTABLE
    FOR_THE_GPU = 2              # CU_MEMHOSTALLOC_DEVICEMAP
    QUERY_NS = 50_000


cdef struct Round:               # of hashes that are under way
    void* stream
    void* event
    uint32_t count               # of pieces
    uint32_t launched            # ... of them, whose kernel is launched
    uint64_t[256] places         # where the others are on the card


cdef PieceHash make_sample(uint64_t* words) noexcept nogil:
    """One word in each part, each where another lane and another of its vectors reads it. The result is its hash."""
    cdef uint64_t words_of_part = PART_BYTES / sizeof(uint64_t), part, lane, vector
    memset(words, 0, PIECE_BYTES)
    for part in range(PARTS):
        lane, vector = (37 * part + 11) % HASH_LANES, part % 8
        words[part * words_of_part + 2 * HASH_LANES * vector + 2 * lane + part / 8 % 2] = <uint64_t>1 << part
    return piece_hash(words, PIECE_BYTES / sizeof(uint64_t))


cdef bint have_memory(Hasher* hasher, void* context) noexcept nogil:
    """Pinned memory for the sample, results and addresses. All contexts can use it, until the one that made it ends."""
    cdef uint64_t size = PIECE_BYTES + HASHED_AT_ONCE * (sizeof(PieceHash) + sizeof(uint64_t))
    cdef void* memory = NULL
    if hasher.memory_context == NULL:
        if real_cuMemHostAlloc(<uint64_t>&memory, size, FOR_ALL_CONTEXTS | FOR_THE_GPU) != CUDA_SUCCESS:
            return 0
        hasher.memory_context = context
        hasher.sample = <uint64_t*>memory
        hasher.expected = make_sample(hasher.sample)
        hasher.results = <PieceHash*>(<uint8_t*>memory + PIECE_BYTES)
        hasher.addresses = <uint64_t*>(hasher.results + HASHED_AT_ONCE)
    return 1


cdef public void vgpu_load_hasher(Gate* gate, void* context) noexcept nogil:
    """Into this context, which is current, once. It takes the driver some 10 ms."""
    cdef Hasher* hasher = &gate.hasher
    cdef void* module = NULL
    cdef const char* name = b"vgpu_hash_pieces"
    cdef int result
    if hasher.context == context:
        return
    hasher.context, hasher.function = context, NULL
    result = real_cuModuleLoadData(<uint64_t>&module, <uint64_t>VGPU_PIECE_HASH)
    if result == CUDA_SUCCESS and have_memory(hasher, context):
        result = real_cuModuleGetFunction(<uint64_t>&hasher.function, <uint64_t>module, <uint64_t>name)
    vgpu_log(b"kernel for hashes loaded, result", result, 0)


cdef public void vgpu_forget_hasher(Gate* gate, const void* context) noexcept nogil:
    """The context has ended, and the kernel, or the pinned memory, with it."""
    if gate.hasher.checked == context:
        gate.hasher.checked = NULL
    if gate.hasher.context == context or gate.hasher.memory_context == context:
        gate.hasher.context = gate.hasher.function = NULL
    if gate.hasher.memory_context == context:
        gate.hasher.memory_context = NULL


cdef bint launch(Gate* gate, Round* run) noexcept nogil:
    """The kernel for the pieces whose kernel is not launched yet."""
    cdef uint32_t count = run.count - run.launched
    cdef PieceHash* results = gate.hasher.results + run.launched
    cdef void* parameters[2]
    cdef int result
    if count == 0:
        return 1
    parameters[0] = &results
    parameters[1] = run.places
    result = real_cuLaunchKernel(
        gate.hasher.function, count, 1, 1, HASH_LANES, 1, 1, 0, run.stream, parameters, NULL
    )
    run.launched = run.count
    return result == CUDA_SUCCESS


cdef bint is_over(Round* run) noexcept nogil:
    """Wait for the kernels. 0: they failed, or the process ends."""
    cdef int result = real_cuEventRecord(run.event, run.stream)
    if result == CUDA_SUCCESS:
        result = real_cuEventQuery(run.event)
    while result == CUDA_ERROR_NOT_READY and not load32(&state().stopping):
        futex_wait(&state().stopping, 0, now_ns() + QUERY_NS)
        result = real_cuEventQuery(run.event)
    return result == CUDA_SUCCESS


cdef bint is_right(Gate* gate, const PieceHash* hash) noexcept nogil:
    """Whether the sample has the hash that it should have. If not, the kernel is never used again."""
    cdef const PieceHash* expected = &gate.hasher.expected
    cdef bint right = hash.a == expected.a and hash.b == expected.b and hash.parts == expected.parts
    gate.hasher.checked = gate.hasher.context
    if not right:
        gate.hasher.function = NULL
        vgpu_log(b"the kernel for hashes is wrong", 0, 0)
    return right


cdef bint note(Gate* gate, Round* run) noexcept nogil:
    cdef const PieceHash* hash
    cdef Block block
    cdef uint32_t i
    if not (launch(gate, run) and is_over(run)):
        return 0
    for i in range(run.count):
        hash = &gate.hasher.results[i]
        if gate.hasher.addresses[i] == SAMPLE:
            if not is_right(gate, hash):
                return 0
            continue
        block.address, block.bytes, block.aux = gate.hasher.addresses[i], hash.a, hash.b
        block.kind, block.flags = <uint32_t>(hash.parts >> 32), <uint32_t>hash.parts
        alloc_insert(&gate.hashes, &block)       # without memory for the entry, the piece is copied
    run.count = run.launched = 0
    return 1


cdef bint add_piece(Gate* gate, uint64_t address, uint64_t place, Round* run) noexcept nogil:
    cdef bint well = 1
    gate.hasher.addresses[run.count] = address
    run.places[run.count - run.launched] = place
    run.count += 1
    if run.count - run.launched == LAUNCH_PIECES:
        well = launch(gate, run)
    if well and run.count == HASHED_AT_ONCE:
        well = note(gate, run)
    return well


cdef bint add_chunk(Gate* gate, Block* chunk, Round* run) noexcept nogil:
    cdef uint64_t place = vgpu_place_of(gate, chunk), at = 0
    cdef bint well = 1
    while place and well and at < chunk.bytes:
        well = add_piece(gate, chunk.address + at, place + at, run)
        at += PIECE_BYTES
    return well


cdef void hash_all(Gate* gate, Round* run) noexcept nogil:
    cdef Block* chunk
    cdef uint64_t i
    cdef bint well = 1
    if gate.hasher.checked != gate.hasher.context:
        well = add_piece(gate, SAMPLE, <uint64_t>gate.hasher.sample, run)
    for i in range(gate.chunks.capacity):
        chunk = &gate.chunks.blocks[i]
        if well and chunk.address and chunk.flags & (CHUNK_AWAY | CHUNK_FIXED) == 0:
            well = add_chunk(gate, chunk, run)
    if well:
        well = note(gate, run)
    if not well:
        real_cuStreamSynchronize(run.stream)     # nothing may be using what goes now


cdef public void vgpu_hash_chunks(Gate* gate, void* context) noexcept nogil:
    """The pieces that are on the card, into ``Gate.hashes``. Nothing writes them from here on until they have left.
    ``context`` is current. The caller has ``chunks_lock``."""
    cdef Round run
    if gate.hashes.capacity:
        memset(gate.hashes.blocks, 0, gate.hashes.capacity * sizeof(Block))
    gate.hashes.count = 0
    vgpu_load_hasher(gate, context)
    if gate.hasher.function == NULL:
        return
    memset(&run, 0, sizeof(Round))
    if real_cuStreamCreate(&run.stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS:
        return
    if real_cuEventCreate(&run.event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS:
        hash_all(gate, &run)
        real_cuEventDestroy_v2(run.event)
    real_cuStreamDestroy_v2(run.stream)
