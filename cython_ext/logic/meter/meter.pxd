"""The meter: how much GPU time a process uses, added up launch by launch, with few launches timed.

Theory of operation
-------------------
A **key** is a kernel at one grid and block size, a graph, or a copy of one size class. Each application thread has a
table of the keys that it launches, with the mean length of each (durations.pxd, ``Duration.mean_ns``). A launch under
an open-ended lease adds its key's mean to what the thread has used (``meter_takes``): no lock, no clock, no driver
call.

One launch of a key in about 32 leaves this path and is timed between two events, of a key that always takes as long one
in about 256. The distance to the next one is random, so a program's rhythm cannot hide its long launches. Because each
key has a mean of its own, rare long launches are counted one by one, and add nothing to the variance. A thread that
launches fast has enough samples at a lower rate. So one launch in 2 ms is timed, but of each key at least one in about
256.

A timed launch stands for all launches of its key since the one that was timed before it. What it took beyond the mean
is added once for each of them (``Timing.weight``, ``usage_amends``). So the sum is that of the samples, each with its
weight. A mean alone would be too low for a key whose length varies: while the mean is low, the key is timed less often,
and the mean stays low for longer.

A thread has an **allowance**, from which each launch takes its length. A vGPU with a limit renews it in small parts
(gate.pyx, ``affords``); without a limit it is never used up.

``Usage`` joins the meter with what the hook observes. The meter counts a launch when it is submitted, and may correct
it later; the GPU is seen busy later, too, and kernels in several streams may run side by side. So the meter's count
becomes GPU time *used* only as far as the GPU was seen busy without it (``usage_settle``).

A kernel may become far longer from one launch to the next, with other arguments. Then the hook finds the GPU at work
long after all that was submitted should have run: it *doubts* the meter, and each key is timed anew at its next launch.

Threads write their own table alone; others read ``meter_spent_ns`` of it at any time. All times are nanoseconds.
"""

from libc.stdint cimport UINT32_MAX, int64_t, uint16_t, uint32_t, uint64_t

from cython_ext.logic.meter.durations cimport LaunchKey

cdef enum:
    METER_BITS = 8
    METER_KEYS = 1 << METER_BITS
    TIMED_YOUNG = 4          # a key with few samples is timed about that often ...
    TIMED_EVERY = 32         # ... and later
    TIMED_LONG = 8           # ... where a launch is much longer than its timing takes
    STEADY_FACTOR = 8        # a key that always takes as long is timed so much less often
    TIMED_RARELY = 256       # no key less often, about
    TIMED_APART_NS = 2_000_000       # closer to each other, the thread's timed launches cost more than they are worth
    YOUNG_SAMPLES = 8
    WEIGHT_MOST = 1024
    LONG_LAUNCH_NS = 100_000
    LASTED_MOST_NS = 1_000_000_000
    SLACK_MOST_NS = 2_000_000_000    # a sample may correct what is so long ago
    COUNTED_MOST_NS = 200_000_000    # counted beyond that: it ran side by side, or the meter was far off
    DOUBTED_NS = 2_000_000
    ASSUMED_NS = 10_000      # of a key without a sample; made good with its first one

cdef extern from *:
    """
    #define UNLIMITED_NS (INT64_C(1) << 60)
    """
    const int64_t UNLIMITED_NS


cdef struct Known:
    uint64_t tag             # 0: none
    int64_t mean_ns
    uint32_t untimed         # so many launches until the next one that is timed
    uint16_t distance        # ... and so many, with that one, since the one before it
    uint16_t carried         # launches before that of which none could be timed
    uint64_t pad             # a place is half a cache line


cdef struct Meter:
    int64_t left_ns          # of the allowance; below 0 by a part of the last launch
    int64_t granted_ns       # all allowances
    uint64_t dice
    uint32_t doubts          # of the gate's, when the keys were last made to be timed
    uint32_t stretch         # keys with enough samples are timed so much less often; 0 is 1
    int64_t timed_ns         # when the thread's last launch was timed
    Known[256] known         # METER_KEYS, in pairs: a key has one of two places


cdef struct Timing:
    int64_t assumed_ns       # what was added for each launch that the timed one stands for ...
    uint32_t weight          # ... and how many these are


cdef struct Usage:
    uint64_t used_ns         # GPU time used: Slot.busy_ns
    int64_t counted_ns       # the meter's count that is not in it yet; below 0: so much too much is
    uint64_t slack_ns        # seen busy, and not used
    uint64_t spent_ns        # of the meters, up to the last settlement
    uint64_t busy_ns         # observed, up to then
    bint metered             # work was submitted by the meter since the last drain


# --- keys

cdef inline uint64_t launch_tag(
    uint64_t handle, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
    uint32_t block_x, uint32_t block_y, uint32_t block_z
) noexcept nogil:
    """A name for the key, never 0; its highest bits are a place in the table. A linear combination, so that two keys of
    a program have one name only by accident; multiplicative hashing (Knuth, volume 3, 6.4), with
    constants that spread each dimension over the table."""
    cdef uint32_t shape = (
        grid_x * <uint32_t>0x2E3FF02D + grid_y * <uint32_t>0x0813F2E9 + grid_z * <uint32_t>0x649C6347
        + block_x * <uint32_t>0x65C7889B + block_y * <uint32_t>0x632FDC51 + block_z * <uint32_t>0x2D8789D9
    )
    return handle * 0x9E3779B97F4A7C15ULL + shape * 0x96655F23B1D117B7ULL | 1


cdef inline uint64_t key_tag(const LaunchKey* key) noexcept nogil:
    """Of a graph before its version is filled in."""
    return launch_tag(key.handle, key.grid_x, key.grid_y, key.grid_z, key.block_x, key.block_y, key.block_z)


cdef inline Known* meter_pair(Meter* meter, uint64_t tag) noexcept nogil:
    return &meter.known[tag >> (65 - METER_BITS) << 1]


cdef inline Known* meter_find(Meter* meter, uint64_t tag) noexcept nogil:
    """The key's place; NULL: it has none."""
    cdef Known* known = meter_pair(meter, tag)
    if known.tag != tag:
        known += 1
    return known if known.tag == tag else NULL


cdef inline Known* meter_place(Meter* meter, uint64_t tag) noexcept nogil:
    """The key's place, or one of the two that it may have, at random."""
    cdef Known* known = meter_find(meter, tag)
    return meter_pair(meter, tag) + (meter.dice & 1) if known == NULL else known


# --- one launch

cdef inline bint meter_takes(Meter* meter, uint64_t tag, bint owing) noexcept nogil:
    """Add a launch of the key to what the thread has used; ``owing``: even if that is more than its allowance has. 0:
    the launch has to go by way of the gate, and nothing was added."""
    cdef Known* known = meter_find(meter, tag)
    if known == NULL or known.untimed == 0 or (not owing and meter.left_ns < known.mean_ns):
        return 0
    known.untimed -= 1
    meter.left_ns -= known.mean_ns
    return 1


cdef inline bint meter_knows(Meter* meter, uint64_t tag) noexcept nogil:
    """Whether the key has a mean, and its next launch is not to be timed."""
    cdef Known* known = meter_find(meter, tag)
    return known != NULL and known.untimed != 0


cdef inline uint32_t meter_dice(Meter* meter, uint32_t sides) noexcept nogil:
    """0 … sides − 1 (xorshift64, Marsaglia 2003)."""
    meter.dice ^= meter.dice << 13
    meter.dice ^= meter.dice >> 7
    meter.dice ^= meter.dice << 17
    return <uint32_t>(meter.dice >> 11) % sides


cdef inline uint32_t usual_distance(int64_t mean_ns, uint32_t samples, bint steady) noexcept nogil:
    if samples == 0:
        return 0             # each launch, until one has been timed
    if samples < YOUNG_SAMPLES:
        return TIMED_YOUNG
    return (TIMED_LONG if mean_ns >= LONG_LAUNCH_NS else TIMED_EVERY) * (STEADY_FACTOR if steady else 1)


cdef inline void meter_enters(Meter* meter, Known* known, uint64_t tag, int64_t mean_ns, uint32_t usual) noexcept nogil:
    """The key's next timed launch is half to one and a half times the usual number of launches away."""
    known.tag = tag
    known.mean_ns = mean_ns
    known.untimed = usual / 2 + meter_dice(meter, usual) if usual else 0
    known.distance = known.untimed + 1
    known.carried = 0


cdef inline void meter_stretches(Meter* meter, int64_t now_ns) noexcept nogil:
    """Keep the thread's timed launches about TIMED_APART_NS apart, or up to four times that."""
    cdef uint32_t stretch = max(meter.stretch, <uint32_t>1)
    if now_ns - meter.timed_ns < TIMED_APART_NS:
        meter.stretch = min(2 * stretch, <uint32_t>TIMED_RARELY)
    elif now_ns - meter.timed_ns > 4 * TIMED_APART_NS:
        meter.stretch = max(stretch / 2, <uint32_t>1)
    meter.timed_ns = now_ns


cdef inline Timing meter_times(
    Meter* meter, uint64_t tag, int64_t mean_ns, uint32_t samples, bint steady, int64_t now_ns
) noexcept nogil:
    """Add a launch that the fast path leaves to the gate, at ``now_ns``. The key's mean by now: ``mean_ns``, of
    ``samples``, and whether the last ones were alike (durations.pxd). The launch is to be timed, for all of ``weight``;
    0: not this one, for its key has but lost its place."""
    cdef Known* known = meter_place(meter, tag)
    cdef uint32_t usual = usual_distance(mean_ns, samples, steady)
    cdef Timing timing
    if samples >= YOUNG_SAMPLES:
        usual = min(usual * max(meter.stretch, <uint32_t>1), <uint32_t>TIMED_RARELY)
    if samples == 0:
        mean_ns = ASSUMED_NS
    timing.assumed_ns = mean_ns
    if known.tag == tag and 0 < samples < YOUNG_SAMPLES:     # less and less often, while none can be timed
        usual = min(max(<uint32_t>TIMED_YOUNG, <uint32_t>known.carried), <uint32_t>TIMED_EVERY)
    if known.tag == tag:
        timing.assumed_ns = known.mean_ns
        timing.weight = known.distance + known.carried
        if samples == 0:
            mean_ns = known.mean_ns
    elif samples < YOUNG_SAMPLES:
        timing.weight = 1
    else:
        timing.weight = usual if meter_dice(meter, usual) == 0 else 0
    if timing.weight and samples >= YOUNG_SAMPLES:
        meter_stretches(meter, now_ns)
    meter.left_ns -= timing.assumed_ns
    meter_enters(meter, known, tag, mean_ns, usual)
    return timing


cdef inline void meter_never_times(Meter* meter, uint64_t tag) noexcept nogil:
    """The key's launches are counted, and none is timed: in spatial mode held time is charged."""
    meter_place(meter, tag).untimed = UINT32_MAX


cdef inline void meter_doubts(Meter* meter) noexcept nogil:
    """Each key is timed at its next launch, which stands for itself: those before it were shorter."""
    cdef int i
    for i in range(METER_KEYS):
        if meter.known[i].tag != 0 and meter.known[i].untimed != UINT32_MAX:
            meter.known[i].untimed = meter.known[i].carried = 0
            meter.known[i].distance = 1


cdef inline void meter_carries(Meter* meter, uint64_t tag, uint32_t weight) noexcept nogil:
    """The launch could not be timed: the next one that is stands for those with ``weight``, too."""
    cdef Known* known = meter_find(meter, tag)
    if known != NULL:
        known.carried = <uint16_t>min(weight, <uint32_t>WEIGHT_MOST)


# --- the allowance

cdef inline void meter_grant(Meter* meter, int64_t allowance_ns) noexcept nogil:
    meter.granted_ns += allowance_ns
    meter.left_ns += allowance_ns


cdef inline void meter_recall(Meter* meter, int64_t most_ns) noexcept nogil:
    """Leave ``most_ns`` of the allowance at most."""
    if meter.left_ns > most_ns:
        meter_grant(meter, most_ns - meter.left_ns)


cdef inline int64_t meter_spent_ns(const Meter* meter) noexcept nogil:
    """What all launches of the thread took."""
    return meter.granted_ns - meter.left_ns


cdef inline int64_t meter_promised_ns(const Meter* meter) noexcept nogil:
    """What the thread may yet use of a limited allowance."""
    return meter.left_ns if 0 < meter.left_ns < UNLIMITED_NS / 2 else 0


cdef inline void meter_turns(Meter* meter, uint64_t seed) noexcept nogil:
    """The meter passes to another vGPU, or another thread. The caller has counted its spent time; its keys stay."""
    meter.left_ns = meter.granted_ns = 0
    meter.dice = seed | 1


# --- usage

cdef inline void usage_settle(Usage* usage, uint64_t spent_ns, uint64_t busy_ns, bint drained) noexcept nogil:
    """Up to now the meters have counted ``spent_ns``, and the GPU was seen busy for ``busy_ns``. ``drained``: all that
    was submitted has run. Work under leases with an end is observed launch by launch, and counts as it is seen."""
    cdef uint64_t seen_ns = busy_ns - min(busy_ns, usage.busy_ns)
    cdef uint64_t ran_ns
    usage.counted_ns += <int64_t>(spent_ns - min(spent_ns, usage.spent_ns))
    if not usage.metered:
        usage.counted_ns += <int64_t>seen_ns
    usage.spent_ns = spent_ns
    usage.busy_ns = busy_ns
    usage.slack_ns = min(usage.slack_ns + seen_ns, <uint64_t>SLACK_MOST_NS)
    ran_ns = min(<uint64_t>max(usage.counted_ns, <int64_t>0), usage.slack_ns)
    usage.used_ns += ran_ns
    usage.slack_ns -= ran_ns
    usage.counted_ns -= <int64_t>ran_ns
    if drained:
        usage.counted_ns = min(usage.counted_ns, <int64_t>COUNTED_MOST_NS)
        usage.metered = 0


cdef inline void usage_takes_over(Usage* usage, int64_t in_flight_ns) noexcept nogil:
    """The meter counts from now on. Work of ``in_flight_ns`` still runs that the backlog would have observed."""
    usage.counted_ns += max(in_flight_ns, <int64_t>0)
    usage.metered = 1


cdef inline void usage_tracks(Usage* usage, int64_t predicted_ns) noexcept nogil:
    """A launch that the backlog observes. Behind metered work the meter counts it. Reason: the backlog cannot separate
    the two until both have drained."""
    if usage.metered:
        usage.counted_ns += predicted_ns


cdef inline void usage_amends(Usage* usage, int64_t lasted_ns, int64_t assumed_ns, uint32_t weight) noexcept nogil:
    """A timed launch took ``lasted_ns``, where ``assumed_ns`` was added for it and for all that it stands for."""
    usage.counted_ns += (min(lasted_ns, <int64_t>LASTED_MOST_NS) - assumed_ns) * weight
    usage.counted_ns = max(usage.counted_ns, -<int64_t>COUNTED_MOST_NS)


cdef inline int64_t usage_room_ns(
    const Usage* usage, int64_t allowed_ns, int64_t others_ns, int64_t promised_ns
) noexcept nogil:
    """What is left of the vGPU's limit: ``allowed_ns`` in all, ``others_ns`` used by its other processes, and
    ``promised_ns`` in the allowances of this process's threads. Once all work has run, a positive count beyond it will
    never become GPU time. Threads that launch no more may hold any amount of allowance. So neither counts then."""
    cdef int64_t left_ns = allowed_ns - others_ns - <int64_t>usage.used_ns
    if not usage.metered:
        return left_ns - min(usage.counted_ns, <int64_t>0)
    return left_ns - usage.counted_ns - promised_ns


cdef inline bint usage_doubtful(const Usage* usage, int64_t silent_ns) noexcept nogil:
    """Whether the GPU works for too long: the hook found it busy ``silent_ns`` after the last launch. That is more than
    twice the meter's count of work that the hook has not observed to run."""
    return usage.metered and silent_ns > DOUBTED_NS and silent_ns / 2 > usage.counted_ns
