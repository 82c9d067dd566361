"""Shared leases: light vGPUs hold open-ended leases at the same time, and the GPU's own time slicing runs them.

When all vGPUs that want the GPU are light (``kinds.py``), turns only cost: each of them needs the GPU for a part of its
time, and would get a part of its *host's* time. So each holds a shared lease, and is charged for the GPU time that it
uses. As soon as a vGPU that may not share wants the GPU, the shared leases end, and turns begin.

Time slicing knows no shares. A shared vGPU is *short* when it waits for the GPU half of the time or more, and got less
than its guarantee, less a tenth of the time that was looked at. Then the vGPU that is most ahead of its guarantee is
*curbed*: the scheduler allows it its guarantee, as if that was its limit, until no vGPU is short. Where the short ones
gain less than half of what the curbed one gives up, curbing does not help, and pauses for 1, 2, 4 … 60 s.

Source: Start-time fair queueing with depth D (Jin, Chase, Kaur: Interposed proportional sharing for a storage service
utility, 2004) delays the one that is ahead in used time ÷ share; here it is delayed only while another one is short.

Pure: accounts and the time in, the curbed vGPU out. Times are CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuserver.core.account import Account
from gpuserver.core.leases import VgpuKey
from gpuserver.core.policy import MILLISECOND, PPM, SECOND

MOST_TOGETHER = 48
"""So many leases at most are predecessors of the lease that follows them."""
WINDOW_NS = 200 * MILLISECOND
MARGIN_PPM = 100_000
WAITS_PPM = 500_000
PAUSE_LEAST_NS = SECOND
PAUSE_MOST_NS = 60 * SECOND


def may_share(company: Collection[Account]) -> bool:
    """Whether all vGPUs that want or hold the GPU may hold shared leases: light ones of one class, two or more."""
    return (
        2 <= len(company) <= MOST_TOGETHER
        and all(a.kind.light and a.share.shareable and a.muster is None and not a.barred for a in company)
        and len({a.share.priority for a in company}) == 1
    )


class Relief:
    """Decides which vGPU is curbed because another one is short."""

    def __init__(self) -> None:
        self.curbed: VgpuKey | None = None
        self._since_ns = 0
        self._marks: dict[VgpuKey, int] = {}
        """GPU time used by each, when the window began."""
        self._before: dict[VgpuKey, int] = {}
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

    def look(self, accounts: Collection[Account], now_ns: int) -> None:
        """At each tick. Once a window is over it is judged: of those that were there all the time."""
        passed_ns = now_ns - self._since_ns
        if passed_ns < WINDOW_NS:
            return
        got = {a.key: a.busy_at(now_ns) - self._marks[a.key] for a in accounts if a.key in self._marks}
        self._judge([a for a in accounts if a.key in got], got, passed_ns, now_ns)
        self._open_window(accounts, now_ns)

    def _judge(self, accounts: list[Account], got: dict[VgpuKey, int], passed_ns: int, now_ns: int) -> None:
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

    def _fails(self, short: list[VgpuKey], got: dict[VgpuKey, int]) -> bool:
        """Whether those that are short still gain less than half of what the curbed one gives up."""
        if self.curbed not in got or self.curbed not in self._before or not short:
            return False
        gave = self._before[self.curbed] - got[self.curbed]
        gained = sum(got[key] - self._before.get(key, got[key]) for key in short)
        if gave > 0 and gained < gave // 2:
            return True
        self._pause_ns = PAUSE_LEAST_NS
        return False
