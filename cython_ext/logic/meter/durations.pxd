"""Learned durations: how long a launch will take, by what is launched, how wide, and after what.

An 8-way set-associative cache in memory of the caller's: nothing is ever rehashed, forgetting is a sweep, and a full
set drops the entry that was launched longest ago. An entry keeps its last eight samples. It predicts their mean without
the largest, so one outlier (a host that was preempted between two events) cannot move it. It is a mean because
predictions are summed. One key may cover layers of different lengths. With a high quantile of each, a short queue would
seem full, and a gap busy.

An entry also keeps its highest recent estimate, which fades by a 256th with each sample. Reason: the length of a kernel
may depend on its arguments, for fifty launches at a time. At any launch it may be again what it was before.

The caller serialises. The driver reuses handles. So call ``durations_forget`` when a module is unloaded or a graph
destroyed. Hand ``DurationTable.generation``, as it was at the launch, to ``durations_learn``: a sample under way at the
forgetting is then dropped.

One kernel at one width may still cover layers of different lengths. The launch before it in its stream distinguishes
them, as a branch's history distinguishes a loop's rounds (Yeh and Patt 1991). Such a key without a sample is predicted
as its kernel is after any launch: that entry has ``after`` = 0 and learns from all of them.
"""

from libc.math cimport fabs
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.logic.gate.gate cimport UNKNOWN_NS

cdef enum:
    DURATION_WAYS = 8
    DURATION_SAMPLES = 8
    SAMPLE_ALWAYS = 3        # the first launches of a key are all timed
    SAMPLE_EVERY = 64        # later ones now and then
    DURATION_MAX_SECONDS = 86_400        # a longer sample is a broken clock
    LONGEST_SAMPLES = 256    # over which the highest estimate fades
    STEADY_NS = 2_000        # of a sample, what the driver's and the GPU's queues make of it
    MEAN_SAMPLES = 16        # over about which the mean moves
    FOREIGN_NS = 100_000     # another vGPU's slice makes a sample longer by more: switching to it and back takes that
    FOREIGN_RARE_NS = 100_000    # within a launch so short hardly a slice ends ...
    FOREIGN_USUAL_NS = 500_000   # ... and within one so long most do
    COMPANY_MOST_PPM = 900_000
    SLICED_NS = 4_000_000    # a launch of two slices and more has a part of each in it
    FOREIGN_MOST = 16        # what foreign samples count for until they show that the key's launches are that long
    FOREIGN_IN_ROW = 16      # in an empty queue, so many one after the other show that
    SAMPLE_EVERY_YOUNG = 8   # ... and while fewer than SAMPLE_ALWAYS samples were good enough to keep

    # What is launched where block_x is 0: LaunchKey.grid_x
    WORK_GRAPH = 1           # grid_y: its version (graphs.pxd)
    WORK_FILL = 2            # grid_y, grid_z: size classes (transfers.pxd)
    WORK_COPY = 3
    WORK_PEER_COPY = 4
    WORK_PREFETCH = 5


cdef struct LaunchKey:
    uint64_t handle          # CUfunction or CUgraphExec, else WORK_*; never 0
    uint32_t grid_x, grid_y, grid_z
    uint32_t block_x, block_y, block_z   # block_x 0: no kernel
    uint64_t after           # hash of the one before in the stream; 0: whatever it was
    uint64_t hash            # of all but ``after``: launch_hash, by the code that made the key


cdef struct Duration:
    LaunchKey key
    float[8] samples_ns      # the newest at [(learned - 1) % 8]
    int64_t estimate_ns      # UNKNOWN_NS before the first sample
    int64_t longest_ns       # the highest estimate of late
    float mean_ns            # of samples, outliers too: what a sum of launches takes (meter.pxd)
    float least_ns           # the shortest of the foreign samples ``in_row``
    uint8_t means            # ``mean_ns`` is of so many samples, since the meter was doubted
    uint8_t foreign          # foreign samples of late, by what each counts, less those that were not
    uint8_t in_row           # foreign samples of an empty queue since the last one that was not foreign
    float peak_ns            # the longest sample of late
    uint64_t used            # DurationTable.clock of the newest launch
    uint32_t launches
    uint32_t learned         # samples ever kept


cdef struct DurationTable:
    Duration* entries        # sets x DURATION_WAYS
    uint32_t sets            # a power of two
    uint32_t generation      # advanced by every forgetting
    uint64_t clock           # launches ever


cdef inline bint durations_init(DurationTable* table, void* memory, size_t size_bytes) noexcept nogil:
    """Use ``memory`` (zeroed, aligned to 8): 1, or 0 if not even one set of entries fits."""
    cdef size_t sets = 1
    if memory == NULL or size_bytes < sizeof(Duration) * DURATION_WAYS:
        return 0
    while sets < (1 << 24) and 2 * sets * DURATION_WAYS * sizeof(Duration) <= size_bytes:
        sets *= 2
    table.entries = <Duration*>memory
    table.sets = <uint32_t>sets
    table.generation = 0
    table.clock = 0
    return 1


cdef inline uint64_t mix64(uint64_t x) noexcept nogil:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL
    return x ^ (x >> 31)


cdef inline uint64_t launch_hash(const LaunchKey* key) noexcept nogil:
    """Of what is launched and how wide. For ``LaunchKey.hash``, and ``after`` of the next."""
    cdef uint64_t hashed = mix64(key.handle)
    hashed = mix64(hashed ^ ((<uint64_t>key.grid_x << 32) | key.grid_y))
    hashed = mix64(hashed ^ ((<uint64_t>key.grid_z << 32) | key.block_x))
    return mix64(hashed ^ ((<uint64_t>key.block_y << 32) | key.block_z))


cdef inline bint is_graph(const LaunchKey* key) noexcept nogil:
    return key.block_x == 0 and key.grid_x == WORK_GRAPH


cdef inline Duration* durations_set(DurationTable* table, const LaunchKey* key) noexcept nogil:
    return table.entries + (mix64(key.hash ^ key.after) & (table.sets - 1)) * DURATION_WAYS


cdef inline bint same_key(const LaunchKey* a, const LaunchKey* b) noexcept nogil:
    return (
        a.handle == b.handle and a.after == b.after
        and a.grid_x == b.grid_x and a.grid_y == b.grid_y and a.grid_z == b.grid_z
        and a.block_x == b.block_x and a.block_y == b.block_y and a.block_z == b.block_z
    )


cdef inline Duration* durations_find(DurationTable* table, const LaunchKey* key) noexcept nogil:
    """The entry of ``key``, or NULL."""
    cdef Duration* entry = durations_set(table, key)
    cdef int way
    for way in range(DURATION_WAYS):
        if same_key(&entry[way].key, key):
            return entry + way
    return NULL


cdef inline Duration* entry_of(DurationTable* table, const LaunchKey* key) noexcept nogil:
    """The entry of ``key``, made if need be, and used now."""
    cdef Duration* entries = durations_set(table, key)
    cdef Duration* entry = durations_find(table, key)
    cdef int way
    if entry == NULL:
        entry = entries
        for way in range(1, DURATION_WAYS):
            if entries[way].used < entry.used:
                entry = entries + way
        memset(entry, 0, sizeof(Duration))
        entry.key = key[0]
        entry.estimate_ns = UNKNOWN_NS
    table.clock += 1
    entry.used = table.clock
    return entry


cdef inline Duration* durations_launch(DurationTable* table, const LaunchKey* key) noexcept nogil:
    """Count a launch of ``key``; its entry, made if need be. Valid until the next call that takes the table."""
    cdef Duration* entry = entry_of(table, key)
    entry.launches += 1
    return entry


cdef inline const Duration* known_by(DurationTable* table, const Duration* entry) noexcept nogil:
    """The entry whose samples predict a launch of this entry's key, or NULL."""
    cdef LaunchKey anywhere = entry.key
    if entry.learned or entry.key.after == 0:
        return entry
    anywhere.after = 0
    return durations_find(table, &anywhere)


cdef inline int64_t durations_predict(DurationTable* table, const Duration* entry) noexcept nogil:
    """What a launch of the entry's key should take; UNKNOWN_NS if its kernel was never timed at this width."""
    cdef const Duration* known = known_by(table, entry)
    return UNKNOWN_NS if known == NULL else known.estimate_ns


cdef inline int64_t durations_longest(DurationTable* table, const Duration* entry) noexcept nogil:
    """What it may take if it is again as long as it was of late; 0 if it was never timed."""
    cdef const Duration* known = known_by(table, entry)
    return 0 if known == NULL else known.longest_ns


cdef inline bint durations_steady(const Duration* entry) noexcept nogil:
    """Whether the last eight samples are alike, but for what a clock makes of short ones, and so were those before: of
    a kernel that is long once in four, eight short ones in a row are no rarity."""
    cdef float least = entry.samples_ns[0], most = entry.samples_ns[0]
    cdef double apart_ns = entry.mean_ns / 4 + <double>STEADY_NS
    cdef int i
    if entry.learned < 2 * DURATION_SAMPLES or <double>(entry.longest_ns - entry.estimate_ns) > apart_ns:
        return 0
    for i in range(1, DURATION_SAMPLES):
        least = min(least, entry.samples_ns[i])
        most = max(most, entry.samples_ns[i])
    return <double>(most - least) <= apart_ns


cdef inline bint should_sample(const Duration* entry) noexcept nogil:
    """Whether the launch just counted is worth timing."""
    cdef uint32_t every = SAMPLE_EVERY if entry.learned >= SAMPLE_ALWAYS else SAMPLE_EVERY_YOUNG
    return entry.launches <= SAMPLE_ALWAYS or entry.launches % every == 0


cdef inline void durations_restart(Duration* entry) noexcept nogil:
    """All samples so far were wrong."""
    entry.learned = entry.means = entry.foreign = entry.in_row = 0
    entry.mean_ns = 0
    entry.longest_ns = 0
    entry.peak_ns = 0
    entry.estimate_ns = UNKNOWN_NS


cdef inline int64_t believe_in_row(Duration* entry, int64_t sample_ns) noexcept nogil:
    """What to learn of a foreign sample of an empty queue; UNKNOWN_NS: nothing."""
    entry.least_ns = min(<float>sample_ns, entry.least_ns) if entry.in_row else <float>sample_ns
    entry.in_row += 1
    if entry.in_row < FOREIGN_IN_ROW:
        return UNKNOWN_NS
    entry.in_row = 0
    return <int64_t>entry.least_ns


cdef inline int64_t durations_believe(
    Duration* entry, int64_t sample_ns, uint32_t company_ppm, bint empty
) noexcept nogil:
    """What to learn of a sample that was taken while other vGPUs computed; UNKNOWN_NS: nothing. ``company_ppm``: the
    part of the time that those used lately. ``empty``: the queue was empty before the launch.

    A launch of several time slices has others' slices in each of its samples. The function subtracts the others' part
    of the time from such a sample, and the mean is right.

    A sample that is much longer than the key's longest launches of late is *foreign*: it seems to have others' time
    slices in it. Short launches meet few slices. So a fifth of foreign samples, and of longer launches a third or half,
    shows that the key's own launches are that long. A key's first sample is believed, until a later one is far shorter.

    In an empty queue most samples may be foreign: behind the first event the GPU has nothing to do, and turns to
    another vGPU before the launch comes. There only FOREIGN_IN_ROW foreign samples in a row show that the launches are
    longer, and the shortest of them is believed.

    Beside other vGPUs a sample of a short launch may be up to 3 µs longer than alone (measured on an H100,
    docs/reference/performance/light.md). So a steady key's sample shows only whether its length has
    changed by half or more.
    """
    cdef int64_t usual_ns = <int64_t>entry.peak_ns, least_ns = <int64_t>entry.peak_ns
    cdef int64_t mean_ns
    cdef uint8_t counts
    cdef uint32_t i
    cdef bint settled        # the mean has come as far as the last samples
    for i in range(min(entry.learned, <uint32_t>DURATION_SAMPLES)):
        least_ns = min(least_ns, <int64_t>entry.samples_ns[i])
    if 0 < entry.learned < DURATION_SAMPLES:
        if 2 * sample_ns + FOREIGN_NS < least_ns:
            durations_restart(entry)
        usual_ns = least_ns
    if sample_ns >= SLICED_NS and (entry.learned == 0 or least_ns >= SLICED_NS):
        return sample_ns - <int64_t>(<double>sample_ns * min(company_ppm, <uint32_t>COMPANY_MOST_PPM) / 1e6)
    if entry.learned == 0:
        return sample_ns
    if sample_ns <= usual_ns + max(usual_ns / 4, <int64_t>FOREIGN_NS):
        entry.foreign -= entry.foreign > 0
        entry.in_row = 0
        mean_ns = <int64_t>entry.mean_ns
        settled = fabs(<double>entry.estimate_ns - entry.mean_ns) <= entry.mean_ns / 16 + STEADY_NS
        if settled and durations_steady(entry) and mean_ns / 2 <= sample_ns <= 2 * mean_ns + STEADY_NS:
            return UNKNOWN_NS
        return sample_ns
    if empty:
        return believe_in_row(entry, sample_ns)
    counts = 4 if usual_ns <= FOREIGN_RARE_NS else 2 if usual_ns <= FOREIGN_USUAL_NS else 1
    entry.foreign += counts
    if entry.foreign < FOREIGN_MOST:
        return UNKNOWN_NS
    entry.foreign = FOREIGN_MOST if counts == 4 else 0
    return sample_ns if counts == 4 else min(sample_ns, 2 * usual_ns + FOREIGN_NS)


cdef inline void durations_learn(
    DurationTable* table, const LaunchKey* key, uint32_t generation, int64_t sample_ns
) noexcept nogil:
    """``key`` took ``sample_ns`` on the GPU. Dropped if the key is gone, or anything was forgotten since the launch."""
    cdef LaunchKey anywhere = key[0]
    cdef Duration* entry
    if generation != table.generation or sample_ns < 0 or sample_ns > <int64_t>DURATION_MAX_SECONDS * 1_000_000_000:
        return
    entry = durations_find(table, key)
    if entry == NULL:
        return
    keep_sample(entry, sample_ns)
    if key.after:
        anywhere.after = 0
        keep_sample(entry_of(table, &anywhere), sample_ns)


cdef inline void keep_sample(Duration* entry, int64_t sample_ns) noexcept nogil:
    cdef float largest = 0, sample
    cdef double total = 0
    cdef uint32_t i, kept
    entry.samples_ns[entry.learned % DURATION_SAMPLES] = <float>sample_ns
    entry.peak_ns = max(<float>sample_ns, entry.peak_ns - entry.peak_ns / LONGEST_SAMPLES)
    entry.learned += 1
    if entry.learned == 0:               # wrapped: all eight samples are still there
        entry.learned = DURATION_SAMPLES
    entry.means = min(<uint8_t>(entry.means + 1), <uint8_t>MEAN_SAMPLES)
    entry.mean_ns += (<float>sample_ns - entry.mean_ns) / entry.means
    kept = min(entry.learned, <uint32_t>DURATION_SAMPLES)
    for i in range(kept):
        sample = entry.samples_ns[i]
        total += sample
        largest = max(largest, sample)
    entry.estimate_ns = <int64_t>(largest if kept < 3 else (total - largest) / (kept - 1))
    if kept >= 3:                        # fewer may be one outlier
        entry.longest_ns = max(entry.estimate_ns, entry.longest_ns - entry.longest_ns / LONGEST_SAMPLES)


cdef inline void durations_doubt(DurationTable* table) noexcept nogil:
    """The next sample of each key is its mean."""
    cdef size_t i
    for i in range(<size_t>table.sets * DURATION_WAYS):
        table.entries[i].means = 0


cdef inline void durations_forget(DurationTable* table, uint64_t handle) noexcept nogil:
    """``handle`` no longer means what it meant: forget its entries. 0 forgets everything."""
    cdef size_t i
    table.generation += 1
    for i in range(<size_t>table.sets * DURATION_WAYS):
        if handle == 0 or table.entries[i].key.handle == handle:
            memset(table.entries + i, 0, sizeof(Duration))
