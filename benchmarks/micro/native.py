"""Latencies of the native path, and what it costs: hook → relay → dispatcher → GO, and lease back after a kill.

Each vGPU has a relay in a process of its own, as brokers have. The dispatcher and the emulated hooks run in this one.
No CUDA and no scheduler: leases are published ahead, as the scheduler would. Prints a table; asserts nothing. Figures
depend on how busy the machine is: ``load`` says how busy it was.

    python -m benchmarks.micro.native [--vgpus 64] [--samples 2000]
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import EventKind, PageMode
from cython_ext.testing.fake_peer import Process

HOUR_NS = 3_600_000_000_000
PATIENCE_NS = 10_000_000_000

BROKER = """
import sys
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.relaypage import RelayPage
from cython_ext.relay.relay import Relay
activity, grants, relays, key = map(int, sys.argv[1:])
with Relay(ActivityPage.map(activity), GrantsPage.map_readonly(grants), RelayPage.map(relays), key) as relay:
    relay.watch(0)
    relay.watch(1)
    print("ready", flush=True)
    sys.stdin.read()
"""

VICTIM = """
import sys
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing.fake_peer import Process
activity, grants = map(int, sys.argv[1:])
process = Process(ActivityPage.map(activity), GrantsPage.map_readonly(grants), 1)
ballast = bytearray(256 << 20)
ballast[::4096] = b"x" * len(ballast[::4096])
process.activate()
process.look()  # as a gate that waits; else its want may be taken for that of one who slept through the lease before
process.want()
epoch, _ = process.wait_lease(10_000_000_000)
process.submit(epoch)
print("works", flush=True)
sys.stdin.read()
"""


class Card:
    """``size`` vGPUs with relays in processes of their own and one emulated hook each."""

    def __init__(self, size: int, owned: ExitStack) -> None:
        self.owned = owned
        self.relays = owned.enter_context(RelayPage.create())
        self.activities = [owned.enter_context(ActivityPage.create()) for _ in range(size)]
        self.pages = [owned.enter_context(self._grants(key)) for key in range(size)]
        self.dispatcher = owned.enter_context(Dispatcher(self.relays))
        owned.callback(lambda: self.hooks.clear())
        for activity in self.activities:
            activity.reserve_slot(os.getpid(), 1)
            activity.reserve_slot(os.getpid(), 2)
        self.hooks = [Process(a, p, 0) for a, p in zip(self.activities, self.pages, strict=True)]
        for key, hook in enumerate(self.hooks):
            self.dispatcher.add(key, self.pages[key])
            hook.pretend_active()
        self.brokers = [self._broker(key) for key in range(size)]
        for broker in self.brokers:
            assert broker.stdout
            broker.stdout.readline()
        self.epoch = 0

    @staticmethod
    def _grants(key: int) -> GrantsPage:
        return GrantsPage.create(
            vgpu_id=f"vgpu-{key:08x}",
            gpu_uuid="GPU-0",
            mode=PageMode.TEMPORAL,
            generation=1,
            memory_limit_bytes=0,
            total_memory_bytes=0,
        )

    def _broker(self, key: int) -> subprocess.Popen[bytes]:
        files = (self.activities[key].fileno(), self.pages[key].fileno(), self.relays.fileno())
        return spawn(self.owned, BROKER, *files, more=(key,))

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def settle(self, key: int, want: bool) -> None:
        """Until the dispatcher knows; its events are not of interest."""
        while self.dispatcher.wants(key) is not want or self.dispatcher.outstanding(key):
            self.dispatcher.events()
            time.sleep(0.0001)


def spawn(owned: ExitStack, code: str, *descriptors: int, more: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A Python process that runs ``code`` with descriptors and ``more`` as arguments; it ends with ``owned``."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *(str(word) for word in (*descriptors, *more))],
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    owned.callback(child.communicate)
    return child


@contextmanager
def card_of(size: int) -> Iterator[Card]:
    with ExitStack() as owned:
        yield Card(size, owned)


def ask(hook: Process) -> None:
    """As a gate that waits asks: it looks. Who had a lease and neither looked nor submitted is taken to be asleep, and
    the want that comes before the relay has judged that lease is struck out."""
    hook.look()
    hook.want()


def granted(hook: Process) -> tuple[int, int]:
    """The lease that it waited for, and when it was seen."""
    epoch, seen_ns = hook.wait_lease(PATIENCE_NS)
    if not epoch:
        raise RuntimeError(f"no lease within {PATIENCE_NS / 1e9:g} s")
    return epoch, seen_ns


def cold_request(card: Card, samples: int, until_go: list[float] | None = None) -> list[float]:
    """An idle vGPU wants and has a standby lease: doorbell → relay → dispatcher → GO seen by the sleeper. µs.

    ``until_go``: takes what of that had passed when GO was given; the rest is the sleeper's.
    """
    dice, found = random.Random(1), []
    for _ in range(samples):
        key = dice.randrange(len(card.hooks))
        card.dispatcher.publish(key, card.next_epoch(), time.monotonic_ns(), None, on_want=True)
        time.sleep(dice.random() * 0.002)  # everybody asleep, as after idleness
        hook = card.hooks[key]
        asked_ns = time.monotonic_ns()
        ask(hook)
        epoch, seen_ns = granted(hook)
        lease = card.pages[key].plan().current
        hook.submit(epoch)
        found.append((seen_ns - asked_ns) / 1000)
        if until_go is not None and lease is not None:
            until_go.append((lease.start_ns - asked_ns) / 1000)
        hook.idle()
        card.settle(key, want=False)
    return found


def hand_over(card: Card, samples: int) -> list[float]:
    """The holder drains, the next one sleeps on its page: drain → relay → dispatcher → GO seen by the next. µs."""
    found = []
    for hook in card.hooks[:2]:
        ask(hook)
    for key in (0, 1):
        card.settle(key, want=True)
    now_ns = time.monotonic_ns()
    holder, epoch = 0, card.next_epoch()
    card.dispatcher.publish(0, epoch, now_ns, now_ns + HOUR_NS)
    for _ in range(samples):
        following, old, epoch = 1 - holder, epoch, card.next_epoch()
        far_ns = time.monotonic_ns() + HOUR_NS
        card.dispatcher.publish(following, epoch, far_ns, 2 * far_ns, after=[(holder, old)], go_by_ns=far_ns)
        seen: list[int] = []
        sleeper = Thread(target=lambda key=following, out=seen: out.append(granted(card.hooks[key])[1]))
        sleeper.start()
        time.sleep(0.0005)
        card.hooks[holder].submit(old)
        card.dispatcher.withdraw(holder, old)  # it went long ago: it ends now
        drained_ns = time.monotonic_ns()
        card.hooks[holder].drain(old)
        sleeper.join()
        found.append((seen[0] - drained_ns) / 1000)
        holder = following
        card.dispatcher.events()
    for hook in card.hooks[:2]:
        hook.idle()
    for key in (0, 1):
        card.settle(key, want=False)
    return found


def kill(card: Card, samples: int) -> list[float]:
    """kill -9 of a holder with 256 MiB resident → the dispatcher has its lease back. µs. Serves once per vGPU."""
    found = []
    for key in range(min(samples, len(card.hooks))):
        with ExitStack() as owned:
            child = spawn(owned, VICTIM, card.activities[key].fileno(), card.pages[key].fileno())
            card.dispatcher.publish(key, card.next_epoch(), time.monotonic_ns(), None, on_want=True)
            assert child.stdout
            child.stdout.readline()
            card.hooks[key].ring()
            time.sleep(0.02)  # its watcher is asleep
            card.dispatcher.events()
            killed_ns = time.monotonic_ns()
            child.kill()
            drained = None
            while drained is None:
                select.select([card.dispatcher.fileno()], [], [])
                drained = next((e for e in card.dispatcher.events() if e.kind is EventKind.DRAINED), None)
            found.append((drained.at_ns - killed_ns) / 1000)
    return found


def cpu_ns(directory: Path, name: str | None = None) -> int:
    """CPU time of all threads of a process, or of those of that name."""
    tasks = [t for t in (directory / "task").iterdir() if name is None or (t / "comm").read_text().strip() == name]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def contention(card: Card, seconds: float, quantum_ns: int) -> list[tuple[str, str]]:
    """All vGPUs want, and take turns of ``quantum_ns``: CPU of dispatcher and relays in percent of one core."""
    size = len(card.hooks)
    for hook in card.hooks:
        ask(hook)
    for key in range(size):
        card.settle(key, want=True)
    holder, epoch = 0, card.next_epoch()
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, epoch, now_ns, now_ns + HOUR_NS)
    before = card.dispatcher.stats()
    cpu_before = cpu_ns(Path("/proc/self"), "vgpu-dispatch"), sum(cpu_ns(Path(f"/proc/{b.pid}")) for b in card.brokers)
    began_ns = time.monotonic_ns()
    turns = events = 0
    while time.monotonic_ns() - began_ns < seconds * 1e9:
        following, old, epoch = (holder + 1) % size, epoch, card.next_epoch()
        _, start_ns = granted(card.hooks[holder])
        card.hooks[holder].submit(old)
        far_ns = start_ns + HOUR_NS
        card.dispatcher.publish(following, epoch, far_ns, far_ns + HOUR_NS, [(holder, old)], far_ns)
        time.sleep(max(0, start_ns + quantum_ns - time.monotonic_ns()) / 1e9)
        card.dispatcher.withdraw(holder, old)  # it went: it ends now
        card.hooks[holder].drain(old)
        events += len(card.dispatcher.events())
        holder, turns = following, turns + 1
    spent_ns = time.monotonic_ns() - began_ns
    after = card.dispatcher.stats()
    percent = [100 * ns / spent_ns for ns in (
        cpu_ns(Path("/proc/self"), "vgpu-dispatch") - cpu_before[0],
        sum(cpu_ns(Path(f"/proc/{b.pid}")) for b in card.brokers) - cpu_before[1],
    )]  # fmt: skip
    rate = 1e9 / spent_ns
    for key, hook in enumerate(card.hooks):
        hook.idle()
        card.settle(key, want=False)
    return [
        ("hand-overs, events a second", f"{turns * rate:.0f}, {events * rate:.0f}"),
        ("dispatcher's wakes a second", f"{(after.wakes - before.wakes) * rate:.0f}"),
        ("CPU dispatcher, % of a core", f"{percent[0]:.2f}"),
        (f"CPU {size} relays, % of a core", f"{percent[1]:.2f}"),
    ]


def row(name: str, samples: list[float]) -> str:
    ranked = sorted(samples)
    p50, p99 = ranked[len(ranked) // 2], ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
    return f"{name:<44} {len(ranked):>7} {p50:>9.1f} {p99:>9.1f} {ranked[-1]:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vgpus", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with card_of(options.vgpus) as card:
        load = os.getloadavg()[0]
        print(f"{options.vgpus} vGPUs, {os.cpu_count()} cores, load {load:.1f}")
        print(f"{'latency, µs':<44} {'samples':>7} {'p50':>9} {'p99':>9} {'max':>9}")
        until_go: list[float] = []
        print(row("cold request → GO seen (standby lease)", cold_request(card, options.samples, until_go)))
        print(row("  of that until GO is given", until_go), flush=True)
        suites: list[tuple[str, Callable[[Card, int], list[float]], int]] = [
            ("drain → GO seen by the next holder", hand_over, options.samples),
            ("kill -9 of the holder → lease back", kill, 32),
        ]
        for name, measure, samples in suites:
            print(row(name, measure(card, samples)), flush=True)
        for quantum_ns in (10_000_000, 1_000_000):
            print(f"all {options.vgpus} contending, turns of {quantum_ns / 1e6:g} ms")
            for name, value in contention(card, options.seconds, quantum_ns):
                print(f"  {name:<42} {value:>7}", flush=True)
        print("dispatcher: GOs later than 2^i ns after they were due")
        lateness = card.dispatcher.stats().lateness_log2_ns
        print("  " + "  ".join(f"2^{i}: {count}" for i, count in enumerate(lateness) if count))


if __name__ == "__main__":
    main()
