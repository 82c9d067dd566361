"""The shared state of one simulated GPU: one file, mapped by every process that uses that GPU.

There is no daemon. A caller of the driver locks the file (lock.pxd), advances the GPU to the present (engine.pxd)
and then does what it came for. A participant may be killed at any instruction, so every transition
is either one store, or can be made again without harm; what is derived (``busy``) is rebuilt after a death.

Any program may write to the file. Every index that is read from it is reduced to its array's range (``sim_context``,
``sim_stream``, ``sim_op``), and every loop over it is bounded: nonsense in it crashes no process.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef enum:
    SIM_VERSION = 9
    SIM_CONTEXTS = 128
    SIM_STREAMS = 1024
    SIM_QUEUE = 1024        # operations a stream holds before its submitter has to wait, as in the real driver
    SIM_WORDS = 16          # SIM_STREAMS / 64
    SIM_GRIDS = 128         # kernels resident at once
    SIM_WINDOW_NS = 250000000   # NVML utilisation is averaged over one such window
    SIM_NOWHERE = 0xffffffff
    SIM_SHARES = 256        # pieces of memory that one process has exported, and others may have imported
    SIM_PARTICIPANTS = 1024  # processes that map the file; a process has one for each library that does

cdef enum SimLibrary:       # what a participant is
    LIBRARY_NONE = 0
    LIBRARY_CUDA = 1
    LIBRARY_NVML = 2
    LIBRARY_PYTHON = 3

cdef enum SimOpKind:
    OP_MARK = 1             # takes no time: an event, a word to be written
    OP_KERNEL = 2
    OP_COPY_IN = 3          # host to device, on the first copy engine
    OP_COPY_OUT = 4         # device to host, on the second
    OP_WAIT = 5             # for an operation of another stream of this GPU
    OP_EXTERNAL = 6         # until its process reports it: a host word, a host function, an event of another GPU

cdef enum SimContextState:
    CONTEXT_FREE = 0
    CONTEXT_ALIVE = 1
    CONTEXT_DYING = 2       # its process is gone; what was on the SMs leaves them

cdef enum SimFrozen:        # CUprocessState
    FROZEN_NOT = 0
    FROZEN_LOCKED = 1
    FROZEN_CHECKPOINTED = 2

cdef enum SimStreamFlags:
    STREAM_LEGACY = 1       # waits for all blocking streams of its context, and they for it
    STREAM_NONBLOCKING = 2


cdef public struct SimOp:
    uint32_t kind
    uint32_t sms            # SMs it can fill; with fewer it runs proportionally slower
    uint64_t seq            # order of submission on this GPU
    double remaining_ns     # at full rate
    int64_t start_ns        # 0: not started
    int64_t end_ns
    uint64_t wait_ordinal   # OP_WAIT: done when that many operations of wait_stream are done
    uint32_t wait_stream
    uint32_t wait_generation
    uint32_t released       # OP_EXTERNAL
    uint32_t failed         # CUresult that kills the context when this operation is reached


cdef public struct SimStream:
    uint32_t context        # index + 1; 0: free
    uint32_t generation     # counts the uses of this slot
    uint32_t flags
    int32_t priority        # lower runs first, as in CUDA
    uint64_t head           # operations done
    uint64_t tail           # operations submitted
    uint64_t delivered      # operations whose effects its process has seen; the ring is free up to here


# GPU time used, for NVML: in this window, in the one before, and ever.
cdef public struct SimLoad:
    int64_t window
    int64_t now_ns
    int64_t before_ns
    int64_t total_ns


cdef public struct SimContext:
    uint32_t state
    uint32_t generation
    uint32_t participant    # index; the context lives as long as that process holds its byte of the file (lock.pxd)
    int32_t pid             # in the PID namespace with the inode `pid_namespace` ...
    uint64_t pid_namespace
    uint64_t pid_start      # ... and its start time, from /proc/PID/stat: distinguishes a reused pid
    uint32_t sm_cap         # SMs its kernels may fill together
    uint64_t group          # contexts of one MPS server share a group; groups take turns on the SMs
    uint64_t memory_bytes   # everything it holds, overhead included
    uint64_t memory_limit   # CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
    uint64_t managed_bytes  # managed memory that its program has ...
    uint64_t resident_bytes  # ... and what of it is on the card, part of memory_bytes
    uint32_t frozen         # FROZEN_*: of its process, by another process
    uint64_t saved_bytes    # what a checkpointed one had on the GPU
    uint32_t moved_to       # index + 1 of the GPU on which it was restored; 0: it is here. Its process follows, ...
    uint32_t moved_slot     # ... into this context there
    uint64_t origin         # from which context of another GPU it was restored (checkpoint.pyx); 0: none
    uint32_t legacy         # its legacy stream
    uint32_t error          # sticky CUresult
    uint64_t server         # MPS server it belongs to; 0: none. A fault spreads over a server
    uint64_t server_namespace   # PID namespace in which `server` has the pid that its number holds
    double sm_ns            # SM time used
    SimLoad load


# A library of a process that has mapped the file.
cdef public struct SimParticipant:
    uint32_t library        # SimLibrary
    int32_t pid
    uint64_t pid_namespace
    uint64_t pid_start


# A piece of physical memory that may belong to several contexts. It goes with the last of them.
cdef public struct SimShare:
    uint64_t id             # the inode of its file; 0: free
    uint64_t bytes
    uint32_t charged        # context + 1: its memory_bytes have them, and NVML shows them there
    uint32_t unused
    uint64_t holders[2]     # bit per context


cdef public struct SimGpu:
    uint64_t magic
    uint32_t version
    uint32_t index
    uint64_t state_bytes
    char name[96]
    unsigned char uuid[16]
    uint64_t memory_bytes
    uint64_t context_bytes  # what a context costs
    uint32_t sms
    uint32_t pci_bus
    int64_t slice_ns        # hardware time slice
    int64_t switch_ns       # saving a running context and starting another
    int64_t idle_switch_ns  # starting another where the last one has nothing to save
    double copy_bytes_per_ns
    double memory_bytes_per_ns
    uint32_t lock           # its holder: index of a participant + 1, and SIM_WAITERS (lock.pxd)
    uint32_t leaving        # a stopped participant + 1 that goes on until it has left the lock; 0: none (share.pxd)
    # -- everything below changes under the lock
    uint32_t recoveries     # holders of the lock that died
    uint32_t suspect        # next context whose process is checked
    int64_t looked_ns
    int64_t time_ns         # simulated up to here (CLOCK_MONOTONIC)
    uint64_t next_seq
    uint64_t active_group   # 0: none yet
    int64_t slice_end_ns
    int64_t switch_end_ns
    double sm_ns            # SM time used by all
    int64_t copy_ns[2]
    SimLoad load
    uint64_t busy[16]       # bit per stream: has unfinished operations (derived from head and tail)
    SimParticipant participants[1024]
    SimContext contexts[128]
    SimShare shares[256]
    SimStream streams[1024]
    SimOp ops[1024][1024]


cdef inline SimContext* sim_context(SimGpu* gpu, uint32_t index) noexcept nogil:
    return &gpu.contexts[index % SIM_CONTEXTS]


cdef inline SimStream* sim_stream(SimGpu* gpu, uint32_t index) noexcept nogil:
    return &gpu.streams[index % SIM_STREAMS]


cdef inline uint32_t sim_owner(const SimStream* stream) noexcept nogil:
    """The index of a stream's context."""
    return (stream.context - 1) % SIM_CONTEXTS


cdef inline SimOp* sim_op(SimGpu* gpu, uint32_t stream, uint64_t ordinal) noexcept nogil:
    return &gpu.ops[stream % SIM_STREAMS][ordinal % SIM_QUEUE]
