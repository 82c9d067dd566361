"""Plan, gate, durations and window of ``cython_ext/logic``, the very code that runs inside applications, for Python.

As in ``bindings_memory`` and ``bindings_wire``, each class holds one struct of a ``.pxd``, and each method calls one
of its functions. The ``.pxd`` explains both.
"""

from typing import NamedTuple

from libc.signal cimport SIGSTOP
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.signal cimport kill
from posix.unistd cimport getpid

from cython_ext.pages.layout cimport FOREVER_NS as _FOREVER_NS, LEASE_ON_GO as _LEASE_ON_GO, LEASE_OPEN as _LEASE_OPEN
from cython_ext.pages.layout cimport GrantsPage, Lease, Plan, epoch_reached
from cython_ext.logic.gate cimport (
    baton as baton_logic, gate, handover, overrun_bound, plan as planning, poll_skip as belief_logic,
    prequeue as ahead_logic, trace, window, windowlength,
)
from cython_ext.logic.meter cimport (
    demand as demanding, durations, event_cost, graphs, meter as metering, steps as stepping, transfers,
)
from cython_ext.logic.gate.prequeue cimport Ahead as _Ahead
from cython_ext.logic.gate.baton cimport Baton as _Baton, Processes as _Processes
from cython_ext.logic.meter.demand cimport Demand as _Demand, Waits as _Waits
from cython_ext.logic.meter.meter cimport Meter as _Meter, Usage as _Usage
from cython_ext.logic.gate.window cimport Backlog as _Backlog
from cython_ext.native cimport pause

FOREVER_NS = _FOREVER_NS
LEASE_OPEN, LEASE_ON_GO = _LEASE_OPEN, _LEASE_ON_GO
UNKNOWN_NS = gate.UNKNOWN_NS
GATE_SUBMIT, GATE_WAIT_BACKLOG, GATE_WAIT_LEASE = gate.GATE_SUBMIT, gate.GATE_WAIT_BACKLOG, gate.GATE_WAIT_LEASE
GATE_LOOK_NS = gate.GATE_LOOK_NS
EARLY_NS = handover.EARLY_NS
TURN_NS, UNUSED_NS, PATIENCE_NS = baton_logic.TURN_NS, baton_logic.UNUSED_NS, baton_logic.PATIENCE_NS
UNDATED, NO_SLOT = baton_logic.UNDATED, baton_logic.NO_SLOT
BELIEVED_AFTER, BELIEVED_LAUNCHES = belief_logic.BELIEVED_AFTER, belief_logic.BELIEVED_LAUNCHES
BELIEVED_NS = belief_logic.BELIEVED_NS
PAIRS, PAIR_MOST_NS = event_cost.PAIRS, event_cost.PAIR_MOST_NS
METER_KEYS, TIMED_EVERY, TIMED_LONG, TIMED_RARELY, STEADY_FACTOR, ASSUMED_NS = (
    metering.METER_KEYS, metering.TIMED_EVERY, metering.TIMED_LONG, metering.TIMED_RARELY, metering.STEADY_FACTOR,
    metering.ASSUMED_NS,
)
TIMED_APART_NS = metering.TIMED_APART_NS
MARKERS = window.MARKERS
WINDOW_LEAST_NS = windowlength.WINDOW_LEAST_NS
GRANTS_BYTES = sizeof(GrantsPage)


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
    closed: int
    takes: bool = False


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
        """Publish plans, about one per microsecond. All words of a plan are one number: first … first + count − 1."""
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
        """Publish between two stops by SIGSTOP: a tracer steps through the instructions between them."""
        cdef Plan plan = plan_of(record)
        with nogil:
            kill(getpid(), SIGSTOP)
            planning.publish_plan(self.page, &plan)
            kill(getpid(), SIGSTOP)

    def stepped_read(self):
        """Read the plan, as ``read`` does, between two stops by SIGSTOP."""
        cdef Plan plan
        cdef bint whole
        with nogil:
            kill(getpid(), SIGSTOP)
            whole = planning.read_plan(self.page, &plan)
            kill(getpid(), SIGSTOP)
        return PlanRecord(lease_record(&plan.current), lease_record(&plan.next)) if whole else None

    def read(self):
        """The current plan, or None if the writer overtook each attempt."""
        cdef Plan plan
        cdef bint whole
        with nogil:
            whole = planning.read_plan(self.page, &plan)
        return PlanRecord(lease_record(&plan.current), lease_record(&plan.next)) if whole else None


def gate_decide(
    record, *, int64_t now_ns, int64_t window_ns, int64_t backlog_ns=0, int64_t predicted_ns=gate.UNKNOWN_NS,
    uint32_t unknown_in_flight=0, uint32_t go_epoch=0, uint32_t returned_epoch=0, uint32_t drained_epoch=0,
    uint32_t last_epoch=0, bint contended=False, uint32_t free_epoch=0,
    int64_t take_most_ns=gate.TAKE_MOST_NS, int64_t taken_ns=0, int64_t doubted_ns=0, int64_t excess_ns=0,
    int64_t queued_excess_ns=0,
):
    cdef Plan plan = plan_of(record)
    cdef gate.GateState state
    cdef gate.Verdict verdict
    state.now_ns, state.window_ns, state.backlog_ns, state.predicted_ns = now_ns, window_ns, backlog_ns, predicted_ns
    state.unknown_in_flight, state.go_epoch, state.returned_epoch = unknown_in_flight, go_epoch, returned_epoch
    state.drained_epoch, state.last_epoch, state.contended = drained_epoch, last_epoch, contended
    state.free_epoch, state.taken_ns = free_epoch, taken_ns
    state.take_most_ns, state.doubted_ns = take_most_ns, doubted_ns
    state.excess_ns, state.queued_excess_ns = excess_ns, queued_excess_ns
    gate.gate_decide(&plan, &state, &verdict)
    return GateVerdict(verdict.action, verdict.epoch, verdict.until_ns, verdict.closed, bool(verdict.takes))


def plan_opens_ns(record, *, int64_t now_ns, uint32_t returned_epoch=0, uint32_t drained_epoch=0):
    cdef Plan plan = plan_of(record)
    cdef gate.GateState state
    state.now_ns, state.returned_epoch, state.drained_epoch = now_ns, returned_epoch, drained_epoch
    return gate.plan_opens_ns(&plan, &state)


def plan_due_ns(record, *, int64_t now_ns, uint32_t returned_epoch=0, uint32_t drained_epoch=0, bint on_go=False):
    cdef Plan plan = plan_of(record)
    cdef gate.GateState state
    state.now_ns, state.returned_epoch, state.drained_epoch = now_ns, returned_epoch, drained_epoch
    return gate.plan_due_ns(&plan, &state, on_go)


# --- durations and window

cdef durations.LaunchKey key_of(key) except *:
    cdef durations.LaunchKey result
    (result.handle, result.grid_x, result.grid_y, result.grid_z,
     result.block_x, result.block_y, result.block_z, result.after) = key
    result.hash = durations.launch_hash(&result)
    return result


cdef class Durations:
    """A DurationTable in ``size_bytes`` of its own. Keys are (handle, grid x, y, z, block x, y, z, after)."""

    cdef durations.DurationTable table
    cdef void* memory

    def __cinit__(self, uint32_t size_bytes):
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
        return durations.durations_predict(&self.table, entry), bool(durations.should_sample(entry))

    def mean_ns(self, key):
        """(the mean of the samples, their number up to 16); None if the key is not in the table."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        return None if entry == NULL else (entry.mean_ns, entry.means)

    def estimate_ns(self, key):
        """The estimate of the key; None if the key is not in the table."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        return None if entry == NULL else entry.estimate_ns

    def longest_ns(self, key):
        """The longest time of the key; None if the key is not in the table."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        return None if entry == NULL else durations.durations_longest(&self.table, entry)

    @staticmethod
    def hash(key):
        """The ``after`` of the next launch in the stream of ``key``."""
        return key_of(key).hash

    def learn(self, key, uint32_t generation, int64_t sample_ns):
        cdef durations.LaunchKey wanted = key_of(key)
        durations.durations_learn(&self.table, &wanted, generation, sample_ns)

    def steady(self, key):
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        return entry != NULL and bool(durations.durations_steady(entry))

    def believe(self, key, int64_t sample_ns, uint32_t company_ppm=0, bint empty=False):
        """What the table learns of a sample; None: nothing. The key must be in the table."""
        cdef durations.LaunchKey wanted = key_of(key)
        cdef durations.Duration* entry = durations.durations_find(&self.table, &wanted)
        if entry == NULL:
            raise KeyError(key)
        sample_ns = durations.durations_believe(entry, sample_ns, company_ppm, empty)
        return None if sample_ns < 0 else sample_ns

    def doubt(self):
        durations.durations_doubt(&self.table)

    def forget(self, uint64_t handle=0):
        durations.durations_forget(&self.table, handle)


cdef class EventCost:
    cdef event_cost.EventCost cost

    def wants(self, bint empty):
        return bool(event_cost.event_cost_wants(&self.cost, empty))

    def notes(self, int64_t elapsed_ns, bint empty, int64_t host_ns=0):
        event_cost.event_cost_notes(&self.cost, elapsed_ns, host_ns, empty)

    def length_ns(self, int64_t elapsed_ns, bint empty, int64_t host_ns=0):
        return event_cost.event_cost_length_ns(&self.cost, elapsed_ns, host_ns, empty)


cdef class Backlog:
    cdef _Backlog backlog
    cdef int64_t recorded_ns

    def __cinit__(self):
        window.backlog_init(&self.backlog)

    def begin(self, int64_t usable_ns):
        window.backlog_begin(&self.backlog, usable_ns)

    def finish(self, int64_t returned_ns):
        window.backlog_finish(&self.backlog, returned_ns)

    def submit(self, int64_t now_ns, int64_t predicted_ns, int64_t assumed_ns=0, int64_t excess_ns=0):
        window.backlog_submit(&self.backlog, now_ns, predicted_ns, assumed_ns, excess_ns)

    def mark(self, uint64_t tag):
        return bool(window.backlog_mark(&self.backlog, tag))

    def mark_late(self, int64_t now_ns, uint64_t tag):
        return bool(window.backlog_mark_late(&self.backlog, now_ns, tag))

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

    def closed_interval(self, int64_t since_ns):
        """After a drain: the part of the busy interval from ``since_ns`` on that no trace record covers yet."""
        cdef int64_t begin_ns = 0, end_ns = 0
        recorded = trace.trace_closed(&self.backlog, since_ns, &self.recorded_ns, &begin_ns, &end_ns)
        return (begin_ns, end_ns) if recorded else None

    def open_interval(self):
        """While busy: the part of the interval that the next trace record covers, if one is due."""
        cdef int64_t begin_ns = 0, end_ns = 0
        recorded = trace.trace_part(&self.backlog, &self.recorded_ns, &begin_ns, &end_ns)
        return (begin_ns, end_ns) if recorded else None

    @property
    def since_ns(self):
        return self.backlog.since_ns

    def backlog_ns(self, int64_t now_ns):
        return window.backlog_ns(&self.backlog, now_ns)

    def excess_ns(self, int64_t now_ns):
        return overrun_bound.backlog_excess_ns(&self.backlog, now_ns)

    def launch_excess_ns(self, int64_t predicted_ns, int64_t longest_ns):
        return overrun_bound.launch_excess_ns(&self.backlog, predicted_ns, longest_ns)

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


cdef class Meter:
    """The meter of one thread. Its keys are those of ``Durations``."""

    cdef _Meter meter

    def __cinit__(self, uint64_t seed=1):
        metering.meter_turns(&self.meter, seed)

    @staticmethod
    def tag(key):
        cdef durations.LaunchKey wanted = key_of(key)
        return metering.key_tag(&wanted)

    def takes(self, uint64_t tag, bint owing=0):
        return bool(metering.meter_takes(&self.meter, tag, owing))

    def times(self, uint64_t tag, int64_t mean_ns, uint32_t samples, int64_t now_ns, bint steady=0):
        """(the time added for the launch, the number of launches that the timed launch represents)."""
        cdef metering.Timing timing = metering.meter_times(&self.meter, tag, mean_ns, samples, steady, now_ns)
        return timing.assumed_ns, timing.weight

    def carries(self, uint64_t tag, uint32_t weight):
        metering.meter_carries(&self.meter, tag, weight)

    def doubts(self):
        metering.meter_doubts(&self.meter)

    def never_times(self, uint64_t tag):
        metering.meter_never_times(&self.meter, tag)

    def grant(self, int64_t allowance_ns):
        metering.meter_grant(&self.meter, allowance_ns)

    def recall(self, int64_t most_ns):
        metering.meter_recall(&self.meter, most_ns)

    def turns(self, uint64_t seed):
        metering.meter_turns(&self.meter, seed)

    @property
    def left_ns(self):
        return self.meter.left_ns

    @property
    def spent_ns(self):
        return metering.meter_spent_ns(&self.meter)

    @property
    def promised_ns(self):
        return metering.meter_promised_ns(&self.meter)


cdef class Usage:
    """The GPU time used by one process of a vGPU."""

    cdef _Usage usage

    def settle(self, uint64_t spent_ns, uint64_t busy_ns, bint drained):
        metering.usage_settle(&self.usage, spent_ns, busy_ns, drained)

    def meter(self, int64_t in_flight_ns=0):
        """The meter counts work from now on. Work of ``in_flight_ns`` still runs that the books observe."""
        metering.usage_takes_over(&self.usage, in_flight_ns)

    def tracks(self, int64_t predicted_ns):
        metering.usage_tracks(&self.usage, predicted_ns)

    def amends(self, int64_t lasted_ns, int64_t assumed_ns, uint32_t weight):
        metering.usage_amends(&self.usage, lasted_ns, assumed_ns, weight)

    def room_ns(self, int64_t allowed_ns, int64_t others_ns, int64_t promised_ns):
        return metering.usage_room_ns(&self.usage, allowed_ns, others_ns, promised_ns)

    @property
    def used_ns(self):
        return self.usage.used_ns

    def doubtful(self, int64_t silent_ns):
        return bool(metering.usage_doubtful(&self.usage, silent_ns))

    @property
    def counted_ns(self):
        return self.usage.counted_ns

    @property
    def metered(self):
        return bool(self.usage.metered)


cdef class Demand:
    """The demand of one process and the waits of its threads."""

    cdef _Demand demand
    cdef _Waits waits, held_up

    def begins_to_wait(self, int64_t now_ns, bint at_gate=0):
        demanding.waits_begin(&self.waits, now_ns)
        if at_gate:
            demanding.waits_begin(&self.held_up, now_ns)

    def waited(self, int64_t now_ns, bint at_gate=0):
        demanding.waits_end(&self.waits, now_ns)
        if at_gate:
            demanding.waits_end(&self.held_up, now_ns)

    def looks(self, int64_t now_ns, uint64_t work_ns, bint wants, bint holds=1, bint shared=0):
        demanding.demand_looks(
            &self.demand, now_ns, work_ns, demanding.waits_until(&self.waits, now_ns),
            demanding.waits_until(&self.held_up, now_ns), self.waits.ended - self.held_up.ended, wants, holds, shared
        )

    @property
    def burst_ns(self):
        return 1000 * self.demand.burst_us

    @property
    def ratio(self):
        return self.demand.ppm / 1e6

    @property
    def waits_ratio(self):
        return self.demand.waits_ppm / 1e6


STEP_NONE, STEP_DECODE, STEP_PREFILL = stepping.STEP_NONE, stepping.STEP_DECODE, stepping.STEP_PREFILL
PAUSE_NS, LONGER = stepping.PAUSE_NS, stepping.LONGER


cdef class Steps:
    """The steps of one thread."""

    cdef stepping.Steps steps

    def launches(self, int64_t now_ns, uint64_t spent_ns):
        """A launch off the fast path; all before took ``spent_ns``."""
        if self.steps.waited:
            stepping.steps_begin(&self.steps, now_ns, spent_ns)

    def waited(self, int64_t now_ns, uint64_t spent_ns):
        """What ended with a wait, and how long that took."""
        cdef int64_t lasted_ns = 0
        return stepping.steps_end(&self.steps, now_ns, spent_ns, &lasted_ns), lasted_ns


cdef class Belief:
    """A Belief."""

    cdef belief_logic.Belief belief

    def answered(self, bint right, int64_t now_ns):
        belief_logic.belief_answered(&self.belief, right, now_ns)

    def suffices(self, int64_t now_ns):
        return bool(belief_logic.belief_suffices(&self.belief, now_ns))


cdef class Graphs:
    """A GraphTable."""

    cdef graphs.GraphTable table

    def updated(self, uint64_t handle):
        graphs.graph_updated(&self.table, handle)

    def updates(self, uint64_t handle):
        return graphs.graph_updates(&self.table, handle)

    def doubted(self, uint64_t handle):
        return bool(graphs.graph_doubted(&self.table, handle))

    def version(self, uint64_t handle):
        return graphs.graph_version(&self.table, handle)

    def timed(self, uint64_t handle, uint32_t updates, int64_t learned_ns, int64_t lasted_ns):
        graphs.graph_timed(&self.table, handle, updates, learned_ns, lasted_ns)

    def forget(self, uint64_t handle=0):
        graphs.graph_forget(&self.table, handle)


cdef class SmallTransferBudget:
    cdef transfers.SmallTransferBudget trifles

    def passes(self, int64_t now_ns):
        return bool(transfers.trifle_passes(&self.trifles, now_ns))


def size_class(uint64_t size_bytes):
    return transfers.size_class(size_bytes)


cdef class Ahead:
    """Work queued ahead of a lease, which joins the ``Backlog`` later."""

    cdef _Ahead ahead

    @staticmethod
    def begins(Backlog backlog):
        return bool(ahead_logic.ahead_begins(&backlog.backlog))

    def takes(self, Backlog backlog, int64_t learned_ns, int64_t most_ns, int64_t excess_ns=0):
        return bool(ahead_logic.ahead_takes(&self.ahead, &backlog.backlog, learned_ns, excess_ns, most_ns))

    def submit(self, Backlog backlog, int64_t learned_ns, int64_t excess_ns=0):
        ahead_logic.ahead_submit(&self.ahead, &backlog.backlog, learned_ns, excess_ns)

    def mark(self, uint64_t tag):
        return bool(ahead_logic.ahead_mark(&self.ahead, tag))

    def release(self, Backlog backlog, int64_t now_ns, bint late=False):
        ahead_logic.ahead_release(&self.ahead, &backlog.backlog, now_ns, late)

    def takes_graph(self, int64_t learned_ns):
        return bool(ahead_logic.ahead_takes_graph(&self.ahead, learned_ns))

    def submit_graph(self, Backlog backlog, int64_t learned_ns):
        ahead_logic.ahead_submit(&self.ahead, &backlog.backlog, learned_ns, 0)
        ahead_logic.ahead_submit_graph(&self.ahead, learned_ns)

    @property
    def launches(self):
        return self.ahead.launches

    @property
    def work_ns(self):
        return self.ahead.work_ns


def baton_ours(uint32_t word, int64_t end_ns, uint32_t slot, int64_t now_ns):
    return bool(baton_logic.baton_ours(word, end_ns, slot, now_ns))


def baton_until_ns(uint32_t word, int64_t end_ns):
    return baton_logic.baton_until_ns(word, end_ns)


def baton_bound(record, int64_t until_ns):
    """The ``PlanRecord`` that the gate uses while it holds the baton."""
    cdef Plan plan = plan_of(record)
    baton_logic.baton_bound(&plan, until_ns)
    return PlanRecord(lease_record(&plan.current), lease_record(&plan.next))


cdef class Baton:
    """The relay's side of the baton."""

    cdef _Baton baton

    def __cinit__(self, uint32_t found=0, int64_t now_ns=0):
        baton_logic.baton_stop(&self.baton)
        baton_logic.baton_take_over(&self.baton, found, now_ns)

    def step(self, int64_t now_ns, wants=(), busy=(), looks=None, bint leased=True):
        """Whether the word or the end changed.

        ``wants``: the slots that want the GPU or have work. ``busy``: the slots that have work. ``looks``: how often
        the gate of each slot has checked the baton.
        """
        cdef _Processes seen
        seen.wants = seen.busy = 0
        seen.leased = leased
        for slot in range(64):
            seen.looks[slot] = 0 if looks is None else looks.get(slot, 0)
        for slot in {*wants, *busy}:
            seen.wants |= <uint64_t>1 << <int>slot
        for slot in busy:
            seen.busy |= <uint64_t>1 << <int>slot
        return bool(baton_logic.baton_step(&self.baton, &seen, now_ns))

    def forget(self, int slot):
        baton_logic.baton_forget(&self.baton, slot)

    @property
    def word(self):
        return self.baton.word

    @property
    def end_ns(self):
        return self.baton.end_ns

    @property
    def holder(self):
        return self.baton.holder

    @property
    def due_ns(self):
        return self.baton.due_ns

    @property
    def late(self):
        return {slot for slot in range(64) if self.baton.late >> slot & 1}

    @property
    def asleep(self):
        return {slot for slot in range(64) if self.baton.asleep >> slot & 1}

    def used_ns(self, int slot):
        return self.baton.used_ns[slot]


def overrun_tolerated_ns(int64_t most_ns, int64_t longest_ns):
    return windowlength.overrun_tolerated_ns(most_ns, longest_ns)


def window_adapt(int64_t window_ns, int64_t most_ns, int64_t overrun_ns, int64_t target_ns):
    return windowlength.window_adapt(window_ns, most_ns, overrun_ns, target_ns)
