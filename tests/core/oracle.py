"""What an outside observer may demand of a run: it sees who held the GPU and who wanted it, never the books.

Each function returns the violations it found, as sentences. Numbers in names refer to the properties of the policy.
K = q̂ + ô + C: the longest token, the longest overrun, the idle credit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from gpuserver.core.scheduler.leases import (
    AccountSnapshot,
    Added,
    Allow,
    Command,
    Drained,
    Event,
    Lease,
    LeaseStarted,
    Measured,
    Observed,
    Publish,
    Removed,
    Withdraw,
)
from gpuserver.core.scheduler.policy import DEFAULT_POLICY
from tests.core.model import MS, Run, S
from tests.core.slices import Slices
from vgpu.share import PPM

POLICY = DEFAULT_POLICY
CREDIT = POLICY.idle_credit_ns


def longest_overrun(run: Run, key: int | None = None, begin: int = 0) -> int:
    return max((r.overrun_ns() for r in run.records if r.go_ns >= begin and (key is None or r.key == key)), default=0)


def quantum(run: Run, key: int, weight: int, period_ns: int) -> int:
    share = run.shares[key].guarantee_ppm
    return min(max(period_ns * share // weight, POLICY.quantum_min_ns), POLICY.quantum_max_ns)


def curve(spans: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Cumulative time at each corner of a piecewise-linear curve."""
    total, corners = 0, [(begin, 0)]
    for a, b in sorted(spans):
        a, b = max(a, begin), min(b, end)
        if b > a:
            corners.append((a, total))
            total += b - a
            corners.append((b, total))
    return [*corners, (end, total)]


def value(corners: list[tuple[int, int]], at: int, position: list[int]) -> int:
    """The curve's value; ``position`` remembers where, for rising ``at``."""
    i = position[0]
    while i + 1 < len(corners) and corners[i + 1][0] <= at:
        i += 1
    position[0] = i
    time, total = corners[i]
    if i + 1 < len(corners):
        after, then = corners[i + 1]
        return total + ((then - total) * (at - time) // (after - time) if after > time else 0)
    return total


def rises(points: Iterable[float]) -> tuple[float, float]:
    """The greatest rise and the greatest fall from any point to a later one."""
    low = high = None
    rise = fall = 0.0
    for p in points:
        low = p if low is None else min(low, p)
        high = p if high is None else max(high, p)
        rise, fall = max(rise, p - low), max(fall, high - p)
    return rise, fall


def held_spans(run: Run, key: int) -> list[tuple[int, int]]:
    return [(a, b) for k, a, b in run.usable_spans() if k == key]


def normalised_difference(run: Run, i: int, j: int, begin: int, end: int) -> tuple[float, float]:
    """Greatest rise and fall of held_i/r_i − held_j/r_j over all windows within [begin, end]."""
    one, other = (curve(held_spans(run, k), begin, end) for k in (i, j))
    times = sorted({t for t, _ in one} | {t for t, _ in other})
    at_one, at_other = [0], [0]
    r_i, r_j = (run.shares[k].guarantee_ppm / PPM for k in (i, j))
    return rises([value(one, t, at_one) / r_i - value(other, t, at_other) / r_j for t in times])


def always_wants_from(run: Run, key: int) -> int | None:
    """Since when it has wanted without a pause until the end; None: it paused."""
    spans = run.wanting[key]
    return spans[0][0] if len(spans) == 1 and spans[0][1] is None else None


def longest_period(run: Run) -> int:
    """P as the policy sets it for what the hand-overs of this run cost, each clamped as the policy does."""
    refills = [app.work.refill_ns for app in run.apps.values() if app.work.refill_ns]
    cost = sum(min(max(refill_ns, POLICY.handover_min_ns), POLICY.handover_max_ns) for refill_ns in refills)
    return min(max(cost * PPM // POLICY.handover_loss_ppm, POLICY.period_ns), POLICY.period_max_ns)


def fairness(run: Run, begin: int = 0, credit_ns: int = CREDIT) -> list[str]:
    """2 and 3: between those that always want both ways, against one that may sleep one way. From ``begin`` on."""
    period_ns = longest_period(run)
    found = []
    uncapped = [k for k in run.keys if run.shares[k].limit_ppm == PPM]
    steady = {k: t for k in uncapped if (t := always_wants_from(run, k)) is not None}
    weight = sum(run.shares[k].guarantee_ppm for k in steady)
    for j, since_j in steady.items():
        for i in run.keys:
            if i == j:
                continue
            since = max(since_j, steady.get(i, 0), begin) + run.up_ns
            both = quantum(run, j, weight, period_ns), quantum(run, i, max(weight, 1), period_ns)
            k = max(both) + longest_overrun(run) + credit_ns
            bound = k * PPM / run.shares[i].guarantee_ppm + k * PPM / run.shares[j].guarantee_ppm
            rise, _ = normalised_difference(run, i, j, since, run.now_ns)
            if rise > bound:
                found.append(f"{i} got {rise / bound:.2f} of what it may be ahead of {j}, who always wanted")
    return found


def waits(run: Run) -> list[str]:
    """4: how long an uncapped vGPU waits for its GO.

    Its own last turn, which it pays for first, was at most a token and a quarter, or an open-ended lease that was cut
    when somebody came: that ends where its queue may. How long a token is depends on who competes (``company``): what
    was a fair one beside few is paid for beside all. It may have had that turn in debt, as the only one left while a
    limit kept the others out: it then pays for the one before as well, which was cut when they came.
    """
    period_ns = longest_period(run)
    found = []
    weight = sum(s.guarantee_ppm for s in run.shares.values())
    quanta = {k: quantum(run, k, weight, period_ns) for k in run.keys}
    longest = max(min(POLICY.quantum_max_ns, period_ns), *quanta.values()) if quanta else 0
    cut_ns = POLICY.decision_ns + POLICY.window_ns
    for key in run.keys:
        share = run.shares[key]
        if share.limit_ppm < PPM:
            continue
        most = max(period_ns, POLICY.quantum_min_ns * weight // share.guarantee_ppm) + longest + longest_overrun(run)
        most += sum(min(CREDIT, 2 * quanta[j]) for j in run.keys if j != key) + 2 * MS
        others_capped = any(s.limit_ppm < PPM for k, s in run.shares.items() if k != key)
        for begin, wait in waits_of(run, key):
            token = quantum(run, key, company(run, key, begin) or weight, period_ns)
            debt = max(token * 5 // 4, cut_ns) + (cut_ns if others_capped else 0) + longest_overrun(run, key)
            bound = most + debt * weight // share.guarantee_ppm
            if wait > bound:
                found.append(f"{key} waited {wait / MS:.1f} ms, {wait / bound:.2f} of its bound")
    return found


def company(run: Run, key: int, at_ns: int) -> int:
    """The least weight that the competition had in the last turn of ``key`` before ``at_ns``: its own, and that of who
    wanted all the while and has no limit that may have kept it out. 0: it may have been alone, or had no turn."""
    turn = max((r for r in run.records if r.key == key and r.go_ns < at_ns), key=lambda r: r.go_ns, default=None)
    if turn is None:
        return 0
    until_ns = turn.drained_ns or at_ns
    others = [
        share.guarantee_ppm
        for k, share in run.shares.items()
        if k != key
        and share.limit_ppm == PPM
        and any(a <= turn.go_ns and (b is None or b >= until_ns) for a, b in run.wanting[k])
    ]
    return run.shares[key].guarantee_ppm + sum(others) if others else 0


def waits_of(run: Run, key: int) -> list[tuple[int, int]]:
    """When each began, and how long it was."""
    goes = [r.go_ns for r in run.records if r.key == key]
    drains = [r.drained_ns for r in run.records if r.key == key and r.drained_ns is not None]
    found = []
    for since, until in run.wanting[key]:
        stop = run.now_ns if until is None else until
        for begin in [since, *(d for d in drains if since < d < stop)]:
            holding = any(r.key == key and r.go_ns <= begin < (r.drained_ns or run.now_ns) for r in run.records)
            if not holding:
                found.append((begin, min((g for g in goes if g >= begin), default=stop) - begin))
    return found


def fill_line(limit_ppm: int) -> int:
    return max(POLICY.quantum_min_ns, POLICY.period_ns * limit_ppm // PPM)


def computed(run: Run, key: int) -> list[tuple[int, int]]:
    """When it computed. At a tail two leases have kernels on the GPU: the model runs both at full speed, which no GPU
    does, so what is computed there counts once, for whom it is charged to. Who went beside one that others had waited
    for long enough computes, though it does not pay for that as held."""
    leases = [
        (r.go_ns, begin if r.shares_overlap else r.go_ns, end)
        for r, (k, begin, end) in zip(run.records, run.usable_spans(), strict=True)
        if k == key
    ]
    starts = [go for go, _, _ in leases]
    kernels = []
    for a, b in run.apps[key].finished:
        _, begin, end = leases[bisect_right(starts, a) - 1]
        kernels.append((max(a, begin), min(b, end)))
    return kernels


def busy_against_limit(run: Run, key: int) -> tuple[float, float]:
    limit = run.shares[key].limit_ppm / PPM
    corners = curve(computed(run, key), 0, run.now_ns)
    return rises([total - limit * at for at, total in corners])


def limits(run: Run) -> list[str]:
    """5: nobody computes more than its limit, in any window."""
    found = []
    for key, share in run.shares.items():
        if share.limit_ppm < PPM:
            limit, line = share.limit_ppm / PPM, fill_line(share.limit_ppm)
            bound = max(2 * line, POLICY.wait_bucket_ns * limit) + line * (1 + limit) + longest_overrun(run, key)
            bound += POLICY.allowance_ahead_ns * limit
            rise, _ = busy_against_limit(run, key)
            if rise > bound:
                found.append(f"{key} was {rise / MS:.1f} ms above its limit, {rise / bound:.2f} of its bound")
    return found


def limit_used(run: Run, key: int) -> list[str]:
    """6: alone and always wanting, a vGPU gets what its limit promises."""
    share = run.shares[key]
    bound = 2 * fill_line(share.limit_ppm) + longest_overrun(run, key)
    _, fall = busy_against_limit(run, key)
    return [f"{key} fell {fall / MS:.1f} ms below its limit, {fall / bound:.2f} of its bound"] if fall > bound else []


def one_holder(run: Run) -> list[str]:
    """7: at most one lease in force that takes work; whoever goes while another is undrained has waited for it."""
    found = []
    for before, after in zip(run.records, run.records[1:], strict=False):
        end = before.drained_ns if before.planned_end_ns is None else before.planned_end_ns
        drained = run.now_ns if before.drained_ns is None else before.drained_ns
        takes_work = min(x for x in (end, drained, before.tail_ns) if x is not None)
        if after.go_ns < takes_work:
            found.append(f"{after.key} went at {after.go_ns} while {before.key} was in force until {end}")
    return found


def books_agree(run: Run) -> list[str]:
    """8: what the books say was held is what an observer saw, to the nanosecond, once nothing is on the way."""
    return [
        f"{key}: books say {book.held_ns}, seen {seen}"
        for key, book in run.scheduler.books().items()
        if abs(book.held_ns - (seen := sum(b - a for k, a, b in run.usable_spans() if k == key))) > 0
    ]


def idle_gpu(run: Run) -> list[str]:
    """8 and 10: while somebody without a limit wants, the GPU is without a lease for as long as two messages and a
    decision take, no longer. The other causes of a gap are that nobody wants, and that limits keep all out."""
    longest_ns = run.up_ns + run.down_ns + POLICY.decision_ns
    gaps, held_ns = [], 0
    for go_ns, drained_ns in [*sorted((r.go_ns, r.drained_ns or run.now_ns) for r in run.records), (run.now_ns,) * 2]:
        if go_ns > held_ns + longest_ns:
            gaps.append((held_ns, go_ns))
        held_ns = max(held_ns, drained_ns)
    found = []
    for key in [k for k, share in run.shares.items() if share.limit_ppm == PPM]:
        for begin, end in gaps:
            for since, until in run.wanting[key]:
                waited_ns = min(end, run.now_ns if until is None else until) - max(begin, since)
                if waited_ns > longest_ns:
                    found.append(f"{key} waited {waited_ns / MS:.2f} ms while nobody held, until {end}")
    return found


class Watch:
    """Contract and work conservation, checked at every event. Pass as ``watch`` of a ``Run``."""

    def __init__(self, scheduler: object) -> None:
        self.scheduler = scheduler
        self.found: list[str] = []
        self.epoch = 0
        self.leases: dict[int, Lease] = {}
        self.went: set[int] = set()
        self.standby: set[int] = set()
        self.over: set[int] = set()
        self.withdrawn: set[int] = set()
        self.allowed: dict[int, tuple[int, int | None]] = {}
        self.planned: dict[int, Lease] = {}
        """Leases that have not begun."""
        self.light: dict[int, bool] = {}
        self.heavy_ns: dict[int, int] = {}
        """When each light vGPU turned heavy the last time."""

    def __call__(self, events: Sequence[Event], now: int, commands: list[Command]) -> None:
        for event in events:
            if isinstance(event, Added):  # its page says that it has no limit yet
                self.allowed.pop(event.vgpu, None)
                self.light.pop(event.vgpu, None)
                self.heavy_ns.pop(event.vgpu, None)
            if isinstance(event, Removed):
                self.planned = {e: lease for e, lease in self.planned.items() if lease.vgpu != event.vgpu}
            if isinstance(event, LeaseStarted) and event.epoch in self.leases:
                self.went.add(event.epoch)
                self.planned.pop(event.epoch, None)
                self.leases[event.epoch] = self.leases[event.epoch].begun(event.at_ns)
            if isinstance(event, Drained):
                self.over.add(event.epoch)
        snapshots: list[AccountSnapshot] = self.scheduler.snapshot(now)  # type: ignore[attr-defined]
        by_vgpu = {s.vgpu: s for s in snapshots}
        for command in commands:
            if (command.lease if isinstance(command, Publish) else command).epoch in self.over:
                self.found.append(f"{command} at {now}, though that lease has drained")
            if isinstance(command, Withdraw):
                self._withdrawn(events, now, command, by_vgpu)
            elif isinstance(command, Allow):
                self.allowed[command.vgpu] = command.epoch, command.allowance_ns
            else:
                self._published(now, command)
                self._limited(now, command.lease, by_vgpu[command.lease.vgpu])
        self._kinds(events, now, snapshots)
        self._waits_for_an_end(now, by_vgpu.keys())
        due = self.scheduler.next_deadline_ns()  # type: ignore[attr-defined]
        if any(s.throttled for s in snapshots) and due is None:
            self.found.append(f"10: somebody is throttled at {now} and no timer is set")
        left = all(isinstance(event, Observed | Measured) for event in events)  # a reading: a tick is due at once
        if due is not None and due <= now and not left:
            self.found.append(f"a deadline at {due} is not after {now}")

    def _kinds(self, events: Sequence[Event], now: int, snapshots: Sequence[AccountSnapshot]) -> None:
        """A measurement turns a vGPU light or heavy, and no other event. A vGPU that turned heavy stays so for a second
        at least."""
        measured = {event.vgpu: event for event in events if isinstance(event, Measured)}
        for s in snapshots:
            was_light, self.light[s.vgpu] = self.light.get(s.vgpu, s.light), s.light
            if s.light is was_light:
                continue
            seen = measured.get(s.vgpu, Measured(s.vgpu, 0))
            if s.light and not (0 < seen.demand_ppm <= 500_000 and seen.burst_ns <= 4 * MS):
                self.found.append(f"{s.vgpu} turned light at {now} by {seen}")
            if s.light and now - self.heavy_ns.get(s.vgpu, now - S) < S:
                self.found.append(f"{s.vgpu} turned light at {now}, and heavy at {self.heavy_ns[s.vgpu]}")
            if not s.light:
                self.heavy_ns[s.vgpu] = now
                if seen.demand_ppm <= 650_000 and seen.burst_ns <= 8 * MS:
                    self.found.append(f"{s.vgpu} turned heavy at {now} by {seen}")

    def _waits_for_an_end(self, now: int, vgpus: Set[int]) -> None:
        """No lease waits for the drain of one without an end: its vGPU would hold until all patience is used up."""
        for lease in self.planned.values():
            for key, epoch in lease.after:
                before = self.leases.get(epoch)
                open_ended = before is not None and before.end_ns is None and epoch not in self.over
                if key in vgpus and open_ended and epoch not in self.withdrawn:
                    self.found.append(f"{lease} waits at {now} for {before}, which has no end")

    def _limited(self, now: int, lease: Lease, statement: AccountSnapshot) -> None:
        """9: hooks of a vGPU with a limit know its allowance before they see a lease without an end; those of others
        know none, but for sharers while another vGPU is short."""
        limit = statement.limit_ppm
        epoch, allowance_ns = self.allowed.get(lease.vgpu, (0, None))
        if lease.end_ns is None and limit < PPM and (epoch != lease.epoch or allowance_ns is None):
            self.found.append(f"9: {lease} at {now}, of a vGPU with a limit, without an allowance")
        if lease.end_ns is None and limit == PPM and allowance_ns is not None and not statement.shared:
            self.found.append(f"9: {lease} at {now}, of a vGPU without a limit, with an allowance")

    def _withdrawn(
        self, events: Sequence[Event], now: int, command: Withdraw, by_vgpu: Mapping[int, AccountSnapshot]
    ) -> None:
        self.withdrawn.add(command.epoch)
        self.planned.pop(command.epoch, None)
        start = self.leases[command.epoch].start_ns
        wants = command.vgpu in by_vgpu and by_vgpu[command.vgpu].wants
        if any(isinstance(event, LeaseStarted) and event.epoch in self.standby for event in events):
            return  # that one asked nobody, and is in the way of whoever was to be next
        about_to_start = start - POLICY.guard_ns < now < start
        if wants and (about_to_start or command.epoch in self.went):
            self.found.append(f"11: lease {command.epoch} was withdrawn at {now}, it starts at {start}")

    def _published(self, now: int, command: Publish) -> None:
        lease = command.lease
        if lease.standby:
            self.standby.add(lease.epoch)
        if lease.epoch not in self.leases:
            if lease.epoch != self.epoch + 1:
                self.found.append(f"11: epoch {lease.epoch} after {self.epoch}")
            self.epoch = lease.epoch
            if lease.start_ns < now:
                self.found.append(f"11: {lease} starts before {now}")
            if lease.after and not lease.start_ns < lease.go_by_ns <= lease.start_ns + POLICY.grace_ns:
                self.found.append(f"{lease} waits without a bound")
        else:
            end = self.leases[lease.epoch].end_ns
            if lease.epoch in self.went and end is not None and end <= now and lease.end_ns != end:  # not told again
                self.found.append(f"{lease} had ended at {end}, and got a new end at {now}")
            nearer = lease.end_ns is not None and (end is None or lease.end_ns < end)
            begun = lease.epoch in self.went  # before that, only the length means anything
            if begun and nearer and lease.end_ns is not None and lease.end_ns < now + POLICY.decision_ns:
                self.found.append(f"11: the end of {lease} moved before {now} + δ")
        self.leases[lease.epoch] = lease
        if lease.epoch not in self.went:
            self.planned[lease.epoch] = lease


Check = Callable[[Run], list[str]]
TEMPORAL_CHECKS: tuple[Check, ...] = (fairness, waits, limits, one_holder, idle_gpu)


# --- shared leases, on a GPU with time slices


def below(run: Slices, key: int, least_ppm: int, slack_ns: int) -> list[str]:
    """Two seconds, from the first on, in which it used less GPU time than ``least_ppm`` of them, less ``slack_ns``."""
    found = []
    for begin in range(S, run.now_ns - 2 * S + 1, S // 2):
        used_ns = run.used_between(key, begin, begin + 2 * S)
        if used_ns < least_ppm * 2 * S // PPM - slack_ns:
            found.append(f"{key} used {used_ns / 2 / S:.0%} from {begin / S:g} s on, of {least_ppm / PPM:.0%}")
    return found


def shared_guarantees(run: Slices) -> list[str]:
    """A sharer that always wants gets its guarantee, less 10 % of the time. One that takes turns gets 93 % of its
    guarantee, of the time in which it needs the GPU; what a window of 200 ms lacks at first may be gone."""
    found = []
    for key, share in run.shares.items():
        if always_wants_from(run, key) != 0 or share.limit_ppm < PPM:
            continue
        if key in run.scheduler.shared():
            found += below(run, key, share.guarantee_ppm - 100_000, 0)
        else:
            due_ppm = share.guarantee_ppm * run.apps[key].work.demand_at(run.now_ns) // PPM
            found += below(run, key, due_ppm * 93 // 100, 40 * MS)
    return found


def curbed_for_another(run: Slices) -> list[str]:
    """A sharer without a limit is curbed for another vGPU that is short, so never while all others use nothing."""
    assert isinstance(run.watch, Watch)
    begin = run.now_ns - 600 * MS
    found = []
    for key in run.scheduler.shared():
        curbed = run.watch.allowed.get(key, (0, None))[1] is not None
        idle = all(run.used_between(other, begin, run.now_ns) == 0 for other in run.keys if other != key)
        if curbed and idle and run.shares[key].limit_ppm == PPM:
            found.append(f"{key} is curbed, and no other vGPU has used the GPU since {begin}")
    return found


def debts_of_sharers(run: Slices) -> list[str]:
    """Used time is charged: the sharer that used least of its guarantee, in each 100 ms of the last second, owes what
    it used in two of them at most. While it shares, V goes on as fast as its own time at least."""
    lags = {s.vgpu: s.lag_ns for s in run.scheduler.snapshot(run.now_ns)}
    spans = [(run.now_ns - S + n * 100 * MS, run.now_ns - S + (n + 1) * 100 * MS) for n in range(10)]
    used = {key: [run.used_between(key, begin, end) for begin, end in spans] for key in run.keys}
    rates = {key: [ns * PPM // run.shares[key].guarantee_ppm for ns in used[key]] for key in run.keys}
    return [
        f"{key} used least of its guarantee, and owes {-lags[key] / MS:.1f} ms"
        for key in run.scheduler.shared()
        if all(rates[key][n] <= rates[other][n] for n in range(10) for other in run.keys)
        and lags[key] < -2 * max(used[key])
    ]


# --- spatial


def guarantees(run: Run, slack_ns: int, begin: int = 0) -> list[str]:
    """15: whoever always wants gets r of every window, short by ``slack_ns`` at most. Hand-over costs are the model's
    refill gaps, so time held counts, not time busy."""
    found = []
    for key, share in run.shares.items():
        since = always_wants_from(run, key)
        if since is None:
            continue
        guarantee = share.guarantee_ppm / PPM
        spans = [(r.go_ns, r.drained_ns or run.now_ns) for r in run.records if r.key == key]
        corners = curve(spans, max(begin, since + run.up_ns + run.down_ns), run.now_ns)
        _, fall = rises([total - guarantee * at for at, total in corners])
        if fall > slack_ns:
            found.append(f"{key} fell {fall / MS:.1f} ms below its guarantee")
    return found


def behind_long_ones(run: Run, begin: int) -> list[str]:
    """15, beside kernels of more than half a round: whose own are not longer than that is short by 4 R + 2 ô at most,
    however long they run."""
    found = guarantees(run, 4 * POLICY.round_ns + 2 * longest_overrun(run), begin)
    return [words for words in found if 2 * run.apps[int(words.split()[0])].work.kernel_ns <= POLICY.round_ns]


def packed(run: Run, begin: int = 0) -> list[str]:
    """13: the SMs of all that has begun and not drained, or come to its tail, fit the card (where nobody had to wait
    out the grace), unless all of it bursts."""
    changes: list[tuple[int, int, int]] = []
    for record in run.records:
        if record.key in run.shares:
            drained = run.now_ns if record.drained_ns is None else record.drained_ns
            drained = drained if record.tail_ns is None else min(drained, record.tail_ns)
            changes += [(record.go_ns, 1, record.key), (drained, -1, record.key)]
    leases = dict.fromkeys(run.shares, 0)  # two of one vGPU run on the same SMs
    for at, change, key in sorted(changes):
        leases[key] += change
        holders = [run.shares[k] for k, count in leases.items() if count]
        used = sum(share.sm_mpercent for share in holders)
        if used > 100_000 and not all(share.bursts for share in holders) and at >= begin:
            return [f"{used} mpercent of the SMs in use at {at}"]
    return []


def left_out(run: Run, most_ns: int, begin: int) -> list[str]:
    """14: nobody with short kernels waits for long beside SMs that are free for it."""
    found = []
    records = [r for r in run.records if r.key in run.shares and (r.drained_ns is None or r.drained_ns > begin)]
    times = sorted({t for r in records for t in (r.go_ns, r.drained_ns or run.now_ns)})
    for key, share in run.shares.items():
        short = run.apps[key].work.kernel_ns <= POLICY.fill_min_ns
        if always_wants_from(run, key) is None or share.limit_ppm < PPM or not short:
            continue
        since = None
        for at in times:
            live = [r for r in records if r.go_ns <= at and (r.drained_ns is None or r.drained_ns > at)]
            room = 100_000 - sum(run.shares[r.key].sm_mpercent for r in live)
            if since is not None and at - since > most_ns:
                found.append(f"{key} waited {(at - since) / MS:.1f} ms beside free SMs, until {at}")
            waits_beside_room = at >= begin and room >= share.sm_mpercent and all(r.key != key for r in live)
            since = (at if since is None else since) if waits_beside_room else None
    return found


def overruns(run: Run, most_ns: int, begin: int) -> list[str]:
    """14: whose kernels, once known, do not fit what is left of a round is not let in."""
    longest = longest_overrun(run, begin=begin)
    return [f"a lease was overrun by {longest / MS:.1f} ms"] if longest > most_ns else []


def round_waits(run: Run) -> list[str]:
    """16: r·wait ≤ 4R + ô."""
    bound = 4 * POLICY.round_ns + longest_overrun(run)
    found = []
    for key, share in run.shares.items():
        if share.limit_ppm == PPM:
            longest = max((wait for _, wait in waits_of(run, key)), default=0)
            if longest * share.guarantee_ppm > bound * PPM:
                found.append(
                    f"{key} waited {longest / MS:.1f} ms, {longest * share.guarantee_ppm / bound / PPM:.2f} of it"
                )
    return found
