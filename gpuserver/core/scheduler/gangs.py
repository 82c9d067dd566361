"""Gangs: vGPUs on different GPUs that hold at the same time. Sans I/O.

Ranks of one job wait for each other on the GPU. Where each GPU Server decides alone, one rank holds a lease while its
peers wait for theirs. The kernels of that rank spin until the peers run, past the end of its lease. No wait is
unbounded, so such jobs make progress, slowly. The members of a *gang* are therefore called together.

Theory of operation
-------------------
Each server repeatedly sends the whole state of its gang member (``GangMemberStatus``) to every other server of the
gang. The next message replaces one that is lost or late. Each server decides for itself, and calls pass only from lower
to higher GPUs. So no two servers ever wait for each other's decision:

    leader      the member on the lowest GPU that is bound: it wants a token, or holds a finite lease
    followers   the members on higher GPUs, called for the leader's lease alone (``GangWindow``)
    no leader   an open-ended lease binds no member, nor does a member that wants nothing: the others follow their own
                accounts

Within its own gang window a follower precedes other vGPUs of its class, but stays within one token ahead of its share:
the guarantees of other vGPUs on its GPU stand. A follower that cannot run, by its limit or its debt, reports it
(``ready``). The leader stays out of the competition on its own GPU until that follower can run. So a gang gets the
least that one of its GPUs can give.

The holder on a follower's GPU needs a window's time to drain. Where other vGPUs share the leader's GPU, the server
publishes the leader's lease that much ahead. A leader that is alone on its GPU and throttled announces the lease that
it will have once its bucket is full. That is a forecast: the lease itself replaces it.

    GPU 0   |  X  |  Y  |  X  |      leads both
    GPU 1   |  X  |  Y  |  X  |      X and Y follow; Y may lead another gang's member on GPU 2 by what it got here

Gangs of different leaders may meet on a GPU where a member of each follows. The member that runs there keeps the other
gang out, and the other gang's leader does not compete meanwhile. That lasts for a bounded time, by the accounts of that
GPU. Reason: a leader that has its own GPU to itself may hold for ever. From then on the other leader calls, and the
later call has precedence.

A leader that has not drained ``gang_late_ns`` after its lease may wait for a follower whose lease ended first. Its
followers are called again, for the shortest of leases, until the leader has drained. A member may be kept out by its
limit or its debt for ``gang_lapse_ns`` without a message from another server. It then takes such a lease uncalled:
another member may be late.

Every gang window lapses ``gang_lapse_ns`` after it arrived. A server that died, was stopped, or cannot be reached binds
no member for longer. The members of that gang then follow their own accounts, until the server is back. A follower
stays bound by accounts that advance with time alone: a bucket fills, and the clock catches up with a debt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuserver.core.scheduler.leases import GangCalled, GangMemberStatus, GangWindow, VgpuIndex
from gpuserver.core.scheduler.policy import DEFAULT_POLICY, Policy

GangName = str


class Gangs:
    """The gangs that have a member on GPU ``gpu_index``, and what is known of their other members."""

    def __init__(self, gpu_index: int, policy: Policy = DEFAULT_POLICY) -> None:
        self._gpu_index = gpu_index
        self._lapse_ns = policy.gang_lapse_ns
        self._members: dict[GangName, VgpuIndex] = {}
        self._received: dict[int, tuple[int, Mapping[GangName, GangMemberStatus]]] = {}
        """By GPU: when its last message arrived, and the statuses in it."""

    @property
    def members(self) -> Mapping[GangName, VgpuIndex]:
        """The member that each gang has here."""
        return self._members

    def enroll(self, members: Mapping[GangName, VgpuIndex], now_ns: int) -> list[GangCalled]:
        """These are the members here from now on. A member that left is not bound any more."""
        left = set(self._members.values()) - set(members.values())
        self._members = dict(members)
        return [*(GangCalled(key, None) for key in sorted(left)), *self._gang_windows(self._members, now_ns)]

    def receive(self, gpu_index: int, outlooks: Mapping[GangName, GangMemberStatus], now_ns: int) -> list[GangCalled]:
        """The server of GPU ``gpu_index`` has sent the status of all its members."""
        _, before = self._received.get(gpu_index, (0, {}))
        self._received[gpu_index] = now_ns, outlooks
        return self._gang_windows(before.keys() | outlooks.keys(), now_ns)

    def lose(self, gpu_index: int, now_ns: int) -> list[GangCalled]:
        """The link to that server has ended."""
        _, before = self._received.pop(gpu_index, (0, {}))
        return self._gang_windows(before, now_ns)

    def _gang_windows(self, gangs: Iterable[GangName], now_ns: int) -> list[GangCalled]:
        return [
            GangCalled(self._members[gang], self._gang_window(gang, now_ns))
            for gang in sorted(gangs)
            if gang in self._members
        ]

    def _gang_window(self, gang: GangName, now_ns: int) -> GangWindow:
        known = {
            gpu: (outlooks[gang], received_ns)
            for gpu, (received_ns, outlooks) in sorted(self._received.items())
            if gang in outlooks and now_ns < received_ns + self._lapse_ns
        }
        lapses_ns = now_ns + self._lapse_ns
        urgent = any(outlook.late for outlook, _ in known.values())
        for gpu, (outlook, _) in known.items():
            if gpu < self._gpu_index and outlook.bound:
                return GangWindow(outlook.start_ns, outlook.end_ns, True, urgent, lapses_ns, leader=gpu)
        held_off = any(gpu > self._gpu_index and not outlook.ready for gpu, (outlook, _) in known.items())
        return GangWindow(binding=held_off, urgent=urgent, lapses_ns=lapses_ns)
