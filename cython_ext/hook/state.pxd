"""The state that the modules of the hook share. The functions that they call in each other: hook.pxd.

Ownership
---------
``State`` is one anonymous mapping with MADV_WIPEONFORK. The child of a fork (raw clone too) finds zeros, that is, an
unattached process. All state of the hook lives there, apart from the addresses of the driver's functions.

``Gate``: this process's end of one vGPU. Every launch reads its first line; writes there are rare. Everything below
``lock`` is touched only under ``lock``, by launching threads on the tracked path and by the gate's own hook thread. No
application code runs under the lock, and no driver call that waits for work. But a driver call under it may wait for
another thread whose call does (monitor_thread.pyx, ``run``).

``Thread``: the record that the fast path of one application thread writes. The hook thread reads it.

Order of locks: Gate.chunks_lock, gate.lock, memory_lock or pools_lock, then captures_lock, threads_lock or
the lock of the ledger.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from cython_ext.pages.layout cimport (
    GRANTS_REMOVED, GRANTS_SWAPPABLE, ActivityPage, GrantsPage, Slot, StorePage, TraceRecord,
)
from cython_ext.logic.memory.alloctable cimport AllocTable, Block
from cython_ext.logic.gate.prequeue cimport Ahead
from cython_ext.logic.memory.arenas cimport Arenas
from cython_ext.logic.gate.poll_skip cimport Belief
from cython_ext.logic.meter.demand cimport Demand, Waits
from cython_ext.logic.meter.durations cimport DurationTable, LaunchKey
from cython_ext.logic.meter.event_cost cimport EventCost
from cython_ext.logic.meter.graphs cimport GraphTable
from cython_ext.logic.meter.meter cimport Meter, Timing, Usage
from cython_ext.logic.memory.piece_hash cimport PieceHash
from cython_ext.logic.meter.steps cimport Steps
from cython_ext.logic.memory.physical cimport PhysicalBook
from cython_ext.logic.memory.pieces cimport Pieces
from cython_ext.logic.memory.pools cimport PoolBook
from cython_ext.logic.meter.transfers cimport SmallTransferBudget
from cython_ext.logic.gate.window cimport Backlog
from cython_ext.native cimport load32

cdef enum:
    MAX_GATES = 16
    LEGACY_HANDLE = 1        # what streams are called, normalised
    OWN_HANDLE = 2
    STREAMS = 512            # streams with work of this process, per gate
    EVENTS = 256             # event objects of the hook, per gate
    SAMPLES = 32             # timed launches under way
    LEFT_BEHIND = 64
    POOLS = 80               # memory pools of a process, and what each of MAX_GATES has for graphs
    CAPTURES = 64            # captures open at once
    RETURNED = 4096          # blocks freed in stream order, of a process

    # CUresult
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_NOT_SUPPORTED = 801

    CU_EVENT_DISABLE_TIMING = 2
    CU_STREAM_NON_BLOCKING = 1
    CAPTURE_RELAXED = 2      # CU_STREAM_CAPTURE_MODE_RELAXED

    # Block.flags of an allocation
    KIND_IMPORTED = 0x100    # Block.kind of ``handles``: another process's memory, not charged here (shared.pyx)
    BLOCK_GATE = 0xFFFF      # the gate that owns it
    BLOCK_PIECES = 0x10000   # charged by the pieces that it touches (Gate.pieces); Block.bytes is its length
    BLOCK_SWAPPABLE = 0x20000    # made of Gate.chunks, which are charged; Block.bytes is its length
    BLOCK_ORDERED = 0x40000  # ... in stream order (stream_ordered.pyx)

    # ... of a chunk: its gate, and
    CHUNK_AWAY = 0x10000     # it is in the store, and has nothing on the card
    CHUNK_PROGRAM = 0x20000  # of memory in State.physical; Block.kind is its number there
    CHUNK_FIXED = 0x40000    # it stays on the card
    CHUNK_WINDOW = 0x80000   # of CHUNK_PROGRAM: mapped at its own address, too

    # Block.kind of a place in the store
    PLACE_BLANK = 0          # its copy is not made
    PLACE_COPIED = 1         # it has a copy, of which the hash is known
    PLACE_ZEROS = 2          # it left with zeros alone: no block is needed

    # What a stream is to the others
    STREAM_BLOCKING = 1      # synchronises with the legacy stream
    STREAM_LEGACY = 2
    STREAM_OWN = 4           # a thread's own default stream: only that thread can name it

    # Gate.word_state: whether the GPU can see Slot.turn
    WORD_NEW = 0             # no thread has tried yet
    WORD_READY = 1
    WORD_NONE = 2            # switched off, or the driver cannot

    # What is special about a launch
    LAUNCH_OVERLAPS = 1      # it may overlap with the tail of its predecessor: no marker between the two
    LAUNCH_WAITS = 2         # the driver may wait for the work before it returns: never ahead of its lease

    # What becomes of an allocation from a pool, before the driver is asked
    POOL_GRANTED = 1
    POOL_REFUSED = 2
    POOL_NOBODYS = 3         # no vGPU pays for it
    POOL_FULL = 4            # the vGPU has no room for it now

    OUT_OF_MORE_THAN_CARD = -1   # no CUresult: out of memory, and not for want of room on the card

    # How a launch was let through: Pass.kind
    PASS_PLAIN = 0           # nothing to clean up: no vGPU, a capture, the gate is off
    PASS_ANNOUNCED = 1       # open-ended lease: Thread.inside is to be cleared
    PASS_TRACKED = 2         # counted in the backlog; markers may have to follow
    PASS_TOUCHING = 3        # it may touch memory that can leave the card (swap.pyx)
    PASS_CALLING = 4         # without a lease: Thread.calling is to be counted down


cdef struct Thread:
    # one application thread that launches, in pages of its own; the first 64 bytes are all that a launch reads besides
    # its meter
    uint32_t inside          # between announcement and submission
    uint32_t taken
    Gate* gate               # of its last launch, and of its counts; NULL: none yet
    void* stream             # stream whose untracked work is known to the gate (app_threads.pyx, vgpu_know_stream) ...
    uint32_t round           # ... since this round of Gate.round
    uint32_t calling         # how deep it is in calls of the driver, but for launches (app_threads.pyx)
    uint64_t launches
    uint64_t graph_launches  # of these
    Thread* next             # never unlinked: reused when its thread has ended
    void* context            # current when ``stream`` became known: of that one, if it is a default stream
    Meter meter              # what it launches under open-ended leases
    Steps steps              # of a vGPU with targets (app_threads.pyx)
    uint64_t tracked_ns      # learned lengths of its launches under leases with an end


cdef struct Stream:
    void* handle             # 1 legacy, 2 a thread's own, else a CUstream
    void* context
    Thread* owner            # of STREAM_OWN
    uint32_t flags           # STREAM_*; 0: non-blocking
    uint32_t overlapping     # so many launches ago at most, one overlapped with its predecessor; 0: none did
    bint dirty               # it has had work since it was last seen drained
    uint32_t turn            # it waits for this one (Gate.turn), or did
    uint64_t after           # LaunchKey.hash of the last tracked launch


cdef struct Event:
    void* handle             # NULL: free place
    void* context
    bint timed
    bint used
    bint held                # its context was about to end: not queried while any context is


cdef struct Sample:
    LaunchKey key
    uint32_t generation
    uint32_t updates         # of a graph, before the launch
    int32_t start            # index of Gate.events
    int32_t end              # -1: not recorded yet
    int64_t began_ns         # into an empty queue: ``start`` passed then, before the host had launched; else 0
    int64_t host_ns          # ... and so long before: not the kernel's
    int64_t least_ns         # a shorter sample is not learned
    bint pair                # two events with nothing between them
    bint first               # of a key without a mean
    bint metered             # under an open-ended lease ...
    Timing timing            # ... and what it stands for
    bint cold                # the host may have loaded code in that time, and the kernel have run in part of it
    bint used


cdef struct Store:
    StorePage* page          # NULL: none was given
    uint64_t file            # its inode
    uint64_t size
    uint64_t blocks
    uint8_t* memory          # block 0
    uint8_t* pins            # of each PIN_BLOCKS blocks, whether they were pinned here (PIN_*)
    PieceHash* hashes        # of the copies that this process has made, by block; parts: those that were copied


cdef struct StoredPiece:
    uint8_t* memory          # NULL: it left as zeros
    uint64_t parts           # that were copied (logic/memory/piece_hash.pxd); the others left as zeros


cdef struct Hasher:          # of pieces, on the GPU (piece_hash.pyx)
    void* context            # in which the kernel is; NULL: in none
    void* function           # NULL: the driver does not load it there
    void* memory_context     # which has made the pinned memory that follows; NULL: there is none
    void* checked            # the context in which the kernel was checked
    uint64_t* sample         # pinned; a piece by which that is done ...
    PieceHash expected       # ... its hash
    PieceHash* results       # pinned, of HASHED_AT_ONCE pieces ...
    uint64_t* addresses      # ... and their addresses in Gate.chunks


cdef struct Gate:
    # --- read by every launch and every allocation
    GrantsPage* grants       # NULL: not attached
    ActivityPage* activity   # another one only if server and broker died together; under lock
    Slot* slot
    uint64_t ledger          # place of this process in the ledger: page, slot, tag; 0 while it moves (quota.pyx)
    uint32_t generation      # of ``grants``; 0 shuts the fast path (the server is silent, the process ends)
    uint32_t round           # advanced when untracked work was seen drained: the next launches announce again
    uint32_t baton_open      # the baton's word while this process has it without an end; 0 too where none goes round
    uint32_t slot_index
    uint32_t fences          # 1: the kernel fences no thread, so that each launch has to do it
    uint32_t primary_known   # 0: there may be a primary context that is not noted (implicit.pyx)
    int64_t unanswered_ns    # a thread waited in vain for the charge of this ActivityPage.context_ns
    # --- the next line: what allocations and frees read besides
    Pieces pieces            # of its linear memory; under State.memory_lock
    Ahead ahead              # under lock
    # --- identity, fixed
    uint32_t thread_state    # 0 starting, 1 runs and holds the slot, 2 failed
    int32_t device           # CUDA ordinal in this process
    int32_t gpu_index        # on the node, where the vGPU is
    char[64] vgpu_id
    char[48] gpu_uuid        # where the vGPU was at the beginning; where it is: grants.gpu_uuid
    char[128] directory      # where broker.sock is
    # of its swappable memory (swappable.pyx); under State.memory_lock, but for the chunks
    Arenas arenas            # small allocations
    AllocTable chunks        # address → Block (aux: handle, flags: CHUNK_*)
    uint32_t chunks_lock     # of the table; its holder may call the driver; a thread that touches gets it at once
    AllocTable places        # of each piece with a copy: address → Block (aux: its block of the store, kind: PLACE_*)
    AllocTable hashes        # as it left last, each piece: address → Block (bytes, aux, kind and flags: its PieceHash)
    Hasher hasher
    # ... and where it is (swap.pyx)
    uint32_t away            # futex; 1: some of it may not be on the card: a thread that touches it waits
    uint32_t touching        # threads that do (atomic)
    uint32_t moving          # the hook thread calls the driver for it
    uint32_t where           # SLOT_RESIDENT, SLOT_AWAY, or SLOT_MOVING: a part of it is swapped out, or moves
    uint32_t aim             # of the last move, SLOT_AWAY or SLOT_RESIDENT
    int64_t move_after_ns    # not tried again before
    int64_t move_began_ns    # 0: no move is under way
    int32_t move_result      # the driver's, that failed this try; 0: none has
    int64_t move_went_ns     # when it last got on
    int64_t mapping_ns       # of this move: in calls that map memory ...
    int64_t copying_ns       # ... and in waits for copies
    uint64_t swap_copied_bytes   # ... and what was copied
    uint64_t swap_copies     # ... by so many copies
    uint64_t clean_bytes     # that the last move out did not copy
    uint64_t away_bytes
    uint64_t imported_bytes  # of other processes' memory, what this one holds; under memory_lock
    void* away_context       # in which it was copied
    # ... host memory for it (store.pyx)
    Store store
    Store heir               # of a later server, once nothing is left in the other
    uint64_t store_next      # the part in which a block was found last
    uint64_t store_ready     # how many blocks had memory when the pinning thread saw it grow last ...
    int64_t store_grew_ns    # ... and when that was
    uint64_t kept_next       # the kept block that was taken last
    uint32_t store_stage     # where this go takes blocks from (store.pyx)
    int64_t pinning_ns       # of this move
    uint32_t pins_ahead      # 1: a thread pins ahead of moves (pin_ahead.pyx) ...
    uint32_t pinning         # ... and is in the driver
    uint64_t graph_round     # advanced before memory of graphs goes back to the card (atomic)
    uint32_t graphs_under_way    # between the last check of their memory and the driver (atomic)
    # --- under lock
    uint32_t lock
    uint64_t past_launches   # of threads that have ended, or changed to another gate; under threads_lock
    uint64_t past_graph_launches
    uint64_t past_spent_ns   # ... by their meters
    int64_t promised_ns      # left of their allowances, when last added up
    Usage usage
    uint32_t learning        # timed launches of keys without a mean, not seen to have run ...
    int64_t learning_ns      # ... and when the last of them went
    EventCost event_cost
    uint32_t doubts          # how often the meter was doubted
    uint64_t quiet_launches  # at the last poll that found some more ...
    int64_t quiet_ns         # ... and when it was
    bint limited             # the vGPU's limit was in force at the hook thread's last poll
    uint64_t tracked_ns      # learned lengths of all launches under leases with an end
    Demand demand
    uint64_t copies          # between host and device (atomic)
    uint64_t copied_bytes
    SmallTransferBudget trifles          # without a lock: a race lets one more pass
    uint32_t submitting      # admitted, not yet handed to the driver (atomic: also counted down without the lock)
    uint32_t waiters         # threads that wait: the process wants, whatever the queue has
    bint open                # --on-server-loss run, or the process ends: everything passes
    bint lost                # the server has been silent for longer than its grace
    bint calls               # the vGPU is suspended, and a thread is in the driver (the hook thread's alone)
    bint reported            # the removal, or the loss, was reported on stderr
    int64_t missing_ns       # since then the vGPU's directory is gone, and the node is there; 0: it is not
    uint32_t gone            # for so long that the vGPU was removed: the grants page is an earlier server's (atomic)
    bint barred              # the broker answers, but does not admit this process again: it runs as another user now
    uint32_t broker_epoch    # of the broker that admitted this process, or has confirmed its slot
    bint untracked           # work was submitted on the fast path since the last drain
    int64_t unseen_ns        # from then on launches do not wait for it any longer; 0: none has yet ...
    int64_t unseen_until_ns  # ... and until then
    bint own_unmarked        # tracked work in a thread's own default stream, without a marker of its own
    bint outrun              # a marker may have come before a launch that it stands for
    uint32_t began_epoch     # the lease that Backlog.leased means
    uint32_t closed_epoch    # a lease that takes no more work, whether or not it has ended
    uint32_t missed_epoch    # the last lease that the process slept through, and for which it rang the relay; 0: none
    uint32_t taken_epoch     # a lease that the process started early, without waiting for GO ...
    int64_t taken_ns         # ... and the predicted length of the work submitted under it until then
    uint32_t over_epoch      # a lease that ended, and is not known to be drained yet; 0: none
    int32_t over_markers     # markers to be retired before its work is done; -1: only a full drain shows that
    int64_t over_end_ns
    int64_t asked_ns         # when a launching thread last asked the driver
    Belief belief
    int64_t look_ns          # when the hook thread queries the driver again
    int64_t idle_since_ns    # drained since; 0: busy
    int64_t gap_ns           # expected idle gap: moving average over drains
    int64_t window_ns        # adapted
    int64_t lease_end_ns     # of began_epoch
    bint lease_sampled       # the lease began on a GO: no other vGPU's work ran at its start
    bint lease_unused        # nothing was submitted since it began
    int32_t marked_stream    # the stream of ``backlog.unmarked``
    uint32_t left_count
    int32_t left[64]         # events behind untracked work of streams that may not be queried
    int32_t probe            # event in a context's legacy stream, behind the threads' own streams there; -1: none
    void* probed             # that context
    uint32_t stream_count
    int64_t length_ns        # of the last lease, from its beginning to the end it was given
    uint32_t baton           # its word, as last judged ...
    bint baton_ours          # ... and whether this process may submit under it,
    int64_t baton_until_ns   # ... until then; FOREVER_NS: no other process wants
    uint32_t baton_used      # the word under which the process submitted last
    uint32_t baton_foreign   # a word for which the process could not use a lease ...
    int64_t baton_foreign_ns     # ... since then
    uint32_t baton_reported  # a sibling's word under which the hook thread reported that work queued ahead waits
    uint32_t turn            # work queued ahead waits for Slot.turn to reach this epoch
    int64_t turn_due_ns      # when the lease begins that it waits for, if the one before has drained by then
    uint32_t word_state      # WORD_*, of Slot.turn
    uint64_t word_address    # for the GPU
    void* word_context       # in which it was registered: only streams of that one wait for it
    int32_t ahead_stream     # the stream of ``ahead.unmarked``
    TraceRecord* ring        # of this process's slot (logic/gate/trace.pxd); NULL: the activity page is older
    int64_t recorded_ns      # up to where busy intervals are recorded there
    Backlog backlog
    DurationTable durations
    GraphTable graphs
    Stream[512] streams
    Event[256] events
    Sample[32] samples
    uint32_t sampling        # how many of them are used


cdef struct Returned:
    # swappable memory that was freed in stream order (stream_ordered.pyx)
    Block block              # aux: the context of the event
    void* event              # in the stream, behind the free
    void* stream             # normalised


cdef struct Capture:
    void* handle             # its first stream (normalised); NULL: none
    void* context            # the stream's
    Thread* owner            # the thread of a default stream, else NULL


cdef struct Setting:
    char[40] name
    char[1024] value
    bint given               # else the driver is to find none
    bint stays               # also after the driver's start


cdef struct State:
    # --- the first two lines, and those of each gate, are all that an allocation or a free reads
    uint32_t attached        # 1 once every gate is there
    uint32_t gate_count
    uint32_t stopping        # exit has begun: the hook makes no more driver calls
    uint32_t contexts        # 1: there may be others than the devices' primary ones
    uint32_t observer        # 1: attached for NVML; 2: tried in vain with this VGPU_ID, and reported that
    uint32_t attach_lock
    uint32_t spins           # there are cores to spare for the last microseconds before something known
    uint32_t exit_known      # the exit handler is registered
    uint32_t started         # the driver's cuInit has succeeded: the hook does not read VGPU_ID any more
    uint8_t[28] pad0
    uint32_t memory_lock
    AllocTable allocations   # under memory_lock: address of an allocation → Block (aux: context, flags: BLOCK_*)
    uint8_t[32] pad1
    Gate[16] gates
    # --- the rest
    uint32_t captures_lock
    uint32_t captures        # open in this process
    uint32_t unlisted        # of them: more than CAPTURES at once
    Capture capturing[64]    # the others
    uint32_t threads_lock
    Thread* threads          # all that ever launched
    Waits waits              # of all threads, for the GPU ...
    Waits held_up            # ... and at a gate alone
    uint32_t dying           # contexts that are being destroyed just now
    PhysicalBook physical    # under memory_lock: what cuMemCreate made, and can leave the card
    AllocTable handles       # ... of other such memory: cuMemCreate's handle → Block (aux: references)
    AllocTable mappings      # ... address → Block (aux: handle)
    bint swappable           # there was memory that can leave the card
    AllocTable doomed        # ... swappable memory freed under a capture, as in ``allocations``
    uint32_t returned_lock   # its holder may call the driver
    uint32_t returned_count
    uint64_t returned_bytes  # that they take
    uint64_t returned_keep   # so much may remain at a synchronisation: the largest release threshold; under pools_lock
    uint64_t ordered_bytes   # allocated in stream order outside the driver's pools, and the peaks ...
    uint64_t ordered_peak_bytes
    uint64_t reserved_peak_bytes     # ... with the returned blocks
    Returned[4096] returned  # RETURNED of them
    AllocTable executables   # ... executable graph that allocates → Block (aux: when it had its memory, flags: gate)
    uint32_t taking          # how many: for a check without the lock
    uint32_t pools_lock
    uint32_t pool_count
    PoolBook[80] pools       # under pools_lock; POOLS of them
    uint32_t view_count
    Gate[16] views           # pages only: NVML before cuInit
    char[256] vgpu_ids       # VGPU_ID as it was at the last request for vGPUs
    char[256] meant_ids      # the same with ids in the place of names
    # --- under attach_lock: what the driver finds in the environment while it starts (environment.pyx)
    uint32_t setting_count
    Setting[8] settings
    uint32_t lenders         # threads in the driver's cuInit
    char** lent_environment
    char** lent_copy         # the same, to detect whether the program has changed it
    char** later_environment
    char** own_environment   # the program's, as it was


cdef struct Pooled:
    # stream-ordered memory that is about to be freed by cuMemFree
    uint64_t pool            # 0: it is none
    uint64_t bytes
    uint64_t used            # of the pool, as the driver reported before


cdef struct Prediction:
    # a launch's prediction before it is made (prediction.pyx)
    int64_t learned_ns       # UNKNOWN_NS: it was never timed, or was changed since
    int64_t assumed_ns       # what it counts for then
    int64_t doubted_ns       # as in GateState ...
    int64_t excess_ns
    bint sample              # it is worth timing ...
    bint anew                # ... at any rate: what was learned may be far off ...
    bint disproved           # ... or is


cdef struct Pass:
    # one launch on its way through the gate, on the launching thread's stack
    int kind                 # PASS_*
    bint mark                # a marker must follow at once
    int32_t sample           # index of Gate.samples to be closed, or -1
    uint64_t tag             # of the key (logic/meter/meter.pxd) ...
    uint32_t weight          # ... and what the sample stands for
    int32_t stream           # index of Gate.streams
    void* handle             # the stream, normalised: 1 legacy, 2 own
    Gate* gate
    Thread* thread


cdef extern from "hook/hook_native.h" nogil:
    void* vgpu_thread        # this thread's Thread; NULL before its first launch


cdef extern from *:
    """
    extern void *vgpu_state_address;
    """
    void* vgpu_state_address         # of the State; NULL before the first attach


cdef inline State* state() noexcept nogil:
    return <State*>vgpu_state_address


cdef inline bint attached() noexcept nogil:
    return vgpu_state_address != NULL and state().attached != 0


cdef inline bint is_removed(const Gate* gate) noexcept nogil:
    """Whether the vGPU was removed: its grants page says so, or its broker and its directory are gone."""
    return load32(&gate.grants.flags) & GRANTS_REMOVED != 0 or load32(&gate.gone) != 0


cdef inline bint is_swappable(const Gate* gate) noexcept nogil:
    """Whether plain allocations are swappable."""
    return gate != NULL and load32(&gate.grants.flags) & GRANTS_SWAPPABLE != 0 and state().gate_count == 1
