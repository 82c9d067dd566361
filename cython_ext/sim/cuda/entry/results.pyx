"""Names and descriptions of results."""

from cython_ext.sim.cuda.driver cimport CUresult, INVALID_VALUE, SUCCESS


cdef const char* text_of(int code, bint described) noexcept nogil:
    if code == 0:
        return b"no error" if described else b"CUDA_SUCCESS"
    if code == 1:
        return b"invalid argument" if described else b"CUDA_ERROR_INVALID_VALUE"
    if code == 2:
        return b"out of memory" if described else b"CUDA_ERROR_OUT_OF_MEMORY"
    if code == 3:
        return b"initialization error" if described else b"CUDA_ERROR_NOT_INITIALIZED"
    if code == 46:
        return b"device is busy or unavailable" if described else b"CUDA_ERROR_DEVICE_UNAVAILABLE"
    if code == 100:
        return b"no CUDA-capable device is detected" if described else b"CUDA_ERROR_NO_DEVICE"
    if code == 101:
        return b"invalid device ordinal" if described else b"CUDA_ERROR_INVALID_DEVICE"
    if code == 200:
        return b"device kernel image is invalid" if described else b"CUDA_ERROR_INVALID_IMAGE"
    if code == 201:
        return b"invalid device context" if described else b"CUDA_ERROR_INVALID_CONTEXT"
    if code == 217:
        return (b"peer access is not supported between these two devices" if described
                else b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
    if code == 218:
        return b"a PTX JIT compilation failed" if described else b"CUDA_ERROR_INVALID_PTX"
    if code == 301:
        return b"file not found" if described else b"CUDA_ERROR_FILE_NOT_FOUND"
    if code == 304:
        return b"OS call failed or operation not supported on this OS" if described else b"CUDA_ERROR_OPERATING_SYSTEM"
    if code == 400:
        return b"invalid resource handle" if described else b"CUDA_ERROR_INVALID_HANDLE"
    if code == 401:
        return b"the operation cannot be performed in the present state" if described else b"CUDA_ERROR_ILLEGAL_STATE"
    if code == 500:
        return b"named symbol not found" if described else b"CUDA_ERROR_NOT_FOUND"
    if code == 600:
        return b"device not ready" if described else b"CUDA_ERROR_NOT_READY"
    if code == 700:
        return b"an illegal memory access was encountered" if described else b"CUDA_ERROR_ILLEGAL_ADDRESS"
    if code == 701:
        return b"too many resources requested for launch" if described else b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    if code == 704:
        return b"peer access is already enabled" if described else b"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
    if code == 705:
        return b"peer access has not been enabled" if described else b"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"
    if code == 708:
        return (b"cannot set while device is active in this process" if described
                else b"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE")
    if code == 709:
        return b"context is destroyed" if described else b"CUDA_ERROR_CONTEXT_IS_DESTROYED"
    if code == 712:
        return (b"part or all of the requested memory range is already mapped" if described
                else b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
    if code == 713:
        return (b"pointer does not correspond to a registered memory region" if described
                else b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
    if code == 720:
        return b"too many blocks in cooperative launch" if described else b"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"
    if code == 805:
        return (b"no connection to the MPS daemon or its server" if described
                else b"CUDA_ERROR_MPS_CONNECTION_FAILED")
    if code == 806:
        return b"a call of the MPS server failed" if described else b"CUDA_ERROR_MPS_RPC_FAILURE"
    if code == 807:
        return (b"the MPS server takes no new process yet" if described
                else b"CUDA_ERROR_MPS_SERVER_NOT_READY")
    if code == 808:
        return (b"the MPS server has its most processes" if described
                else b"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    if code == 800:
        return b"operation not permitted" if described else b"CUDA_ERROR_NOT_PERMITTED"
    if code == 801:
        return b"operation not supported" if described else b"CUDA_ERROR_NOT_SUPPORTED"
    if code == 900:
        return (b"operation not permitted when stream is capturing" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    if code == 901:
        return (b"operation failed due to a previous error during capture" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    if code == 902:
        return (b"operation would result in a merge of separate capture sequences" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_MERGE")
    if code == 903:
        return (b"capture was not ended in the same stream as it began" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED")
    if code == 904:
        return b"capturing stream has unjoined work" if described else b"CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    if code == 905:
        return (b"dependency created on uncaptured work in another stream" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_ISOLATION")
    if code == 906:
        return (b"operation would make the legacy stream depend on a capturing blocking stream" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
    if code == 907:
        return (b"operation not permitted on an event last recorded in a capturing stream" if described
                else b"CUDA_ERROR_CAPTURED_EVENT")
    if code == 908:
        return (b"attempt to terminate a thread-local capture sequence from another thread" if described
                else b"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD")
    if code == 910:
        return (b"the graph update included changes that are not allowed" if described
                else b"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE")
    if code == 999:
        return b"unknown error" if described else b"CUDA_ERROR_UNKNOWN"
    return NULL


cdef public CUresult cuGetErrorName(int code, const char** text) noexcept nogil:
    text[0] = text_of(code, False)
    return SUCCESS if text[0] != NULL else INVALID_VALUE


cdef public CUresult cuGetErrorString(int code, const char** text) noexcept nogil:
    text[0] = text_of(code, True)
    return SUCCESS if text[0] != NULL else INVALID_VALUE
