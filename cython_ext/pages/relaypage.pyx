"""The page in which the relays of a GPU's vGPUs report to its server, made and read from Python (layout:
``layout.pxd``).
"""

from libc.string cimport memset

from cython_ext cimport native
from cython_ext.pages cimport layout
from cython_ext.pages.page cimport Page
from cython_ext.pages.tenant cimport at_least_zero, bounded, part_of

from cython_ext.readings import RelayReading


cdef class RelayPage(Page):
    """A GPU Server's vGPUs, each as its relay sees it."""

    cdef layout.RelayPage* get(self) except NULL:
        self.check_open()
        return <layout.RelayPage*>self.base

    @staticmethod
    def create():
        """Make and seal a page with all entries empty."""
        cdef RelayPage self = RelayPage.__new__(RelayPage)
        self.make("vgpu-relay", sizeof(layout.RelayPage), layout.RELAY_MAGIC, 0)
        return self

    @staticmethod
    def map(int descriptor):
        """Map a page made elsewhere, writable; the descriptor stays the caller's. Raises ``PageError``."""
        cdef RelayPage self = RelayPage.__new__(RelayPage)
        self.adopt(descriptor, sizeof(layout.RelayPage), layout.RELAY_MAGIC, True)
        return self

    @property
    def processes(self):
        """Of all vGPUs of the GPU: admitted, and not known to be dead."""
        cdef layout.RelayPage* page = self.get()
        native.fence()
        return sum(native.load32(&page.entries[key].processes) for key in range(layout.MAX_VGPUS))

    def processes_by_key(self):
        """The same of each vGPU that has any."""
        cdef layout.RelayPage* page = self.get()
        native.fence()
        counts = ((key, native.load32(&page.entries[key].processes)) for key in range(layout.MAX_VGPUS))
        return {key: count for key, count in counts if count}

    cdef layout.RelayEntry* at(self, int key) except NULL:
        if not 0 <= key < layout.MAX_VGPUS:
            raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {layout.MAX_VGPUS - 1}")
        return &self.get().entries[key]

    def clear(self, int key):
        """The relay of vGPU ``key`` has ended: another vGPU may have the key."""
        memset(self.at(key), 0, sizeof(layout.RelayEntry))

    def entry(self, int key):
        """The last report of the relay of vGPU ``key`` (0 … 255)."""
        cdef layout.RelayEntry* entry = self.at(key)
        return RelayReading(
            want=native.load32(&entry.want) != 0,
            returned_epoch=native.load32(&entry.returned_epoch),
            drained_epoch=native.load32(&entry.drained_epoch),
            processes=entry.processes,
            drained_ns=at_least_zero(entry.drained_ns),
            busy_ns=bounded(entry.busy_ns),
            launches=bounded(entry.launches),
            longest_kernel_ns=at_least_zero(entry.longest_kernel_ns),
            refill_ns=at_least_zero(entry.refill_ns),
            want_since_ns=at_least_zero(entry.want_since_ns),
            tail_epoch=native.load32(&entry.tail_epoch),
            split_drain_epoch=native.load32(&entry.split_drain_epoch),
            submitted_epoch=native.load32(&entry.submitted_epoch),
            submitted_ns=at_least_zero(entry.submitted_ns),
            demand_ppm=part_of(native.load32(&entry.demand_ppm)),
            waits_ppm=part_of(native.load32(&entry.waits_ppm)),
            burst_us=native.load32(&entry.burst_us),
            work_ns=bounded(native.load64(&entry.work_ns)),
        )
