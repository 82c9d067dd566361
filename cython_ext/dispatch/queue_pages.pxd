"""The dispatcher's reads and writes in shared memory, word by word. A relay's entry becomes the report for a queue. A
queue's view is written into its vGPU's grants page.

Order
-----
A relay's entry: the relay writes ``want`` and the figures before the two epochs. The dispatcher reads them after the
epochs. So a drain or a return is never paired with a want from before it. A want that the dispatcher reads as cleared
too early is explained by the next report.

A grants page: ``open_epoch`` is cleared before any other word changes, and set after all others have changed. Reason: a
gate on its fast path reads no other word. ``change`` moves last, then the dispatcher wakes the sleepers. ``free_epoch``
may change by itself: a thread that could start early under it is not asleep.
"""

from libc.string cimport memcmp

from cython_ext.dispatch.vgpu_queue cimport GrantView, Report
from cython_ext.pages.layout cimport GrantsPage as Grants, Plan, RelayEntry
from cython_ext.logic.gate.plan cimport publish_plan
from cython_ext.native cimport add32, exchange32, load32, load64, loadi64, store32, storei64


cdef inline void read_report(const RelayEntry* entry, Report* report) noexcept nogil:
    report.returned_epoch = load32(&entry.returned_epoch)
    report.drained_epoch = load32(&entry.drained_epoch)
    report.tail_epoch = load32(&entry.tail_epoch)
    report.split_drain_epoch = load32(&entry.split_drain_epoch)
    report.want = load32(&entry.want) != 0
    report.drained_ns = loadi64(&entry.drained_ns)
    report.counted_ns = loadi64(&entry.counted_ns)       # before busy_ns, which may only be newer
    report.busy_ns = load64(&entry.busy_ns)
    report.longest_kernel_ns = max(0, loadi64(&entry.longest_kernel_ns))
    report.refill_ns = max(0, loadi64(&entry.refill_ns))
    report.predicted_end_ns = max(0, loadi64(&entry.predicted_end_ns))
    report.submitted_epoch = load32(&entry.submitted_epoch)
    report.submitted_ns = loadi64(&entry.submitted_ns)


cdef inline void write_page(Grants* page, const GrantView* view) noexcept nogil:
    if page.open_epoch != view.open_epoch and page.open_epoch != 0:
        exchange32(&page.open_epoch, 0)
    if page.free_epoch != view.free_epoch:
        store32(&page.free_epoch, 0)
    if page.go_epoch != view.go_epoch and page.go_epoch != 0:
        store32(&page.go_epoch, 0)       # or an epoch from long ago would seem to reach the new lease
    if view.window_ns:
        storei64(&page.window_ns, view.window_ns)
    if memcmp(&page.plans[page.published & 1], &view.plan, sizeof(Plan)) != 0:
        publish_plan(page, &view.plan)
    store32(&page.go_epoch, view.go_epoch)
    store32(&page.open_epoch, view.open_epoch)
    store32(&page.free_epoch, view.free_epoch)
    add32(&page.change, 1)
