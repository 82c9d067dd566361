"""Simulated GPUs from Python: making them, looking at them, and driving the engine itself with a clock of one's own."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strncpy

import os
import uuid as uuids
from pathlib import Path

from cython_ext.native cimport now_ns
from cython_ext.sim.cost cimport SimTerms, sim_annotation, sim_evaluate
from cython_ext.sim.engine cimport sim_advance, sim_earliest, sim_load_ratio
from cython_ext.sim.queues cimport (
    sim_close_stream, sim_fail_context, sim_free_context, sim_has_room, sim_kill_context, sim_memory_used,
    sim_next_op, sim_open_context, sim_open_stream, sim_recover, sim_submit, sim_take_memory,
)
from cython_ext.sim.mps cimport sim_granted_sms
from cython_ext.sim.lock cimport SIM_SEAT_BYTES, sim_seat
from cython_ext.sim.share cimport (
    sim_context_pid, sim_enter, sim_learn_pids, sim_lock, sim_magic, sim_map, sim_reap, sim_unlock, sim_unmap,
)
from cython_ext.sim.state cimport (
    CONTEXT_FREE, LIBRARY_PYTHON, OP_COPY_IN, OP_COPY_OUT, OP_EXTERNAL, OP_KERNEL, OP_MARK, OP_WAIT, SIM_CONTEXTS,
    SIM_NOWHERE, SIM_QUEUE, SIM_STREAMS, SIM_VERSION, STREAM_LEGACY, STREAM_NONBLOCKING, SimGpu, SimOp, SimParticipant,
    sim_op,
)

CONTEXTS = SIM_CONTEXTS
STREAMS = SIM_STREAMS
QUEUE = SIM_QUEUE
LEGACY = STREAM_LEGACY
NONBLOCKING = STREAM_NONBLOCKING
MARK = OP_MARK
KERNEL = OP_KERNEL
COPY_IN = OP_COPY_IN
COPY_OUT = OP_COPY_OUT
WAIT = OP_WAIT
EXTERNAL = OP_EXTERNAL


cdef void configure(SimGpu* gpu, int index, bytes name, bytes uuid, uint64_t memory_bytes, uint32_t sms,
                    int64_t time_ns):
    gpu.version = SIM_VERSION
    gpu.index = index
    gpu.state_bytes = sizeof(SimGpu)
    strncpy(gpu.name, name, 95)
    memcpy(gpu.uuid, <char*>uuid, 16)
    gpu.memory_bytes = memory_bytes
    gpu.context_bytes = 480 << 20       # what a context costs on an H200, without the program's modules
    gpu.sms = sms
    gpu.pci_bus = 0x18 + index
    gpu.slice_ns = 2_050_000            # as on an H100 (benchmarks/micro/slicing.py); a switch takes one as long ...
    gpu.switch_ns = 138_000
    gpu.idle_switch_ns = 138_000        # ... where the context that leaves has nothing to save
    gpu.copy_bytes_per_ns = 55
    gpu.memory_bytes_per_ns = 4100
    gpu.time_ns = time_ns
    gpu.next_seq = 1
    gpu.magic = sim_magic()


def create_gpus(folder, count, *, name="Simulated H200", memory_bytes=143_771 << 20, sms=132):
    """Make `count` simulated GPUs in a folder, and replace files of their names. Returns their UUIDs.

    A program uses them with VGPU_SIM_DIR naming the folder and the simulated driver in its library path.
    The name always shows that the GPU is simulated.
    """
    if not 1 <= count <= 16:
        raise ValueError(f"{count} simulated GPUs: ask for 1 to 16")
    if not 8 <= sms <= 4096 or memory_bytes < 1 << 30:
        raise ValueError(f"{sms} SMs and {memory_bytes} bytes: a simulated GPU has 8 to 4096 SMs and at least 1 GiB")
    if "simulated" not in name.lower():
        name = f"Simulated {name}"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    answer = []
    for index in range(count):
        # The same one whenever this folder is filled again, after a reboot for example: its vGPUs come back.
        uuid = uuids.uuid5(uuids.NAMESPACE_URL, f"{folder.resolve().as_uri()}/gpu{index}")
        new = folder / f".gpu{index}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(descriptor, sizeof(SimGpu))
            # Like a device node: a user that may use the folder may use the GPU.
            os.fchmod(descriptor, 0o666)
        finally:
            os.close(descriptor)
        # Only a complete state is ever found under its name.
        os.replace(initialised(new, index, name.encode(), uuid.bytes, memory_bytes, sms), folder / f"gpu{index}")
        answer.append(f"GPU-{uuid}")
    for index in range(count, 16):
        (folder / f"gpu{index}").unlink(missing_ok=True)
    return answer


cdef initialised(path, int index, bytes name, bytes uuid, uint64_t memory_bytes, uint32_t sms):
    import mmap

    cdef char[::1] view
    cdef SimGpu* gpu
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        view = memory
        gpu = <SimGpu*>&view[0]
        configure(gpu, index, name, uuid, memory_bytes, sms, now_ns())
        view = None
    return path


def granted_sms(uint32_t sms):
    """SMs that simulated MPS grants under the present CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""
    return sim_granted_sms(sms)


def evaluate(text, *, double blocks=1, double threads=1, double sms=132, parameters=()):
    """The value of a cost expression; ValueError if it is none."""
    cdef SimTerms terms
    cdef double value
    cdef bytes raw = text.encode()
    terms.blocks = blocks
    terms.threads = threads
    terms.sms = sms
    terms.parameters = 0
    for p in parameters[:16]:
        terms.parameter[terms.parameters] = p
        terms.parameters += 1
    if not sim_evaluate(raw, &terms, &value):
        raise ValueError(f"not a cost expression: {text!r}")
    return value


def annotation(ptx, kernel, key):
    """The expression that the PTX's comments give for one key of a kernel, or None."""
    cdef bytes raw = ptx.encode()
    cdef const char* found = sim_annotation(raw, kernel.encode(), key.encode())
    return None if found == NULL else (<bytes>found).split(None, 1)[0].decode()


cdef class Engine:
    """One simulated GPU: of its own (tests, with times of the caller's choosing), or of a folder (to read its state).
    """

    cdef SimGpu* gpu
    cdef char* own              # where the state lies, if it is of no file

    def __cinit__(self, folder=None, int index=0, *, uint64_t memory_bytes=16 << 30, uint32_t sms=132):
        if folder is None:
            self.own = <char*>calloc(1, SIM_SEAT_BYTES + sizeof(SimGpu))
            if self.own == NULL:
                raise MemoryError
            self.gpu = <SimGpu*>(self.own + SIM_SEAT_BYTES)
            sim_seat(self.gpu).number = 1
            sim_seat(self.gpu).fd = -1
            configure(self.gpu, index, b"Simulated", bytes(16), memory_bytes, sms, 1)
        else:
            self.gpu = sim_map(os.fsencode(folder), index, LIBRARY_PYTHON)
            if self.gpu == NULL:
                raise FileNotFoundError(f"no simulated GPU {index} of this version in {folder}; make one with "
                                        "create_gpus, or start a node with `vgpuctl serve --simulate 1`")

    def __dealloc__(self):
        if self.own != NULL:
            free(self.own)
        elif self.gpu != NULL:
            sim_unmap(self.gpu)

    # -- looking

    def refresh(self):
        """Advance a shared GPU to the present and bury the dead."""
        sim_enter(self.gpu)
        sim_reap(self.gpu)
        sim_unlock(self.gpu)

    def sm_time(self):
        """Advance a shared GPU to the present: (its time in ns, {pid: SM time}), of the same instant."""
        sim_learn_pids(self.gpu)
        sim_enter(self.gpu)
        sim_reap(self.gpu)
        used = {}
        for i in range(SIM_CONTEXTS):
            if self.gpu.contexts[i].state != CONTEXT_FREE:
                pid = sim_context_pid(self.gpu, i)
                used[pid] = used.get(pid, 0) + self.gpu.contexts[i].sm_ns
        time_ns = self.gpu.time_ns
        sim_unlock(self.gpu)
        return time_ns, used

    @property
    def time_ns(self):
        return self.gpu.time_ns

    @property
    def sm_ns(self):
        """SM time used by all kernels so far (ns × SMs)."""
        return self.gpu.sm_ns

    @property
    def kernel_ns(self):
        """Time during which a kernel ran."""
        return self.gpu.load.total_ns

    @property
    def copy_ns(self):
        return self.gpu.copy_ns[0], self.gpu.copy_ns[1]

    @property
    def memory_used_bytes(self):
        return sim_memory_used(self.gpu)

    @property
    def memory_bytes(self):
        return self.gpu.memory_bytes

    @property
    def context_bytes(self):
        return self.gpu.context_bytes

    @property
    def recoveries(self):
        return self.gpu.recoveries

    @property
    def utilisation_ratio(self):
        return sim_load_ratio(&self.gpu.load, self.gpu.time_ns)

    def contexts(self):
        """{index: (pid, state, memory_bytes, SM time, kernel time, error)} of those in use."""
        return {
            i: (sim_context_pid(self.gpu, i), self.gpu.contexts[i].state, self.gpu.contexts[i].memory_bytes,
                self.gpu.contexts[i].sm_ns, self.gpu.contexts[i].load.total_ns, self.gpu.contexts[i].error)
            for i in range(SIM_CONTEXTS) if self.gpu.contexts[i].state != CONTEXT_FREE
        }

    def stream(self, uint32_t index):
        """(context, head, tail) of a stream; context is None if it is free."""
        owner = self.gpu.streams[index].context
        return owner - 1 if owner else None, self.gpu.streams[index].head, self.gpu.streams[index].tail

    def operation(self, uint32_t stream, uint64_t ordinal):
        """(kind, remaining_ns, start_ns, end_ns) of one of a stream's last operations."""
        cdef SimOp* op = sim_op(self.gpu, stream, ordinal)
        return op.kind, op.remaining_ns, op.start_ns, op.end_ns

    # -- driving

    def set_times(self, *, int64_t slice_ns, int64_t switch_ns, int64_t idle_switch_ns):
        self.gpu.slice_ns = slice_ns
        self.gpu.switch_ns = switch_ns
        self.gpu.idle_switch_ns = idle_switch_ns

    def advance(self, int64_t now):
        sim_advance(self.gpu, now)

    def open_context(self, int pid=1, *, uint64_t server=0, uint32_t sm_cap=0, uint64_t memory_limit=0):
        """``pid``: of this process's PID namespace. The context lives as long as this engine."""
        cdef SimParticipant process
        process.library = LIBRARY_PYTHON
        process.pid = pid
        process.pid_start = 0
        process.pid_namespace = sim_seat(self.gpu).pid_namespace
        index = sim_open_context(self.gpu, sim_seat(self.gpu).number - 1, &process, server, sm_cap, memory_limit)
        return None if index == SIM_NOWHERE else index

    def close_context(self, uint32_t context):
        sim_free_context(self.gpu, context)

    def kill_context(self, uint32_t context, int64_t grace_ns):
        sim_kill_context(self.gpu, context, grace_ns)

    def fail_context(self, uint32_t context, uint32_t error):
        sim_fail_context(self.gpu, context, error)

    def take_memory(self, uint32_t context, uint64_t size):
        return sim_take_memory(self.gpu, context, size)

    def give_memory(self, uint32_t context, uint64_t size):
        self.gpu.contexts[context].memory_bytes -= size

    def open_stream(self, uint32_t context, *, uint32_t flags=0, int priority=0):
        index = sim_open_stream(self.gpu, context, flags, priority)
        return None if index == SIM_NOWHERE else index

    def close_stream(self, uint32_t stream):
        sim_close_stream(self.gpu, stream)

    def has_room(self, uint32_t stream):
        return sim_has_room(self.gpu, stream)

    def submit(self, uint32_t stream, uint32_t kind, double ns=0, *, uint32_t sms=0, wait=None):
        """Queue an operation (`wait`: stream and number of its operations); its ordinal."""
        cdef SimOp* op
        if not sim_has_room(self.gpu, stream):
            raise BlockingIOError("the stream's queue is full")
        op = sim_next_op(self.gpu, stream)
        op.kind = kind
        op.sms = sms if 0 < sms <= self.gpu.sms else self.gpu.sms
        op.remaining_ns = ns
        if wait is not None:
            op.wait_stream, op.wait_ordinal = wait
            op.wait_generation = self.gpu.streams[op.wait_stream].generation
        return sim_submit(self.gpu, stream)

    def release(self, uint32_t stream, uint64_t ordinal):
        sim_op(self.gpu, stream, ordinal).released = 1

    def fail_operation(self, uint32_t stream, uint64_t ordinal, uint32_t error):
        sim_op(self.gpu, stream, ordinal).failed = error

    def deliver(self, uint32_t stream):
        """Make room for what is finished, as the owning process does."""
        self.gpu.streams[stream].delivered = self.gpu.streams[stream].head

    def earliest(self, uint32_t stream, uint64_t ordinal):
        return sim_earliest(self.gpu, stream, ordinal, 4)

    def damage_and_recover(self):
        """Lose what is derived, as if its last writer had died half-way, and rebuild it."""
        memset(&self.gpu.busy, 0xA5, sizeof(self.gpu.busy))
        sim_recover(self.gpu)

    def hold_mutex(self):
        """Take the lock and keep it: for a process that means to die, or to be stopped, with it."""
        sim_lock(self.gpu)

    def release_mutex(self):
        sim_unlock(self.gpu)
