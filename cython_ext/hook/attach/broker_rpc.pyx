"""The conversation with a broker: one request, one answer, and the pages that come with it. No connection outlasts it.
"""

from libc.errno cimport (
    EACCES, EAGAIN, ECONNRESET, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOSYS, EPERM, EPIPE, errno,
)
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memset, strchr, strlen

from cython_ext.hook.hook cimport vgpu_map_store, vgpu_say
from cython_ext.hook.attach.mounted cimport is_mounted
from cython_ext.hook.attach.paths cimport append, append_number, runtime_directory
from cython_ext.hook.attach.reply cimport Reply
from cython_ext.hook.state cimport CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OPERATING_SYSTEM, Gate, state
from cython_ext.pages.layout cimport (
    ACTIVITY_MAGIC, GRANTS_MAGIC, LAYOUT_VERSION, MAX_PROCESSES, ActivityPage, GrantsPage, PageHeader, TracedActivity,
)
from cython_ext.logic.wire cimport (
    Reader, Writer, wire_begin, wire_bool, wire_find_bool, wire_find_int, wire_find_text, wire_finish, wire_frame,
    wire_int, wire_map, wire_open, wire_text, wire_uint,
)
from cython_ext.native cimport now_ns

cdef extern from "hook/connect.h" nogil:
    int vgpu_connect(const char* path) noexcept      # a socket, or -errno
    long vgpu_exchange(
        int socket, const uint8_t* request, size_t size, uint8_t* reply, size_t capacity, int* fds, int* fd_count
    ) noexcept                                       # bytes received, or -errno
    bint vgpu_could_be_replaced(const char* path) noexcept
    bint vgpu_trusts_peer(int socket) noexcept
    long vgpu_file_size(int fd) noexcept
    void vgpu_command(char* out, size_t capacity) noexcept
    bint vgpu_exists(const char* path) noexcept
    bint vgpu_is_kept(const char* directory) noexcept
    int close(int fd) noexcept
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset) noexcept
    int madvise(void* address, size_t size, int advice) noexcept
    int munmap(void* address, size_t size) noexcept
    enum:
        PROT_READ
        PROT_WRITE
        MAP_SHARED
        MADV_DONTFORK
    void* MAP_FAILED

cdef enum:
    PROTOCOL = 1
    PATH_BYTES = 108         # what a socket address holds
    CLOCKS_APART_NS = 1_000_000_000


cdef const char* cause_of(int reason) noexcept nogil:
    """What is missing in this process or on this machine, and what helps; NULL: it is about the node."""
    if reason == EMFILE:
        return b"this program has no file descriptor left for its broker and pages: close some, or raise ulimit -n"
    if reason == ENFILE:
        return b"this machine has no open file left: raise the sysctl fs.file-max, or end programs"
    if reason == ENOMEM or reason == ENOBUFS:
        return b"no memory is left for its pages: raise ulimit -v, or the memory limit of this container"
    if reason == EPERM or reason == ENOSYS:
        return (
            b"a seccomp filter or security module forbids this program a system call that the hook needs: allow "
            b"socket, connect, sendto, recvmsg and mmap"
        )
    if reason == EAGAIN:
        return b"its broker did not answer within 10 s: vgpuctl status shows the node's state, vgpuctl logs why"
    if reason == ECONNRESET or reason == EPIPE:
        return b"its broker closed the connection without an answer: vgpuctl logs says why"
    return NULL


cdef public int vgpu_unreachable(const char* vgpu_id, const char* directory, int reason) noexcept nogil:
    """Report why there is no connection, by the errno and by what the file system shows."""
    cdef const char* cause = cause_of(reason)
    cdef char[256] control
    control[0] = 0
    runtime_directory(control, sizeof(control))
    append(control, sizeof(control), b"/control.sock")
    if cause != NULL:
        vgpu_say(vgpu_id, b": ", cause)
        return CUDA_ERROR_OPERATING_SYSTEM
    if is_mounted(directory) and reason == EACCES:
        vgpu_say(
            vgpu_id, b", the vGPU of this container, admits programs of its owner alone: run the container as that "
            b"user, or create the vGPU with --attach mount", b""
        )
        return CUDA_ERROR_NO_DEVICE
    if is_mounted(directory):
        vgpu_say(
            vgpu_id, b", the vGPU of this container, was removed, or its node does not run: ", b"the administrator of "
            b"this machine can start the node, or this container with another vGPU"
        )
        return CUDA_ERROR_OPERATING_SYSTEM if vgpu_is_kept(directory) else CUDA_ERROR_NO_DEVICE
    if reason == EACCES:
        vgpu_say(vgpu_id, b" belongs to another user", b": vgpuctl create makes one of your own")
        return CUDA_ERROR_NO_DEVICE
    if not vgpu_exists(directory) and vgpu_exists(control):
        vgpu_say(
            b"VGPU_ID=", vgpu_id, b" is no vGPU of this node: vgpuctl ls shows those there are, unset VGPU_ID runs "
            b"without one"
        )
        return CUDA_ERROR_NO_DEVICE
    vgpu_say(
        b"no node answers at ", directory, b": start it with vgpuctl serve, or set VGPU_RUNTIME_DIR to where it runs"
    )
    return CUDA_ERROR_OPERATING_SYSTEM


cdef size_t write_request(uint8_t* buffer, size_t capacity, const char* role, int64_t slot) noexcept nogil:
    cdef Writer writer
    cdef char[64] command
    cdef const char* vgpus = b""     # where the process has one vGPU, the list adds nothing
    vgpu_command(command, sizeof(command))
    wire_begin(&writer, buffer, capacity)
    wire_map(&writer, 8)
    wire_text(&writer, b"op")
    wire_text(&writer, b"attach")
    wire_text(&writer, b"version")
    wire_uint(&writer, PROTOCOL)
    wire_text(&writer, b"role")
    wire_text(&writer, role)
    wire_text(&writer, b"command")
    wire_text(&writer, command)
    wire_text(&writer, b"now_ns")
    wire_int(&writer, now_ns())
    wire_text(&writer, b"slot")
    wire_int(&writer, slot)
    wire_text(&writer, b"vgpus")
    if strchr(state().meant_ids, c',') != NULL:
        vgpus = state().meant_ids
    wire_text(&writer, vgpus)
    wire_text(&writer, b"counts")
    wire_bool(&writer, 1)
    return wire_finish(&writer)


cdef bint read_reply(const uint8_t* data, long size, int64_t asked_ns, Reply* reply) noexcept nogil:
    """1: admitted. 0: not, and ``reply.error`` has the reason. The broker noted its time after the request at
    ``asked_ns`` and before now, however long either process was delayed."""
    cdef Reader reader
    cdef bint ok = 0
    cdef int64_t body = wire_frame(data, size), now = 0
    memset(reply, 0, sizeof(Reply))
    if body < 0 or 4 + body > size:
        append(
            reply.error, sizeof(reply.error), b"its broker's answer is garbled: vgpuctl and hook are of different "
            b"versions?"
        )
        return 0
    wire_open(&reader, data + 4, body)
    wire_find_bool(&reader, b"ok", &ok)
    if not ok:
        wire_find_text(&reader, b"code", reply.code, sizeof(reply.code))
        if not wire_find_text(&reader, b"error", reply.error, sizeof(reply.error)):
            append(reply.error, sizeof(reply.error), b"its broker refused without a reason")
        return 0
    wire_find_text(&reader, b"mode", reply.mode, sizeof(reply.mode))
    wire_find_text(&reader, b"mps_pipe_directory", reply.pipe_directory, sizeof(reply.pipe_directory))
    wire_find_text(&reader, b"mps_log_directory", reply.log_directory, sizeof(reply.log_directory))
    wire_find_text(
        &reader, b"mps_active_thread_percentage", reply.active_thread_percentage, sizeof(reply.active_thread_percentage)
    )
    wire_find_text(&reader, b"mps_pinned_memory_limit", reply.pinned_memory_limit, sizeof(reply.pinned_memory_limit))
    wire_find_text(&reader, b"mps_client_priority", reply.client_priority, sizeof(reply.client_priority))
    wire_find_text(&reader, b"gpu_uuid", reply.gpu_uuid, sizeof(reply.gpu_uuid))
    wire_find_int(&reader, b"broker_epoch", &reply.broker_epoch)
    if not (
        wire_find_int(&reader, b"slot", &reply.slot) and wire_find_int(&reader, b"generation", &reply.generation)
        and wire_find_int(&reader, b"gpu_index", &reply.gpu_index) and wire_find_int(&reader, b"now_ns", &now)
        and reply.slot < MAX_PROCESSES and strlen(reply.gpu_uuid) < 48
    ):
        append(
            reply.error, sizeof(reply.error), b"its broker's answer lacks a field: vgpuctl and hook are of different "
            b"versions?"
        )
        return 0
    if now - now_ns() > CLOCKS_APART_NS or asked_ns - now > CLOCKS_APART_NS:
        append(
            reply.error, sizeof(reply.error), b"its node has another monotonic clock: start this program outside its "
            b"time namespace"
        )
        return 0
    return 1


cdef size_t map_size(int fd, size_t size) noexcept nogil:
    """As much of ``size`` as the page has."""
    return min(size, <size_t>max(vgpu_file_size(fd), 0))


cdef void* map_page(int fd, size_t size, uint64_t magic, bint writable, int* reason) noexcept nogil:
    """The page behind ``fd`` if it is what it should be, else NULL; ``reason``: the errno if the kernel did not map it.
    The child of a fork does not inherit it."""
    cdef void* page
    cdef PageHeader* header
    size = map_size(fd, size)
    if size < sizeof(PageHeader):
        return NULL
    page = mmap(NULL, size, PROT_READ | PROT_WRITE if writable else PROT_READ, MAP_SHARED, fd, 0)
    if page == MAP_FAILED:
        reason[0] = errno
        return NULL
    header = <PageHeader*>page
    if header.magic != magic or header.min_version > LAYOUT_VERSION or header.size > size:
        munmap(page, size)
        return NULL
    madvise(page, size, MADV_DONTFORK)
    return page


cdef bint own_socket(char* path, const Gate* gate, int64_t slot) noexcept nogil:
    """Where the broker waits for the process in ``slot`` alone, if that became another user's."""
    path[0] = 0
    return (
        append(path, PATH_BYTES, gate.directory) and append(path, PATH_BYTES, b"/broker.")
        and append_number(path, PATH_BYTES, <unsigned int>slot) and append(path, PATH_BYTES, b".sock")
    )


cdef public bint vgpu_converse(
    Gate* gate, const char* role, int64_t slot, Reply* reply, int* reason, GrantsPage** grants, ActivityPage** activity
) noexcept nogil:
    """Ask the broker at ``gate.directory``. ``reason``: why there was no answer at all, an errno; else
    ``reply.error``."""
    cdef char[108] path
    cdef uint8_t[8192] buffer
    cdef int[3] fds
    cdef int fd_count = 3, socket, i
    cdef bint mapped = 0
    cdef long size
    cdef int64_t asked_ns
    cdef bint admitted
    reason[0] = 0
    memset(reply, 0, sizeof(Reply))
    path[0] = 0
    if not append(path, PATH_BYTES, gate.directory) or not append(path, PATH_BYTES, b"/broker.sock"):
        append(
            reply.error, sizeof(reply.error), b"the path of its socket is longer than a socket's can be: use a shorter "
            b"VGPU_RUNTIME_DIR"
        )
        return 0
    if vgpu_could_be_replaced(gate.directory):
        append(
            reply.error, sizeof(reply.error), b"another user can replace its node's directory: set VGPU_RUNTIME_DIR to "
            b"where your node, or root's, runs"
        )
        return 0
    socket = vgpu_connect(path)
    if (socket == -EACCES or socket == -EPERM) and slot >= 0 and own_socket(path, gate, slot):
        socket = vgpu_connect(path)
        if socket < 0:
            socket = -EACCES         # as at the socket of all: it is not yet, or no more, a socket of this user
    if socket < 0:
        reason[0] = -socket
        return 0
    if not vgpu_trusts_peer(socket):
        close(socket)
        append(
            reply.error, sizeof(reply.error), b"another user answers in the place of its broker: set VGPU_RUNTIME_DIR "
            b"to where your node, or root's, runs"
        )
        return 0
    asked_ns = now_ns()
    size = write_request(buffer, sizeof(buffer), role, slot)
    size = vgpu_exchange(socket, buffer, size, buffer, sizeof(buffer), fds, &fd_count)
    close(socket)
    admitted = 0
    if size < 0:
        reason[0] = <int>-size
    else:
        admitted = read_reply(buffer, size, asked_ns, reply)
        if admitted and fd_count >= 2:
            grants[0] = <GrantsPage*>map_page(fds[0], sizeof(GrantsPage), GRANTS_MAGIC, 0, reason)
            reply.activity_bytes = map_size(fds[1], sizeof(TracedActivity))
            # An observer writes nothing, and its descriptor lets it write nothing.
            activity[0] = <ActivityPage*>map_page(
                fds[1], reply.activity_bytes, ACTIVITY_MAGIC, role[0] != c'o', reason
            )
            mapped = grants[0] != NULL and activity[0] != NULL and (fd_count == 2 or vgpu_map_store(gate, fds[2]))
        if admitted and not mapped and not reason[0]:
            append(
                reply.error, sizeof(reply.error), b"its shared pages are not as this hook knows them: install the hook "
                b"of the node's version"
            )
        admitted = admitted and mapped
    for i in range(fd_count):
        close(fds[i])
    return admitted
