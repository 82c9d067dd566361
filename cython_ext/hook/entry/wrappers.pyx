"""The wrappers of start-up, launches, captures, and handles that die (contexts: contexts.pyx). Each does its own small
part and calls the real function.

A launch:  announce (fastpath.pxd) → the real launch → clear ``inside``.   Where that is not enough:  vgpu_enter → the
real launch → vgpu_leave (gate.pyx). The ``_ptsz`` twins differ in what stream 0 means: the thread's own default stream
(2) instead of the legacy one (1).

Cancellation is held up from ``vgpu_enter`` to ``vgpu_leave`` here, and by guards around most other wrappers
(generate_hook.py). The reason is in hook_native.h.
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.gate.fastpath cimport announce, named
from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxSetCurrent, real_cuGraphExecDestroy, real_cuGraphLaunch,
    real_cuGraphLaunch_ptsz, real_cuInit, real_cuLaunchCooperativeKernel, real_cuLaunchCooperativeKernel_ptsz,
    real_cuLaunchCooperativeKernelMultiDevice, real_cuLaunchKernel, real_cuLaunchKernel_ptsz, real_cuLaunchKernelEx,
    real_cuLaunchKernelEx_ptsz, real_cuLibraryUnload, real_cuModuleUnload, real_cuStreamBeginCapture,
    real_cuStreamBeginCapture_ptsz, real_cuStreamBeginCapture_v2, real_cuStreamBeginCapture_v2_ptsz,
    real_cuStreamBeginCaptureToGraph, real_cuStreamBeginCaptureToGraph_ptsz, real_cuStreamBeginRecaptureToGraph,
    real_cuStreamBeginRecaptureToGraph_ptsz, real_cuStreamDestroy, real_cuStreamDestroy_v2, real_cuStreamEndCapture,
    real_cuStreamEndCapture_ptsz, real_cuStreamGetCtx,
)
from cython_ext.hook.hook cimport (
    vgpu_attach, vgpu_capture_began, vgpu_capture_begins, vgpu_capture_ended, vgpu_check_partition, vgpu_enter,
    vgpu_forget, vgpu_graph_dies, vgpu_graph_goes, vgpu_graph_takes, vgpu_graph_went, vgpu_leave, vgpu_lend_environment,
    vgpu_return_environment, vgpu_stop_at_exit, vgpu_stream_dies,
)
from cython_ext.hook.state cimport (
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, LAUNCH_OVERLAPS, LAUNCH_WAITS, MAX_GATES, PASS_ANNOUNCED, Gate, Pass,
    OUT_OF_MORE_THAN_CARD, Thread, attached, is_swappable, state,
)
from cython_ext.logic.meter.durations cimport WORK_GRAPH, LaunchKey
from cython_ext.logic.meter.meter cimport launch_tag
from cython_ext.native cimport store32

cdef extern from *:
    """
    #include "hook/generated/driver.h"
    """
    const char* VGPU_VERSION

cdef extern from "hook/hook_native.h" nogil:
    int vgpu_hold_cancel(bint in_waits) noexcept
    void vgpu_let_cancel(int held) noexcept

cdef enum:
    ROUNDS = 16              # of a graph whose memory goes back between its two checks
    PROGRAMMATIC_STREAM_SERIALIZATION = 6    # CU_LAUNCH_ATTRIBUTE_...: may start before its predecessor has ended


cdef struct LaunchAttribute:                 # CUlaunchAttribute
    int id
    int pad
    int[16] value


cdef struct LaunchConfig:                    # CUlaunchConfig: hStream at byte 32
    unsigned int gx, gy, gz
    unsigned int bx, by, bz
    unsigned int shared
    void* stream
    const LaunchAttribute* attributes
    unsigned int attribute_count


cdef struct LaunchParams:                    # CUDA_LAUNCH_PARAMS
    void* f
    unsigned int gx, gy, gz
    unsigned int bx, by, bz
    unsigned int shared
    void* stream
    void** params


cdef public const char* vgpu_hook_version() noexcept nogil:
    return VGPU_VERSION


# --- start-up

cdef public int cuInit(unsigned int flags) noexcept nogil:
    """Attach first: the driver reads devices and MPS from the environment when it starts, and cudart caches what it
    sees."""
    cdef int error = vgpu_attach(0)
    cdef bint lent
    if error != CUDA_SUCCESS:
        return error
    error = vgpu_lend_environment(&lent)
    if error != CUDA_SUCCESS:
        return error
    error = vgpu_check_partition(real_cuInit(flags))
    if lent:
        vgpu_return_environment()
    if attached():
        vgpu_stop_at_exit()
        if error == CUDA_SUCCESS:
            store32(&state().started, 1)
    return error


# --- launches

cdef inline LaunchKey launch_key(
    void* f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz
) noexcept nogil:
    cdef LaunchKey key
    key.handle = <uint64_t>f
    key.grid_x = gx
    key.grid_y = gy
    key.grid_z = gz
    key.block_x = bx
    key.block_y = by
    key.block_z = bz
    key.after = key.hash = 0     # the gate knows
    return key


cdef inline int kernel_real(
    bint own, void* f, unsigned int gx, unsigned int gy, unsigned int gz,
    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, void* stream, void** params, void** extra,
) noexcept nogil:
    if own:
        return real_cuLaunchKernel_ptsz(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
    return real_cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)


cdef inline int kernel(
    bint own, void* f, unsigned int gx, unsigned int gy, unsigned int gz,
    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, void* stream, void** params, void** extra,
) noexcept nogil:
    cdef Thread* thread = announce(named(stream, own), launch_tag(<uint64_t>f, gx, gy, gz, bx, by, bz))
    cdef LaunchKey key
    cdef Pass launch
    cdef int result, held
    if thread != NULL:
        result = kernel_real(own, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
        store32(&thread.inside, 0)
        return result
    key = launch_key(f, gx, gy, gz, bx, by, bz)
    held = vgpu_hold_cancel(1)
    result = vgpu_enter(&launch, named(stream, own), &key, 0)
    if result == CUDA_SUCCESS:
        result = kernel_real(own, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
        vgpu_leave(&launch, result)
    vgpu_let_cancel(held)
    return result


cdef public int cuLaunchKernel(
    void* f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
    unsigned int shared, void* stream, void** params, void** extra,
) noexcept nogil:
    return kernel(0, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)


cdef public int cuLaunchKernel_ptsz(
    void* f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
    unsigned int shared, void* stream, void** params, void** extra,
) noexcept nogil:
    return kernel(1, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)


cdef inline bint is_programmatic(const LaunchConfig* config) noexcept nogil:
    cdef unsigned int i
    for i in range(config.attribute_count):
        if config.attributes[i].id == PROGRAMMATIC_STREAM_SERIALIZATION and config.attributes[i].value[0]:
            return 1
    return 0


cdef inline int kernel_ex_real(bint own, const void* config, void* f, void** params, void** extra) noexcept nogil:
    if own:
        return real_cuLaunchKernelEx_ptsz(config, f, params, extra)
    return real_cuLaunchKernelEx(config, f, params, extra)


cdef inline int kernel_ex(bint own, const void* given, void* f, void** params, void** extra) noexcept nogil:
    cdef const LaunchConfig* config = <const LaunchConfig*>given
    cdef Thread* thread
    cdef LaunchKey key
    cdef Pass launch
    cdef int result, held
    if config == NULL:
        return kernel_ex_real(own, given, f, params, extra)          # the driver's error
    thread = announce(
        named(config.stream, own),
        launch_tag(<uint64_t>f, config.gx, config.gy, config.gz, config.bx, config.by, config.bz),
    )
    if thread != NULL:
        result = kernel_ex_real(own, given, f, params, extra)
        store32(&thread.inside, 0)
        return result
    key = launch_key(f, config.gx, config.gy, config.gz, config.bx, config.by, config.bz)
    held = vgpu_hold_cancel(1)
    result = vgpu_enter(&launch, named(config.stream, own), &key, LAUNCH_OVERLAPS if is_programmatic(config) else 0)
    if result == CUDA_SUCCESS:
        result = kernel_ex_real(own, given, f, params, extra)
        vgpu_leave(&launch, result)
    vgpu_let_cancel(held)
    return result


cdef public int cuLaunchKernelEx(const void* config, void* f, void** params, void** extra) noexcept nogil:
    return kernel_ex(0, config, f, params, extra)


cdef public int cuLaunchKernelEx_ptsz(const void* config, void* f, void** params, void** extra) noexcept nogil:
    return kernel_ex(1, config, f, params, extra)


cdef inline int cooperative_real(
    bint own, void* f, unsigned int gx, unsigned int gy, unsigned int gz,
    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, void* stream, void** params,
) noexcept nogil:
    if own:
        return real_cuLaunchCooperativeKernel_ptsz(f, gx, gy, gz, bx, by, bz, shared, stream, params)
    return real_cuLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params)


cdef inline int cooperative(
    bint own, void* f, unsigned int gx, unsigned int gy, unsigned int gz,
    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, void* stream, void** params,
) noexcept nogil:
    cdef Thread* thread = announce(named(stream, own), launch_tag(<uint64_t>f, gx, gy, gz, bx, by, bz))
    cdef LaunchKey key
    cdef Pass launch
    cdef int result, held
    if thread != NULL:
        result = cooperative_real(own, f, gx, gy, gz, bx, by, bz, shared, stream, params)
        store32(&thread.inside, 0)
        return result
    key = launch_key(f, gx, gy, gz, bx, by, bz)
    held = vgpu_hold_cancel(1)
    result = vgpu_enter(&launch, named(stream, own), &key, 0)
    if result == CUDA_SUCCESS:
        result = cooperative_real(own, f, gx, gy, gz, bx, by, bz, shared, stream, params)
        vgpu_leave(&launch, result)
    vgpu_let_cancel(held)
    return result


cdef public int cuLaunchCooperativeKernel(
    void* f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
    unsigned int shared, void* stream, void** params,
) noexcept nogil:
    return cooperative(0, f, gx, gy, gz, bx, by, bz, shared, stream, params)


cdef public int cuLaunchCooperativeKernel_ptsz(
    void* f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
    unsigned int shared, void* stream, void** params,
) noexcept nogil:
    return cooperative(1, f, gx, gy, gz, bx, by, bz, shared, stream, params)


cdef public int vgpu_grid(
    Pass* work, void* stream, bint own, bint waits, void* function, unsigned int width, unsigned int height
) noexcept nogil:
    """A launch whose block was set before (cuFuncSetBlockShape), and stands for one here."""
    cdef LaunchKey key
    work.kind = PASS_ANNOUNCED
    work.sample = -1
    work.thread = announce(named(stream, own), launch_tag(<uint64_t>function, width, height, 1, 1, 1, 1))
    if work.thread != NULL:
        return CUDA_SUCCESS
    key = launch_key(function, width, height, 1, 1, 1, 1)
    return vgpu_enter(work, named(stream, own), &key, 0)


cdef inline void turn_to(void* stream) noexcept nogil:
    """Make the stream's context the current one: where it is, its vGPU is."""
    cdef void* context = NULL
    if real_cuStreamGetCtx(stream, &context) == CUDA_SUCCESS:
        real_cuCtxSetCurrent(context)


cdef public int cuLaunchCooperativeKernelMultiDevice(
    void* launches, unsigned int count, unsigned int flags
) noexcept nogil:
    """One kernel on each of several GPUs, which wait for each other. Each is let through by its own vGPU; the first
    waits for the last under its lease, and pays for that."""
    cdef const LaunchParams* each = <const LaunchParams*>launches
    cdef Pass[MAX_GATES] passes
    cdef void* context = NULL
    cdef LaunchKey key
    cdef int result = CUDA_SUCCESS
    cdef unsigned int i, entered = 0
    if launches == NULL or not attached():
        return real_cuLaunchCooperativeKernelMultiDevice(launches, count, flags)
    real_cuCtxGetCurrent(&context)
    while result == CUDA_SUCCESS and entered < min(count, <unsigned int>MAX_GATES):
        turn_to(each[entered].stream)
        key = launch_key(
            each[entered].f, each[entered].gx, each[entered].gy, each[entered].gz,
            each[entered].bx, each[entered].by, each[entered].bz,
        )
        result = vgpu_enter(&passes[entered], each[entered].stream, &key, LAUNCH_WAITS)
        entered += result == CUDA_SUCCESS
    real_cuCtxSetCurrent(context)
    if result == CUDA_SUCCESS:
        result = real_cuLaunchCooperativeKernelMultiDevice(launches, count, flags)
    for i in range(entered):
        turn_to(each[i].stream)
        vgpu_leave(&passes[i], result)
    real_cuCtxSetCurrent(context)
    return result


cdef inline int graph_real(bint own, void* graph, void* stream) noexcept nogil:
    return real_cuGraphLaunch_ptsz(graph, stream) if own else real_cuGraphLaunch(graph, stream)


cdef int launch_taking_graph(bint own, void* graph, void* stream) noexcept nogil:
    """One that allocates, perhaps: off the fast path."""
    cdef Gate* gate = NULL
    cdef LaunchKey key
    cdef Pass launch
    cdef int _, result = CUDA_ERROR_OUT_OF_MEMORY
    key = launch_key(graph, WORK_GRAPH, 0, 0, 0, 0, 0)
    for _ in range(ROUNDS):
        result = vgpu_graph_takes(own, graph, stream)
        if result != CUDA_SUCCESS:
            return result
        result = vgpu_enter(&launch, named(stream, own), &key, 0)
        if result != CUDA_SUCCESS:
            return result
        result = vgpu_graph_goes(own, graph, stream, &gate)
        if result != CUDA_ERROR_OUT_OF_MEMORY or not is_swappable(&state().gates[0]):
            break
        vgpu_leave(&launch, result)          # its memory went back as the vGPU left the card meanwhile
    else:
        return result
    if result == OUT_OF_MORE_THAN_CARD:
        result = CUDA_ERROR_OUT_OF_MEMORY
    if result == CUDA_SUCCESS:
        if launch.thread != NULL:
            launch.thread.graph_launches += 1
        result = graph_real(own, graph, stream)
        vgpu_graph_went(gate)
    vgpu_leave(&launch, result)
    return result


cdef inline int launch_graph(bint own, void* graph, void* stream) noexcept nogil:
    """A graph is one unit, with a learned duration of its own."""
    cdef Thread* thread
    cdef LaunchKey key
    cdef Pass launch
    cdef int result, held
    if attached() and state().taking:
        held = vgpu_hold_cancel(0)       # what it takes is settled behind the wait
        result = launch_taking_graph(own, graph, stream)
        vgpu_let_cancel(held)
        return result
    thread = announce(named(stream, own), launch_tag(<uint64_t>graph, WORK_GRAPH, 0, 0, 0, 0, 0))
    if thread != NULL:
        thread.graph_launches += 1
        result = graph_real(own, graph, stream)
        store32(&thread.inside, 0)
        return result
    key = launch_key(graph, WORK_GRAPH, 0, 0, 0, 0, 0)
    held = vgpu_hold_cancel(1)
    result = vgpu_enter(&launch, named(stream, own), &key, 0)
    if result == CUDA_SUCCESS:
        if launch.thread != NULL:
            launch.thread.graph_launches += 1
        result = graph_real(own, graph, stream)
        vgpu_leave(&launch, result)
    vgpu_let_cancel(held)
    return result


cdef public int cuGraphLaunch(void* graph, void* stream) noexcept nogil:
    return launch_graph(0, graph, stream)


cdef public int cuGraphLaunch_ptsz(void* graph, void* stream) noexcept nogil:
    return launch_graph(1, graph, stream)


# --- captures

cdef inline int begun(int result, void* stream, void* context) noexcept nogil:
    vgpu_capture_began(stream if result == CUDA_SUCCESS else NULL, context)
    return result


cdef public int cuStreamBeginCapture(void* stream) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 0))
    return begun(real_cuStreamBeginCapture(stream), named(stream, 0), context)


cdef public int cuStreamBeginCapture_ptsz(void* stream) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 1))
    return begun(real_cuStreamBeginCapture_ptsz(stream), named(stream, 1), context)


cdef public int cuStreamBeginCapture_v2(void* stream, int mode) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 0))
    return begun(real_cuStreamBeginCapture_v2(stream, mode), named(stream, 0), context)


cdef public int cuStreamBeginCapture_v2_ptsz(void* stream, int mode) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 1))
    return begun(real_cuStreamBeginCapture_v2_ptsz(stream, mode), named(stream, 1), context)


cdef public int cuStreamBeginCaptureToGraph(
    void* stream, void* graph, const void* nodes, const void* edges, size_t count, int mode
) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 0))
    return begun(real_cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode), named(stream, 0), context)


cdef public int cuStreamBeginCaptureToGraph_ptsz(
    void* stream, void* graph, const void* nodes, const void* edges, size_t count, int mode
) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 1))
    return begun(
        real_cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode), named(stream, 1), context
    )


cdef public int cuStreamBeginRecaptureToGraph(
    void* stream, int mode, void* graph, void* differs, void* data
) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 0))
    return begun(real_cuStreamBeginRecaptureToGraph(stream, mode, graph, differs, data), named(stream, 0), context)


cdef public int cuStreamBeginRecaptureToGraph_ptsz(
    void* stream, int mode, void* graph, void* differs, void* data
) noexcept nogil:
    cdef void* context = vgpu_capture_begins(named(stream, 1))
    return begun(
        real_cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, differs, data), named(stream, 1), context
    )


cdef public int cuStreamEndCapture(void* stream, void** graph) noexcept nogil:
    cdef int result = real_cuStreamEndCapture(stream, graph)
    vgpu_capture_ended(named(stream, 0), result == CUDA_SUCCESS)
    return result


cdef public int cuStreamEndCapture_ptsz(void* stream, void** graph) noexcept nogil:
    cdef int result = real_cuStreamEndCapture_ptsz(stream, graph)
    vgpu_capture_ended(named(stream, 1), result == CUDA_SUCCESS)
    return result


# --- handles that die

cdef public int cuStreamDestroy(void* stream) noexcept nogil:
    vgpu_stream_dies(stream)
    return real_cuStreamDestroy(stream)


cdef public int cuStreamDestroy_v2(void* stream) noexcept nogil:
    vgpu_stream_dies(stream)
    return real_cuStreamDestroy_v2(stream)


cdef public int cuGraphExecDestroy(void* graph) noexcept nogil:
    vgpu_forget(<uint64_t>graph)
    vgpu_graph_dies(graph)
    return real_cuGraphExecDestroy(graph)


cdef public int cuModuleUnload(void* module) noexcept nogil:
    vgpu_forget(0)
    return real_cuModuleUnload(module)


cdef public int cuLibraryUnload(void* library) noexcept nogil:
    vgpu_forget(0)
    return real_cuLibraryUnload(library)
