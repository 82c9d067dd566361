"""The hook's messages: one line on stderr for each fault, and a log of its acts with VGPU_HOOK_LOG=stderr|PATH.

The hook writes straight to the descriptor: it touches no stdio buffer of the application, and keeps no descriptor.
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport getenv
from libc.string cimport memcpy, strcmp, strlen

from cython_ext.native cimport load32, now_ns, store32

cdef extern from "<fcntl.h>" nogil:
    enum:
        O_WRONLY
        O_CREAT
        O_APPEND
        O_CLOEXEC
    int open(const char* path, int flags, ...) noexcept

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int fd, const void* data, size_t size) noexcept
    int close(int fd) noexcept

cdef enum:
    LINE = 1024
    LOG_UNKNOWN = 0
    LOG_OFF = 1
    LOG_ON = 2

cdef uint32_t logging

cdef struct Line:
    char[1024] text
    size_t length


cdef void add(Line* line, const char* text) noexcept nogil:
    cdef size_t size = strlen(text)
    if size > LINE - 2 - line.length:
        size = LINE - 2 - line.length
    memcpy(line.text + line.length, text, size)
    line.length += size


cdef void add_number(Line* line, int64_t value) noexcept nogil:
    cdef char[24] digits
    cdef int at = 23
    cdef bint negative = value < 0
    digits[23] = 0
    if negative:
        value = -value
    while True:
        at -= 1
        digits[at] = <char>(c'0' + value % 10)
        value //= 10
        if value == 0:
            break
    if negative:
        at -= 1
        digits[at] = c'-'
    add(line, digits + at)


cdef void send(Line* line, int fd) noexcept nogil:
    line.text[line.length] = c'\n'
    if write(fd, line.text, line.length + 1) < 0:
        return               # no reader is there


cdef public void vgpu_say(const char* what, const char* detail, const char* advice) noexcept nogil:
    """``vgpu: WHAT DETAIL ADVICE`` on stderr."""
    cdef Line line
    cdef int saved = errno
    line.length = 0
    add(&line, b"vgpu: ")
    add(&line, what)
    add(&line, detail)
    add(&line, advice)
    send(&line, 2)
    (&errno)[0] = saved


cdef public void vgpu_log(const char* what, int64_t a, int64_t b) noexcept nogil:
    """A line of diagnostics with two numbers, if VGPU_HOOK_LOG asks for it. Not for the fast path."""
    cdef Line line
    cdef const char* path
    cdef int fd, saved = errno
    if load32(&logging) == LOG_OFF:
        return
    path = getenv(b"VGPU_HOOK_LOG")
    store32(&logging, LOG_OFF if path == NULL or path[0] == 0 else LOG_ON)
    if load32(&logging) == LOG_OFF:
        return
    fd = 2 if strcmp(path, b"stderr") == 0 else open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0o600)
    if fd >= 0:
        line.length = 0
        add_number(&line, now_ns())
        add(&line, b" ")
        add(&line, what)
        add(&line, b" ")
        add_number(&line, a)
        add(&line, b" ")
        add_number(&line, b)
        send(&line, fd)
        if fd != 2:
            close(fd)
    (&errno)[0] = saved
