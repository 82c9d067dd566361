"""A node's folder (the same as in vgpu/paths.py), and what may be a part of a path in it. A path is built in the
caller's buffer; one that does not fit is refused, never cut.
"""

from libc.stdlib cimport getenv
from libc.string cimport memcpy, strlen

cdef extern from "hook/connect.h" nogil:
    int vgpu_uid() noexcept
    long vgpu_link(const char* path, char* out, size_t capacity) noexcept
    bint vgpu_exists(const char* path) noexcept
    bint vgpu_listens(const char* path) noexcept


cdef inline bint append(char* path, size_t capacity, const char* text) noexcept nogil:
    """Behind what is there. 0: it does not fit, and nothing has changed."""
    cdef size_t length = strlen(path), size = strlen(text)
    if length + size + 1 > capacity:
        return 0
    memcpy(path + length, text, size + 1)
    return 1


cdef inline bint append_number(char* path, size_t capacity, unsigned int number) noexcept nogil:
    """Likewise, in decimal digits."""
    cdef char[12] digits
    cdef int at = 11
    digits[11] = 0
    while True:
        at -= 1
        digits[at] = <char>(c'0' + number % 10)
        number //= 10
        if number == 0:
            break
    return append(path, capacity, digits + at)


cdef inline bint own_directory(char* path, size_t capacity) noexcept nogil:
    """Where a node of this user lies by default; the user is not root."""
    cdef const char* given = getenv(b"XDG_RUNTIME_DIR")
    if given != NULL and given[0]:
        return append(path, capacity, given) and append(path, capacity, b"/vgpu")
    return (
        append(path, capacity, b"/tmp/vgpu-")
        and append_number(path, capacity, vgpu_uid())
        and append(path, capacity, b"/vgpu")
    )


cdef inline bint runtime_directory(char* path, size_t capacity) noexcept nogil:
    """VGPU_RUNTIME_DIR; else that of this user's node if it listens, or if the system has no node; else the system's.
    vgpu/node/link.py has the same rule for clients."""
    cdef const char* given = getenv(b"VGPU_RUNTIME_DIR")
    cdef char[108] control       # as long as a socket's path may be
    path[0] = 0
    if given != NULL and given[0]:
        return append(path, capacity, given)
    if vgpu_uid() == 0:
        return append(path, capacity, b"/run/vgpu")
    if not vgpu_exists(b"/run/vgpu/control.sock"):
        return own_directory(path, capacity)
    control[0] = 0
    if (
        own_directory(control, sizeof(control)) and append(control, sizeof(control), b"/control.sock")
        and vgpu_listens(control)
    ):
        return own_directory(path, capacity)
    return append(path, capacity, b"/run/vgpu")


cdef inline bint well_formed(const char* vgpu_id) noexcept nogil:
    """``vgpu-`` and eight hex digits; so that no id is a path."""
    cdef int i
    if strlen(vgpu_id) != 13 or vgpu_id[0] != c'v' or vgpu_id[1] != c'g' or vgpu_id[2] != c'p' or vgpu_id[3] != c'u':
        return 0
    if vgpu_id[4] != c'-':
        return 0
    for i in range(5, 13):
        if not (c'0' <= vgpu_id[i] <= c'9' or c'a' <= vgpu_id[i] <= c'f'):
            return 0
    return 1


cdef inline bint is_name(const char* text) noexcept nogil:
    """Of a vGPU (vgpu/spec.py), so that no name is a path."""
    cdef size_t i = 0
    cdef bint letter
    while text[i]:
        letter = c'0' <= text[i] <= c'9' or c'a' <= text[i] <= c'z' or c'A' <= text[i] <= c'Z'
        if not letter and (i == 0 or (text[i] != c'.' and text[i] != c'_' and text[i] != c'-')):
            return 0
        i += 1
    return 0 < i < 64


cdef inline bint find_by_name(const char* name, char* vgpu_id, size_t capacity) noexcept nogil:
    """The id of this user's vGPU of that name: runtime directory/names/UID/NAME is a link to it (vgpu/paths.py)."""
    cdef char[256] path
    cdef long size
    path[0] = 0
    if not (
        is_name(name) and runtime_directory(path, sizeof(path)) and append(path, sizeof(path), b"/names/")
        and append_number(path, sizeof(path), vgpu_uid()) and append(path, sizeof(path), b"/")
        and append(path, sizeof(path), name)
    ):
        return 0
    size = vgpu_link(path, vgpu_id, capacity - 1)
    if size <= 0:
        return 0
    vgpu_id[size] = 0
    return well_formed(vgpu_id)
