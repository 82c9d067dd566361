"""What a context takes is charged before whatever its program allocates next. Real programs, simulated GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import Spoken
from tests.tiers import slow
from vgpu.protocol.messages import VgpuStatus
from vgpu.units import MIB

ONCE = {"plain": "create", "pitched": "retain", "managed": "runtime", "ordered": "create", "physical": "runtime"}
"""Each kind of memory, and the way its context comes that is tried in every run."""
LIMIT = 1024 * MIB
CONTEXT = 480 * MIB  # of the simulated driver

PROGRAM = """
import ctypes, subprocess, sys, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from tests.hook.app import App, create_physical
library = ctypes.CDLL("libcuda.so.1")
app = App.__new__(App)
app.library = library
app.device = c_int(0)
MIB = 1 << 20

def create():
    assert library.cuCtxCreate_v2(byref(c_void_p()), 0, 0) == 0

def retain():
    context = c_void_p()
    assert library.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
    assert library.cuCtxSetCurrent(context) == 0

def runtime(device=0):  # as cudart does: the hook does not see it
    mapped = next(line.split() for line in open("/proc/self/maps") if "libcuda.so" in line)
    listed = subprocess.run(["nm", "-D", mapped[5]], capture_output=True, text=True, check=True).stdout
    offset = next(line.split()[0] for line in listed.splitlines() if line.endswith(" cuDevicePrimaryCtxRetain"))
    unseen = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)(int(mapped[0].split("-")[0], 16) + int(offset, 16))
    context = c_void_p()
    assert unseen(ctypes.addressof(context), device) == 0
    assert library.cuCtxSetCurrent(context) == 0

def plain(size):
    return library.cuMemAlloc_v2(byref(c_uint64()), c_size_t(size))

def pitched(size):
    pitch = c_size_t()
    return library.cuMemAllocPitch_v2(byref(c_uint64()), byref(pitch), c_size_t(1 << 20), c_size_t(size >> 20), 16)

def managed(size):
    return library.cuMemAllocManaged(byref(c_uint64()), c_size_t(size), 1)

def ordered(size):
    return library.cuMemAllocAsync(byref(c_uint64()), c_size_t(size), None)

def physical(size, device=0):
    return create_physical(app, size, device)[0]

def fill(allocate=plain, size=100 * MIB):
    "How many there was room for."
    count = 0
    while allocate(size) == 0:
        count += 1
    return count

def free():
    free, total = c_size_t(), c_size_t()
    assert library.cuMemGetInfo_v2(byref(free), byref(total)) == 0
    return free.value

def lasts(allocate=plain):
    began = time.monotonic()
    allocate(2 * MIB)
    return time.monotonic() - began

assert library.cuInit(0) == 0
print("started", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@contextmanager
def programs(node: SimulatedNode, vgpu: VgpuStatus, count: int = 1) -> Iterator[list[Spoken]]:
    started = [Spoken(node, vgpu, PROGRAM) for _ in range(count)]
    try:
        yield started
    finally:
        for program in started:
            program.end()


def said(program: Spoken, line: str) -> str:
    program.say(line)
    return program.heard()


def used(node: SimulatedNode, vgpu: VgpuStatus, contexts: int) -> int:
    """Once all of these are in the figure."""

    def seen() -> VgpuStatus | None:
        now = node.reading(vgpu.vgpu_id)
        return now if now is not None and now.memory_implicit_bytes >= contexts * CONTEXT else None

    return eventually(seen, "the contexts are seen").memory_used_bytes


@pytest.mark.parametrize(
    ("comes", "kind"),
    [
        pytest.param(comes, kind, marks=[pytest.mark.slow] * (comes != ONCE[kind]))
        for kind in ONCE
        for comes in ("create", "retain", "runtime")
    ],
)
def test_the_first_allocation_finds_the_context_charged(node: SimulatedNode, comes: str, kind: str) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1G")
    with programs(node, vgpu) as (program,):
        assert int(said(program, f"{comes}() or fill({kind})")) == 5
        if kind != "managed":  # which is not on the card, so that soon the driver shows nothing beyond the ledger
            assert used(node, vgpu, 1) <= LIMIT


@pytest.mark.parametrize("comes", ["create", "runtime"])
def test_what_is_called_free_at_once_is(node: SimulatedNode, comes: str) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1G")
    with programs(node, vgpu) as (program,):
        assert int(said(program, f"{comes}() or free()")) == LIMIT - CONTEXT


def test_a_plain_allocation_that_can_be_swapped_finds_it_charged(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1G", oversubscribe="swap")
    with programs(node, vgpu) as (program,):
        assert int(said(program, "create() or fill()")) == 5
        assert used(node, vgpu, 1) <= LIMIT


def test_processes_find_each_others_contexts_charged(node: SimulatedNode) -> None:
    """Both allocate at once, the moment that both have one."""
    vgpu = node.create(sm_percent=50, memory_bytes="1500M")
    with programs(node, vgpu, 2) as both:
        for program in both:
            program.say("create()")
        for program in both:
            assert program.heard() == "None"
        for program in both:
            program.say("fill()")
        assert sum(int(program.heard()) for program in both) == 5
        assert used(node, vgpu, 2) <= 1500 * MIB


def test_a_context_of_another_process_is_charged_although_that_one_allocates_nothing(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1500M")
    with programs(node, vgpu, 2) as (first, second):
        said(first, "create() or plain(2 * MIB)")
        said(second, "create()")
        assert int(said(first, "fill()")) == 5
        assert used(node, vgpu, 2) <= 1500 * MIB


@pytest.mark.parametrize("comes", [*slow("create", "retain"), "runtime"])
def test_a_second_context_later_is_charged_before_the_next_allocation(node: SimulatedNode, comes: str) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1500M")
    with programs(node, vgpu) as (program,):
        said(program, "create() or plain(2 * MIB)")
        time.sleep(4.5)  # NVML is read once a second by now
        assert int(said(program, f"{comes}() or fill()")) == 5
        assert used(node, vgpu, 2) <= 1500 * MIB


@pytest.mark.slow
def test_a_primary_context_after_another_that_was_reset_is_charged(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="1G")
    with programs(node, vgpu) as (program,):
        said(program, "runtime() or plain(2 * MIB)")
        said(program, "library.cuDevicePrimaryCtxReset_v2(0)")
        time.sleep(2.5)
        assert int(said(program, "runtime() or fill()")) == 5


@pytest.mark.slow
def test_a_context_on_another_gpu_is_not_taken_for_one_here() -> None:
    with SimulatedNode(2) as two:
        vgpus = [two.create(gpu, sm_percent=50, memory_bytes="1G") for gpu in ("0", "1")]
        program = Spoken(two, vgpus, PROGRAM)
        try:
            said(program, "runtime() or plain(2 * MIB)")
            said(program, "physical(2 * MIB, 1)")  # has the hook look for contexts there, whatever comes of it
            time.sleep(4.5)
            assert int(said(program, "runtime(1) or fill()")) == 5
        finally:
            program.end()


@pytest.mark.parametrize("stuck", ["server", *slow("broker")])
def test_while_nobody_can_look_each_context_is_waited_for_once_and_not_for_long(stuck: str) -> None:
    with SimulatedNode() as node:
        vgpu = node.create(sm_percent=50, memory_bytes="2G")
        pid = node.server_pid() if stuck == "server" else vgpu.broker_pid
        assert pid
        with programs(node, vgpu) as (program,):
            said(program, "create() or plain(2 * MIB)")
            os.kill(pid, signal.SIGSTOP)
            try:
                said(program, "create() or lasts()")  # once, or not at all, if a regular reading has just come
                assert float(said(program, "sum(lasts() for _ in range(200))")) < 60, "no more than that"
            finally:
                os.kill(pid, signal.SIGCONT)
            said(program, "create() or lasts()")
            assert used(node, vgpu, 3) <= 2048 * MIB


@pytest.mark.parametrize(
    "victims",
    [*slow("server", "broker"), "server broker"],
)
def test_whoever_was_killed_the_next_one_charges_what_came_to_be_meanwhile(victims: str) -> None:
    with SimulatedNode() as node:
        vgpu = node.create(sm_percent=50, memory_bytes="1500M")
        pids = {"server": node.server_pid(), "broker": vgpu.broker_pid}
        with programs(node, vgpu) as (program,):
            said(program, "create() or plain(2 * MIB)")
            for victim in victims.split():
                os.kill(pids[victim] or 0, signal.SIGKILL)
            said(program, "create() or lasts()")
            eventually(lambda: int(said(program, "free()")) <= 540 * MIB, "the hook has the page that knows of both")
            assert int(said(program, "fill()")) == 5
            assert used(node, vgpu, 2) <= 1500 * MIB


def test_in_a_vgpu_that_was_removed_nobody_waits(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="2G")
    with programs(node, vgpu) as (program,):
        said(program, "create() or plain(2 * MIB)")
        with node.link() as link:
            link.remove(vgpu.vgpu_id, force=True)
        assert float(said(program, "sum(create() or lasts() for _ in range(20))")) < 10, (
            "half a second for each would be"
        )
