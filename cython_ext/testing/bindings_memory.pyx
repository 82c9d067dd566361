"""The memory books of ``cython_ext/logic``, and their locks, for Python.

``bindings_logic`` describes these bindings.
"""

import os
from typing import NamedTuple

from libc.signal cimport SIGSTOP
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from posix.signal cimport kill
from posix.unistd cimport getpid

from cython_ext.pages.layout cimport ActivityPage, Slot, StorePage
from cython_ext.pages.layout cimport MAX_PROCESSES as _MAX_PROCESSES, MEMORY_KINDS as _MEMORY_KINDS
from cython_ext.pages.layout cimport SLOT_ACTIVE, SLOT_FREE
from cython_ext.logic.memory cimport alloctable, arenas, ledger, physical, pieces, pools, store
from cython_ext.logic.memory cimport piece_hash as hashing
from cython_ext.logic.sync cimport lock, robust, section
from cython_ext.native cimport cas32, compiler_fence, exchange32, futex_wake, load32, load64, now_ns, store32, store64

MAX_PROCESSES, MEMORY_KINDS = _MAX_PROCESSES, _MEMORY_KINDS
LEDGER_OK, LEDGER_REFUSED, LEDGER_BROKEN = ledger.LEDGER_OK, ledger.LEDGER_REFUSED, ledger.LEDGER_BROKEN
ROBUST_LOCKED, ROBUST_OWNER_DIED, ROBUST_TIMEOUT = robust.ROBUST_LOCKED, robust.ROBUST_OWNER_DIED, robust.ROBUST_TIMEOUT
ROBUST_FREE = robust.ROBUST_FREE
ACTIVITY_BYTES = sizeof(ActivityPage)
STORE_HEADER_BYTES = sizeof(StorePage)
SLOT_BYTES = sizeof(Slot)
SLOT_OFFSET = <size_t>&(<ActivityPage*>NULL).slots[0]
LEDGER_OFFSET = <size_t>&(<ActivityPage*>NULL).ledger
SECTION_NAMED = section.SECTION_NAMED


def forget_thread():
    """Read the TID anew: the child of a fork has another TID than the thread that forked."""
    robust.robust_forget()


os.register_at_fork(after_in_child=forget_thread)


class SlotWords(NamedTuple):
    state: int
    reserved_bytes: int
    committed_bytes: tuple
    intent_kind: int
    peak_bytes: int
    refusals: int
    refused_bytes: int


# --- ledger

cdef enum:
    OP_RESERVE
    OP_COMMIT
    OP_CANCEL
    OP_RELEASE
    OP_SHARE
    OP_REAP
    OP_CHECK
    OP_HOLD

_NO_LIMIT = 2**64 - 1
LEDGER_OPERATIONS = {
    "reserve": OP_RESERVE, "commit": OP_COMMIT, "cancel": OP_CANCEL, "release": OP_RELEASE, "share": OP_SHARE,
    "reap": OP_REAP, "check": OP_CHECK, "hold": OP_HOLD,
}


cdef int ledger_operation(
    int operation, ActivityPage* page, uint32_t name, uint32_t slot, uint32_t kind, uint64_t size_bytes,
    uint64_t limit_bytes
) noexcept nogil:
    cdef uint64_t freed_bytes
    if operation == OP_RESERVE:
        return ledger.ledger_reserve(page, name, slot, kind, size_bytes, limit_bytes, UINT64_MAX)
    if operation == OP_COMMIT:
        return ledger.ledger_commit(page, name, slot, kind, size_bytes)
    if operation == OP_CANCEL:
        return ledger.ledger_cancel(page, name, slot, kind, size_bytes)
    if operation == OP_RELEASE:
        return ledger.ledger_release(page, name, slot, kind, size_bytes)
    if operation == OP_SHARE:
        return ledger.ledger_share(page, name, slot, kind, size_bytes)
    if operation == OP_REAP:
        return ledger.ledger_reap(page, name, slot, 0, &freed_bytes)
    if operation == OP_HOLD:
        return robust.robust_hold(<uint32_t*>&page.slots[slot].alive)
    return ledger.ledger_check(page, name)


cdef int older_lock(uint32_t* word, int64_t until_ns) noexcept nogil:
    """Take the ledger's lock as older hooks did: under their TID, which the kernel knows meanwhile."""
    cdef robust.RobustThread* thread = robust.robust_thread()
    cdef uint32_t seen
    thread.interrupted = thread.head.list_op_pending
    thread.head.list_op_pending = robust.robust_node(thread, word)
    compiler_fence()
    while True:
        seen = load32(word)
        if not seen & robust.FUTEX_TID_MASK:
            if cas32(word, seen, thread.tid | (seen & robust.FUTEX_WAITERS)):
                return robust.ROBUST_OWNER_DIED if seen & robust.FUTEX_OWNER_DIED else robust.ROBUST_LOCKED
        elif now_ns() >= until_ns:
            thread.head.list_op_pending = thread.interrupted
            return robust.ROBUST_TIMEOUT


cdef void older_unlock(uint32_t* word) noexcept nogil:
    cdef robust.RobustThread* thread = robust.robust_thread()
    if exchange32(word, 0) & robust.FUTEX_WAITERS:
        futex_wake(word, 1)
    compiler_fence()
    thread.head.list_op_pending = thread.interrupted


cdef class Activity:
    """An ActivityPage in a writable buffer of at least ACTIVITY_BYTES.

    An operation on a slot takes the lock under the slot's name. If other processes may want the lock meanwhile, the
    process that emulates the slot calls ``live`` first: a name whose slot is not alive counts as dead.
    """

    cdef uint8_t[::1] memory
    cdef ActivityPage* page
    cdef int own_slot                # ``lock`` took it for the process ``own_pid``
    cdef int own_pid
    cdef uint32_t locked             # the name under which this process took the lock

    def __cinit__(self, uint8_t[::1] memory not None):
        if memory.shape[0] < <Py_ssize_t>sizeof(ActivityPage):
            raise ValueError(f"an activity page takes {sizeof(ActivityPage)} bytes, the buffer has {memory.shape[0]}")
        self.memory = memory
        self.page = <ActivityPage*>&memory[0]

    def init(self):
        memset(self.page, 0, sizeof(ActivityPage))
        ledger.ledger_init(self.page)
        self.own_pid = 0

    cdef uint32_t name(self, uint32_t slot):
        """The name of the process in the slot. A process without a name gets one."""
        if slot >= _MAX_PROCESSES:
            return section.section_name(slot, 0)
        if load32(&self.page.slots[slot].ledger_name) == 0:
            store32(&self.page.slots[slot].ledger_name, section.section_name(slot, <uint32_t>(now_ns() >> 4)))
        return load32(&self.page.slots[slot].ledger_name)

    cdef uint32_t broker(self):
        return section.section_broker(load32(&self.page.broker_epoch))

    def live(self, uint32_t slot):
        """This process emulates the slot, under a new name, until this thread ends. ROBUST_* of its ``alive``."""
        cdef int result = robust.robust_hold(self.alive_word(slot))
        if result == robust.ROBUST_LOCKED:
            store32(&self.page.slots[slot].ledger_name, 0)
            self.name(slot)
            store32(&self.page.slots[slot].state, SLOT_ACTIVE)
        return result

    def reserve(
        self, uint32_t slot, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes,
        uint64_t process_limit_bytes=_NO_LIMIT,
    ):
        cdef uint32_t name = self.name(slot)
        cdef int result
        with nogil:
            result = ledger.ledger_reserve(self.page, name, slot, kind, size_bytes, limit_bytes, process_limit_bytes)
        return result

    def commit(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        return self.operate(OP_COMMIT, self.name(slot), slot, kind, size_bytes)

    def cancel(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        return self.operate(OP_CANCEL, self.name(slot), slot, kind, size_bytes)

    def release(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        return self.operate(OP_RELEASE, self.name(slot), slot, kind, size_bytes)

    def share(self, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        return self.operate(OP_SHARE, self.name(slot), slot, kind, size_bytes)

    cdef int operate(self, int operation, uint32_t name, uint32_t slot, uint32_t kind, uint64_t size_bytes):
        cdef int result
        with nogil:
            result = ledger_operation(operation, self.page, name, slot, kind, size_bytes, 0)
        return result

    def reap(self, uint32_t slot, bint keeps_shared=False):
        """Reap the slot as the broker does: (LEDGER_*, freed bytes)."""
        cdef uint32_t name = self.broker()
        cdef uint64_t freed_bytes
        cdef int result
        with nogil:
            result = ledger.ledger_reap(self.page, name, slot, keeps_shared, &freed_bytes)
        return result, freed_bytes

    def check(self):
        return self.operate(OP_CHECK, self.broker(), 0, 0, 0)

    def stepped(self, str operation, uint32_t slot=0, uint32_t kind=0, uint64_t size_bytes=0, uint64_t limit_bytes=0):
        """Do one operation between two stops by SIGSTOP: a tracer steps through the instructions between them.

        "reap" and "check" are operations of the broker. For the others this process emulates the slot; "hold" begins
        that.
        """
        cdef int chosen = LEDGER_OPERATIONS[operation]
        cdef uint32_t name
        cdef int result
        robust.robust_thread()                       # the first use in a thread makes two system calls
        if chosen == OP_REAP or chosen == OP_CHECK or chosen == OP_HOLD:
            name = self.broker()
        else:
            self.live(slot)
            name = self.name(slot)
        with nogil:
            kill(getpid(), SIGSTOP)
            result = ledger_operation(chosen, self.page, name, slot, kind, size_bytes, limit_bytes)
            kill(getpid(), SIGSTOP)
        return result

    def churn(self, uint32_t slot, uint32_t kind, uint64_t size_bytes, uint64_t limit_bytes):
        """Emulate the slot, and reserve, commit and release until a test kills this process."""
        cdef uint32_t name
        self.live(slot)
        name = self.name(slot)
        with nogil:
            while True:
                if (
                    ledger.ledger_reserve(self.page, name, slot, kind, size_bytes, limit_bytes, UINT64_MAX)
                    == ledger.LEDGER_OK
                ):
                    ledger.ledger_commit(self.page, name, slot, kind, size_bytes)
                    ledger.ledger_release(self.page, name, slot, kind, size_bytes)

    def lock(self, int64_t timeout_ns, int slot=-1):
        """Take the ledger's lock, as an operation of the slot's process does: ROBUST_*.

        With −1, this process emulates a free slot from its first lock on.
        """
        cdef uint32_t name
        cdef int result
        if slot < 0:
            slot = self.live_anywhere()
        name = self.name(slot)
        with nogil:
            result = section.ROBUST_LOCKED
            if not section.section_try(self.page, name):
                result = section.section_wait(self.page, name, now_ns() + timeout_ns)
        if result != section.ROBUST_TIMEOUT:
            self.locked = name
        return result

    cdef int live_anywhere(self) except -1:
        cdef int slot
        if self.own_pid == getpid():
            return self.own_slot
        for slot in range(_MAX_PROCESSES - 1, -1, -1):
            if load32(&self.page.slots[slot].state) == SLOT_FREE and self.live(slot) == robust.ROBUST_LOCKED:
                self.own_slot, self.own_pid = slot, getpid()
                return slot
        raise RuntimeError("no slot of the page is free")

    def lock_as_broker(self, int64_t timeout_ns):
        """Take the ledger's lock as the broker of the page's epoch: ROBUST_*."""
        cdef uint32_t name = self.broker()
        cdef int result
        with nogil:
            result = section.section_wait(self.page, name, now_ns() + timeout_ns)
        if result != section.ROBUST_TIMEOUT:
            self.locked = name
        return result

    def next_broker(self, bint older=False):
        """Another broker takes over. ``older``: that broker puts its TID in the lock."""
        store32(&self.page.broker_epoch, load32(&self.page.broker_epoch) + 1)
        if not older:
            store32(&self.page.naming_epoch, load32(&self.page.broker_epoch))

    def unlock(self):
        section.section_leave(self.page, self.locked)

    def older_live(self, uint32_t slot):
        """This process emulates the slot with an older hook, which shows no name. ROBUST_*."""
        cdef int result = robust.robust_hold(self.alive_word(slot))
        store32(&self.page.slots[slot].ledger_name, 0)
        store32(&self.page.slots[slot].state, SLOT_ACTIVE)
        return result

    def older_lock(self, int64_t timeout_ns):
        """Take the ledger's lock as an older hook: ROBUST_*."""
        cdef int result
        with nogil:
            result = older_lock(ledger.ledger_word(self.page), now_ns() + timeout_ns)
        return result

    def older_unlock(self):
        older_unlock(ledger.ledger_word(self.page))

    @property
    def lock_word(self):
        return load32(ledger.ledger_word(self.page))

    @lock_word.setter
    def lock_word(self, uint32_t value):
        store32(ledger.ledger_word(self.page), value)

    def hold_alive(self, uint32_t slot):
        """Hold ``alive`` of the slot until this thread ends: ROBUST_*."""
        return robust.robust_hold(self.alive_word(slot))

    def drop_alive(self, uint32_t slot):
        robust.robust_drop(self.alive_word(slot))

    def watch_alive(self, uint32_t slot, int64_t timeout_ns):
        cdef uint32_t* word = self.alive_word(slot)
        cdef int result
        with nogil:
            result = robust.robust_watch(word, now_ns() + timeout_ns)
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
        """The sum over the slots, read without the lock."""
        return ledger.ledger_sum(self.page)


# --- lock and allocation table

cdef class Lock:
    cdef uint32_t word

    def add_under(self, uint64_t[::1] counter not None, int times):
        """Take the lock, add one without atomics, and release it, ``times`` times and without the GIL."""
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


PIECE_BYTES, SMALL_BYTES = pieces.PIECE_BYTES, pieces.SMALL_BYTES


cdef class Pieces:
    cdef pieces.Pieces pieces

    def __dealloc__(self):
        alloctable.alloc_clear(&self.pieces.shared)

    def take(self, uint64_t address, uint64_t size):
        return pieces.pieces_take(&self.pieces, address, size)

    def give(self, uint64_t address, uint64_t size):
        return pieces.pieces_give(&self.pieces, address, size)

    @property
    def room_bytes(self):
        return self.pieces.room_bytes

    def __len__(self):
        return self.pieces.shared.count


def pieces_for(uint64_t size):
    return pieces.pieces_for(size)


def pieces_for_rows(uint64_t row_bytes, uint64_t rows, uint64_t unit_bytes):
    return pieces.pieces_for_rows(row_bytes, rows, unit_bytes)


# --- arenas

ARENA_BYTES, UNIT_BYTES = arenas.ARENA_BYTES, arenas.UNIT_BYTES


cdef class Arenas:
    cdef arenas.Arenas arenas

    def __dealloc__(self):
        arenas.arenas_clear(&self.arenas)

    def add(self, uint64_t address):
        return bool(arenas.arenas_add(&self.arenas, address))

    def take(self, uint64_t size):
        return arenas.arenas_take(&self.arenas, size)

    def give(self, uint64_t address, uint64_t size):
        return bool(arenas.arenas_give(&self.arenas, address, size))

    def free_bytes(self):
        return sum(self.arenas.arena[i].free for i in range(self.arenas.count)) * UNIT_BYTES

    def __len__(self):
        return self.arenas.count


# --- blocks of a store

cdef class Blocks:
    """``owners``: shared memory with a word for each block, behind a page's header."""

    cdef uint8_t[::1] memory
    cdef uint64_t count

    def __init__(self, memory):
        self.memory = memory
        self.count = (self.memory.shape[0] - sizeof(StorePage)) // sizeof(uint64_t)

    cdef StorePage* page(self):
        return <StorePage*>&self.memory[0]

    def take(self, uint32_t pid, uint64_t start_time, uint64_t begin, uint64_t end):
        return store.store_take(self.page(), store.store_name(pid, start_time), begin, min(end, self.count))

    def reserve(self, uint32_t pid, uint64_t start_time, uint64_t block):
        return bool(store.store_reserve(self.page(), block, store.store_name(pid, start_time)))

    def take_reserved(self, uint32_t pid, uint64_t start_time, bint own, uint64_t begin, uint64_t end):
        cdef uint64_t name = store.store_name(pid, start_time)
        return store.store_take_reserved(self.page(), name, own, begin, min(end, self.count))

    def is_used(self, uint64_t block):
        return bool(store.is_used(store.store_owners(self.page())[block]))

    def give(self, uint64_t block):
        store.store_give(self.page(), block)

    def give_all(self, uint32_t pid, uint64_t start_time):
        cdef uint64_t name = store.store_name(pid, start_time)
        return store.store_give_all(self.page(), self.count, &name, 1)

    def __len__(self):
        return self.count


def hash_of_piece(const uint64_t[::1] words):
    """(a, b) of the 128-bit hash, and its parts."""
    cdef hashing.PieceHash found = hashing.piece_hash(&words[0], words.shape[0])
    return found.a, found.b, found.parts


def parts_to_copy(uint64_t parts):
    return hashing.parts_to_copy(parts)


def runs_of_parts(uint64_t parts):
    """(first, count) of each."""
    cdef uint64_t first, count = hashing.first_run(parts, &first)
    runs = []
    while count:
        runs.append((first, count))
        parts = hashing.without_run(parts, first, count)
        count = hashing.first_run(parts, &first)
    return runs


# --- books of pools

POOL_STEP = pools.POOL_STEP


cdef class PoolBook:
    cdef pools.PoolBook book

    @property
    def words(self):
        """(charged, reserved, claimed), in bytes."""
        return self.book.charged, self.book.reserved, self.book.claimed

    def growth(self, uint64_t taken, uint64_t used, uint64_t size):
        return pools.pool_growth(&self.book, taken, used, size)

    def begin(self, uint64_t asked, uint64_t size):
        pools.pool_begin(&self.book, asked, size)

    def end(self, uint64_t size):
        pools.pool_end(&self.book, size)

    def used(self, uint64_t taken, uint64_t used):
        return pools.pool_used(&self.book, taken, used)

    def freed(self, uint64_t before, uint64_t after, uint64_t size):
        pools.pool_freed(&self.book, before, after, size)

    def settle(self, uint64_t taken, uint64_t used):
        """(commit, beyond, cancel, release), in bytes."""
        cdef pools.PoolDue due
        pools.pool_settle(&self.book, taken, used, &due)
        return due.commit, due.beyond, due.cancel, due.release


# --- physical memory of a program

cdef class PhysicalBook:
    """Addresses and handles are numbers. Methods that find nothing return None."""

    cdef physical.PhysicalBook book

    def __dealloc__(self):
        alloctable.alloc_clear(&self.book.handles)
        alloctable.alloc_clear(&self.book.mappings)

    def add(self, uint64_t handle, uint64_t size, uint64_t chunk_bytes):
        return physical.physical_add(&self.book, handle, size, chunk_bytes) != NULL

    def release(self, uint64_t handle):
        """Whether the memory goes."""
        cdef physical.Physical* found = physical.physical_of(&self.book, handle)
        if found == NULL or found.references == 0:
            return None
        if not physical.physical_release(found):
            return False
        physical.physical_remove(&self.book, found)
        return True

    def map(self, uint64_t handle, uint64_t address):
        cdef physical.Physical* found = physical.physical_of(&self.book, handle)
        return None if found == NULL else physical.mapping_add(&self.book, found, address) != NULL

    def unmap(self, uint64_t address):
        """(handle, whether its memory goes)."""
        cdef physical.Mapping* mapping = physical.mapping_at(&self.book, address)
        cdef physical.Physical* found
        cdef uint64_t handle
        if mapping == NULL:
            return None
        found = mapping.physical
        handle = found.handle
        if not physical.mapping_remove(&self.book, mapping):
            return handle, False
        physical.physical_remove(&self.book, found)
        return handle, True

    def around(self, uint64_t address):
        """(address, bytes, handle) of the mapping."""
        cdef physical.Mapping* mapping = physical.mapping_around(&self.book, address)
        return None if mapping == NULL else (mapping.address, mapping.physical.bytes, mapping.physical.handle)

    def is_whole(self, uint64_t address, uint64_t size):
        return bool(physical.mappings_are_whole(&self.book, address, size))

    def chunks(self, uint64_t handle):
        """Their sizes."""
        cdef physical.Physical* found = physical.physical_of(&self.book, handle)
        cdef uint64_t offset = 0, size
        if found == NULL:
            return None
        sizes = []
        while offset < found.bytes:
            size = physical.chunk_in(found, offset)
            sizes.append(size)
            offset += size
        return sizes

    def mapped(self, uint64_t handle):
        """The addresses of its mappings."""
        cdef physical.Physical* found = physical.physical_of(&self.book, handle)
        cdef physical.Mapping* mapping = NULL if found == NULL else found.mappings
        addresses = []
        while mapping != NULL:
            addresses.append(mapping.address)
            mapping = mapping.next
        return addresses

    def __len__(self):
        return self.book.handles.count
