"""A broker's reply to a process that attaches, and the function that requests it (broker_rpc.pyx)."""

from libc.stdint cimport int64_t

from cython_ext.hook.state cimport Gate
from cython_ext.pages.layout cimport ActivityPage, GrantsPage


cdef struct Reply:
    int64_t slot
    int64_t generation
    int64_t gpu_index
    char[16] mode
    char[256] pipe_directory
    char[256] log_directory
    char[32] active_thread_percentage
    char[64] pinned_memory_limit
    char[8] client_priority
    char[64] gpu_uuid
    char[512] error
    char[16] code            # of a refusal
    int64_t broker_epoch     # of the broker that answered; 0: an older one, which does not send it
    size_t activity_bytes    # of the activity page, as mapped


cdef extern:
    int vgpu_unreachable(const char* vgpu_id, const char* directory, int reason) noexcept nogil
    bint vgpu_converse(
        Gate* gate, const char* role, int64_t slot, Reply* reply, int* reason, GrantsPage** grants,
        ActivityPage** activity
    ) noexcept nogil
