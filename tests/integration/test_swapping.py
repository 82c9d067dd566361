"""vGPUs that together own more than the card has, on a simulated node: programs see pauses, and find their memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import Spoken, state
from vgpu.errors import VgpuError
from vgpu.protocol.messages import VgpuStatus

MIB = 1 << 20
ROOM_MIB = 128
"""What is left of the card beside the contexts of the test's programs, and what is promised to one that needs none."""
OWNED = 80 * MIB
"""Of such, one is on the card at a time."""

PROGRAM = """
import sys, threading
from ctypes import addressof, byref, c_char, c_size_t, c_uint32, c_uint64, c_void_p
from tests.hook.app import App
app = App()
size, byte, busy, ordered = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "busy", sys.argv[4] == "ordered"
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
def in_order(size):
    address = c_uint64()
    app.call("cuMemAllocAsync", byref(address), c_size_t(size), app.stream)
    return address.value
block = in_order(size) if ordered else app.allocate(size)
app.call("cuMemsetD8_v2", c_uint64(block), byte, c_size_t(size))
app.synchronize()
kernel = app.kernel(1.0)
count = 0
def check():
    assert all(app.read(block + at, 4096) == bytes([byte]) * 4096 for at in range(0, size - 4096, 16 << 20))
def work():
    global count
    app.call("cuCtxSetCurrent", context)
    while True:
        kernel.launch()
        if ordered:
            other = in_order(1 << 20)
            app.call("cuMemsetD8Async", c_uint64(other), byte, c_size_t(1 << 20), app.stream)
            app.call("cuMemFreeAsync", c_uint64(other), app.stream)
        app.call("cuStreamSynchronize", app.stream)  # not the context: see "block"
        check()
        count += 1
if busy:
    threading.Thread(target=work, daemon=True).start()
print("started", flush=True)
for line in sys.stdin:
    if line == "touch\\n":
        check()
    if line == "block\\n":          # a copy in a stream that waits for a word of this process ...
        flag = c_uint32()
        stream = app.new_stream(1)
        data = (c_char * 512)(*bytes([byte]) * 512)
        app.call("cuMemHostRegister_v2", byref(flag), c_size_t(4), 0)
        app.call("cuStreamWaitValue32_v2", stream, c_uint64(addressof(flag)), 1, 0)
        app.call("cuMemcpyHtoDAsync_v2", c_uint64(block), data, c_size_t(512), stream)
    if line == "let go\\n":         # ... written here
        flag.value = 1
    if line == "more\\n":
        assert app.allocate(size) is not None
    print(count, flush=True)
"""


class Program(Spoken):
    """Owns memory of one value; ``busy``: works for ever, and checks it; ``ordered``: by cuMemAllocAsync."""

    def __init__(
        self,
        node: SimulatedNode,
        vgpu: VgpuStatus,
        byte: int,
        *,
        busy: bool,
        owned: int = OWNED,
        ordered: bool = False,
    ) -> None:
        how = ("busy" if busy else "idle", "ordered" if ordered else "plain")
        super().__init__(node, vgpu, PROGRAM, str(owned), str(byte), *how)

    def did(self) -> int:
        self.say("count")
        return int(self.heard())

    def says(self, line: str) -> None:
        """As ``say``, and waits until it has done it."""
        self.say(line)
        self.heard()

    def works(self) -> None:
        before = self.did()
        eventually(lambda: self.did() > before, "it goes on")


class Swapped:
    """A node on which little is left, vGPUs that are swapped, and their programs."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.engine = Engine(next(node.directory.rglob("gpu0")).parent)
        self.programs: list[Program] = []
        self.free = 0

    def vgpus(self, *names: str) -> list[VgpuStatus]:
        """For a program each, so that ROOM_MIB are left."""
        self.free = len(names) * self.engine.context_bytes + ROOM_MIB * MIB
        self.node.create(sm_percent=10, memory_bytes=self.engine.memory_bytes - self.free)
        more: dict[str, Any] = {"sm_percent": 20, "memory_bytes": "2G", "oversubscribe": "swap"}
        return [self.node.create(name=name, **more) for name in names]

    def program(
        self, vgpu: VgpuStatus, byte: int, *, busy: bool = True, owned: int = OWNED, ordered: bool = False
    ) -> Program:
        self.programs.append(Program(self.node, vgpu, byte, busy=busy, owned=owned, ordered=ordered))
        eventually(lambda: self.reading(vgpu).memory_implicit_bytes, "its context is seen")
        return self.programs[-1]

    def reading(self, vgpu: VgpuStatus) -> VgpuStatus:
        found = self.node.reading(vgpu.vgpu_id)
        assert found is not None
        return found

    def suspended(self, vgpu: VgpuStatus) -> None:
        """Asked for; whoever is asked may die meanwhile."""
        with suppress(VgpuError), self.node.link() as link:
            link.suspend(vgpu.vgpu_id)

    def swaps_out(self, vgpu: VgpuStatus) -> None:
        eventually(lambda: state(self.node, vgpu) == "swapped", f"{vgpu.name} leaves the card")

    def idles(self, vgpu: VgpuStatus) -> None:
        eventually(lambda: state(self.node, vgpu) == "idle", f"{vgpu.name} wants nothing any more")

    def host_memory(self) -> tuple[int, int]:
        """Kept for what is away, and used by it."""
        with self.node.link() as link:
            (gpu,) = link.gpus()
        return gpu.host_memory_bytes, gpu.host_memory_used_bytes

    def on_card(self) -> int:
        self.engine.refresh()
        return self.engine.memory_used_bytes

    def close(self) -> None:
        for program in self.programs:
            program.end()


@contextmanager
def swapping(*options: str) -> Iterator[Swapped]:
    with SimulatedNode(1, "temporal", *options) as node:
        found = Swapped(node)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode(1) as running:
        yield running


@pytest.fixture
def swapped(shared: SimulatedNode) -> Iterator[Swapped]:
    found = Swapped(shared)
    yield found
    found.close()
    shared.clear()


@pytest.fixture
def alone() -> Iterator[Swapped]:
    """On a node of its own, whose server the test kills."""
    with swapping() as found:
        yield found


@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "ordered"])
def test_three_that_do_not_fit_together_take_turns_and_find_their_memory(swapped: Swapped, ordered: bool) -> None:
    vgpus = swapped.vgpus("a", "b", "c")
    programs = [swapped.program(vgpu, byte, ordered=ordered) for byte, vgpu in enumerate(vgpus, 1)]
    for _ in range(2):
        for program in programs:
            program.works()
        eventually(lambda: swapped.on_card() <= swapped.free, "what is promised to others is left to them")
    assert all(program.popen.poll() is None for program in programs)


def test_who_is_idle_leaves_for_who_wants_and_comes_back_when_it_is_touched(swapped: Swapped) -> None:
    idle, busy = swapped.vgpus("idle", "busy")
    sleeper = swapped.program(idle, 1, busy=False)
    swapped.idles(idle)
    worker = swapped.program(busy, 2)
    worker.works()
    swapped.swaps_out(idle)
    eventually(lambda: swapped.reading(idle).memory_away_bytes == OWNED, "it has left")
    assert swapped.reading(idle).memory_used_bytes >= OWNED
    sleeper.say("touch")
    assert sleeper.heard() == "0"
    worker.works()


@pytest.mark.slow
def test_no_more_leave_than_it_takes(swapped: Swapped) -> None:
    *small, large = swapped.vgpus("a", "b", "c", "large")
    for byte, vgpu in enumerate(small, 1):
        swapped.program(vgpu, byte, busy=False, owned=40 * MIB)
        swapped.idles(vgpu)
    swapped.program(large, 9)
    eventually(lambda: sum(state(swapped.node, vgpu) == "swapped" for vgpu in small) == 2, "two make room")
    swapped.programs[-1].works()
    assert [state(swapped.node, vgpu) for vgpu in small] == ["swapped", "swapped", "idle"]


@pytest.mark.slow
def test_who_cannot_leave_goes_on_and_leaves_once_it_can(swapped: Swapped) -> None:
    stuck, other = swapped.vgpus("stuck", "other")
    worker = swapped.program(stuck, 1)
    worker.says("block")
    waits = swapped.node.program(other, PROGRAM, str(OWNED), "2", "busy", "plain")
    try:
        with swapped.node.link() as link:
            kinds = (n.event.kind for n in link.watch(snapshots=False, events=True) if n.event is not None)
            assert next(kind for kind in kinds if kind in {"stuck", "swapped-out"}) == "stuck"
        worker.works()
        worker.says("let go")
        assert waits.stdout is not None
        assert waits.stdout.readline() == "started\n"
    finally:
        waits.kill()
        waits.communicate()
    worker.works()


def test_an_allocation_waits_until_others_have_made_room_for_it(swapped: Swapped) -> None:
    first, second = swapped.vgpus("first", "second")
    sleeper = swapped.program(first, 1, busy=False, owned=60 * MIB)
    swapped.idles(first)
    other = swapped.program(second, 2, busy=False, owned=60 * MIB)
    other.say("more")
    assert other.heard() == "0"
    assert state(swapped.node, first) == "swapped"
    sleeper.say("touch")
    assert sleeper.heard() == "0"


def test_what_is_promised_to_others_is_left_to_them(swapped: Swapped) -> None:
    """Promised, it is there when the call returns."""
    (vgpu,) = swapped.vgpus("a")
    sleeper = swapped.program(vgpu, 1, busy=False)
    swapped.idles(vgpu)
    greedy = swapped.node.create(sm_percent=10, memory_bytes="100M")
    assert state(swapped.node, vgpu) == "swapped"
    sleeper.say("touch")
    with swapped.node.link() as link:
        link.remove(greedy.vgpu_id)
    assert sleeper.heard() == "0"


def test_suspended_it_leaves_at_once_and_resumed_it_comes_when_it_is_needed(swapped: Swapped) -> None:
    (vgpu,) = swapped.vgpus("a")
    program = swapped.program(vgpu, 1)
    for _ in range(2):
        program.works()
        with swapped.node.link() as link:
            assert link.suspend(vgpu.vgpu_id).state == "suspended"
        assert swapped.on_card() == swapped.engine.context_bytes
        with swapped.node.link() as link:
            link.resume(vgpu.vgpu_id)
    program.works()


@pytest.mark.slow
def test_a_server_that_dies_while_it_is_being_suspended_does_not_leave_it_on_the_card(alone: Swapped) -> None:
    """Its programs leave for whoever serves then, and it is away until it is resumed."""
    vgpu, other = alone.vgpus("a", "b")
    program = alone.program(vgpu, 1)
    program.says("block")  # it cannot leave before the server dies
    asking = threading.Thread(target=lambda: alone.suspended(vgpu))
    asking.start()
    eventually(lambda: state(alone.node, vgpu) == "suspended", "it is being suspended")
    os.kill(alone.node.server_pid(), signal.SIGKILL)
    asking.join()
    program.says("let go")
    eventually(lambda: alone.reading(vgpu).memory_away_bytes == OWNED, "it leaves")
    assert state(alone.node, vgpu) == "suspended"
    alone.program(other, 2).works()
    with alone.node.link() as link:
        link.resume(vgpu.vgpu_id)
    for program in alone.programs:
        program.works()


@pytest.mark.slow
def test_nobody_leaves_for_a_program_that_was_stopped(swapped: Swapped) -> None:
    """It wants the card, and would be the next, for ever."""
    first, second = swapped.vgpus("a", "b")
    stopped, other = swapped.program(first, 1), swapped.program(second, 2)
    stopped.works()
    eventually(lambda: swapped.reading(first).memory_away_bytes == OWNED, "it has left")
    stopped.popen.send_signal(signal.SIGSTOP)
    try:
        other.works()
        for _ in range(6):
            time.sleep(0.5)  # longer than a stay together: it would have to make room
            assert state(swapped.node, second) in {"running", "waiting", "idle"}
            other.works()
    finally:
        stopped.popen.send_signal(signal.SIGCONT)
    stopped.works()
    other.works()


@pytest.mark.slow
def test_an_allocation_of_a_program_that_was_stopped_is_passed_over(swapped: Swapped) -> None:
    """There is room for it, which it does not take, and others wait."""
    first, second = swapped.vgpus("a", "b")
    worker = swapped.program(first, 1)
    asks = swapped.program(second, 2, busy=False, owned=40 * MIB)
    swapped.idles(second)
    worker.says("block")
    asks.say("more")
    eventually(lambda: state(swapped.node, second) != "idle", "it asks")
    time.sleep(0.1)  # it goes on asking
    asks.popen.send_signal(signal.SIGSTOP)
    worker.says("let go")
    eventually(lambda: swapped.reading(first).memory_away_bytes == OWNED, "it has left")
    worker.works()
    asks.popen.send_signal(signal.SIGCONT)
    assert asks.heard() == "0"
    worker.works()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["server", "broker", "both"])
def test_whoever_of_us_dies_nothing_is_lost(alone: Swapped, who: str) -> None:
    vgpus = alone.vgpus("a", "b")
    programs = [alone.program(vgpu, byte, ordered=byte == 2) for byte, vgpu in enumerate(vgpus, 1)]
    killed: set[int] = set()

    def there() -> list[int] | None:
        """Who is to die, all of them: not one that is dead, of whom the node has yet to hear. Programs go on meanwhile
        with what they had."""
        pids = [] if who == "broker" else [alone.node.server_pid()]
        if who != "server":
            readings = [alone.node.reading(vgpu.vgpu_id) for vgpu in vgpus]
            pids += [0 if reading is None else reading.broker_pid or 0 for reading in readings]
        return pids if 0 not in pids and killed.isdisjoint(pids) else None

    for _ in range(3):
        for program in programs:
            program.works()
        for pid in eventually(there, "they have successors"):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    eventually(there, "they have successors")
    for program in programs:
        program.works()
    assert all(program.popen.poll() is None for program in programs)
    # What the last server had set aside is still what is used: for all that they own, and what moves need beside it.
    assert alone.host_memory()[0] <= 3 * 128 * MIB


@pytest.mark.slow
def test_who_ends_while_it_is_away_leaves_nothing(swapped: Swapped) -> None:
    away, here = swapped.vgpus("away", "here")
    sleeper = swapped.program(away, 1, busy=False)
    worker = swapped.program(here, 2)
    worker.works()
    swapped.swaps_out(away)
    sleeper.popen.kill()
    sleeper.popen.wait()
    eventually(lambda: swapped.reading(away).memory_used_bytes == 0, "its memory is given back")
    eventually(lambda: swapped.host_memory()[1] == 0, "so is the host's")
    assert swapped.program(away, 3, busy=False).did() == 0
    worker.works()
    assert swapped.host_memory()[0]
    for program in swapped.programs:
        program.end()
    eventually(lambda: swapped.host_memory()[0] == 0, "where nobody has it pinned, others can have it")


def test_removed_while_it_is_away_its_program_is_not_left_waiting(swapped: Swapped) -> None:
    away, here = swapped.vgpus("away", "here")
    sleeper = swapped.program(away, 1, busy=False)
    swapped.program(here, 2).works()
    swapped.swaps_out(away)
    with swapped.node.link() as link:
        link.remove(away.vgpu_id, force=True)
    sleeper.say("touch")  # an error, or what it had: nobody waits for a vGPU that is no more
    sleeper.popen.communicate()


@pytest.mark.slow
def test_those_that_come_and_those_that_leave_pass_each_other() -> None:
    """Neither would fit beside the other, on the card or in the host memory."""
    owned = 90 * MIB
    with swapping("--host-memory", str(128 * MIB)) as swapped:
        vgpus = swapped.vgpus("a", "b")
        programs = [swapped.program(vgpu, byte, owned=owned) for byte, vgpu in enumerate(vgpus, 1)]
        # Until the driver shows a program's context, both have room.
        eventually(lambda: swapped.host_memory()[0], "they take turns")
        for _ in range(3):
            for program in programs:
                program.works()
        assert swapped.host_memory()[0] == 128 * MIB
        # More than card and host memory have together is refused, and soon: it would be waited for in vain.
        programs[0].say("more")
        programs[0].popen.wait()
        assert programs[0].popen.returncode
        programs[1].works()


@pytest.mark.slow
def test_without_host_memory_nobody_leaves_and_it_is_said_why() -> None:
    with swapping("--host-memory", "1") as swapped:
        here, other = swapped.vgpus("here", "other")
        sleeper = swapped.program(here, 1, busy=False)
        swapped.idles(here)
        with swapped.node.link() as link, pytest.raises(VgpuError, match="--host-memory gives more"):
            link.suspend(here.vgpu_id)
        greedy = swapped.program(other, 2, busy=False, owned=40 * MIB)
        greedy.say("more")
        assert greedy.popen.wait()  # it is refused, and not waited for
        assert sleeper.did() == 0
