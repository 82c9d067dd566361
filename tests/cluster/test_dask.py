"""Dask's workers in vGPUs, by the preload ``vgpu.dask``: with Dask itself, on a node of simulated GPUs.

Tests with workers are skipped where Dask is not installed. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import engines
from tests.cluster.ray_probe import Found, find
from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import VgpuError

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(900)  # on a busy machine a worker of Dask takes half a minute to start


@pytest.fixture(scope="module")
def dask() -> Any:
    if find_spec("click") is None or find_spec("distributed") is None:
        why = "dask is not installed: pip install --group engines"
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    import vgpu.dask

    return vgpu.dask


# --- without workers


def test_options_are_words_of_the_preload(dask: Any) -> None:
    given = dask.options(sm=30, mem="8G", burst=True, wait=5)
    assert given["preload"] == given["preload_nanny"] == ["vgpu.dask"]
    parsed = dask.dask_setup.make_context("dask_setup", given["preload_argv"], resilient_parsing=True).params
    said = {name: value for name, value in parsed.items() if value is not None}
    assert said == {"sm": "30", "mem": "8G", "burst": True, "wait": 5.0, "gpu": "auto"}


def test_what_cannot_be_is_refused_before_dask_has_it(dask: Any) -> None:
    with pytest.raises(VgpuError):
        dask.options(sm=130)


@pytest.mark.parametrize("words", [("--sm", "130"), ("--mem", "8G"), ("--sm", "30", "--priority", "best")])
def test_the_command_refuses_it_before_it_starts_workers(dask: Any, words: tuple[str, ...]) -> None:
    import click

    with pytest.raises(click.ClickException, match=r"--sm|--priority"):
        dask.dask_setup.make_context("dask_setup", list(words))


def test_dask_is_not_imported(dask: Any) -> None:
    code = "import sys, vgpu.dask; vgpu.dask.options(sm=30); sys.exit('distributed' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


# --- with workers


class Cluster:
    """A scheduler, and what ``dask worker`` starts."""

    def __init__(self, node: SimulatedNode, folder: Path) -> None:
        self._node = node
        self._folder = folder
        self._environment = node.environment | {"DASK_DISTRIBUTED__WORKER__DAEMON": "True"}
        file = folder / "scheduler.json"
        self._dask("scheduler", "--no-dashboard", "--port", "0", "--scheduler-file", str(file))
        eventually(lambda: file.exists() and file.read_text(), "the scheduler runs")
        self.address = json.loads(file.read_text())["address"]

    def _dask(self, *words: str) -> subprocess.Popen[str]:
        with (self._folder / f"{words[0]}.log").open("a") as log:
            command = [sys.executable, "-m", "dask", *words]
            return self._node.popen(command, env=self._environment, stdout=log, stderr=log)

    def worker(self, *words: str) -> subprocess.Popen[str]:
        threads = ("--nthreads", "1", "--no-dashboard", "--local-directory", str(self._folder))
        return self._dask("worker", self.address, *threads, *words)

    def log(self) -> str:
        return (self._folder / "worker.log").read_text()

    @contextmanager
    def client(self, workers: int) -> Iterator[Any]:
        from distributed import Client

        with Client(self.address) as client:
            client.wait_for_workers(workers, timeout=240)
            yield client


@pytest.fixture
def cluster(dask: Any, node: SimulatedNode, tmp_path: Path) -> Cluster:
    return Cluster(node, tmp_path)


def vgpus(node: SimulatedNode) -> set[str]:
    with node.link() as link:
        return {vgpu.vgpu_id for vgpu in link.list()}


def is_empty(node: SimulatedNode) -> bool:
    return not vgpus(node)


SIZE = ("--preload", "vgpu.dask", "--sm", "30", "--mem", "8G")


@slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_worker_has_a_vgpu_that_goes_with_it(cluster: Cluster, node: SimulatedNode) -> None:
    started = cluster.worker("--nworkers", "2", *SIZE)
    with cluster.client(2) as client:
        found: list[Found] = list(client.run(find).values())
        assert [(one.init, one.devices, one.total_mib) for one in found] == [(0, 1, 8192)] * 2
        assert {one.vgpu_ids for one in found} == vgpus(node)
        assert len(vgpus(node)) == 2
        started.send_signal(signal.SIGTERM)
        eventually(lambda: is_empty(node), "the vGPUs go with the workers")


@slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_worker_is_started_again_in_another_vgpu(cluster: Cluster, node: SimulatedNode) -> None:
    cluster.worker(*SIZE)
    with cluster.client(1) as client:
        (first,) = client.run(find).values()
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: vgpus(node) not in ({first.vgpu_ids}, set()), "the nanny starts another worker")
        client.wait_for_workers(1, timeout=240)
        assert client.submit(find, pure=False).result(timeout=240).vgpu_ids in vgpus(node) - {first.vgpu_ids}


@slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_nanny_leaves_nothing(cluster: Cluster, node: SimulatedNode) -> None:
    started = cluster.worker(*SIZE)
    with cluster.client(1):
        assert not is_empty(node)
        started.kill()
        eventually(lambda: is_empty(node), "the worker ends with its nanny, and the vGPU with the worker")


@slow
def test_a_worker_without_room_ends_with_the_reason(cluster: Cluster, node: SimulatedNode) -> None:
    for gpu in "01":
        node.create(gpu, sm_percent=80, memory_bytes="1G")
    refused = cluster.worker(*SIZE, "--wait", "1")
    assert refused.wait(240) != 0
    assert "vgpu: none of 2 GPUs; GPU 0, the emptiest: 30% of the GPU's time asked for, 20% is left" in cluster.log()


@slow
def test_a_worker_without_the_hook_runs_no_task(cluster: Cluster, node: SimulatedNode) -> None:
    refused = cluster.worker("--no-nanny", *SIZE)
    assert refused.wait(240) != 0
    assert "this worker was started without the hook of st-vgpu" in cluster.log()
    assert is_empty(node)


@slow
def test_workers_of_a_local_cluster_have_vgpus(dask: Any, node: SimulatedNode) -> None:
    """In a program of its own, because the preload changes the environment of the program."""
    code = (
        "import vgpu.dask\n"
        "from distributed import Client, LocalCluster\n"
        "from tests.cluster.ray_probe import find\n"
        "if __name__ == '__main__':\n"
        "    asked = vgpu.dask.options(sm=20, mem='4G')\n"
        "    with LocalCluster(n_workers=2, dashboard_address=None, **asked) as cluster, Client(cluster) as client:\n"
        "        print(sorted(found.total_mib for found in client.run(find).values()))\n"
    )
    script = node.directory / "local.py"
    script.write_text(code)
    pipe = subprocess.PIPE
    out, error = node.popen([sys.executable, str(script)], stdout=pipe, stderr=pipe).communicate(timeout=240)
    assert out.strip() == "[4096, 4096]", error
    eventually(lambda: is_empty(node), "the vGPUs go with the cluster")
