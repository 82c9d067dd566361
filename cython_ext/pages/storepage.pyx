"""The page with a user's host memory for what is swapped out of the card. A GPU Server makes and maintains it.

Every process of the user may write all of it. So a word in it may affect only that user's own vGPUs. The server takes
the number of blocks, and of those with memory, from the file, not from the header.
"""

import os
from concurrent.futures import ThreadPoolExecutor

from libc.errno cimport EINVAL, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from cython_ext cimport native
from cython_ext.pages cimport layout
from cython_ext.logic.memory cimport store as logic
from cython_ext.pages.page cimport Page

from cython_ext.pages.page import PageError

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void* address, size_t size, int advice)
    const int MADV_HUGEPAGE, MADV_REMOVE

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_mbind

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    MADV_POPULATE_WRITE = 23     # Linux 5.14
    MPOL_PREFERRED = 1
    SMALL_PAGE = 4096
    FILE_BLOCK = 512             # of stat
    MOST_KEEPERS = 64

STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS = logic.BLOCK_BYTES, logic.SEGMENT_BLOCKS
STORE_TIME_MASK = (<uint64_t>1 << logic.START_BITS) - 1    # of a start time, what is in a name
MOST_BLOCKS = 1 << 23            # 16 TiB


cdef tuple process_in(uint64_t owner):
    """(pid, the low bits of its start time)"""
    cdef uint64_t name = logic.name_in(owner)
    return name >> logic.START_BITS, name & ((<uint64_t>1 << logic.START_BITS) - 1)


cdef class StorePage(Page):
    """``blocks`` of ``STORE_BLOCK_BYTES``, of which ``ready`` have memory behind them."""

    cdef readonly uint64_t blocks, ready
    cdef uint64_t offset

    cdef layout.StorePage* get(self) except NULL:
        self.check_open()
        return <layout.StorePage*>self.base

    @staticmethod
    def create(blocks, numa_node=None):
        """A store without memory behind it yet, of whole segments. ``fileno``: the descriptor for its user's
        processes. ``numa_node``: where its memory is to be while there is some; None: anywhere."""
        cdef StorePage self = StorePage.__new__(StorePage)
        if not 0 < blocks <= MOST_BLOCKS:
            raise ValueError(f"a store has 1 … {MOST_BLOCKS} blocks, not {blocks}")
        blocks += -blocks % STORE_SEGMENT_BLOCKS
        cdef uint64_t size = logic.store_size(blocks, &self.offset)
        self.blocks = blocks
        self.make("vgpu-store", sizeof(layout.StorePage), layout.STORE_MAGIC, 0, size - sizeof(layout.StorePage))
        cdef layout.StorePage* page = self.get()
        page.blocks = blocks
        page.offset = self.offset
        madvise(<uint8_t*>self.base + self.offset, blocks * logic.BLOCK_BYTES, MADV_HUGEPAGE)
        if numa_node is not None and 0 <= numa_node < 64:
            self.prefer(<int>numa_node)
        return self

    cdef void prefer(self, int node):
        """Of a shared file the kernel keeps this policy with the file. A container may forbid the call."""
        cdef unsigned long nodes = <unsigned long>1 << node
        syscall(SYS_mbind, <uint8_t*>self.base + self.offset, self.blocks * logic.BLOCK_BYTES, MPOL_PREFERRED,
                &nodes, 65, 0)

    @staticmethod
    def map(int descriptor):
        """Map a store that another server made; keeps a copy of the descriptor. Raises ``PageError``."""
        cdef StorePage self = StorePage.__new__(StorePage)
        cdef uint64_t found = os.fstat(descriptor).st_size
        cdef uint64_t blocks = found // (logic.BLOCK_BYTES + sizeof(uint64_t))
        while blocks and logic.store_size(blocks, &self.offset) > found:
            blocks -= 1
        if blocks == 0:
            raise PageError(f"the StorePage at descriptor {descriptor} has {found} bytes, too few for a block")
        self.blocks = blocks
        self.adopt(
            descriptor, sizeof(layout.StorePage), layout.STORE_MAGIC, True, found - sizeof(layout.StorePage)
        )
        self.descriptor = os.dup(descriptor)
        self.set_ready(self.blocks_with_memory())
        return self

    cdef uint64_t blocks_with_memory(self):
        """By the file system's word, in whole segments: the header is less than one."""
        segments = os.fstat(self.descriptor).st_blocks * FILE_BLOCK // (STORE_SEGMENT_BLOCKS * STORE_BLOCK_BYTES)
        return min(self.blocks, segments * STORE_SEGMENT_BLOCKS)

    cdef int set_ready(self, uint64_t ready) except -1:
        """Publish the number to the processes that use the store."""
        self.ready = ready
        native.store32(&self.get().ready, <uint32_t>ready)
        return 0

    def grow(self, blocks, threads=1):
        """Have memory behind so many more blocks, and the rest of their segment; how many it were. Without the GIL,
        about 0.3 s a GiB and thread. ``MemoryError``: the host has none."""
        self.check_open()
        cdef uint64_t begin = self.ready
        cdef uint64_t end = min(self.blocks, begin + <uint64_t>(blocks + -blocks % STORE_SEGMENT_BLOCKS))
        if threads == 1:
            self.touch(begin, end)
        else:
            step = max(1, (end - begin + threads - 1) // threads)
            with ThreadPoolExecutor(threads) as pool:
                for part in [pool.submit(self.touch, at, min(at + step, end)) for at in range(begin, end, step)]:
                    part.result()
        self.set_ready(end)
        return end - begin

    def touch(self, uint64_t begin, uint64_t end):
        """Have memory behind the blocks from ``begin`` to before ``end``. ``MemoryError``: the host has none."""
        self.check_open()
        if not begin <= end <= self.blocks:
            raise ValueError(f"blocks {begin} to {end} of {self.blocks}")
        cdef uint8_t* memory = <uint8_t*>self.base + self.offset
        cdef uint64_t at
        cdef int failed
        self.pin()
        with nogil:
            failed = madvise(memory + begin * logic.BLOCK_BYTES, (end - begin) * logic.BLOCK_BYTES, MADV_POPULATE_WRITE)
        if failed and errno == EINVAL:       # an older kernel
            with nogil:
                at = begin * logic.BLOCK_BYTES
                while at < end * logic.BLOCK_BYTES:
                    native.store32(<uint32_t*>(memory + at), 0)
                    at += SMALL_PAGE
            failed = 0
        self.unpin()
        if failed:
            raise MemoryError(f"the host has no memory for {(end - begin) * logic.BLOCK_BYTES} bytes: "
                              f"{os.strerror(errno)}")

    @property
    def used(self):
        """How many blocks have what is nowhere else: the owner neither keeps nor reserves them."""
        cdef uint64_t* owners = logic.store_owners(self.get())
        cdef uint64_t i, count = 0
        with nogil:
            for i in range(self.blocks):
                count += logic.is_used(native.load64(&owners[i]))
        return count

    @property
    def reserved(self):
        """How many blocks processes have pinned, and not used yet."""
        cdef uint64_t* owners = logic.store_owners(self.get())
        cdef uint64_t i, count = 0
        with nogil:
            for i in range(self.blocks):
                count += logic.is_reserved(native.load64(&owners[i]))
        return count

    def kept(self):
        """How many blocks processes keep: a dictionary of (pid, low bits of start time), of at most 64 processes."""
        cdef uint64_t* owners = logic.store_owners(self.get())
        cdef uint64_t[64] names
        cdef uint64_t[64] counts
        cdef uint64_t i, owner, known = 0, at = 0
        with nogil:
            for i in range(self.blocks):
                owner = native.load64(&owners[i])
                if not logic.is_kept(owner):
                    continue
                if known == 0 or names[at] != owner:     # one process has most of its blocks in a row
                    at = 0
                    while at < known and names[at] != owner:
                        at += 1
                    if at == MOST_KEEPERS:
                        at = 0
                        continue
                    if at == known:
                        names[at], counts[at] = owner, 0
                        known += 1
                counts[at] += 1
        return {process_in(names[i]): counts[i] for i in range(known)}

    def take_first(self, processes):
        """Of whom kept blocks are taken first, each as (pid, start time): the first three of them."""
        cdef layout.StorePage* page = self.get()
        cdef size_t i
        cdef uint64_t name
        for i in range(3):
            name = 0
            if i < len(processes):
                pid, start_time = processes[i]
                name = logic.store_name(pid, start_time)
            native.store64(&page.first_taken[i], name)

    def owners(self, uint64_t begin, size_t most):
        """The owners of the blocks, as (pid, the low bits of its start time): ``most`` names, from block ``begin`` on.
        After the last block the search goes on with the first. Also the block from which to search for others: any
        process may write as many names as there are blocks."""
        cdef uint64_t* owners = logic.store_owners(self.get())
        cdef uint64_t k, i = 0, name, last = 0
        found = set()
        for k in range(self.blocks):
            i = (begin + k) % self.blocks
            name = logic.name_in(native.load64(&owners[i]))
            if name and name != last:
                if len(found) == most:
                    break
                last = name
                found.add(process_in(name))
        else:
            i = begin
        return found, i

    def give_back(self, processes):
        """What they had that are no more, each as (pid, start time); so many blocks it was. Without the GIL."""
        cdef layout.StorePage* page = self.get()
        cdef size_t count = len(processes), i
        cdef uint64_t given
        cdef uint64_t* names = <uint64_t*>malloc(max(1, count) * sizeof(uint64_t))
        if names == NULL:
            raise MemoryError(f"no memory for {count} names")
        try:
            for i, (pid, start_time) in enumerate(processes):
                names[i] = logic.store_name(pid, start_time)
            self.pin()
            with nogil:
                given = logic.store_give_all(page, self.blocks, names, count)
            self.unpin()
        finally:
            free(names)
        return given

    def clear(self, pid, start_time):
        """Give all memory back to the host if all blocks are free; whether that was so. Meanwhile the calling process
        owns every block. Without the GIL. ``OSError``: it was not possible, and all is as it was."""
        cdef layout.StorePage* page = self.get()
        cdef uint64_t name = logic.store_name(pid, start_time)
        cdef bint empty
        cdef int failed = 0
        self.pin()
        with nogil:
            empty = logic.store_take_all(page, self.blocks, name)
            if empty:
                native.store32(&page.ready, 0)
                failed = madvise(<uint8_t*>self.base + self.offset, self.blocks * logic.BLOCK_BYTES, MADV_REMOVE)
                failed = errno if failed else 0
                logic.store_give_all(page, self.blocks, &name, 1)
        self.unpin()
        if empty:
            self.set_ready(self.ready if failed else 0)
        if failed:
            raise OSError(failed, os.strerror(failed))
        return bool(empty)
