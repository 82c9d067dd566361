"""Usage and its reasons, with real programs on a simulated node: what is kept after ``rm``, kills and restarts."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from vgpu.api.node import Node
from vgpu.ctl.programs import attachment
from vgpu.errors import VgpuError
from vgpu.integrations.claims import Claim
from vgpu.protocol.messages import VgpuStatus
from vgpu.protocol.usage import UsageRow, UserUsage, WhyReport
from vgpu.spec import VgpuSpec
from vgpu.usage.why import Cause

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
WORK = ("--mode", "compute", "--seconds", "600")
ROUNDED_S = 0.01
"""An answer has millionths of an hour."""


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedNode]:
    with SimulatedNode(2) as node:
        yield node


@pytest.fixture
def node(shared: SimulatedNode) -> Iterator[SimulatedNode]:
    yield shared
    shared.clear()


def work(node: SimulatedNode, vgpu: VgpuStatus, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vgpu.workload", *(options or WORK)]
    return node.popen(command, env=attachment([vgpu]).environment(node.environment), stdout=subprocess.DEVNULL)


def rows(node: SimulatedNode, since_unix_s: float = 0.0) -> dict[str, UsageRow]:
    with node.link() as link:
        return {row.vgpu_id: row for row in link.usage(by="vgpu", since_unix_s=since_unix_s).rows}


def busy_s(node: SimulatedNode, vgpu: VgpuStatus) -> float:
    now = node.reading(vgpu.vgpu_id)
    return 0.0 if now is None else now.busy_ns / 1e9


def why(node: SimulatedNode, vgpu: VgpuStatus, cause: Cause) -> WhyReport:
    """The answer once its first finding is about ``cause``."""
    last: list[WhyReport] = []

    def found() -> bool:
        with node.link() as link:
            last.append(link.why(vgpu.vgpu_id))
        return last[-1].findings[0].cause == cause

    try:
        eventually(found, f"a finding about {cause}", 2 * PATIENCE_S)
    except AssertionError:
        pytest.fail(f"{cause} was not found, but {last[-1]}")
    return last[-1]


# --- usage


def test_what_a_program_used_is_kept_to_the_nanosecond_after_its_vgpu_is_gone(node: SimulatedNode) -> None:
    with node.link() as link:
        vgpu = link.create(VgpuSpec.parse(sm_percent=30, memory_bytes="2G", name="used"), claim=Claim("api", "one"))
        program = work(node, vgpu)
        eventually(lambda: busy_s(node, vgpu) > 2, "two seconds of work")
        program.kill()
        program.wait()
        last = link.remove(vgpu.vgpu_id, force=True)
    row = rows(node)[vgpu.vgpu_id]
    assert (row.name, row.claim, row.owner_uid) == ("used", "api/one", os.getuid())
    assert abs(row.used_gpu_hours * 3600 - last.busy_ns / 1e9) < ROUNDED_S
    assert abs(row.promised_gpu_hours - 0.3 * row.measured_hours) < 1e-5
    assert abs(row.memory_promised_gib_hours - 2 * row.measured_hours) < 1e-4
    assert row.promised_gpu_hours - row.used_gpu_hours <= row.wasted_gpu_hours + 2 * ROUNDED_S / 3600
    assert row.wasted_gpu_hours <= row.promised_gpu_hours


def test_a_suspended_vgpu_keeps_its_promise_and_a_migrated_one_its_row(node: SimulatedNode) -> None:
    vgpu = node.create(gpu="0", sm_percent=20, memory_bytes="1G")
    program = work(node, vgpu)
    eventually(lambda: busy_s(node, vgpu) > 1, "a second of work")
    with node.link() as link:
        link.migrate(vgpu.vgpu_id, "1")
        eventually(lambda: busy_s(node, vgpu) > 2, "another second of work")
        link.suspend(vgpu.vgpu_id)
        before = rows(node)[vgpu.vgpu_id]
        later = eventually(
            lambda: found if (found := rows(node)[vgpu.vgpu_id]).measured_hours > before.measured_hours else None,
            "the next sample",
        )
        added = later.promised_gpu_hours - before.promised_gpu_hours
        assert abs(added - 0.2 * (later.measured_hours - before.measured_hours)) < 1e-5
        assert abs((later.wasted_gpu_hours - before.wasted_gpu_hours) - added) < 1e-5
        assert why(node, vgpu, Cause.SUSPENDED).findings[0].command == f"vgpuctl resume {vgpu.vgpu_id}"
        link.resume(vgpu.vgpu_id)
        program.kill()
        program.wait()
        last = link.remove(vgpu.vgpu_id, force=True)
    assert abs(rows(node)[vgpu.vgpu_id].used_gpu_hours * 3600 - last.busy_ns / 1e9) < ROUNDED_S


def test_kills_of_servers_and_nodes_count_nothing_twice_and_counters_never_go_back() -> None:
    with SimulatedNode(1) as node:
        vgpu = node.create(sm_percent=40, memory_bytes="1G", name="long")
        work(node, vgpu)
        seen: list[int] = []

        def counter() -> int:
            """What a scrape finds; it may be 0 at first, and never falls."""
            with node.link() as link:
                users: tuple[UserUsage, ...] = link.meter().users
            seen.append(sum(user.used_ns for user in users))
            assert seen == sorted(seen)
            return seen[-1]

        eventually(counter, "the first counter")
        for number in range(3):
            reached = busy_s(node, vgpu)
            if number == 1:
                node.kill_node()
                node.start()
            else:
                os.kill(node.server_pid(), signal.SIGKILL)
            eventually(lambda reached=reached: busy_s(node, vgpu) > reached + 2, "work goes on")  # type: ignore[misc]
            counter()
        node.supervisor.send_signal(signal.SIGTERM)
        node.supervisor.wait(PATIENCE_S)
        node.start()
        row = rows(node)[vgpu.vgpu_id]
        assert 0 < row.used_gpu_hours * 3600 <= busy_s(node, vgpu) + 3
        assert counter() > 0
        assert (node.paths.state / "node.db").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_costs_the_history_and_no_vgpu() -> None:
    with SimulatedNode(1) as node:
        vgpu = node.create(sm_percent=40, memory_bytes="1G")
        eventually(lambda: rows(node).get(vgpu.vgpu_id), "its row")
        node.supervisor.send_signal(signal.SIGTERM)
        node.supervisor.wait(PATIENCE_S)
        (node.paths.state / "node.db").write_bytes(b"no database" * 1000)
        node.start()
        assert node.reading(vgpu.vgpu_id) is not None
        with node.link() as link:
            [event] = link.events(kinds=("history-lost",))
        assert "node.db.damaged-" in event.text
        assert eventually(lambda: rows(node).get(vgpu.vgpu_id), "its new row").measured_hours < 0.1


def test_the_command_prints_tables_json_and_csv(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G", name="printed")
    eventually(lambda: rows(node).get(vgpu.vgpu_id), "its row")

    def printed(*options: str) -> str:
        command = [sys.executable, "-m", "vgpu.ctl", "usage", *options]
        return subprocess.run(command, env=node.environment, check=True, capture_output=True, text=True).stdout

    assert "PROMISED GPU-H" in printed().splitlines()[0]
    assert any("printed" in line for line in printed("--by", "vgpu", "--since", "1h").splitlines())
    assert {row["vgpu_id"] for row in json.loads(printed("--by", "vgpu", "-o", "json"))["rows"]} >= {vgpu.vgpu_id}
    asked = Node(node.paths.control_socket).usage("vgpu")
    assert {row["vgpu_id"] for row in asked} >= {vgpu.vgpu_id}
    head, *lines = printed("--by", "vgpu", "-o", "csv").splitlines()
    assert head.startswith("since,until,user,uid,vgpu,name,claim,measured_hours,promised_gpu_hours")
    assert all(line.count(",") == head.count(",") for line in lines)
    refused = subprocess.run(
        [sys.executable, "-m", "vgpu.ctl", "usage", "--since", "1h", "--until", "2h"],
        env=node.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "--until is not after --since" in refused.stderr


def test_usage_is_answered_while_another_process_holds_the_database(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=10, memory_bytes="1G")
    eventually(lambda: rows(node).get(vgpu.vgpu_id), "its row")
    with closing(sqlite3.connect(node.paths.state / "node.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert vgpu.vgpu_id in rows(node)
        other.execute("ROLLBACK")


# --- why


def test_at_its_limit_and_there_is_room_here_or_on_another_gpu(node: SimulatedNode) -> None:
    vgpu = node.create(gpu="0", sm_percent=30, memory_bytes="1G", name="web")
    work(node, vgpu)
    here = why(node, vgpu, Cause.AT_LIMIT)
    assert "70 % of GPU 0 are free" in here.findings[0].text
    assert here.findings[0].command == "vgpuctl set web --sm 45"
    node.create(gpu="0", sm_percent=70, memory_bytes="1G")
    there = why(node, vgpu, Cause.AT_LIMIT_HERE)
    assert "GPU 0 has no room: 100 % of GPU 1 are free" in there.findings[0].text
    assert there.findings[0].command == "vgpuctl migrate web --gpu 1 && vgpuctl set web --sm 45"


def test_no_program_then_one_whose_allocations_are_refused(node: SimulatedNode) -> None:
    vgpu = node.create(gpu="0", sm_percent=30, memory_bytes="1G", name="small")
    assert why(node, vgpu, Cause.NO_PROGRAM).findings[0].command == "vgpuctl exec small COMMAND"
    work(node, vgpu, "--mode", "alloc", "--bytes", str(4 << 30), "--seconds", "600")
    full = why(node, vgpu, Cause.MEMORY_FULL).findings[0]
    assert full.command.startswith("vgpuctl set small --mem ")


def test_less_than_promised_because_of_overcommit(node: SimulatedNode) -> None:
    vgpus = [node.create(gpu="0", sm_percent=100, memory_bytes="1G", overcommit=True) for _ in range(2)]
    for vgpu in vgpus:
        work(node, vgpu)
    found = why(node, vgpus[0], Cause.OVERCOMMIT).findings[0]
    assert "GPU 0 is overcommitted (200 % in sum)" in found.text
    assert found.command == f"vgpuctl migrate {vgpus[0].vgpu_id} --gpu 1"


def test_a_program_that_asks_too_little_is_host_bound(node: SimulatedNode) -> None:
    vgpu = node.create(gpu="0", sm_percent=80, memory_bytes="1G", name="slow")
    work(node, vgpu, *WORK, "--host-ms", "40")
    found = why(node, vgpu, Cause.HOST_BOUND)
    assert found.figures["used_percent"] < 40
    assert found.findings[0].command.startswith("vgpuctl set slow --sm ")
    with node.link() as link, pytest.raises(VgpuError, match="there is no vGPU 'nothing'"):
        link.why("nothing")
