"""A recording of real servers, brokers and hooks on a simulated GPU: what is in it, and who is forgotten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus
from vgpu.protocol.trace import TraceChunk
from vgpu.trace.chrome import chrome_trace
from vgpu.trace.recording import Recording
from vgpu.trace.spans import activity, busy_of, hand_overs

SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode(1) as running:
        yield running


@contextmanager
def pair(node: SimulatedNode) -> Iterator[tuple[VgpuStatus, VgpuStatus]]:
    """Two vGPUs of 30 and 70 %, each with a program that always has work."""
    made = tuple(node.create(sm_percent=percent, memory_bytes="4G", name=f"p{percent}") for percent in (30, 70))
    command = [sys.executable, "-m", "vgpu.workload", "--seconds", "60"]
    with ExitStack() as owned:
        for vgpu in made:
            environment = attachment([vgpu]).environment(node.environment)
            program = node.popen(command, env=environment, stdout=subprocess.DEVNULL)
            owned.callback(program.wait)
            owned.callback(program.kill)

        def both_take_turns() -> bool:
            readings = [node.reading(vgpu.vgpu_id) for vgpu in made]
            return all(reading is not None and reading.tokens > 3 for reading in readings)

        eventually(both_take_turns, "both programs take turns")
        yield made[0], made[1]
    with node.link() as link:
        for vgpu in made:
            link.remove(vgpu.vgpu_id, force=True)


def record(node: SimulatedNode, duration_ns: int) -> Recording:
    made: Recording | None = None
    with node.link() as link:
        for chunk in link.trace("0", duration_ns):
            if made is None:
                made = Recording.beginning_with(chunk)
            else:
                made.add(chunk)
    assert made is not None
    return made


def test_a_pair_of_30_and_70_percent(node: SimulatedNode) -> None:
    with pair(node) as (first, second):
        small, large = first.vgpu_id, second.vgpu_id

        def in_step() -> Recording | None:
            """Of two seconds in which this machine kept neither of them from asking for its share."""
            made = record(node, 2 * SECOND_NS)
            held = {vgpu_id: made.held_ratio(vgpu_id) for vgpu_id in (small, large)}
            working_ns = sum(span.end_ns - span.begin_ns for span in activity(made))
            shares = abs(held[small] / sum(held.values()) - 0.3) < 0.08
            return made if shares and working_ns > 0.5 * made.length_ns else None

        made = eventually(in_step, "both get their shares")
    assert (made.whole, made.lost, made.gpu.simulated) == (True, 0, True)
    assert made.length_ns == 2 * SECOND_NS
    assert [made.label(vgpu_id) for vgpu_id in made.vgpus] == ["p30", "p70"]
    held = {vgpu_id: made.held_ratio(vgpu_id) for vgpu_id in (small, large)}
    # What the hooks noted lies in their leases, of which it fills the most.
    for vgpu_id, intervals in busy_of(made).items():
        assert held[vgpu_id] * made.length_ns >= 0.9 * sum(end - begin for begin, end in intervals) > 0
    assert {(one.giver, one.taker) for one in hand_overs(made)} == {(small, large), (large, small)}
    # In temporal mode one lease follows another: they overlap by their tails, and by what is to drain in 0.15 ms.
    inorder = sorted(made.leases, key=lambda lease: lease.go_ns)
    for before, after in pairwise(inorder):
        assert before.end_ns is not None or before.drained_ns is not None
        over_ns = min(at for at in (before.end_ns, before.drained_ns) if at is not None)
        assert after.go_ns >= over_ns - 1_500_000
    charged = {lease.epoch: lease.charged_ns for lease in made.leases if lease.drained_ns is not None}
    assert sum(map(bool, charged.values())) > 0.8 * len(charged), "but those that a program slept through"
    assert made.waits
    assert made.launches
    assert {level.name for level in made.levels} == {"lag", "backlog"}
    assert {drain.vgpu_id for drain in made.drains} == {small, large}
    names = {event["name"] for event in chrome_trace([made])["traceEvents"]}
    assert {"lease", "wait", "tail", "busy", "lag, ms", "p30 → p70", "p70 → p30"} <= names


def test_who_is_gone_is_forgotten_at_once(node: SimulatedNode) -> None:
    """As many as there may be are killed; as many others have their place."""

    def begins(owned: ExitStack) -> bool:
        """On a link of its own, which stays open if it does."""
        with ExitStack() as trial:
            link = trial.enter_context(node.link())
            begun = _first(link.trace("0", 300 * SECOND_NS)) is not None
            owned.push(trial.pop_all() if begun else ExitStack())
        return begun

    for _ in range(2):
        with ExitStack() as owned:
            for _ in range(4):
                eventually(lambda links=owned: begins(links), "a recording begins")  # type: ignore[misc]
            with node.link() as late, pytest.raises(VgpuError, match="recorded by 4 others") as refused:
                next(late.trace("0", SECOND_NS))
            assert refused.value.code is ErrorCode.UNAVAILABLE

        def has_room() -> bool:
            with node.link() as link:
                return _first(link.trace("0", SECOND_NS)) is not None

        eventually(has_room, "the place of who has gone is free")


def _first(chunks: Iterator[TraceChunk]) -> TraceChunk | None:
    """None: refused for now."""
    with suppress(VgpuError):
        return next(chunks)
    return None


def test_a_process_whose_hook_notes_nothing_is_there_by_its_leases(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    child = node.attach(vgpu.vgpu_id)
    eventually(lambda: child.epochs, "its first lease")
    quiet = eventually(lambda: (found := record(node, SECOND_NS // 10)).leases and found, "a recording with a lease")
    assert not quiet.busy
    child.kill()
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)


def test_a_gpu_that_is_not_there(node: SimulatedNode) -> None:
    with node.link() as link, pytest.raises(VgpuError) as refused:
        next(link.trace("3", SECOND_NS))
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_a_watch_of_a_vgpu_that_is_not_there_says_so(node: SimulatedNode) -> None:
    with node.link() as link, pytest.raises(VgpuError) as refused:
        next(link.watch(vgpus=("vgpu-ffffffff",)))
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_a_server_that_dies_leaves_what_was_recorded(node: SimulatedNode) -> None:
    """And the next one begins without a recording."""
    told: list[TraceChunk] = []
    with node.link() as link:
        chunks = link.trace("0", 300 * SECOND_NS)
        told.append(next(chunks))
        os.kill(node.server_pid(), signal.SIGKILL)
        with pytest.raises(VgpuError, match="closed the link"):
            told.extend(chunks)
    assert not any(chunk.done for chunk in told)
    eventually(lambda: _serves(node), "another server serves")
    assert record(node, SECOND_NS // 10).whole


def _serves(node: SimulatedNode) -> bool:
    with node.link() as link:
        return link.gpus()[0].state == "serving"


@pytest.mark.slow
def test_the_command_by_its_own(node: SimulatedNode, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vgpu.ctl", "trace", "--seconds", "0.3", "-o", str(tmp_path / "t.json")]
    done = subprocess.run(
        [*command, "--png", str(tmp_path / "t.png")], env=node.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["gpus"][0]["simulated"]
    assert (tmp_path / "t.png").stat().st_size > 1000
