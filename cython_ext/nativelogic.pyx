"""The logic of ``cython_ext/logic``, the very code that runs inside applications, for Python: tests and servers.

Thin by intent: each class holds one struct of a ``.pxd`` and each method is one call of it. What it means is said
there.
"""

import os
from typing import NamedTuple

from libc.signal cimport SIGSTOP
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.signal cimport kill
from posix.unistd cimport getpid

from cython_ext.layout cimport ActivityPage, GrantsPage, Lease, Plan, Slot, epoch_reached
from cython_ext.layout cimport (
    FOREVER_NS as _FOREVER_NS, LEASE_ON_GO as _LEASE_ON_GO, LEASE_OPEN as _LEASE_OPEN, MAX_PROCESSES as _MAX_PROCESSES,
    MEMORY_KINDS as _MEMORY_KINDS,
)
from cython_ext.logic cimport alloctable, durations, gate, ledger, lock, plan as planning, robust, window, wire
from cython_ext.logic.window cimport Backlog as _Backlog
from cython_ext.native cimport now_ns as clock_ns
from cython_ext.native cimport load32, load64, pause, store32, store64

FOREVER_NS = _FOREVER_NS
LEASE_OPEN, LEASE_ON_GO = _LEASE_OPEN, _LEASE_ON_GO
MAX_PROCESSES, MEMORY_KINDS = _MAX_PROCESSES, _MEMORY_KINDS
UNKNOWN_NS = gate.UNKNOWN_NS
GATE_SUBMIT, GATE_WAIT_BACKLOG, GATE_WAIT_LEASE = gate.GATE_SUBMIT, gate.GATE_WAIT_BACKLOG, gate.GATE_WAIT_LEASE
GATE_LOOK_NS = gate.GATE_LOOK_NS
LEDGER_OK, LEDGER_REFUSED, LEDGER_BROKEN = ledger.LEDGER_OK, ledger.LEDGER_REFUSED, ledger.LEDGER_BROKEN
ROBUST_LOCKED, ROBUST_OWNER_DIED, ROBUST_TIMEOUT = robust.ROBUST_LOCKED, robust.ROBUST_OWNER_DIED, robust.ROBUST_TIMEOUT
ROBUST_FREE = robust.ROBUST_FREE
MARKERS = window.MARKERS
WINDOW_LEAST_NS = window.WINDOW_LEAST_NS
FRAME_MAX_BYTES = wire.FRAME_MAX_BYTES
ACTIVITY_BYTES = sizeof(ActivityPage)
GRANTS_BYTES = sizeof(GrantsPage)
SLOT_BYTES = sizeof(Slot)
SLOT_OFFSET = <size_t>&(<ActivityPage*>NULL).slots[0]
LEDGER_OFFSET = <size_t>&(<ActivityPage*>NULL).ledger


def forget_thread():
    """The child of a fork has another TID than the thread that made it."""
    robust.robust_forget()


os.register_at_fork(after_in_child=forget_thread)


class LeaseRecord(NamedTuple):
    epoch: int = 0
    flags: int = 0
    start_ns: int = 0
    end_ns: int = 0
    go_by_ns: int = 0


class PlanRecord(NamedTuple):
    current: LeaseRecord = LeaseRecord()
    next: LeaseRecord = LeaseRecord()


class GateVerdict(NamedTuple):
    action: int
    epoch: int
    until_ns: int


class SlotWords(NamedTuple):
    state: int
    reserved_bytes: int
    committed_bytes: tuple
    intent_kind: int
    peak_bytes: int
    refusals: int
    refused_bytes: int


cdef Lease lease_of(record) except *:
    cdef Lease lease
    lease.epoch, lease.flags, lease.start_ns, lease.end_ns, lease.go_by_ns = record
    return lease


cdef Plan plan_of(record) except *:
    cdef Plan result
    result.current = lease_of(record.current)
    result.next = lease_of(record.next)
    return result


cdef lease_record(const Lease* lease):
    return LeaseRecord(lease.epoch, lease.flags, lease.start_ns, lease.end_ns, lease.go_by_ns)


def reached(uint32_t now, uint32_t wanted):
    return bool(epoch_reached(now, wanted))


# --- plan and gate

cdef class Grants:
    """A GrantsPage in a writable buffer of at least GRANTS_BYTES."""

    cdef uint8_t[::1] memory
    cdef GrantsPage* page

    def __cinit__(self, uint8_t[::1] memory not None):
        if memory.shape[0] < <Py_ssize_t>sizeof(GrantsPage):
            raise ValueError(f"a grants page takes {sizeof(GrantsPage)} bytes, the buffer has {memory.shape[0]}")
        self.memory = memory
        self.page = <GrantsPage*>&memory[0]

    def publish(self, record):
        cdef Plan plan = plan_of(record)
        with nogil:
            planning.publish_plan(self.page, &plan)

    def publish_counting(self, uint32_t first, uint32_t count):
        """Publish plans whose every word is one number, first … first + count − 1, about one in a microsecond."""
        cdef Plan plan
        cdef uint32_t i
        cdef int _spin
        with nogil:
            for i in range(first, first + count):
                plan.current.epoch = plan.current.flags = plan.next.epoch = plan.next.flags = i
                plan.current.start_ns = plan.current.end_ns = plan.current.go_by_ns = i
                plan.next.start_ns = plan.next.end_ns = plan.next.go_by_ns = i
                planning.publish_plan(self.page, &plan)
                for _spin in range(50):
                    pause()

    def stepped_publish(self, record):
        """Stop this process by SIGSTOP, publish, stop again: a tracer steps through what lies between."""
        cdef Plan plan = plan_of(record)
        with nogil:
            kill(getpid(), SIGSTOP)
            planning.publish_plan(self.page, &plan)
            kill(getpid(), SIGSTOP)

    def stepped_read(self):
        """As ``read``, between two stops by SIGSTOP."""
        cdef Plan plan
        cdef bint whole
        with nogil:
            kill(getpid(), SIGSTOP)
            whole = planning.read_plan(self.page, &plan)
            kill(getpid(), SIGSTOP)
        return PlanRecord(lease_record(&plan.current), lease_record(&plan.next)) if whole else None

    def read(self):
        """The current plan, or None if the writer overtook every try."""
        cdef Plan plan
        cdef bint whole
        with nogil:
            whole = planning.read_plan(self.page, &plan)
        return PlanRecord(lease_record(&plan.current), lease_record(&plan.next)) if whole else None


def gate_decide(
    record, *, int64_t now_ns, int64_t window_ns, int64_t backlog_ns=0, int64_t predicted_ns=gate.UNKNOWN_NS,
    uint32_t unknown_in_flight=0, uint32_t go_epoch=0, uint32_t returned_epoch=0, uint32_t drained_epoch=0,
    uint32_t last_epoch=0, bint contended=False,
):
    cdef Plan plan = plan_of(record)
    cdef gate.GateState state
    cdef gate.Verdict verdict
    state.now_ns, state.window_ns, state.backlog_ns, state.predicted_ns = now_ns, window_ns, backlog_ns, predicted_ns
    state.unknown_in_flight, state.go_epoch, state.returned_epoch = unknown_in_flight, go_epoch, returned_epoch
    state.drained_epoch, state.last_epoch, state.contended = drained_epoch, last_epoch, contended
    gate.gate_decide(&plan, &state, &verdict)
    return GateVerdict(verdict.action, verdict.epoch, verdict.until_ns)


# --- durations and window

cdef durations.LaunchKey key_of(key) except *:
    cdef durations.LaunchKey result
    (result.handle, result.grid_x, result.grid_y, result.grid_z,
     result.block_x, result.block_y, result.block_z) = key
    return result


cdef class Durations:
    """A DurationTable in ``size_bytes`` of its own. Keys are (handle, grid x, y, z, block x, y, z)."""

    cdef durations.DurationTable table
    cdef void* memory

    def __cinit__(self, size_t size_bytes):
        self.memory = calloc(1, size_bytes)
        if not durations.durations_init(&self.table, self.memory, size_bytes):
            free(self.memory)
            self.memory = NULL
            raise ValueError(f"{size_bytes} bytes do not hold one set of entries")

    def __dealloc__(self):
        free(self.memory)

    @property
    def entries(self):
        return self.table.sets * durations.DURATION_WAYS

    @property
    def generation(self):
        return self.table.generation

    def launch(self, key):
        """(estimate_ns, whether to time this launch)."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_launch(&self.table, &wanted)
        return entry.estimate_ns, bool(durations.should_sample(entry))

    def estimate_ns(self, key):
        """None if the key is not in the table."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        return None if entry == NULL else entry.estimate_ns

    def learn(self, key, uint32_t generation, int64_t sample_ns):
        cdef durations.LaunchKey wanted = key_of(key)
        durations.durations_learn(&self.table, &wanted, generation, sample_ns)

    def forget(self, uint64_t handle=0):
        durations.durations_forget(&self.table, handle)


cdef class Backlog:
    cdef _Backlog backlog

    def __cinit__(self):
        window.backlog_init(&self.backlog)

    def begin(self, int64_t usable_ns):
        window.backlog_begin(&self.backlog, usable_ns)

    def finish(self, int64_t returned_ns):
        window.backlog_finish(&self.backlog, returned_ns)

    def submit(self, int64_t now_ns, int64_t predicted_ns, int64_t assumed_ns=0):
        window.backlog_submit(&self.backlog, now_ns, predicted_ns, assumed_ns)

    def mark(self, uint64_t tag):
        return bool(window.backlog_mark(&self.backlog, tag))

    def oldest(self):
        cdef uint64_t tag
        return tag if window.backlog_oldest(&self.backlog, &tag) else None

    def seen_busy(self, int64_t now_ns):
        window.backlog_seen_busy(&self.backlog, now_ns)

    def completed(self, int64_t now_ns):
        return bool(window.backlog_completed(&self.backlog, now_ns))

    def drained(self, int64_t now_ns):
        window.backlog_drained(&self.backlog, now_ns)

    def discard(self, bint discard):
        self.backlog.discard = discard

    def backlog_ns(self, int64_t now_ns):
        return window.backlog_ns(&self.backlog, now_ns)

    @property
    def end_ns(self):
        return window.backlog_end_ns(&self.backlog)

    @property
    def busy_ns(self):
        return window.backlog_busy_ns(&self.backlog)

    @property
    def longest_ns(self):
        return window.backlog_longest_ns(&self.backlog)

    @property
    def idle_ns(self):
        return self.backlog.idle_ns

    @property
    def refill_ns(self):
        return self.backlog.refill_ns

    @property
    def drained_ns(self):
        return self.backlog.drained_ns

    @property
    def scale(self):
        return self.backlog.scale

    @property
    def unknown(self):
        return self.backlog.unknown

    @property
    def busy(self):
        return bool(self.backlog.busy)


def window_adapt(int64_t window_ns, int64_t most_ns, int64_t overrun_ns, int64_t target_ns, bint mispredicted=False):
    return window.window_adapt(window_ns, most_ns, overrun_ns, target_ns, mispredicted)


# --- ledger

cdef enum:
    OP_RESERVE
    OP_COMMIT
    OP_CANCEL
    OP_RELEASE
    OP_REAP
    OP_CHECK

LEDGER_OPERATIONS = {
    "reserve": OP_RESERVE, "commit": OP_COMMIT, "cancel": OP_CANCEL, "release": OP_RELEASE, "reap": OP_REAP,
    "check": OP_CHECK,
}


cdef int ledger_operation(
    int operation, ActivityPage* page, uint32_t slot, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes
) noexcept nogil:
    cdef uint64_t freed_bytes
    if operation == OP_RESERVE:
        return ledger.ledger_reserve(page, slot, kind, size_bytes, limit_bytes)
    if operation == OP_COMMIT:
        return ledger.ledger_commit(page, slot, kind, size_bytes)
    if operation == OP_CANCEL:
        return ledger.ledger_cancel(page, slot, kind, size_bytes)
    if operation == OP_RELEASE:
        return ledger.ledger_release(page, slot, kind, size_bytes)
    if operation == OP_REAP:
        return ledger.ledger_reap(page, slot, &freed_bytes)
    return ledger.ledger_check(page)


cdef class Activity:
    """An ActivityPage in a writable buffer of at least ACTIVITY_BYTES."""

    cdef uint8_t[::1] memory
    cdef ActivityPage* page

    def __cinit__(self, uint8_t[::1] memory not None):
        if memory.shape[0] < <Py_ssize_t>sizeof(ActivityPage):
            raise ValueError(f"an activity page takes {sizeof(ActivityPage)} bytes, the buffer has {memory.shape[0]}")
        self.memory = memory
        self.page = <ActivityPage*>&memory[0]

    def init(self):
        memset(self.page, 0, sizeof(ActivityPage))
        ledger.ledger_init(self.page)

    def reserve(self, uint32_t slot, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes):
        cdef int result
        with nogil:
            result = ledger.ledger_reserve(self.page, slot, kind, size_bytes, limit_bytes)
        return result

    def commit(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        cdef int result
        with nogil:
            result = ledger.ledger_commit(self.page, slot, kind, size_bytes)
        return result

    def cancel(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        cdef int result
        with nogil:
            result = ledger.ledger_cancel(self.page, slot, kind, size_bytes)
        return result

    def release(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        cdef int result
        with nogil:
            result = ledger.ledger_release(self.page, slot, kind, size_bytes)
        return result

    def reap(self, uint32_t slot):
        """(LEDGER_*, freed bytes)."""
        cdef uint64_t freed_bytes
        cdef int result
        with nogil:
            result = ledger.ledger_reap(self.page, slot, &freed_bytes)
        return result, freed_bytes

    def check(self):
        cdef int result
        with nogil:
            result = ledger.ledger_check(self.page)
        return result

    def stepped(self, str operation, uint32_t slot=0, uint32_t kind=0, uint64_t size_bytes=0, uint64_t limit_bytes=0):
        """Stop this process by SIGSTOP, do one operation, stop again: a tracer steps through what lies between."""
        cdef int chosen = LEDGER_OPERATIONS[operation]
        cdef int result
        robust.robust_thread()                       # the two system calls of a thread's first use come before
        with nogil:
            kill(getpid(), SIGSTOP)
            result = ledger_operation(chosen, self.page, slot, kind, size_bytes, limit_bytes)
            kill(getpid(), SIGSTOP)
        return result

    def churn(self, uint32_t slot, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes):
        """Reserve, commit, release for ever: somebody kills this process."""
        with nogil:
            while True:
                if ledger.ledger_reserve(self.page, slot, kind, size_bytes, limit_bytes) == ledger.LEDGER_OK:
                    ledger.ledger_commit(self.page, slot, kind, size_bytes)
                    ledger.ledger_release(self.page, slot, kind, size_bytes)

    def lock(self, int64_t timeout_ns):
        """Take the ledger's lock, as an operation does: ROBUST_*."""
        cdef int result
        with nogil:
            result = robust.robust_lock(ledger.ledger_word(self.page), clock_ns() + timeout_ns)
        return result

    def unlock(self):
        robust.robust_unlock(ledger.ledger_word(self.page))

    def hold_alive(self, uint32_t slot):
        """Hold ``alive`` of the slot until this thread dies: ROBUST_*."""
        return robust.robust_hold(self.alive_word(slot))

    def drop_alive(self, uint32_t slot):
        robust.robust_drop(self.alive_word(slot))

    def watch_alive(self, uint32_t slot, int64_t timeout_ns):
        cdef uint32_t* word = self.alive_word(slot)
        cdef int result
        with nogil:
            result = robust.robust_watch(word, clock_ns() + timeout_ns)
        return result

    cdef uint32_t* alive_word(self, uint32_t slot) except NULL:
        if slot >= _MAX_PROCESSES:
            raise IndexError(slot)
        return <uint32_t*>&self.page.slots[slot].alive

    def set_state(self, uint32_t slot, uint32_t state):
        if slot >= _MAX_PROCESSES:
            raise IndexError(slot)
        store32(&self.page.slots[slot].state, state)

    def slot(self, uint32_t slot):
        cdef Slot* words
        if slot >= _MAX_PROCESSES:
            raise IndexError(slot)
        words = &self.page.slots[slot]
        return SlotWords(
            load32(&words.state), load64(&words.reserved_bytes),
            tuple([load64(&words.committed_bytes[kind]) for kind in range(_MEMORY_KINDS)]),
            load64(&words.intent_kind), words.peak_bytes, words.refusals, words.refused_bytes,
        )

    @property
    def charged_bytes(self):
        return load64(&self.page.charged_bytes)

    @charged_bytes.setter
    def charged_bytes(self, uint64_t value):
        store64(&self.page.charged_bytes, value)

    @property
    def sum_bytes(self):
        """Σ over the slots, read without the lock."""
        return ledger.ledger_sum(self.page)


# --- lock and allocation table

cdef class Lock:
    cdef uint32_t word

    def add_under(self, uint64_t[::1] counter not None, int times):
        """Take, add one without atomics, release; ``times`` times, without the GIL."""
        cdef int _i
        with nogil:
            for _i in range(times):
                lock.lock_acquire(&self.word)
                counter[0] += 1
                lock.lock_release(&self.word)

    def try_acquire(self):
        return bool(lock.lock_try(&self.word))

    def release(self):
        lock.lock_release(&self.word)

    def reset(self):
        lock.lock_reset(&self.word)


cdef class Allocations:
    cdef alloctable.AllocTable table

    def __dealloc__(self):
        alloctable.alloc_clear(&self.table)

    def __len__(self):
        return self.table.count

    @property
    def capacity(self):
        return self.table.capacity

    def insert(self, uint64_t address, uint64_t size_bytes, uint32_t kind=0, uint64_t aux=0):
        cdef alloctable.Block block
        memset(&block, 0, sizeof(block))
        block.address, block.bytes, block.kind, block.aux = address, size_bytes, kind, aux
        return bool(alloctable.alloc_insert(&self.table, &block))

    def find(self, uint64_t address):
        """(bytes, kind, aux) or None."""
        cdef alloctable.Block* block = alloctable.alloc_find(&self.table, address)
        return None if block == NULL else (block.bytes, block.kind, block.aux)

    def remove(self, uint64_t address):
        cdef alloctable.Block block
        if not alloctable.alloc_remove(&self.table, address, &block):
            return None
        return block.bytes, block.kind, block.aux

    def longest_probe(self):
        cdef uint64_t longest = 0, i
        for i in range(self.table.capacity):
            if self.table.blocks[i].address:
                longest = max(longest, alloctable.probe_length(&self.table, i))
        return longest


# --- wire

cdef void put_value(wire.Writer* writer, value) except *:
    cdef bytes raw
    if value is None:
        wire.wire_nil(writer)
    elif isinstance(value, bool):
        wire.wire_bool(writer, value)
    elif isinstance(value, int):
        if value < 0:
            wire.wire_int(writer, value)
        else:
            wire.wire_uint(writer, value)
    elif isinstance(value, float):
        wire.wire_float(writer, value)
    elif isinstance(value, str):
        raw = value.encode()
        wire.wire_str(writer, raw, len(raw))
    elif isinstance(value, bytes):
        raw = value
        wire.wire_bin(writer, <const char*>raw, len(raw))
    elif isinstance(value, dict):
        wire.wire_map(writer, len(value))
        for key, item in value.items():
            put_value(writer, key)
            put_value(writer, item)
    else:
        raise TypeError(f"a hook's messages hold no {type(value).__name__}")


def encode_frame(dict message not None, size_t capacity=wire.FRAME_MAX_BYTES + wire.FRAME_HEADER_BYTES):
    """Header and body; None if it does not fit into ``capacity`` bytes."""
    cdef wire.Writer writer
    cdef uint8_t* buffer = <uint8_t*>calloc(1, capacity + 1)
    cdef size_t length
    if buffer == NULL:
        raise MemoryError
    buffer[capacity] = 0xA5                          # a sentinel: nothing is written beyond the end
    try:
        wire.wire_begin(&writer, buffer, capacity)
        put_value(&writer, message)
        length = wire.wire_finish(&writer)
        if buffer[capacity] != 0xA5:
            raise AssertionError("the writer left its buffer")
        return buffer[:length] if length else None
    finally:
        free(buffer)


cdef take_value(wire.Reader* reader):
    cdef int kind = wire.wire_peek(reader)
    cdef size_t size
    cdef const char* text
    cdef const uint8_t* data
    if kind == wire.WIRE_NIL:
        wire.wire_skip(reader)
        return None
    if kind == wire.WIRE_BOOL:
        return bool(wire.wire_read_bool(reader))
    if kind == wire.WIRE_INT:
        return wire.wire_read_uint(reader) if reader.data[reader.at] == 0xCF else wire.wire_read_int(reader)
    if kind == wire.WIRE_FLOAT:
        return wire.wire_read_float(reader)
    if kind == wire.WIRE_STR:
        text = wire.wire_read_str(reader, &size)
        return text[:size].decode("utf-8", "surrogateescape") if text != NULL else None
    if kind == wire.WIRE_BIN:
        data = wire.wire_read_bin(reader, &size)
        return data[:size] if data != NULL else None
    if kind == wire.WIRE_MAP:
        pairs = {}
        for _ in range(wire.wire_read_map(reader)):
            key = take_value(reader)
            if reader.bad or not isinstance(key, str):
                reader.bad = True
                break
            pairs[key] = take_value(reader)
        return pairs
    wire.wire_skip(reader)
    return None


def decode_body(const uint8_t[::1] body not None):
    """The map in ``body``; values of kinds a hook does not know come as None. ValueError if it is malformed."""
    cdef wire.Reader reader
    wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
    value = take_value(&reader)
    if reader.bad or not isinstance(value, dict):
        raise ValueError("malformed message")
    return value


def skip_body(const uint8_t[::1] body not None):
    """Bytes that one value takes at the start of ``body``; None if it is malformed."""
    cdef wire.Reader reader
    wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
    wire.wire_skip(&reader)
    return None if reader.bad else reader.at


def find_in_body(const uint8_t[::1] body not None, bytes key not None, size_t capacity=256):
    """(text or None, int or None, bool or None) under ``key``."""
    cdef wire.Reader reader
    cdef int64_t number
    cdef bint flag, found
    cdef char* text = <char*>calloc(1, capacity)
    if text == NULL:
        raise MemoryError
    try:
        wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
        found = wire.wire_find_text(&reader, key, text, capacity)
        as_text = (<bytes>text).decode("utf-8", "surrogateescape") if found else None
        as_int = number if wire.wire_find_int(&reader, key, &number) else None
        as_bool = bool(flag) if wire.wire_find_bool(&reader, key, &flag) else None
        return as_text, as_int, as_bool
    finally:
        free(text)


def frame_length(const uint8_t[::1] data not None):
    """Length of the body a header announces; −1: header incomplete, −2: too long."""
    return wire.wire_frame(&data[0] if data.shape[0] else NULL, data.shape[0])
