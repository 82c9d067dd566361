"""What the parts of the simulated driver share: result codes, the objects behind handles, and each other's services.

Handles are pointers to these objects. An object that is destroyed loses its mark and its memory is kept for the next
of its kind. So a stale handle is refused instead of followed into memory of another kind.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from cython_ext.sim.state cimport SimGpu


cdef extern from "sim/cuda/sim_native.h" nogil:
    cdef struct SimOwnStream "sim_own":
        void* context
        void* stream
        uint32_t id
    ctypedef struct SimThread:
        void* stack[64]
        int depth
        int capture_mode
        SimOwnStream own[8]
        uint32_t own_next
        uint32_t id
    SimThread sim_thread
    void sim_sleep_until(int64_t at_ns) noexcept
    int sim_start_thread(void* (*run)(void*) noexcept nogil) noexcept


ctypedef public int CUresult

cdef enum CUresultValue:
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_PTX = 218
    FILE_NOT_FOUND = 301
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    PEER_ACCESS_ALREADY_ENABLED = 704
    PEER_ACCESS_NOT_ENABLED = 705
    PRIMARY_CONTEXT_ACTIVE = 708
    CONTEXT_IS_DESTROYED = 709
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HOST_MEMORY_NOT_REGISTERED = 713
    COOPERATIVE_LAUNCH_TOO_LARGE = 720
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    CAPTURE_UNSUPPORTED = 900
    CAPTURE_INVALIDATED = 901
    CAPTURE_MERGE = 902
    CAPTURE_UNMATCHED = 903
    CAPTURE_UNJOINED = 904
    CAPTURE_ISOLATION = 905
    CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    CAPTURE_WRONG_THREAD = 908
    UNKNOWN = 999

cdef enum:
    MARK_CONTEXT = 0x43545831
    MARK_STREAM = 0x53545231
    MARK_EVENT = 0x45564e31
    MARK_MODULE = 0x4d4f4431
    MARK_FUNCTION = 0x46554e31
    MARK_GRAPH = 0x47525031
    MARK_EXEC = 0x47524531
    MARK_NODE = 0x4e4f4431
    MARK_POOL = 0x504f4f31
    MARK_ARRAY = 0x41525231
    MARK_MIPMAP = 0x4d495031

# What its process has to do about an operation that the GPU has reached or finished.
cdef enum EffectKind:
    EFFECT_NONE = 0
    EFFECT_EVENT = 1        # note when an event happened
    EFFECT_INTERVAL = 2     # store a kernel's start and end
    EFFECT_WRITE = 3        # store a word
    EFFECT_WAIT = 4         # release the stream when a word satisfies a condition
    EFFECT_HOST = 5         # call a function, then release the stream
    EFFECT_REMOTE = 6       # release the stream when a stream of another GPU has come far enough

cdef enum:
    TOUCHES = 6


# The process's own side of one operation in a stream's queue; dies with it.
cdef public struct Effect:
    uint32_t kind
    uint32_t flags          # of a wait or write: 64-bit wide is WIDE_WORD
    void* event
    uint64_t address
    uint64_t value
    void* function
    uint64_t touched[6]     # device addresses the operation will use
    uint32_t touches

cdef enum:
    WIDE_WORD = 0x100

cdef enum DataKind:
    DATA_NONE = 0
    DATA_COPY = 1
    DATA_FILL = 2


# One operation as the program asked for it: to be queued now, or kept as a node of a graph.
cdef public struct Work:
    uint32_t kind           # SimOpKind
    double ns               # duration at full rate
    uint32_t sms
    SimGpu* wait_gpu        # OP_WAIT: the GPU of the stream; NULL: the same GPU, whichever that is
    uint32_t wait_slot
    uint32_t wait_generation
    uint64_t wait_count
    Effect effect
    uint32_t data           # DataKind: what happens to memory, at submission
    uint64_t target
    uint64_t source
    uint64_t width          # bytes of a row
    uint64_t height
    uint64_t target_pitch
    uint64_t source_pitch
    uint32_t fill
    uint32_t fill_bytes     # 1, 2 or 4
    uint32_t memory         # NODE_TAKES, NODE_GIVES: of a graph, ``width`` bytes at ``target``; else 0
    Function* function      # of a kernel
    uint32_t failed         # CUresult with which it ends
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes


cdef enum:
    NODE_TAKES = 10         # CU_GRAPH_NODE_TYPE_MEM_ALLOC
    NODE_GIVES = 11         # ..._MEM_FREE


# What an executable graph needs of its device for nodes that allocate.
cdef public struct GraphMemory:
    int device
    uint64_t size
    bint mapped
    const Stream* stream    # in which it was launched last
    GraphMemory* next


# Nodes of a graph that something comes after.
cdef public struct Frontier:
    Node* node[32]
    uint32_t count


cdef public struct Node:
    uint32_t mark
    int type                # CUgraphNodeType
    Graph* graph
    Work work
    Frontier needs
    uint32_t needed_by      # nodes that depend on it
    uint32_t order          # position in the graph; an exec runs nodes in an order that respects dependencies
    uint32_t spans          # of a child graph's last node: the child's nodes and the empty one before them; else 0
    Node* next


cdef public struct Graph:
    uint32_t mark
    uint32_t count
    Node* first
    Node* last


# One capture, begun in one stream and joined by others through events.
cdef public struct Capture:
    uint32_t id
    int mode                # CUstreamCaptureMode
    uint32_t thread
    bint invalidated
    bint foreign            # into a graph of the program's (cuStreamBeginCaptureToGraph)
    Graph* graph
    Stream* origin
    Capture* next


cdef public struct Device:
    SimGpu* gpu
    Context* primary
    uint32_t retained
    uint32_t primary_flags
    void* pool              # current memory pool
    void* default_pool
    uint32_t peers          # bit per device that may be accessed


cdef public struct Context:
    uint32_t mark
    uint32_t id
    int device
    uint32_t slot
    uint32_t generation     # of the slot: another one means that this process lost it
    uint32_t flags
    bint is_primary
    bint is_green           # has streams of its own; its memory is the primary one's
    uint32_t attached       # by cuCtxAttach, and not detached yet
    SimGpu* gpu
    Stream* legacy
    void* shared            # blocks of 2 MiB that allocations up to 1 MiB are carved from (memory.pyx)
    uint32_t captures       # captures open on blocking streams
    uint64_t limits[16]
    Context* next


cdef public struct Stream:
    uint32_t mark
    uint32_t id
    Context* context
    SimGpu* gpu
    uint32_t slot
    uint32_t generation
    uint32_t flags          # SimStreamFlags
    int priority
    Capture* capture        # it takes part in
    Frontier frontier       # nodes that its next one will depend on
    bint closing            # destroyed, but not yet drained
    Effect* effects         # ring parallel to the shared one
    Stream* next


cdef public struct Event:
    uint32_t mark
    uint32_t id
    Context* context
    uint32_t flags
    bint recorded
    SimGpu* gpu             # where it was recorded last
    uint32_t slot
    uint32_t generation
    uint64_t count          # operations of that stream that must be done
    int64_t time_ns         # 0 until seen
    uint32_t pending        # records on their way; the memory is kept for them
    uint64_t before_seq     # of a whole context: what was submitted before; 0: of one stream
    Capture* capture        # recorded within this capture
    Frontier frontier       # and after these nodes
    Event* next


cdef public struct Function:
    uint32_t mark
    Module* module
    bint hashes             # it is the hook's kernel for hashes of pieces, which is carried out
    char name[256]
    int parameters
    uint32_t size[64]
    uint32_t offset[64]
    const char* ns          # expressions of the annotation, or NULL
    const char* sms
    const char* interval
    const char* fault       # CUresult: it ends in a fatal error
    int attributes[32]
    Function* next


cdef public struct Module:
    uint32_t mark
    bint is_library
    char* text              # PTX; NULL for an image of another kind
    Function* functions
    Module* next


cdef public struct Side3D:        # of CUDA_MEMCPY3D
    size_t x
    size_t y
    size_t z
    size_t lod
    int type
    void* host
    uint64_t device
    void* array
    void* context           # reserved in the plain form
    size_t pitch
    size_t height


cdef public struct Copy3D:        # CUDA_MEMCPY3D, and _PEER
    Side3D source
    Side3D target
    size_t width
    size_t height
    size_t depth


cdef public struct Array:
    uint32_t mark
    uint64_t address
    uint64_t width          # elements
    uint64_t rows
    uint64_t element_bytes
    Array* next


# arrays.pyx
cdef extern bint drv_is_array(const Array* array) noexcept nogil

# process.pyx
cdef extern int drv_devices() noexcept nogil
cdef extern Device* drv_device(int index) noexcept nogil
cdef extern CUresult drv_ready() noexcept nogil
cdef extern void drv_lock() noexcept nogil
cdef extern void drv_unlock() noexcept nogil
cdef extern CUresult drv_begin(Context* context) noexcept nogil
cdef extern void drv_end(Context* context) noexcept nogil
cdef extern CUresult drv_wait(
    Context* context, SimGpu* gpu, uint32_t slot, uint32_t generation, uint64_t count) noexcept nogil
cdef extern CUresult drv_wait_room(Stream* stream) noexcept nogil
cdef extern Stream* drv_streams() noexcept nogil
cdef extern Stream* drv_new_stream() noexcept nogil
cdef extern void drv_drop_stream(Stream* stream) noexcept nogil
cdef extern uint32_t drv_next_id() noexcept nogil
cdef extern void drv_enter(SimGpu* gpu) noexcept nogil
cdef extern void drv_leave(SimGpu* gpu) noexcept nogil
cdef extern void drv_follow() noexcept nogil

# agent.pyx
cdef extern void drv_serve(SimGpu* gpu) noexcept nogil
cdef extern void drv_wake_agent() noexcept nogil

# contexts.pyx
cdef extern Context* drv_contexts() noexcept nogil
cdef extern Context* drv_current() noexcept nogil
cdef extern CUresult drv_current_context(Context** context) noexcept nogil
cdef extern bint drv_is_context(Context* context) noexcept nogil
cdef extern CUresult drv_open_context(int index, unsigned int flags, bint primary, Context** out) noexcept nogil
cdef extern void drv_close_context(Context* context) noexcept nogil

# streams.pyx
cdef extern CUresult drv_open_stream(Context* context, uint32_t flags, int priority, Stream** stream) noexcept nogil
cdef extern CUresult drv_stream(void* handle, Stream** stream) noexcept nogil
cdef extern CUresult drv_submit(Stream* stream, Work* work) noexcept nogil
cdef extern CUresult drv_enqueue(Stream* stream, Work* work) noexcept nogil
cdef extern CUresult drv_synchronize(Stream* stream) noexcept nogil
cdef extern CUresult drv_synchronize_context(Context* context) noexcept nogil
cdef extern CUresult drv_synchronize_before(Context* context, bint blocking_only, uint64_t seq) noexcept nogil
cdef extern bint drv_is_done(Context* context, uint64_t seq) noexcept nogil

# events.pyx
cdef extern void drv_note_record(Event* event, Stream* stream) noexcept nogil

# capture.pyx
cdef extern CUresult drv_check_unsafe() noexcept nogil
cdef extern CUresult drv_capture_work(Stream* stream, Work* work) noexcept nogil
cdef extern CUresult drv_capture_event(Stream* stream, Event* event) noexcept nogil
cdef extern CUresult drv_capture_wait(Stream* stream, Event* event) noexcept nogil
cdef extern CUresult drv_break_captures(Context* context) noexcept nogil

# launch.pyx, copies.pyx
cdef extern CUresult drv_price_kernel(
    Function* function, const unsigned int* grid, const unsigned int* block, unsigned int shared_bytes,
    void** parameters, void** extra, Stream* stream, Work* work) noexcept nogil
cdef extern CUresult drv_price_copy(Stream* stream, Work* work) noexcept nogil
cdef extern CUresult drv_copy_3d(const void* params, Work* work) noexcept nogil

# graphs.pyx
cdef extern Graph* drv_new_graph() noexcept nogil
cdef extern void drv_free_graph(Graph* graph) noexcept nogil
cdef extern Node* drv_add_node(Graph* graph, Frontier* needs, Work* work, int type) noexcept nogil
cdef extern CUresult drv_kernel_node(const void* params, Work* work) noexcept nogil
cdef extern CUresult drv_fill_node(const void* params, Work* work) noexcept nogil
cdef extern CUresult drv_copy_node(const void* params, Work* work) noexcept nogil
cdef extern CUresult drv_add_to_graph(
    Node** out, Graph* graph, Node** dependencies, size_t count, Work* work, int type) noexcept nogil

# graphmemory.pyx
cdef extern void mem_forget_node(const Node* node) noexcept nogil
cdef extern CUresult drv_capture_take(Stream* stream, uint64_t* address, uint64_t size) noexcept nogil
cdef extern CUresult drv_capture_give(Stream* stream, uint64_t address) noexcept nogil
cdef extern CUresult drv_graph_memory(const Graph* graph, GraphMemory** out) noexcept nogil
cdef extern CUresult drv_map_graph(GraphMemory* memory, Stream* stream, bint launch) noexcept nogil
cdef extern bint drv_waits_for_graph(uint64_t address) noexcept nogil
cdef extern CUresult drv_do_memory(const Work* work) noexcept nogil
cdef extern void drv_forget_graph_memory(GraphMemory* memory, const Work* work, uint32_t count) noexcept nogil

# memory.pyx
cdef extern void drv_touch(Effect* effect, uint64_t address) noexcept nogil
cdef extern void drv_move_data(Work* work) noexcept nogil
cdef extern void drv_forget_context(Context* context) noexcept nogil
