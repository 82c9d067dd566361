"""Ray's tasks and actors in vGPUs: on a cluster of two nodes, with simulated GPUs; nothing is left after it.

Tests with a cluster are skipped where Ray is not installed. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vgpu
from client_hook import interpreter
from tests.cluster import engines
from tests.cluster.ray_cluster import RayCluster, why_no_ray
from tests.cluster.ray_probe import Actor, Found, find
from tests.integration.node import SimulatedNode, eventually
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import late
from vgpu.ray import room, start
from vgpu.ray.worker import Share
from vgpu.spec import VgpuSpec

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(900)  # on a busy machine Ray alone takes a minute to start


# --- pure


def test_a_task_asks_for_the_size_of_its_vgpu() -> None:
    asked = vgpu.ray.vgpu(sm=30, mem="8G")
    assert asked["resources"] == {"vgpu_sm": 30, "vgpu_mem_mib": 8192}
    environment = asked["runtime_env"]
    assert environment["py_executable"] == "vgpuctl ray-worker --sm 30 --mem 8G -- python"
    assert environment["env_vars"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["env_vars"]["PATH"] == f"{Path(sys.executable).parent}:${{PATH}}"


def test_a_part_of_a_gpu_is_what_ray_assigns() -> None:
    asked = vgpu.ray.gpus(0.3, burst=True)
    assert asked["num_gpus"] == 0.3
    assert asked["runtime_env"]["py_executable"] == "vgpuctl ray-worker --num-gpus --burst -- python"


def test_times_are_typed_with_their_unit() -> None:
    asked = vgpu.ray.fractions(ttl="8h", idle_suspend=10**9)
    assert asked["py_executable"] == "vgpuctl ray-worker --num-gpus --ttl 8h --idle-suspend 1000000000ns -- python"


def test_a_gpu_that_is_named_is_a_resource_of_ray() -> None:
    asked = vgpu.ray.vgpu(sm=30, gpu=1, resources={"mine": 1})
    assert asked["resources"] == {"vgpu_sm": 30, "vgpu_sm_1": 30, "mine": 1}
    assert "--gpu 1 " in asked["runtime_env"]["py_executable"]


@given(st.floats(1, 100), st.integers(1 << 26, 1 << 40))
def test_ray_counts_at_least_what_the_vgpu_has(sm: float, memory: int) -> None:
    """Ray takes whole numbers alone above 1."""
    resources = vgpu.ray.vgpu(sm=sm, mem=memory)["resources"]
    assert sm <= resources["vgpu_sm"] < sm + 1
    assert 0 <= (resources["vgpu_mem_mib"] << 20) - memory < 1 << 20
    assert all(isinstance(amount, int) for amount in resources.values())


def test_a_runtime_env_is_joined() -> None:
    given = {"working_dir": "/src", "env_vars": {"A": "1", "PATH": "/mine"}}
    joined = vgpu.ray.fractions(given)
    assert joined["working_dir"] == "/src"
    assert joined["env_vars"] == {"A": "1", "PATH": "/mine", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    assert given == {"working_dir": "/src", "env_vars": {"A": "1", "PATH": "/mine"}}


@pytest.mark.parametrize(
    "ask",
    [
        lambda: vgpu.ray.vgpu(sm=130),
        lambda: vgpu.ray.vgpu(mem="8G"),
        lambda: vgpu.ray.gpus(0),
        lambda: vgpu.ray.gpus(0.3, priority="best"),
        lambda: vgpu.ray.fractions({"py_executable": "uv run"}),
        lambda: vgpu.ray.vgpu(sm=30, runtime_env={"nsight": "default"}),
    ],
)
def test_what_cannot_be_is_refused_before_ray_has_it(ask: Callable[[], object]) -> None:
    with pytest.raises(VgpuError):
        ask()


def test_ray_is_not_imported() -> None:
    code = "import sys, vgpu; vgpu.ray.vgpu(sm=30); vgpu.ray.gpus(0.5); sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


WORKER = ("python", "-O", "/ray/default_worker.py", "--worker-id=ab12", "--node-ip-address=::1")


def test_our_part_of_the_worker_stands_before_rays() -> None:
    assert start.inside(WORKER, {"refusal": "full"}) == [
        *("python", "-O", "-m", "vgpu.ray.worker", '{"refusal": "full"}'),
        *WORKER[2:],
    ]
    assert room.worker_id(WORKER) == "ab12"
    assert room.worker_id(["python", "train.py"]) == ""
    with pytest.raises(VgpuError, match="no worker of Ray"):
        start.inside(["python", "-m", "train"], {})


class Full:
    """``make`` for ``patiently``: no room the first ``times`` times."""

    def __init__(self, times: int, code: ErrorCode = ErrorCode.NO_ROOM) -> None:
        self.times, self.code, self.asked = times, code, 0

    def __call__(self) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise VgpuError(self.code, "nothing is left")
        return "made"


def test_room_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LOOK_S", 0)
    looks: list[float] = []
    assert late.patiently(Full(3), 1e9, looks.append) == "made"  # type: ignore[comparison-overlap]
    assert len(looks) == 3


def test_the_wait_ends_with_the_reason() -> None:
    with pytest.raises(VgpuError, match="nothing is left"):
        late.patiently(full := Full(9), 0, lambda _: None)
    assert full.asked == 1


def test_other_refusals_are_not_waited_for() -> None:
    with pytest.raises(VgpuError) as refused:
        late.patiently(full := Full(9, ErrorCode.NOT_FOUND), 1e9, lambda _: None)
    assert (refused.value.code, full.asked) == (ErrorCode.NOT_FOUND, 1)


def test_a_spatial_gpu_has_workers_that_it_does_not_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of ``ray-worker`` is no wish of a user."""
    asked: list[int] = []

    class Spatial:
        def create(self, spec: VgpuSpec, **_: object) -> str:
            asked.append(spec.idle_suspend_ns)
            if spec.idle_suspend_ns:
                raise VgpuError(ErrorCode.MODE, "a spatial GPU suspends nothing")
            return "made"

    monkeypatch.setattr(room, "Node", Spatial)
    spec = VgpuSpec.parse(sm_percent="10", memory_bytes="1G", idle_suspend_ns="5m")
    assert room.create(spec, "auto", "", 0) == "made"  # type: ignore[comparison-overlap]
    assert asked == [room.IDLE_SUSPEND_NS, 0]
    with pytest.raises(VgpuError, match="suspends nothing"):
        room.create(spec.model_copy(update={"idle_suspend_ns": 60_000_000_000}), "auto", "", 0)


class Held:
    """In place of a node: one vGPU, made by that process."""

    def __init__(self, pid: int, owner: int) -> None:
        self.reading = {"asker_pid": pid, "owner_uid": owner}

    def list(self) -> Any:
        return [self]


def titled(title: str) -> subprocess.Popen[bytes]:
    sleeping = subprocess.Popen([title, "600"], executable="/bin/sleep")
    eventually(lambda: room._title(sleeping.pid).startswith(title.encode()), "it has its title")
    return sleeping


@pytest.mark.parametrize(
    ("title", "owner", "ends"), [("ray::IDLE", 0, True), ("ray::f", 0, False), ("ray::IDLE", 1, False)]
)
def test_an_idle_worker_gives_its_vgpu_back(title: str, owner: int, ends: bool) -> None:
    """Not at the first look: a worker is idle for a moment before its first task."""
    worker = titled(title)
    reclaiming = room.Reclaiming(Held(worker.pid, os.getuid() + owner))  # type: ignore[arg-type]
    try:
        reclaiming.look(100.0)
        assert worker.poll() is None
        reclaiming.look(100.0 + room.IDLE_S)
        if ends:
            assert worker.wait(60) == -signal.SIGTERM
        else:
            assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()


def test_a_worker_has_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, str]] = []

    class Made:
        id, reading = "vgpu-00000000", {"environment": {"VGPU_RUNTIME_DIR": "/run"}}

    monkeypatch.setattr(room, "create", lambda spec, gpu, *_: made.append((spec.sm_percent, gpu)) or Made())
    share = Share({"sm_percent": 100, "burst": True}, 0)
    assert share.take(["1"], 0.3)["VGPU_ID"] == "vgpu-00000000"
    assert share.take(["1"], 0.3) == {}
    assert made == [(30, "1")]
    with pytest.raises(VgpuError, match=r"has 0.3 of GPU 1"):
        share.take(["0"], 0.3)


# --- the command


def vgpuctl(node: SimulatedNode, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return node.popen(interpreter.command("vgpu.ctl", *words), stdin=pipe, stdout=pipe, stderr=pipe)


def test_the_resources_of_a_node(node: SimulatedNode) -> None:
    out, _ = vgpuctl(node, "ray", "resources").communicate(timeout=60)
    assert json.loads(out) == {
        "vgpu_sm": 200,
        "vgpu_mem_mib": 2 * 143_771,
        "vgpu_sm_0": 100,
        "vgpu_sm_1": 100,
    }


def test_a_ray_worker_is_its_program_in_a_vgpu_that_ends_with_it(node: SimulatedNode) -> None:
    code = "import os; print(os.getpid(), os.environ['VGPU_ID'], flush=True); input()"
    words = ("--sm", "30", "--mem", "8G", "--", sys.executable, "-c", code, "--worker-id=ab12")
    worker = vgpuctl(node, "ray-worker", *words)
    assert worker.stdout is not None
    pid, vgpu_id = worker.stdout.readline().split()
    assert int(pid) == worker.pid
    made = node.reading(vgpu_id)
    assert made is not None
    assert made.claim is not None
    assert (made.claim.name, made.lifetime, made.asker_pid) == ("ray/ab12", "process", worker.pid)
    assert made.spec.idle_suspend_ns == 300 * 10**9
    worker.kill()
    worker.wait()
    eventually(lambda: node.reading(vgpu_id) is None, "the vGPU goes")


@pytest.mark.parametrize("words", [("--idle-suspend", "off"), ("--oversubscribe=managed",)])
def test_idle_suspend_is_a_default(node: SimulatedNode, words: Sequence[str]) -> None:
    code = "import os; print(os.environ['VGPU_ID'], flush=True); input()"
    worker = vgpuctl(node, "ray-worker", "--sm", "5", *words, "--", sys.executable, "-c", code)
    assert worker.stdout is not None
    made = node.reading(worker.stdout.readline().strip())
    assert made is not None
    assert made.spec.idle_suspend_ns == 0
    worker.communicate("\n", timeout=60)


def test_a_ray_worker_outside_ray_ends_where_there_is_no_room(node: SimulatedNode) -> None:
    for gpu in "01":
        node.create(gpu, sm_percent=95, memory_bytes="1G")
    refused = vgpuctl(node, "ray-worker", "--sm", "30", "--wait", "0", "--", "python", "-c", "")
    _, error = refused.communicate(timeout=60)
    assert refused.returncode == 125
    assert error.startswith("vgpuctl: none of 2 GPUs; GPU")


# --- with Ray


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[RayCluster]:
    if why := why_no_ray():
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    with RayCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RayCluster) -> Iterator[RayCluster]:
    yield shared_cluster
    shared_cluster.clear()


def on(node: str, **options: Any) -> dict[str, Any]:
    """Options of Ray that place a task on ``node``."""
    return {"num_cpus": 0, **options, "resources": {**options.get("resources", {}), f"on_{node}": 1}}


def actor(node: str, **options: Any) -> Any:
    import ray

    return ray.remote(**on(node, **options))(Actor).remote()


def run(node: str, **options: Any) -> Found:
    import ray

    return ray.get(ray.remote(**on(node, **options))(find).remote(), timeout=240)  # type: ignore[no-any-return]


def found_by(*actors: Any) -> list[Found]:
    import ray

    return ray.get([one.find.remote() for one in actors], timeout=240)  # type: ignore[no-any-return]


@slow
def test_each_actor_has_a_vgpu_of_its_node(cluster: RayCluster) -> None:
    import ray

    size = vgpu.ray.vgpu(sm=30, mem="8G")
    actors = [actor("one", **size), actor("one", **size), actor("two", **size)]
    found = found_by(*actors)
    assert [(one.init, one.devices, one.total_mib) for one in found] == [(0, 1, 8192)] * 3
    by_node = [{vgpu.vgpu_id for vgpu in cluster.vgpus(name)} for name in ("one", "two")]
    assert by_node == [{found[0].vgpu_ids, found[1].vgpu_ids}, {found[2].vgpu_ids}]
    for one in actors:
        ray.kill(one)
    eventually(cluster.is_empty, "the vGPUs go with the actors")


@slow
def test_a_killed_worker_leaves_nothing_and_is_started_again(cluster: RayCluster) -> None:
    restarted = actor("two", max_restarts=1, max_task_retries=2, **vgpu.ray.vgpu(sm=60, mem="8G"))
    (first,) = found_by(restarted)
    os.kill(first.pid, signal.SIGKILL)
    (second,) = found_by(restarted)
    assert (second.init, second.total_mib) == (0, 8192)
    assert [vgpu.vgpu_id for vgpu in cluster.vgpus()] == [second.vgpu_ids] != [first.vgpu_ids]


@slow
def test_a_task_is_held_to_the_part_and_on_the_gpu_that_ray_assigns(cluster: RayCluster) -> None:
    """Two halves come to one GPU, and so a whole one is left."""
    halves = [actor("one", **vgpu.ray.gpus(0.5)) for _ in range(2)]
    found = found_by(*halves)
    assert {one.visible for one in found} == {found[0].visible}
    (whole,) = found_by(actor("one", **vgpu.ray.gpus(1)))
    assert [one.total_mib for one in (*found, whole)] == [143_771 // 2, 143_771 // 2, 143_771]
    placed = {vgpu.vgpu_id: str(vgpu.gpu_index) for vgpu in cluster.vgpus()}
    assert [placed[one.vgpu_ids] for one in (*found, whole)] == [one.visible for one in (*found, whole)]


@slow
def test_two_gpus_of_an_actor_are_two_vgpus(cluster: RayCluster) -> None:
    (found,) = found_by(actor("one", **vgpu.ray.gpus(2)))
    assert (found.init, found.devices, len(found.vgpu_ids.split(","))) == (0, 2, 2)


@slow
def test_a_task_of_a_job_with_fractions_has_what_num_gpus_says(cluster: RayCluster) -> None:
    held = run("two", num_gpus=0.25, runtime_env=vgpu.ray.fractions())
    assert (held.devices, held.total_mib) == (1, 143_771 // 4)
    eventually(cluster.is_empty, "Ray ends the worker of a task with num_gpus")
    assert run("two", runtime_env=vgpu.ray.fractions()).devices == 0


@slow
def test_an_idle_worker_gives_way(cluster: RayCluster) -> None:
    small = run("two", **vgpu.ray.vgpu(sm=40, mem="8G"))
    assert [vgpu.vgpu_id for vgpu in cluster.vgpus()] == [small.vgpu_ids]
    (large,) = found_by(actor("two", **vgpu.ray.vgpu(sm=90, mem="8G")))
    assert (large.init, large.total_mib) == (0, 8192)


@slow
@pytest.mark.parametrize("asked", ["size", "part"])
def test_an_actor_without_room_fails_with_the_reason(cluster: RayCluster, asked: str) -> None:
    from ray.exceptions import ActorDiedError

    cluster.nodes["two"].create(sm_percent=80, memory_bytes="1G")
    options = vgpu.ray.vgpu(sm=30, mem="1G") if asked == "size" else vgpu.ray.gpus(0.3)
    words = shlex.split(options["runtime_env"]["py_executable"])
    options["runtime_env"]["py_executable"] = shlex.join([*words[:2], "--wait", "1", *words[2:]])
    with pytest.raises(ActorDiedError, match="30% of the GPU's time asked for, 20% is left"):
        found_by(actor("two", **options))


@slow
def test_a_worker_that_is_killed_while_it_waits_leaves_nothing(cluster: RayCluster) -> None:
    import ray

    taken = cluster.nodes["two"].create(sm_percent=80, memory_bytes="1G")
    waiting = actor("two", **vgpu.ray.vgpu(sm=31, mem="1G"))
    pid = eventually(waiting_worker, "it waits for room")
    ray.kill(waiting)
    os.kill(pid, signal.SIGKILL)
    with cluster.nodes["two"].link() as link:
        link.remove(taken.vgpu_id, force=True)
    eventually(cluster.is_empty, "no vGPU is made for it")


def waiting_worker() -> int:
    shown = subprocess.run(["pgrep", "-f", "vgpu.ctl ray-worker --sm 31 "], capture_output=True, text=True, check=False)
    return int(shown.stdout.split()[0]) if shown.stdout else 0


@slow
def test_a_killed_raylet_leaves_nothing(cluster: RayCluster) -> None:
    added = cluster.add("two", "third")
    (found,) = found_by(actor("third", **vgpu.ray.vgpu(sm=30, mem="8G")))
    assert cluster.nodes["two"].reading(found.vgpu_ids) is not None
    cluster.cluster.remove_node(added, allow_graceful=False)
    eventually(cluster.is_empty, "the workers end with their raylet")
