"""Shared leases: light vGPUs hold open-ended leases at the same time, and the GPU's own time slicing runs them.

A light vGPU (``kinds.py``) needs the GPU for a part of its time. Taking turns, it would get a part of its *host's*
time. So it holds a shared lease beside others, and is charged for the GPU time that it uses. vGPUs that may not share
take turns with each other, beside the sharers.

Time slicing knows no shares. Two remedies hold back sharers, and only while another vGPU is short:

``Relief``: a sharer is *short* when two conditions hold. It waits for the GPU half of the time or more, and it got less
than its guarantee minus a tenth of the window. Then the sharer that is most ahead of its guarantee is *curbed*: the
scheduler allows it its guarantee, as if that was its limit, until no sharer is short. Curbing does not help where the
short ones gain less than half of what the curbed one gives up. It then pauses for 1, 2, 4 … 60 s.

``Guard``: the vGPUs that take turns are *owed* what their work together fell short of 93 % of their guarantees. Only
those count that wanted the GPU all the time. ``eevdf.py`` divides the time among them. A trainer whose host is late now
and then does not fill its leases: what it computes alone in such a lease is due. From OWED_NS on, and until nothing is
owed, each sharer that costs more than its guarantee is curbed.

A sharer *costs* what it uses, and its part of the switches between contexts: all the time that vGPUs in turns did not
get. Where guarantees add up to 100 % at most and those vGPUs are short, a sharer costs more than its guarantee. So
there is a sharer to curb.

Source: Start-time fair queueing with depth D (Jin, Chase, Kaur: Interposed proportional sharing for a storage service
utility, 2004) delays the one that is ahead in used time ÷ share; here it is delayed only while another one is short.

Pure: accounts and the time in, the curbed vGPUs out. Times are CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuserver.core.scheduler.account import Account
from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.scheduler.policy import MILLISECOND, SECOND
from vgpu.share import PPM

MOST_TOGETHER = 48
"""So many leases at most are predecessors of the lease that follows them."""
WINDOW_NS = 200 * MILLISECOND
MARGIN_PPM = 100_000
WAITS_PPM = 500_000
PAUSE_LEAST_NS = SECOND
PAUSE_MOST_NS = 60 * SECOND
OWED_NS = 20 * MILLISECOND
LENIENCE_PPM = 70_000
"""Switches between contexts may cost vGPUs in turns so much of what is due: requests that are put off cost as much.
Three streams of 60 requests/s beside a trainer leave it 67 % (measured on an H100), where 70 are guaranteed."""
OWED_MOST_NS = 200 * MILLISECOND
"""The most that the guard makes good of what time slicing took from vGPUs in turns before."""
COST_MOST = 4
"""A sharer's switches cost at most so many times what it uses, with that."""


def sharers(company: Collection[Account]) -> list[Account]:
    """Those of ``company`` (all vGPUs that want or hold the GPU) that may hold shared leases now. They are light and of
    one class, beside others of that class or a lower one. None of all is in a gang, or refuses to share
    (``Share.shareable``)."""
    light = [a for a in company if a.kind.light and a.share.shareable and a.gang_window is None and not a.penalised]
    if not 0 < len(light) <= MOST_TOGETHER or len(company) < 2:
        return []
    if len({a.share.priority for a in light}) > 1:
        return []
    mine, priority = {a.key for a in light}, light[0].share.priority
    others = [a for a in company if a.key not in mine]
    if all(a.share.shareable and a.gang_window is None and a.share.priority <= priority for a in others):
        return light
    return []


class Relief:
    """Decides which vGPU is curbed because another one is short."""

    def __init__(self) -> None:
        self.curbed: VgpuIndex | None = None
        self._since_ns = 0
        self._marks: dict[VgpuIndex, int] = {}
        """GPU time used by each, when the window began."""
        self._before: dict[VgpuIndex, int] = {}
        """What each used in the window before one was curbed."""
        self._pauses_until_ns = 0
        self._pause_ns = PAUSE_LEAST_NS

    def reset(self, accounts: Collection[Account], now_ns: int) -> None:
        """Sharing begins: no vGPU is curbed, and a window opens."""
        self.curbed = None
        self._before = {}
        self._open_window(accounts, now_ns)

    def _open_window(self, accounts: Collection[Account], now_ns: int) -> None:
        self._since_ns = now_ns
        self._marks = {a.key: a.busy_at(now_ns) for a in accounts}

    def update(self, accounts: Collection[Account], now_ns: int) -> None:
        """Called at each decision. Judges a window once it is over, by the vGPUs that shared all the time."""
        passed_ns = now_ns - self._since_ns
        if passed_ns < WINDOW_NS:
            return
        got = {a.key: a.busy_at(now_ns) - self._marks[a.key] for a in accounts if a.key in self._marks}
        self._judge([a for a in accounts if a.key in got], got, passed_ns, now_ns)
        self._open_window(accounts, now_ns)

    def _judge(self, accounts: list[Account], got: dict[VgpuIndex, int], passed_ns: int, now_ns: int) -> None:
        margin_ns = 0 if self.curbed is not None else MARGIN_PPM * passed_ns // PPM
        due = {a.key: a.guarantee * passed_ns // PPM for a in accounts}
        short = [a.key for a in accounts if a.kind.waits_ppm >= WAITS_PPM and got[a.key] < due[a.key] - margin_ns]
        ahead = [a for a in accounts if a.key not in short and got[a.key] > due[a.key]]
        if self.curbed is not None:
            if self._fails(short, got):
                self._pauses_until_ns = now_ns + self._pause_ns
                self._pause_ns = min(2 * self._pause_ns, PAUSE_MOST_NS)
                self.curbed = None
            elif not short or self.curbed not in got:
                self.curbed = None
        elif short and ahead and now_ns >= self._pauses_until_ns:
            self.curbed = max(ahead, key=lambda a: (got[a.key] / a.guarantee, -a.order)).key
            self._before = got

    def _fails(self, short: list[VgpuIndex], got: dict[VgpuIndex, int]) -> bool:
        """Whether those that are short still gain less than half of what the curbed one gives up."""
        if self.curbed not in got or self.curbed not in self._before or not short:
            return False
        gave = self._before[self.curbed] - got[self.curbed]
        gained = sum(got[key] - self._before.get(key, got[key]) for key in short)
        if gave > 0 and gained < gave // 2:
            return True
        self._pause_ns = PAUSE_LEAST_NS
        return False


class Guard:
    """Keeps the guarantees of the vGPUs that take turns beside sharers."""

    def __init__(self) -> None:
        self.curbed: Mapping[VgpuIndex, int] = {}
        """What each curbed sharer may use, in parts per million of the time."""
        self._since_ns = 0
        self._marks: dict[VgpuIndex, tuple[int, int]] = {}
        """Work and use of each, when the window began."""
        self._wanted: set[VgpuIndex] = set()
        """Those that take turns, and have wanted the GPU at each update since."""
        self._owed_ns = 0
        self._cost_ppm = PPM
        """What sharers cost ÷ what they use."""

    def update(self, sharing: Collection[Account], turns: Collection[Account], now_ns: int) -> None:
        """Called at each decision. ``sharing`` hold shared leases; ``turns`` are the others that want or hold the
        GPU."""
        self._wanted &= {a.key for a in turns if a.wants}
        passed_ns = now_ns - self._since_ns
        if passed_ns < WINDOW_NS:
            return
        if self._marks and passed_ns < 2 * WINDOW_NS:
            self._judge(sharing, turns, passed_ns, now_ns)
        self._since_ns = now_ns
        self._marks = {a.key: (a.kind.work_ns, a.busy_at(now_ns)) for a in (*sharing, *turns)}
        self._wanted = {a.key for a in turns}

    def _judge(self, sharing: Collection[Account], turns: Collection[Account], passed_ns: int, now_ns: int) -> None:
        known = [a for a in turns if a.key in self._marks]
        worked = {a.key: min(max(0, a.kind.work_ns - self._marks[a.key][0]), passed_ns) for a in known}
        used = {a.key: a.busy_at(now_ns) - self._marks[a.key][1] for a in sharing if a.key in self._marks}
        judged = [a for a in known if a.key in self._wanted and a.kind.demand_ppm]
        if judged:
            due_ppm = sum(a.guarantee * (a.kind.alone_ppm or a.kind.demand_ppm) // PPM for a in judged)
            due_ns = due_ppm * (PPM - LENIENCE_PPM) // PPM * passed_ns // PPM
            self._owed_ns += due_ns - sum(worked[a.key] for a in judged)
        self._owed_ns = min(max(self._owed_ns, 0), OWED_MOST_NS) if judged else 0
        if self._wanted and sum(used.values()):
            cost_ns = max(0, passed_ns - sum(worked.values()))
            cost_ppm = min(max(cost_ns * PPM // sum(used.values()), PPM), COST_MOST * PPM)
            self._cost_ppm += (cost_ppm - self._cost_ppm) // 4
        if self._owed_ns < (1 if self.curbed else OWED_NS):
            self.curbed = {}
            return
        allowed = {a.key: a.guarantee * PPM // self._cost_ppm for a in sharing}
        ahead = {key for key, used_ns in used.items() if used_ns * PPM > allowed[key] * passed_ns}
        self.curbed = {key: allowed[key] for key in allowed if key in ahead or key in self.curbed}
