"""Demand: how much of its time a process needs the GPU. By it the GPU Server separates light vGPUs from heavy ones.

Theory of operation
-------------------
    demand = G ÷ (G + H); under an exclusive lease G ÷ (the time in which it may submit), if that is more

G is the GPU time that the process's launches take by themselves, as the hook has learned it. H is host time: the
process wants the GPU, and none of its threads waits for it, neither in the gate nor in the driver. Other vGPUs on the
GPU make a program wait for longer, and change neither G nor H. So the demand of a GPU-bound program is near 1 beside
any others. A program that alone computes for a fifth of its time has a demand of a fifth.

A program that launches without waiting may keep host and GPU busy at the same time: training does. Its G ÷ (G + H) is a
half, and the GPU has no time for another. Under an exclusive lease that shows: its work fills the time in which it
might submit. Not in that time are waits at the gate, and without a lease all waits. A vGPU that gave its lease back
might submit, too: it would have a lease if it wanted one. Under a shared lease others' work is in that time.

A thread waits from the beginning of a call that waits for the GPU to its end, in the gate or in the driver
(``Waits``, which adds up the time in which at least one thread does). Host time is what is left of the time in which
the process wants the GPU. A program that asks again and again whether its work is done does not wait, by this measure:
its demand is too low.

The *run length* (``burst`` in names) is the work that the process launches between two waits for the GPU. The longer
it is, the longer a lease that has to end goes on. A program that launches all the time and hardly ever waits has an
endless one. It fills the GPU, even where others' slices make its G ÷ (G + H) small. Of each figure, the mean is
weighted by work. The hook thread counts the waits that ended since its last sample, and divides the work since then by
them.

A figure needs some G, and MEASURED_NS of G and H together, which a vGPU that has the GPU all the time uses up in a
tenth of a second. Of a pause, in which the process does not want the GPU, PAUSE_MOST_NS at most count as host time: a
trainer that loads data for a while does not begin anew as a light one. The *waits* are the part of the last WAITED_NS
in which a thread waited. A process that gets less than its share, and waits half of the time, is short of GPU time.

All times are nanoseconds. The caller serialises.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport store32

cdef enum:
    MEASURED_NS = 100_000_000    # G + H of one figure
    WAITED_NS = 200_000_000      # wall time of one figure of the waits
    PAUSE_MOST_NS = 20_000_000   # of a pause, at most so much is host time


cdef struct Waits:
    uint32_t lock            # of the other fields
    uint32_t threads         # that wait now
    int64_t since_ns         # since then at least one does
    uint64_t waited_ns       # before
    uint32_t ended           # waits, of any thread


cdef struct Demand:
    uint32_t ppm             # G ÷ (G + H), at least 1; 0: not measured yet
    uint32_t waits_ppm       # the part of the time in which the process waited for the GPU
    uint32_t burst_us        # mean run length, weighted by work
    uint32_t waits           # ended at the last sample
    uint64_t looked_work_ns  # G at the last sample
    uint64_t burst_ns        # G since the last wait that ended
    double bursts            # Σ run lengths since the last figure ...
    double squares           # ... and of their squares
    int64_t looked_ns        # the last sample; 0: none yet
    int64_t paused_ns        # of a pause that has not ended, so much was host time
    uint64_t waited_ns       # Waits at the last sample ...
    uint64_t held_up_ns      # ... and those at the gate
    int64_t submits_ns       # since the last figure, the time in which it might submit
    bint holds               # at the last sample it had a lease
    bint shared              # since then, its lease was a shared one
    uint64_t work_ns         # G at the last figure
    int64_t host_ns          # H since then
    int64_t waiting_ns       # waited since the last figure of the waits ...
    int64_t watched_ns       # ... and how long that is


cdef inline void waits_begin(Waits* waits, int64_t now_ns) noexcept nogil:
    lock_acquire(&waits.lock)
    if waits.threads == 0:
        waits.since_ns = now_ns
    waits.threads += 1
    lock_release(&waits.lock)


cdef inline void waits_end(Waits* waits, int64_t now_ns) noexcept nogil:
    lock_acquire(&waits.lock)
    waits.threads -= 1
    store32(&waits.ended, waits.ended + 1)
    if waits.threads == 0:
        waits.waited_ns += <uint64_t>max(now_ns - waits.since_ns, <int64_t>0)
    lock_release(&waits.lock)


cdef inline uint64_t waits_until(Waits* waits, int64_t now_ns) noexcept nogil:
    """The time up to now in which at least one thread waited."""
    cdef uint64_t waited_ns
    lock_acquire(&waits.lock)
    waited_ns = waits.waited_ns
    if waits.threads:
        waited_ns += <uint64_t>max(now_ns - waits.since_ns, <int64_t>0)
    lock_release(&waits.lock)
    return waited_ns


cdef inline void add_bursts(Demand* demand, uint64_t work_ns, uint32_t waits) noexcept nogil:
    """Since the last sample so much was launched, and so many waits ended."""
    cdef double each, first
    if waits == 0:
        demand.burst_ns += work_ns
        return
    each = <double>work_ns / waits
    first = <double>demand.burst_ns + each
    demand.bursts += first + each * (waits - 1)
    demand.squares += first * first + each * each * (waits - 1)
    demand.burst_ns = 0


cdef inline uint32_t mean_burst_us(const Demand* demand) noexcept nogil:
    """With the one that has not ended."""
    cdef double last = <double>demand.burst_ns
    cdef double all_ns = demand.bursts + last
    return <uint32_t>min((demand.squares + last * last) / all_ns / 1e3, 1e9) if all_ns > 0 else 0


cdef inline void demand_looks(
    Demand* demand, int64_t now_ns, uint64_t work_ns, uint64_t waited_ns, uint64_t held_up_ns,
    uint32_t waits, bint wants, bint holds, bint shared
) noexcept nogil:
    """A sample of the hook thread. ``work_ns``: G since the process began; ``waited_ns``: of the same time, what its
    threads waited, ``held_up_ns`` of it at the gate; ``waits``: how many waits for the GPU have ended; ``wants``: the
    process has work for the GPU, or had some a moment ago; ``holds``: it has a lease; ``shared``: a shared one."""
    cdef int64_t passed_ns = now_ns - demand.looked_ns
    cdef int64_t waiting_ns = <int64_t>(waited_ns - min(waited_ns, demand.waited_ns))
    cdef int64_t gate_ns = <int64_t>(held_up_ns - min(held_up_ns, demand.held_up_ns))
    cdef int64_t active_ns = passed_ns if wants else min(passed_ns, <int64_t>PAUSE_MOST_NS - demand.paused_ns)
    cdef uint64_t done_ns = work_ns - min(work_ns, demand.work_ns)
    cdef uint64_t all_ns
    cdef bint first = demand.looked_ns == 0, held = demand.holds
    demand.paused_ns = 0 if wants or first else demand.paused_ns + active_ns
    demand.looked_ns = now_ns
    demand.waited_ns = waited_ns
    demand.held_up_ns = held_up_ns
    demand.holds = holds
    if first:
        demand.work_ns = demand.looked_work_ns = work_ns
        demand.waits = waits
        return
    add_bursts(demand, work_ns - min(work_ns, demand.looked_work_ns), waits - demand.waits)
    demand.looked_work_ns = work_ns
    demand.waits = waits
    demand.watched_ns += passed_ns
    demand.waiting_ns += waiting_ns
    demand.host_ns += max(active_ns - waiting_ns, <int64_t>0)
    demand.submits_ns += max(active_ns - (gate_ns if held else waiting_ns), <int64_t>0)
    demand.shared = demand.shared or shared
    if demand.watched_ns >= WAITED_NS:
        demand.waits_ppm = <uint32_t>min(demand.waiting_ns * 1_000_000 / demand.watched_ns, <int64_t>1_000_000)
        demand.waiting_ns = demand.watched_ns = 0
    all_ns = done_ns + <uint64_t>demand.host_ns
    if all_ns >= MEASURED_NS:
        if not demand.shared:
            all_ns = max(min(all_ns, <uint64_t>demand.submits_ns), done_ns)
        if done_ns:
            demand.ppm = max(<uint32_t>(<double>done_ns / <double>all_ns * 1e6), <uint32_t>1)
            demand.burst_us = mean_burst_us(demand)
        demand.bursts = demand.squares = 0
        demand.work_ns = work_ns
        demand.host_ns = demand.submits_ns = 0
        demand.shared = 0
