"""Spatial mode, after the driver's cuInit: is this process under MPS, and how many SMs did it get?

Without a daemon at the directory in its settings, the driver runs a process as if there were no MPS: on the whole GPU.
So a process whose daemon has just died must not start. The hook reads back what the process got, and publishes it in
the slot.
"""

from cython_ext.hook.generated.driver cimport real_cuDeviceGet, real_cuDeviceGetAttribute
from cython_ext.hook.hook cimport vgpu_log, vgpu_say
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, attached, state
from cython_ext.pages.layout cimport MODE_SPATIAL
from cython_ext.native cimport load32, store32

cdef enum:
    ATTRIBUTE_SM_COUNT = 16
    ATTRIBUTE_MPS_ENABLED = 133
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805
    CUDA_ERROR_MPS_SERVER_NOT_READY = 807
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED = 809
    STEP = 2                 # SMs; MPS grants them in such steps


cdef void explain(const char* vgpu_id, int error) noexcept nogil:
    if error == CUDA_ERROR_MPS_MAX_CLIENTS_REACHED or error == CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED:
        vgpu_say(vgpu_id, b": the MPS server of its GPU has its most processes: ", b"vgpuctl ps shows them; end one")
    elif error == CUDA_ERROR_MPS_SERVER_NOT_READY:
        vgpu_say(
            vgpu_id, b": the MPS server of its GPU recovers from a fault and takes no process until those that the "
            b"fault has hit are gone: ", b"vgpuctl ps shows them"
        )
    elif error == CUDA_ERROR_MPS_CONNECTION_FAILED:
        vgpu_say(
            vgpu_id, b": the MPS daemon of its GPU does not answer, and without it nothing would limit this program: ",
            b"it is started again within seconds; vgpuctl gpu ls shows it"
        )


cdef public int vgpu_check_partition(int error) noexcept nogil:
    """What cuInit is to return in spatial mode, after the driver's has returned ``error``."""
    cdef Gate* gate
    cdef int device = 0, sm_count = 0, shared = 0, planned, answered
    if not attached() or state().gates[0].grants.mode != MODE_SPATIAL:
        return error
    gate = &state().gates[0]
    if error == CUDA_SUCCESS and real_cuDeviceGet(&device, 0) == CUDA_SUCCESS:
        answered = real_cuDeviceGetAttribute(&shared, ATTRIBUTE_MPS_ENABLED, device)
        real_cuDeviceGetAttribute(&sm_count, ATTRIBUTE_SM_COUNT, device)
        store32(&gate.slot.sm_count, <unsigned int>sm_count)
        vgpu_log(b"SMs, shared by MPS", sm_count, shared)
        # A driver that does not know the attribute still shows by the SMs whether it limits the process.
        planned = <int>load32(&gate.slot.sm_planned)
        if answered == CUDA_SUCCESS and not shared and not (planned and planned - STEP <= sm_count <= planned + STEP):
            error = CUDA_ERROR_MPS_CONNECTION_FAILED
    explain(gate.vgpu_id, error)
    return error
