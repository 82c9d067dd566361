"""An upgrade: what a node of an older release has made, and programs that it has started, under this tree's node.

The older release is a commit of this repository, which the test builds from the clone's history.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.node import eventually
from tests.upgrade.releases import THIS, Machine, Release, release_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the build takes minutes

OLDER = "ba852bca9be2e124e1a900cf960daa31276a651c"
CONFIG = """
[serve]
simulate = 1
quantum = "30ms"
"""
TIMES = ("held_ns", "busy_ns", "tokens")


@pytest.fixture(scope="module")
def older() -> Release:
    return release_of(OLDER)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine() as made:
        made.config.write_text(CONFIG)
        yield made


def create_three(machine: Machine, release: Release) -> None:
    for options in (
        "--name first --sm 30 --mem 2G --quota-request 20 --quota-limit 60",
        "--name second --sm 50 --mem 4G --mem-per-process 1G --priority low --burst --on-server-loss error",
        "--name third --sm 10 --mem 1G --oversubscribe swap --idle-suspend 1h --ttl 8h",
    ):
        machine.create(release, options)


def test_vgpus_keep_shares_quotas_names_and_used_time(machine: Machine, older: Release) -> None:
    machine.serve(older)
    create_three(machine, older)
    machine.workload(older, machine.vgpus(older)["first"]["vgpu_id"], 1).result()
    machine.vgpuctl(older, "suspend", "third")
    before = machine.vgpus(older)
    assert before["first"]["busy_ns"] > 0
    machine.stop()

    machine.serve(THIS)
    after = machine.vgpus(THIS)
    assert after.keys() == before.keys()
    for name, vgpu in before.items():
        kept = {field: vgpu[field] for field in ("vgpu_id", "owner_uid", "created_unix_s", "expires_unix_s")}
        assert kept.items() <= after[name].items()
        assert vgpu["spec"].items() <= after[name]["spec"].items()
        for field in ("guarantee_ratio", "limit_ratio", "memory_limit_bytes", *TIMES):
            assert after[name][field] == vgpu[field], (name, field)
    states = {"first": "idle", "second": "idle", "third": "suspended"}
    eventually(lambda: {name: vgpu["state"] for name, vgpu in machine.vgpus(THIS).items()} == states, "brokers started")
    [gpu] = machine.readings(THIS, "gpu", "ls")
    assert gpu["period_ns"] == 30_000_000

    machine.vgpuctl(THIS, "resume", "third")
    for vgpu in after.values():
        assert machine.workload(THIS, vgpu["vgpu_id"], 1).result()["kernels"] > 0
    assert machine.vgpus(THIS)["first"]["busy_ns"] > before["first"]["busy_ns"]


def test_a_running_program_goes_on_under_the_next_release(machine: Machine, older: Release) -> None:
    machine.serve(older)
    program = machine.workload(older, machine.create(older, "--name first --sm 30 --mem 2G"), 600)
    program.goes_on()
    machine.stop()
    machine.serve(THIS)
    program.goes_on()
    program.goes_on()
    assert machine.vgpus(THIS)["first"]["processes"] == 1


def test_a_node_that_was_killed_is_followed_by_one_of_the_next_release(machine: Machine, older: Release) -> None:
    """Its GPU Server lives on, of the older release. The next node has all that it needs from its own."""
    machine.serve(older)
    program = machine.workload(older, machine.create(older, "--name first --sm 30 --mem 2G"), 600)
    program.goes_on()
    os.kill(machine.node_pid, signal.SIGKILL)
    machine.serve(THIS)
    program.goes_on()
    program.goes_on()
    second = machine.create(THIS, "--name second --sm 30 --mem 2G")
    assert machine.workload(THIS, second, 1).result()["kernels"] > 0


def test_a_program_under_the_older_hook_runs_on_this_node(machine: Machine, older: Release) -> None:
    """As in a container whose image has the hook of the older release."""
    machine.serve(THIS)
    vgpu_id = machine.create(THIS, "--name first --sm 30 --mem 2G")
    result = machine.workload(THIS, vgpu_id, 5, LD_PRELOAD=str(older.hook)).result()
    assert result["kernels"] > 0
    assert result["total_mem"] == 2 << 30
    # That hook does not know how much its limit still allows: leases hold it to 30 %, as under its own node.
    assert machine.vgpus(THIS)["first"]["tokens"] > 20
    assert result["gpu_time_ns"] < 0.4 * 1e9 * result["seconds"]


def test_a_program_under_this_hook_runs_on_the_older_node(machine: Machine, older: Release) -> None:
    machine.serve(older)
    vgpu_id = machine.create(older, "--name first --sm 30 --mem 2G")
    result = machine.workload(older, vgpu_id, 3, LD_PRELOAD=str(THIS.hook)).result()
    assert result["kernels"] > 0
    assert result["total_mem"] == 2 << 30


def test_vgpuctl_of_this_release_asks_the_older_node(machine: Machine, older: Release) -> None:
    """Between the installation of a release and the restart of the node."""
    machine.serve(older)
    machine.create(THIS, "--name first --sm 30 --mem 2G")
    machine.vgpuctl(THIS, "set", "first", "--sm", "40")
    assert machine.vgpus(THIS)["first"]["spec"]["sm_percent"] == 40.0
    refused = machine.ask(THIS, "create", "--sm", "10", "--mem", "1G", "--lease", "exclusive")
    assert refused.returncode != 0
    assert "restart the node" in refused.stderr
    machine.vgpuctl(THIS, "rm", "first")
    assert machine.vgpus(THIS) == {}
