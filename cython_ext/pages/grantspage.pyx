"""The page that shows what a vGPU may do, written and read from Python (layout: ``layout.pxd``)."""

import os

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cython_ext cimport native
from cython_ext.pages cimport layout
from cython_ext.pages.page cimport F_SEAL_FUTURE_WRITE, Page, text_of

from cython_ext.readings import GrantsFlag, LeaseReading, PageMode, PlanReading

cdef extern from "limits.h":
    const int INT_MAX

cdef size_t APPENDED = sizeof(int64_t)   # GrantsPage.allowed_ns
cdef size_t FIRST_BYTES = sizeof(layout.GrantsPage) - APPENDED


cdef int put_text(char* target, size_t size, str value, str what) except -1:
    raw = value.encode()
    if len(raw) >= size:
        raise ValueError(f"{what} is {len(raw)} bytes of UTF-8, at most {size - 1} fit: {value!r}")
    memset(target, 0, size)
    memcpy(target, <const char*>raw, len(raw))
    return 0


cdef uint64_t as_bytes(object value, str what) except? 1:
    if not 0 <= value <= INT64_MAX:
        raise ValueError(f"{what} must lie within 0 … 2⁶³ − 1, not {value}")
    return value


cdef int64_t as_ns(object value, str what) except? 1:
    if not 0 <= value <= INT64_MAX:
        raise ValueError(f"{what} must lie within 0 … 2⁶³ − 1 ns, not {value}")
    return value


cdef object lease_reading(const layout.Lease* lease):
    if lease.epoch == 0:
        return None
    endless = bool(lease.flags & layout.LEASE_OPEN)
    return LeaseReading(
        lease.epoch, lease.start_ns, None if endless else lease.end_ns,
        None if lease.go_by_ns == INT64_MAX else lease.go_by_ns, bool(lease.flags & layout.LEASE_ON_GO),
    )


cdef class GrantsPage(Page):
    """What a vGPU may do; written by its GPU Server alone. Amounts in bytes, times in CLOCK_MONOTONIC ns."""

    cdef layout.GrantsPage* get(self) except NULL:
        self.check_open()
        return <layout.GrantsPage*>self.base

    @staticmethod
    def create(*, vgpu_id, gpu_uuid, mode, generation, memory_limit_bytes, total_memory_bytes,
               process_limit_bytes=0, implicit_bytes=0, window_ns=1_000_000, grace_ns=10_000_000_000, flags=0):
        """Make and seal the page of one vGPU. ``fileno`` is a read-only descriptor, for broker and hooks."""
        cdef GrantsPage self = GrantsPage.__new__(GrantsPage)
        self.make("vgpu-grants", FIRST_BYTES, layout.GRANTS_MAGIC, F_SEAL_FUTURE_WRITE, APPENDED)
        cdef layout.GrantsPage* page = self.get()
        page.generation = generation
        page.mode = PageMode(mode)
        page.total_memory_bytes = as_bytes(total_memory_bytes, "total_memory_bytes")
        put_text(page.vgpu_id, sizeof(page.vgpu_id), vgpu_id, "the vGPU's id")
        put_text(page.gpu_uuid, sizeof(page.gpu_uuid), gpu_uuid, "the GPU's UUID")
        self.grace_ns = grace_ns
        self.window_ns = window_ns
        self.memory_limit_bytes = memory_limit_bytes
        self.process_limit_bytes = process_limit_bytes
        self.implicit_bytes = implicit_bytes
        self.flags = flags
        page.alive_ns = native.now_ns()
        # The seal holds even for a writable descriptor; /proc/PID/fdinfo also shows a read-only one as such.
        read_only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(self.descriptor)
        self.descriptor = read_only
        return self

    @staticmethod
    def map_readonly(int descriptor):
        """Map a page made elsewhere; the descriptor stays the caller's. Raises ``PageError``."""
        cdef GrantsPage self = GrantsPage.__new__(GrantsPage)
        self.adopt(descriptor, FIRST_BYTES, layout.GRANTS_MAGIC, False, APPENDED)
        return self

    @property
    def generation(self):
        return self.get().generation

    @property
    def vgpu_id(self):
        return text_of(self.get().vgpu_id, sizeof(self.get().vgpu_id))

    @property
    def gpu_uuid(self):
        return text_of(self.get().gpu_uuid, sizeof(self.get().gpu_uuid))

    @property
    def total_memory_bytes(self):
        return self.get().total_memory_bytes

    @property
    def mode(self):
        return PageMode(self.get().mode)

    @mode.setter
    def mode(self, value):
        self.check_writable()
        native.store32(&self.get().mode, PageMode(value))

    @property
    def flags(self):
        return GrantsFlag(native.load32(&self.get().flags))

    @flags.setter
    def flags(self, value):
        """Sleepers are woken: a removed vGPU's gates must fail, not wait."""
        self.check_writable()
        native.store32(&self.get().flags, GrantsFlag(value))
        native.add32(&self.get().change, 1)
        self.wake()

    @property
    def company_ppm(self):
        return native.load32(&self.get().company_ppm)

    @company_ppm.setter
    def company_ppm(self, value):
        native.store32(&self.get().company_ppm, value)

    @property
    def memory_limit_bytes(self):
        return native.load64(&self.get().memory_limit_bytes)

    @memory_limit_bytes.setter
    def memory_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().memory_limit_bytes, as_bytes(value, "memory_limit_bytes"))

    @property
    def process_limit_bytes(self):
        """The most that one process may own; 0: as much as the vGPU."""
        return native.load64(&self.get().process_limit_bytes)

    @process_limit_bytes.setter
    def process_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().process_limit_bytes, as_bytes(value, "process_limit_bytes"))

    @property
    def card_limit_bytes(self):
        """Of its limit what it may own just now, if that depends on others, but for managed memory of an oversubscribed
        one; 0: all of it."""
        return native.load64(&self.get().card_limit_bytes)

    @card_limit_bytes.setter
    def card_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().card_limit_bytes, as_bytes(value, "card_limit_bytes"))

    @property
    def present_bytes(self):
        """Of what can be moved, so much may be on the card while it comes there; 0: all of it."""
        return native.load64(&self.get().present_bytes)

    @present_bytes.setter
    def present_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().present_bytes, as_bytes(value, "present_bytes"))

    @property
    def spare_bytes(self):
        """An allocation that waits for more room than this waits in vain; 0: not known."""
        return native.load64(&self.get().spare_bytes)

    @spare_bytes.setter
    def spare_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().spare_bytes, as_bytes(value, "spare_bytes"))

    @property
    def implicit_bytes(self):
        return native.load64(&self.get().implicit_bytes)

    @implicit_bytes.setter
    def implicit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().implicit_bytes, as_bytes(value, "implicit_bytes"))

    @property
    def implicit_ns(self):
        """``implicit_bytes`` has all that contexts took until then; 0: not read yet. Set it after ``implicit_bytes``.
        """
        return native.loadi64(&self.get().implicit_ns)

    @implicit_ns.setter
    def implicit_ns(self, value):
        self.check_writable()
        native.storei64(&self.get().implicit_ns, as_ns(value, "implicit_ns"))

    @property
    def slo_ns(self):
        """The most time of a decode step and of a prefill, in whole microseconds; 0: not asked for."""
        return 1000 * native.load32(&self.get().tpot_us), 1000 * native.load32(&self.get().ttft_us)

    @slo_ns.setter
    def slo_ns(self, both):
        self.check_writable()
        native.store32(&self.get().tpot_us, both[0] // 1000)
        native.store32(&self.get().ttft_us, both[1] // 1000)

    @property
    def window_ns(self):
        return native.loadi64(&self.get().window_ns)

    @window_ns.setter
    def window_ns(self, value):
        self.check_writable()
        native.storei64(&self.get().window_ns, as_ns(value, "window_ns"))

    @property
    def grace_ns(self):
        return native.loadi64(&self.get().grace_ns)

    @grace_ns.setter
    def grace_ns(self, value):
        self.check_writable()
        native.storei64(&self.get().grace_ns, as_ns(value, "grace_ns"))

    @property
    def allowed_ns(self):
        """What its processes may use in all, under a lease without an end; 0: no limit. Written by the dispatcher."""
        return native.loadi64(&self.get().allowed_ns)

    @property
    def alive_ns(self):
        """When the server last showed life. Written by the dispatcher."""
        return native.loadi64(&self.get().alive_ns)

    def wake(self):
        """Wake all threads that wait on the page; works on read-only mappings. Used when a page's server has ended."""
        native.futex_wake(&self.get().change, INT_MAX)

    def plan(self):
        """The published plan. May be from a moment ago; never a mixture of two."""
        cdef layout.GrantsPage* page = self.get()
        cdef layout.Plan plan
        cdef uint32_t published
        while True:
            published = native.load32(&page.published)
            memcpy(&plan, &page.plans[published & 1], sizeof(plan))
            native.fence()
            if native.load32(&page.published) == published:
                break
        return PlanReading(
            lease_reading(&plan.current), lease_reading(&plan.next), native.load32(&page.open_epoch),
            native.load32(&page.go_epoch), native.load32(&page.free_epoch), native.load32(&page.change),
        )
