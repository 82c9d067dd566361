"""The shared pages, declared once: server, broker, hook and tests compile this file.

Theory of operation
-------------------
Four kinds of page connect the processes of one GPU. All are memfds, mapped and then closed.

``GrantsPage``, one per vGPU. Only the GPU Server writes it; it is sealed (F_SEAL_FUTURE_WRITE). The broker and the
hooks map it read-only. It shows what the vGPU may do: current and next lease, GO, window, memory limit.

``ActivityPage``, one per vGPU. Hooks and the broker write it; it is sealed against resizing. It shows what the vGPU's
processes do: a ``Slot`` per process, the memory ledger, a doorbell. A tenant may write anything in it.

``RelayPage``, one per GPU Server. The brokers write it (trusted: the server starts them), and the dispatcher reads it.
It has one ``RelayEntry`` per vGPU: its processes' wants and drains, merged.

``StorePage``, one per user with vGPUs that are swapped. The GPU Server makes it, and that user's hooks write it. It is
host memory for what is swapped out of the card, and names the owner of each block.

The path of a token:  hook: want, doorbell → broker's relay thread: merges, ``RelayEntry``, relay doorbell → dispatcher
thread of the server: GO into the ``GrantsPage``, futex → hook. Python is on none of these hops.

Rules of publication
--------------------
* A record with more than one word (``Plan``) is two copies and a counter: write the copy that is not published, then
  advance the counter. A writer killed anywhere leaves the last published copy whole; readers retry only if the counter
  moved while they copied. (A seqlock's reader would hang for ever.)
* Every futex word is a counter that is advanced before the wake, so no wake is lost.
* Epochs are 32-bit, start at 1 and grow by one per lease of a GPU; compare them with ``epoch_reached`` (wrap-safe).
  0 is "none". A process may have been idle for any number of leases of other vGPUs. So compare an epoch in its slot
  with ``epoch_past``.
* Fields are only ever appended. A hook refuses a page whose ``size`` is more than it knows. So ``size`` stays what it
  was under ``min_version``. The file has the appended fields behind it; where the maker lacks them, they are zero.
  ``min_version`` is the oldest reader that understands the page.
* A lock that processes of several PID namespaces share names no TID (logic/sync/section.pxd). Older processes, which
  put theirs in ``ActivityPage.ledger``, are not refused. No name is like a TID, so both kinds exclude each other.
  ``ledger_name`` and ``naming_epoch`` show whether a TID there can be an owner's. LAYOUT_MIN_VERSION stays.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "vgpu_native.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef enum:
    LAYOUT_VERSION = 1
    LAYOUT_MIN_VERSION = 1
    MAX_VGPUS = 256          # per GPU Server
    MAX_PROCESSES = 64       # per vGPU

    MODE_TEMPORAL = 1
    MODE_SPATIAL = 2

    # Lease.flags
    LEASE_OPEN = 1           # no end: in force until it gets one
    LEASE_ON_GO = 2          # usable only once GO was given (or go_by_ns has passed); else usable from start_ns on

    # GrantsPage.flags
    GRANTS_CONTENDED = 1     # another vGPU of the GPU wants, or has lately: early return on idleness is worth something
    GRANTS_REMOVED = 2       # the vGPU was removed: every gate fails with an error
    GRANTS_LOSS_ERROR = 4    # --on-server-loss error (default: block)
    GRANTS_LOSS_RUN = 8      # --on-server-loss run
    GRANTS_TRACED = 16       # a client traces: hooks record in their rings what they observe of the GPU
    GRANTS_STILL = 64        # no lease comes for a while: work queued ahead is let run, and no more is queued
    GRANTS_MANAGED = 32      # --oversubscribe managed: plain allocations are managed memory
    GRANTS_SWAPPABLE = 128   # --oversubscribe swap: plain allocations can leave the card and come back
    GRANTS_AWAY = 256        # ... and are to be in the host's memory; with GRANTS_STILL, and while no lease is given
    GRANTS_PRESENT = 512     # ... are to be on the card; neither: where they are (a new server does not know yet)
    GRANTS_SHARED = 1024     # its open-ended lease is a shared one
    GRANTS_COMPANY = 2048    # vGPUs with shared leases compute at the same time as this one
    GRANTS_PASSED = 4096     # with GRANTS_AWAY: another vGPU comes onto the card meanwhile

    # Slot.state
    SLOT_FREE = 0
    SLOT_RESERVED = 1        # handed out by the broker, the process has not mapped it yet
    SLOT_ACTIVE = 2
    SLOT_DEAD = 3            # its process is dead; waits until the driver has freed its memory

    # Slot.where: of what can leave the card
    SLOT_RESIDENT = 0        # on the card
    SLOT_AWAY = 1            # in the host's memory
    SLOT_STUCK = 2           # the move that GRANTS_AWAY asks for was not possible; it is tried again
    SLOT_MOVING = 3
    SLOT_KEPT_AWAY = 4       # the same for the move that GRANTS_PRESENT asks for: the card has no room
    SLOT_FAILED_BACK = 5     # ... or the driver fails it: its result is in the bits above
    SLOT_PLACE = 0xFF        # the bits of ``where`` that have one of these
    SLOT_RESULT_SHIFT = 8

    # memory kinds, index of Slot.committed_bytes
    KIND_DEVICE = 0          # cuMemAlloc, pitched
    KIND_MANAGED = 1
    KIND_VMM = 2             # cuMemCreate
    KIND_ASYNC = 3           # stream-ordered
    KIND_OTHER = 4           # arrays
    KIND_GRAPH = 5           # what the driver has taken for graphs that allocate
    KIND_SHARED = 6          # cuMemCreate's that other processes may have, too
    MEMORY_KINDS = 8

    # TraceRecord.kind
    TRACE_BUSY = 1           # the GPU had work of the process from begin to end, by its backlog
    TRACE_LAUNCH = 2         # a launch that was timed: ended at ``end_ns`` at the latest; value: logic/gate/trace.pxd
    TRACE_DRAIN = 3          # a lease that ended at begin (0: it had no end) had drained at end; value: see there
    TRACE_RING = 512         # records of one process that a reader may be behind

    EPOCHS_PAST = 1 << 20    # leases of a GPU, in which a vGPU has a few

cdef extern from *:
    """
    #define GRANTS_MAGIC   0x31544E5247555047ULL  /* "GPUGRNT1" */
    #define ACTIVITY_MAGIC 0x3154434147555047ULL  /* "GPUGACT1" */
    #define RELAY_MAGIC    0x31594C5247555047ULL  /* "GPUGRLY1" */
    #define STORE_MAGIC    0x3152545347555047ULL  /* "GPUGSTR1" */
    #define FOREVER_NS     INT64_MAX
    """
    const uint64_t GRANTS_MAGIC
    const uint64_t ACTIVITY_MAGIC
    const uint64_t RELAY_MAGIC
    const uint64_t STORE_MAGIC
    const int64_t FOREVER_NS


cdef struct PageHeader:
    uint64_t magic
    uint32_t size            # bytes of the page under ``min_version``, without what was appended since
    uint16_t version
    uint16_t min_version
    uint64_t features


cdef struct Lease:
    uint32_t epoch           # 0: none
    uint32_t flags           # LEASE_*
    int64_t start_ns
    int64_t end_ns           # FOREVER_NS with LEASE_OPEN
    int64_t go_by_ns         # GO counts as given from here on: no wait is unbounded


cdef struct Plan:
    Lease current
    Lease next


cdef struct GrantsPage:
    PageHeader header
    uint32_t generation      # of the server that wrote this page; stale when ActivityPage.generation is another
    uint32_t mode            # MODE_*
    uint32_t flags           # GRANTS_*
    uint32_t reserved0
    uint64_t memory_limit_bytes
    uint64_t implicit_bytes  # contexts, modules, stacks: read from NVML by the server, charged beside the ledger
    int64_t window_ns        # most predicted GPU time a process may have queued while other vGPUs wait
    int64_t grace_ns         # how long a gate waits on a silent server before on-server-loss applies
    int64_t alive_ns         # the dispatcher's heartbeat, at least every 100 ms
    uint64_t total_memory_bytes   # of the physical card
    char[64] vgpu_id         # NUL-terminated
    char[48] gpu_uuid
    uint32_t free_epoch      # the GPU is free: a standby lease that may start without GO (logic/gate/gate.pxd); else 0
    uint32_t company_ppm     # of an exclusive vGPU beside shared leases: the part of the time that they used lately
    uint64_t process_limit_bytes  # the most that one process may own; 0: as much as the vGPU
    uint64_t card_limit_bytes     # of its limit what it may own just now, where that depends on others; 0: all of it
    uint64_t present_bytes   # of what can be moved, so much may be on the card while it comes; 0: all of it
    uint64_t spare_bytes     # an allocation that waits for more room than this waits in vain; 0: not known
    int64_t implicit_ns      # implicit_bytes has all that contexts took until then; 0: not read yet
    uint32_t tpot_us         # --slo: the most time of a decode step ...
    uint32_t ttft_us         # ... and of a prefill; 0: not asked for
    # --- hot: one cache line, read by every gated launch
    uint32_t open_epoch      # epoch of the open-ended lease that is usable now, else 0: the gate's fast path
    uint32_t change          # futex; advanced with every publication and every GO
    uint32_t go_epoch        # the newest epoch of this vGPU to which GO was given
    uint32_t published       # plans[published & 1] is the current plan
    Plan[2] plans
    int64_t allowed_ns       # under an open-ended lease: what RelayEntry.busy_ns may come to; 0: the vGPU has no limit


cdef struct Slot:
    # one process; 512 bytes. The hook thread holds `alive` (robust) for as long as the process lives.
    uint32_t state           # SLOT_*
    uint32_t pid             # as the broker sees it (from the kernel, not from the process)
    uint64_t start_time      # clock ticks since boot, with pid a unique name
    pthread_mutex_t alive    # 40 bytes (x86-64) or 48 (aarch64); locked by logic/sync/robust.pxd, zero is unlocked
    uint8_t[8] pad0
    # --- activity, written by the hook
    uint32_t want            # 1: a gate waits or work is submitted; 0: idle and drained
    uint32_t undrained       # 1: submitted work may still run
    uint32_t drained_epoch   # nothing submitted under this epoch or an older one still runs, nothing more will be
    uint32_t last_epoch      # the newest epoch under which work was submitted
    int64_t want_since_ns
    int64_t drained_ns       # when drained_epoch was seen
    int64_t first_submit_ns  # of the lease in last_epoch
    int64_t last_submit_ns
    int64_t predicted_end_ns     # predicted completion of everything submitted
    uint64_t busy_ns         # sum over all leases: time with work on the GPU, as observed
    uint64_t overrun_ns      # sum of drained − lease end, where positive
    uint64_t launches
    uint64_t graph_launches
    uint64_t copies          # between host and device: not gated
    uint64_t gate_waits
    uint64_t gate_wait_ns
    int64_t longest_kernel_ns
    int64_t refill_ns        # idle time at the start of the last lease (the hand-over cost c of the policy)
    int64_t counted_ns       # busy_ns is known up to here; written after it, read before it
    # --- memory, written under ActivityPage.ledger
    uint64_t reserved_bytes
    uint64_t[8] committed_bytes   # by KIND_*
    uint64_t peak_bytes
    uint64_t refusals
    uint64_t refused_bytes   # size of the last refused request
    # the commit under way sets committed_bytes and reserved_bytes to these; redone by the finder of a dead owner
    uint64_t intent_bytes
    uint64_t intent_kind     # 1 + KIND_* while an operation is under way, else 0
    uint64_t intent_reserved_bytes
    char[64] command         # argv[0], for ps; a tenant's word
    uint32_t turn            # the newest epoch whose work may run: work queued ahead waits for it, on the GPU
    uint32_t tail_epoch      # takes no more work, and the work that still runs is short (logic/gate/handover.pxd)
    uint64_t copied_bytes    # of ``copies``
    uint32_t baton           # 1: its hook knows the baton and submits only with it
    uint32_t sm_planned      # SMs that its partition should give it (spatial mode); 0: no limit. Written by the broker
    uint32_t sm_count        # ... and that the driver reports; 0: not known yet
    uint32_t where           # SLOT_RESIDENT and what follows it
    uint64_t traced          # records that it has ever written into its ring
    uint64_t away_bytes      # of its memory that is swapped out, never too much; written before ``where``
    int64_t moved_ns         # how long the last move took ...
    uint64_t room_bytes      # an allocation waits for so much more of the card; 0: none does
    int64_t pinned_ns        # ... and how much of that to pin host memory
    uint32_t ends            # 1: the process has begun to end, with calls of the driver
    uint32_t unpredicted     # 1: some submitted work has no known length: predicted_end_ns is void
    int64_t locked_out_ns    # the hook thread lived then, while a thread of the program held gate.lock
    uint32_t ledger_name     # what its hook puts in ``ledger`` (logic/sync/section.pxd); 0: an older hook puts TIDs
    uint32_t demand_ppm      # the part of its time in which it needs the GPU (logic/meter/demand.pxd); 0: not measured
    uint32_t waits_ppm       # the part of the last 200 ms in which it waited for the GPU
    uint32_t burst_us        # GPU time of the work between two waits for it, the mean weighted by work
    uint64_t work_ns         # Σ over its launches: GPU time that they take by themselves, as learned
    uint64_t pinned_bytes    # of the store, that it has pinned for itself
    uint32_t clean_blocks    # what the last move out did not copy, in pieces of 2 MiB: the store had it, or zeros
    # A slot stays 512 bytes on x86-64, which are used up with this word.
    uint32_t imported_pieces     # of 2 MiB: memory of other processes that it holds, not charged here


cdef struct ActivityPage:
    PageHeader header
    uint32_t generation      # of the server in charge; hooks with another grants page re-attach
    uint32_t broker_epoch    # advanced by each broker that takes over the page
    uint32_t doorbell        # futex; hooks → broker's relay thread
    uint32_t returned_epoch  # the vGPU gave this epoch back: no gate may use it or an older one
    uint32_t want            # merged by the relay, as reported to the server
    uint32_t processes       # slots not free
    uint32_t baton           # futex; which process may submit (logic/gate/baton.pxd); 0: no baton goes round
    uint32_t pad0
    int64_t baton_end_ns     # of its turn
    # --- the limit ledger
    pthread_mutex_t ledger   # its first word is locked by logic/sync/section.pxd, zero is unlocked
    # --- steps and prefills of its processes (logic/meter/steps.pxd), counted while they have a target (atomic)
    uint32_t tpot_attained
    uint32_t tpot_missed
    uint32_t ttft_attained
    uint32_t ttft_missed
    uint32_t tpot_mean_us    # of the last decode steps
    uint32_t ttft_last_us
    uint64_t charged_bytes   # Σ slots (reserved + committed), recomputed when an owner died
    uint64_t ledger_epoch    # advanced by every completed operation
    int64_t context_ns       # the newest context of a process is older (hook/memory/implicit.pyx); 0: there is none
    uint32_t naming_epoch    # ``broker_epoch`` of a broker that puts no TID in ``ledger``
    uint32_t pad2
    int64_t busy_base_ns     # RelayEntry.busy_ns less that of all active slots; written by the relay
    uint8_t[24] pad3
    Slot[64] slots


cdef struct TraceRecord:
    uint32_t sequence        # its number, from 1; 0 while it is being written
    uint32_t kind            # TRACE_*
    int64_t begin_ns
    int64_t end_ns
    uint64_t value


cdef struct TracedActivity:
    # An activity page and what was appended behind it: a ring for each slot, written by its process while GRANTS_TRACED
    # is set (logic/gate/trace.pxd). ``size`` in the header is that of ``page``; by the size of the file the rings are
    # there.
    ActivityPage page
    TraceRecord[64][512] rings


cdef struct RelayEntry:
    # one vGPU, 128 bytes; written by its broker's relay thread only
    uint32_t want
    uint32_t returned_epoch  # early return: idle and drained under this epoch
    uint32_t drained_epoch   # every process has drained this epoch
    uint32_t processes       # admitted, and not known to be dead
    int64_t drained_ns
    uint64_t busy_ns         # Σ over processes of observed busy time
    uint64_t launches
    int64_t longest_kernel_ns
    int64_t refill_ns
    int64_t want_since_ns
    int64_t predicted_end_ns     # latest over processes of Slot.predicted_end_ns
    int64_t counted_ns       # busy_ns is known up to here: earliest of the processes with work
    uint32_t tail_epoch      # as in Slot, of a vGPU with one process
    uint32_t split_drain_epoch  # in force, and drained by a process that wants: it can go on under another one only
    int64_t submitted_ns     # when the first work was submitted under the lease ...
    uint32_t submitted_epoch     # ... which is the newest that any was submitted under
    uint32_t demand_ppm      # the highest of the processes'
    uint32_t waits_ppm       # likewise
    uint32_t burst_us        # the longest of the processes'
    uint64_t work_ns         # Σ over the processes
    uint8_t[8] pad


cdef struct RelayPage:
    PageHeader header
    uint32_t doorbell        # futex; relays → dispatcher
    uint32_t pad0
    uint64_t[4] dirty        # bit per vGPU key: its entry changed
    RelayEntry[256] entries


cdef struct StorePage:
    # 64 bytes, then ``owners``: the owner of each block (logic/memory/store.pxd), and from ``offset`` on the blocks, 2
    # MiB each. Every process that maps the page may write all of it.
    PageHeader header
    uint32_t blocks
    uint32_t ready           # so many have memory behind them: the others cannot be taken yet
    uint64_t offset
    uint64_t[3] first_taken  # names of processes: of kept blocks (logic/memory/store.pxd), theirs are taken first


cdef inline bint epoch_reached(uint32_t now, uint32_t wanted) noexcept nogil:
    """Whether ``now`` is ``wanted`` or newer, on the 32-bit circle; nothing reaches 0 and 0 reaches nothing."""
    return now != 0 and wanted != 0 and <int32_t>(now - wanted) >= 0


cdef inline bint epoch_past(uint32_t now, uint32_t wanted) noexcept nogil:
    """Whether ``now``, the last epoch that a process is done with, includes ``wanted``. An epoch from 2³¹ leases ago
    seems to be newer. But a process that is done with a newer epoch than the plan shows is ahead by a few leases only.
    """
    return now != 0 and wanted != 0 and now - wanted < EPOCHS_PAST
