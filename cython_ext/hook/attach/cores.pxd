"""How many cores this process may use: those of its affinity, and no more than the CPU quota of its container. A hook
that spins on a quota is throttled while it holds a lease.
"""

cdef extern from "hook/connect.h" nogil:
    long vgpu_cores() noexcept
    long vgpu_read(const char* path, char* out, size_t capacity) noexcept

cdef enum:
    NO_QUOTA = 1 << 20


cdef inline long number_at(const char* text, long size, long* at) noexcept nogil:
    """The next number of the text; -1: there is none, as before "max" and "-1"."""
    cdef long value = -1
    while at[0] < size and text[at[0]] == c' ':
        at[0] += 1
    while at[0] < size and c'0' <= text[at[0]] <= c'9' and value < 1000000000:
        value = 10 * max(value, 0) + text[at[0]] - c'0'
        at[0] += 1
    return value


cdef inline long quota_cores(const char* text, long size) noexcept nogil:
    """Whole cores of a quota, by the text of ``cpu.max``: quota and period in microseconds."""
    cdef long at = 0
    cdef long quota = number_at(text, size, &at)
    cdef long period = number_at(text, size, &at)
    return quota / period if quota >= 0 and period > 0 else NO_QUOTA


cdef inline long usable_cores() noexcept nogil:
    """By cgroup v2, and by v1. A container sees its own quota at these paths; a program of the host sees none."""
    cdef char[64] text
    cdef long size = vgpu_read(b"/sys/fs/cgroup/cpu.max", text, sizeof(text))
    cdef long quota
    if size > 0:
        return min(vgpu_cores(), quota_cores(text, size))
    size = vgpu_read(b"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", text, 32)
    if size <= 0:
        return vgpu_cores()
    text[size - 1] = c' '    # over the newline
    quota = vgpu_read(b"/sys/fs/cgroup/cpu/cpu.cfs_period_us", text + size, 32)
    return min(vgpu_cores(), quota_cores(text, size + max(quota, 0)))
