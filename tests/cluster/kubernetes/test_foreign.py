"""A vGPU of a claim admits the processes of the claim's pods. Containers are namespaces without an engine, in cgroups
named as a pod's; the kernel says which process is in which."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from tests.cluster import pods
from tests.cluster.conftest import Run
from tests.cluster.kubernetes.cluster import FakeCluster, FakeKubelet, Process, claim_of, pod_of
from tests.integration.node import PATIENCE_S, SimulatedNode, eventually
from vgpu.api.node import Node

THIRD = ("gpu-1", "30", "8Gi")
InPod = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def vgpu_and_claim(cluster: FakeCluster, kubelet: FakeKubelet, driver: Process) -> tuple[str, dict[str, Any]]:
    claim = claim_of(THIRD)
    cluster.add(claim)
    (vgpu_id,) = kubelet.vgpus(claim)
    return vgpu_id, claim


@pytest.fixture
def in_pod(node: SimulatedNode, start: Run) -> Iterator[InPod]:
    """Start the probe in a container of a pod, or in none, with the mounts of a vGPU."""
    top = pods.hierarchy()
    if top is None:
        pytest.skip("no cgroup can be made here")
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []

        def run(vgpu_id: str, pod: str | None, *words: str) -> subprocess.Popen[str]:
            with node.link() as link:
                volumes = list(link.inspect(vgpu_id).mounts)
            cgroup = None if pod is None else stack.enter_context(pods.cgroup_of(top, pod))
            started.append(start(volumes, "/probe", *words, cgroup=cgroup))
            return started[-1]

        yield run
        for process in started:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate(timeout=PATIENCE_S)


def test_a_process_of_the_claims_pod_is_admitted(
    node: SimulatedNode, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    vgpu_id, claim = vgpu_and_claim
    reading = node.reading(vgpu_id)
    assert reading is not None
    assert reading.claim is not None
    assert reading.claim.pods == (pod_of(claim),)
    output, _ = said(in_pod(vgpu_id, pod_of(claim), "1024"))
    assert output.startswith("init 0 context 0 devices 1")


def test_a_process_of_another_pod_is_refused_and_named(
    node: SimulatedNode, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    vgpu_id, _ = vgpu_and_claim
    other = str(uuid4())
    output, error = said(in_pod(vgpu_id, other))
    assert output.startswith("init 100")
    sentence = (
        f"{vgpu_id} is for the pods that have its claim, and this process runs in container {pods.CONTAINER[:12]}"
    )
    assert f"{sentence} of pod {other}; let its pod claim a vGPU" in error
    with node.link() as link:
        eventually(lambda: link.events(vgpu_id, kinds=("foreign",)), "the refusal is an event")
        (event,) = link.events(vgpu_id, kinds=("foreign",))
    assert f"was refused: {sentence} of pod {other}" in event.text
    reading = node.reading(vgpu_id)
    assert reading is not None
    assert (reading.processes, reading.awaited_pods) == (0, ())


def test_a_process_of_no_pod_is_refused(
    node: SimulatedNode, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    """As one of the host that found the socket through /proc/PID/root."""
    vgpu_id, _ = vgpu_and_claim
    output, error = said(in_pod(vgpu_id, None))
    assert output.startswith("init 100")
    assert "and this process runs in no pod" in error


def test_a_pod_that_gets_the_claim_later_is_admitted(
    node: SimulatedNode, cluster: FakeCluster, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    """The kubelet does not prepare a claim again for its second pod. The process waits until the driver has asked."""
    vgpu_id, claim = vgpu_and_claim
    second = str(uuid4())
    cluster.reserve(claim, pod_of(claim), second)
    output, _ = said(in_pod(vgpu_id, second, "1024"))
    assert output.startswith("init 0 context 0 devices 1")
    reading = node.reading(vgpu_id)
    assert reading is not None
    assert reading.claim is not None
    assert set(reading.claim.pods or ()) == {pod_of(claim), second}
    with node.link() as link:
        assert not link.events(vgpu_id, kinds=("foreign",))


def test_a_process_that_waits_is_admitted_once_its_pod_is_named(
    node: SimulatedNode, cluster: FakeCluster, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    vgpu_id, claim = vgpu_and_claim
    second = str(uuid4())
    waiting = in_pod(vgpu_id, second, "1024")
    eventually(lambda: node.reading(vgpu_id).awaited_pods == (second,), "it waits")  # type: ignore[union-attr]
    cluster.reserve(claim, pod_of(claim), second)
    output, _ = said(waiting)
    assert output.startswith("init 0 context 0 devices 1")


def test_a_vgpu_without_pods_admits_as_before(node: SimulatedNode, in_pod: InPod) -> None:
    claim = {"kind": "dra", "uid": "made-before.0", "tenant": "team-a"}
    vgpu = Node(node.paths.control_socket).create(sm=30, mem="8G", gpu=1, keep=True, attach="mount", claim=claim)
    output, _ = said(in_pod(vgpu.id, None, "1024"))
    assert output.startswith("init 0 context 0 devices 1")


def test_a_program_that_was_admitted_comes_back_after_its_pod_has_left(
    node: SimulatedNode, cluster: FakeCluster, vgpu_and_claim: tuple[str, dict[str, Any]], in_pod: InPod
) -> None:
    """The broker and the GPU Server are killed. Only new processes are asked for their pod."""
    vgpu_id, claim = vgpu_and_claim
    program = in_pod(vgpu_id, pod_of(claim), "1024", "wait")
    eventually(lambda: node.reading(vgpu_id).processes == 1, "it is attached")  # type: ignore[union-attr]
    second = str(uuid4())
    cluster.reserve(claim, second)
    output, _ = said(in_pod(vgpu_id, second))
    assert output.startswith("init 0")
    reading = node.reading(vgpu_id)
    assert reading is not None
    assert reading.claim is not None
    assert reading.claim.pods == (second,)
    assert reading.broker_pid is not None
    for pid in (reading.broker_pid, node.server_pid(1)):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.reading(vgpu_id).broker_pid not in {None, reading.broker_pid}, "a new broker is there")  # type: ignore[union-attr]
    eventually(lambda: node.reading(vgpu_id).processes == 1, "it is attached again")  # type: ignore[union-attr]
    output, _ = program.communicate("\n", timeout=PATIENCE_S)
    assert output.startswith("init 0 context 0 devices 1")
