"""``vgpuctl extender`` between a scheduler and an API server of the tests, and the plugin that gives what it chose."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from client_hook import interpreter
from tests.cluster.kubernetes.cluster import (
    NODE,
    FakeCluster,
    FakeKubelet,
    PluginKubelet,
    Process,
    gpu_pod,
    kubeconfig,
)
from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes.extender import allocate, assumed, gpus

GIB = 1 << 30
MIB = 1 << 20
MEM = "aliyun.com/gpu-mem"
COUNT = "aliyun.com/gpu-count"
SHARE = "nvidia.com/gpu"


class Extender:
    """Context manager: ``vgpuctl extender``, and what a scheduler asks it."""

    def __init__(self, kubelet: FakeKubelet, cluster: FakeCluster, *options: str, verify: Any = True) -> None:
        self._verify = verify
        self._environment = os.environ | {"KUBECONFIG": str(kubeconfig(kubelet, cluster)), "PYTHONPATH": str(ROOT)}
        self._command = interpreter.command("vgpu.ctl", "extender", "--listen", "127.0.0.1:0", *options)
        self._log = kubelet.folder / "extender.log"

    def __enter__(self) -> Extender:
        self.start()
        return self

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "answers the scheduler" in line, self._log.read_text()
        self.url = line.split()[0].removesuffix("/vgpu-scheduler")
        limits = httpx.Limits(max_connections=100)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, limits=limits, verify=self._verify)

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.communicate()

    def __exit__(self, *_: object) -> None:
        """pytest shows what is printed here if the test fails."""
        self.kill()
        print(self._log.read_text())

    def ask(self, verb: str, body: Mapping[str, Any], prefix: str = "vgpu-scheduler") -> Any:
        return self.http.post(f"/{prefix}/{verb}", json=body).raise_for_status().json()

    def bind(self, pod: Mapping[str, Any], node: str = NODE) -> str:
        """ "": it is bound."""
        names = {"PodName": pod["metadata"]["name"], "PodNamespace": pod["metadata"]["namespace"]}
        return str(self.ask("bind", {**names, "PodUID": pod["metadata"]["uid"], "Node": node})["Error"])

    def inspect(self, node: str = NODE) -> dict[str, Any]:
        """The first and only node of the answer."""
        (found,) = self.http.get(f"/vgpu-scheduler/inspect/{node}").raise_for_status().json()["nodes"]
        return dict(found)


def aliyun_node(name: str, count: int, gibibytes: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"allocatable": {MEM: str(count * gibibytes), COUNT: str(count)}}}


@pytest.fixture
def extender(kubelet: FakeKubelet, cluster: FakeCluster) -> Iterator[Extender]:
    for name, count in (("n1", 2), ("n2", 1)):
        cluster.add_node(aliyun_node(name, count, 16))
    with Extender(kubelet, cluster, "--policy", "pack") as extender:
        yield extender


def allocated(cluster: FakeCluster, name: str) -> None:
    """As the plugin of the node says it."""
    cluster.change_pod(name, {"metadata": {"annotations": {assumed.ASSIGNED: "true"}}})


@pytest.mark.parametrize("prefix", ["vgpu-scheduler", "gpushare-scheduler"])
def test_a_scheduler_filters_prioritizes_and_binds(extender: Extender, cluster: FakeCluster, prefix: str) -> None:
    pod = cluster.add_pod(gpu_pod("a", {MEM: 12}))
    asked = {"Pod": pod, "NodeNames": ["n1", "n2", "n3"]}
    answer = extender.ask("filter", asked, prefix)
    assert answer["NodeNames"] == ["n1", "n2"]
    assert answer["FailedNodes"] == {"n3": "it has no GPU that the extender knows"}
    scores = extender.ask("prioritize", asked, prefix)
    assert {one["Host"]: one["Score"] for one in scores} == {"n1": 0, "n2": 10, "n3": 0}
    body = {"PodName": "a", "PodNamespace": "team-a", "PodUID": pod["metadata"]["uid"], "Node": "n2"}
    assert extender.ask("bind", body, prefix) == {"Error": ""}
    assert extender.ask("bind", body, prefix) == {"Error": ""}, "the scheduler may ask again"
    bound = cluster.pod("a")
    assert bound["spec"]["nodeName"] == "n2"
    said = bound["metadata"]["annotations"]
    assert {name: said[f"ALIYUN_COM_GPU_MEM_{name}"] for name in ("IDX", "POD", "DEV", "ASSIGNED")} == {
        "IDX": "0",
        "POD": "12",
        "DEV": "16",
        "ASSIGNED": "false",
    }
    assert int(said["ALIYUN_COM_GPU_MEM_ASSUME_TIME"]) > 1e18
    large = cluster.add_pod(gpu_pod("b", {MEM: 8}))
    answer = extender.ask("filter", {"pod": large, "nodenames": ["n1", "n2"]}, prefix)
    assert answer["NodeNames"] == ["n1"]
    assert answer["FailedNodes"]["n2"] == ("8 GiB and 50 % asked for; of its 1 GPU the emptiest has 4 GiB and 25 %")
    every = extender.http.get(f"/{prefix}/inspect").json()["nodes"]
    assert [(one["name"], one["usedMiB"]) for one in every] == [("n1", 0), ("n2", 12 * 1024)]
    assert extender.http.get(f"/{prefix}/inspect/n9").status_code == 404


def test_a_request_that_makes_no_sense_is_refused_in_words(extender: Extender) -> None:
    for verb, body, words in (
        ("filter", b"{", "Invalid JSON"),
        ("filter", b"[]", "should be"),
        ("prioritize", b'{"NodeNames": []}', "pod: is missing"),
        ("filter", b'{"Pod": {}, "NodeNames": []}', "no metadata"),
        ("bind", b'{"PodName": "a"}', "podnamespace: is missing"),
    ):
        answer = extender.http.post(f"/vgpu-scheduler/{verb}", content=body)
        assert answer.status_code == 400
        assert words in answer.json()["Error"], answer.text
    assert extender.http.get("/healthz").text == "ok"


@pytest.mark.slow
def test_sixty_four_binds_at_once_give_no_gpu_twice(extender: Extender, cluster: FakeCluster) -> None:
    """64 pods of 1 to 8 GiB, for 48 GiB on three GPUs. A kubelet allocates what is bound."""
    sizes = {f"p{number}": 1 + number % 8 for number in range(64)}
    nodes = {name: f"n{1 + at % 2}" for at, name in enumerate(sizes)}
    pods = [cluster.add_pod(gpu_pod(name, {MEM: size})) for name, size in sizes.items()]
    ended = threading.Event()
    waiting: list[int] = []
    """How many pods of a size waited on a node."""

    def allocate_all() -> None:
        done: set[str] = set()
        while not ended.wait(0.001):
            fresh = [(name, node) for name, node in cluster.bindings if name not in done]
            waiting.extend(Counter((node, sizes[name]) for name, node in fresh).values())
            for name, _ in fresh:
                allocated(cluster, name)
                done.add(name)

    kubelet = threading.Thread(target=allocate_all)
    kubelet.start()
    try:
        with ThreadPoolExecutor(64) as pool:
            answers = dict(
                zip(sizes, pool.map(lambda pod: extender.bind(pod, nodes[pod["metadata"]["name"]]), pods), strict=True)
            )
    finally:
        ended.set()
        kubelet.join()
    assert dict(cluster.bindings) == {name: nodes[name] for name, said in answers.items() if not said}
    assert all("asked for" in said or "has not yet allocated" in said for said in answers.values() if said)
    used: Counter[tuple[str, str]] = Counter()
    for name, node in cluster.bindings:
        used[node, cluster.pod(name)["metadata"]["annotations"][assumed.INDEX]] += sizes[name]
    assert max(used.values()) <= 16
    assert set(waiting) == {1}
    for name, said in answers.items():
        if "asked for" in said:
            assert all(used[node, at] + sizes[name] > 16 for node, at in used if node == nodes[name])


def test_a_bind_waits_for_the_kubelet(extender: Extender, cluster: FakeCluster) -> None:
    first, second = (cluster.add_pod(gpu_pod(name, {MEM: 4})) for name in ("a", "b"))
    assert extender.bind(first, "n1") == ""
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(extender.bind, second, "n1")
        other = cluster.add_pod(gpu_pod("c", {MEM: 5}))
        assert extender.bind(other, "n1") == "", "one of another size does not wait"
        assert not waits.done()
        allocated(cluster, "a")
        assert waits.result(PATIENCE_S) == ""


def test_a_new_extender_knows_what_the_old_one_chose(extender: Extender, cluster: FakeCluster) -> None:
    assert extender.bind(cluster.add_pod(gpu_pod("a", {MEM: 12})), "n2") == ""
    extender.kill()
    allocated(cluster, "a")
    cluster.add_pod(gpu_pod("b", {MEM: 8}))
    extender.start()
    assert extender.inspect("n2")["usedMiB"] == 12 * 1024
    assert "asked for" in extender.bind(cluster.pod("b"), "n2")
    cluster.delete_pod("a")
    eventually(lambda: extender.inspect("n2")["usedMiB"] == 0, "the GPU is free")
    assert extender.bind(cluster.pod("b"), "n2") == ""


def test_a_pod_that_was_annotated_and_not_bound_holds_its_gpu_until_it_is_bound(
    extender: Extender, cluster: FakeCluster
) -> None:
    """The extender died between the two."""
    cluster.add_pod(gpu_pod("a", {MEM: 12}))
    said = '{"node":"n2","vgpus":[{"container":"c0","resource":"aliyun.com/gpu-mem","count":12,"gpu":"0","index":0,'
    said += f'"sm":75,"memory_bytes":{12 * GIB}}}]}}'
    now = str(int(time.time() * 1e9))
    written = {assumed.ASSUMED: said, assumed.ASSIGNED: "false", assumed.ASSUME_TIME: now}
    cluster.change_pod("a", {"metadata": {"annotations": written}})
    eventually(lambda: extender.inspect("n2")["usedMiB"] == 12 * 1024, "the extender has seen it")
    assert "asked for" in extender.bind(cluster.add_pod(gpu_pod("b", {MEM: 8})), "n2")
    assert extender.bind(cluster.pod("a"), "n2") == ""


@pytest.mark.slow
def test_a_pod_that_the_kubelet_loses_gives_its_gpu_back(kubelet: FakeKubelet, cluster: FakeCluster) -> None:
    cluster.add_node(aliyun_node("n1", 1, 16))
    with Extender(kubelet, cluster, "--limit", "1s") as extender:
        assert extender.bind(cluster.add_pod(gpu_pod("a", {MEM: 12})), "n1") == ""
        eventually(lambda: extender.inspect("n1")["usedMiB"] == 0, "the GPU is free")
        assert not set(assumed.ALL) & set(cluster.pod("a")["metadata"].get("annotations") or {})
        second = cluster.add_pod(gpu_pod("b", {MEM: 12}))
        assert extender.bind(second, "n1") == ""
        allocated(cluster, "b")
        eventually(lambda: extender.inspect("n1")["gpus"][0]["pods"][0]["assigned"], "the extender has seen it")


def test_a_pod_that_another_scheduler_binds_meanwhile_gets_no_gpu(extender: Extender, cluster: FakeCluster) -> None:
    pod = cluster.add_pod(gpu_pod("a", {MEM: 4}))
    cluster.change_pod("a", {"spec": {"nodeName": "elsewhere"}})
    assert extender.bind(pod, "n1") == "the pod is bound to elsewhere already"
    cluster.add_pod(gpu_pod("b", {MEM: 4}))
    stranger = cluster.pod("b") | {"metadata": cluster.pod("b")["metadata"] | {"uid": "another"}}
    assert extender.bind(stranger, "n1") == "the pod is gone"
    assert extender.inspect("n1")["usedMiB"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "authority of the scheduler's certificate"),
        (["--policy", "best"], "is none"),
        (["--limit", "0s"], "shorter than"),
        (["--tls-cert", "/nowhere"], "needs a certificate and its key"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "cannot be used"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    kubelet: FakeKubelet, cluster: FakeCluster, options: Sequence[str], words: str
) -> None:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig(kubelet, cluster))}
    command = interpreter.command("vgpu.ctl", "extender", *options)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr


def test_an_api_server_that_does_not_answer_ends_the_start(kubelet: FakeKubelet, cluster: FakeCluster) -> None:
    path = kubeconfig(kubelet, cluster)
    config = json.loads(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    path.write_text(json.dumps(config))
    command = interpreter.command("vgpu.ctl", "extender", "--listen", "127.0.0.1:0")
    environment = os.environ | {"KUBECONFIG": str(path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 5
    assert "the API server does not answer" in done.stderr


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate of it for 127.0.0.1 and for a client."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        try:
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


def test_https_serves_schedulers_with_a_certificate_alone(
    kubelet: FakeKubelet, cluster: FakeCluster, certificates: Path
) -> None:
    cluster.add_node(aliyun_node("n1", 1, 16))
    options = ["--tls-cert", "server.pem", "--tls-key", "server.key", "--tls-client-ca", "ca.pem"]
    words = [word if word.startswith("--") else str(certificates / word) for word in options]
    known = ssl.create_default_context(cafile=certificates / "ca.pem")
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    with Extender(kubelet, cluster, *words, verify=known) as extender:
        assert extender.url.startswith("https://")
        assert extender.bind(cluster.add_pod(gpu_pod("a", {MEM: 4})), "n1") == ""
        stranger = ssl.create_default_context(cafile=certificates / "ca.pem")
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"{extender.url}/vgpu-scheduler/inspect", verify=stranger)


# --- down to the vGPU


@pytest.fixture
def kubelets(kubelet: FakeKubelet) -> Iterator[PluginKubelet]:
    with PluginKubelet(kubelet.folder) as kubelets:
        yield kubelets


def written_gpus(cluster: FakeCluster) -> tuple[Any, ...]:
    return eventually(lambda: gpus.gpus_of(cluster.node()), "the plugin has written the GPUs at the node")


def vgpus_of(node: SimulatedNode, names: Sequence[str]) -> list[Any]:
    return [node.reading(name.removeprefix("vgpu.dev/vgpu=")) for name in names]


def allocated_by(kubelets: PluginKubelet, resource: str, count: int, *, skip: int = 0) -> list[str]:
    devices = sorted(kubelets.devices(resource))
    return kubelets.allocate(resource, *devices[skip : skip + count])


@pytest.mark.slow
def test_gibibytes_of_a_pod_are_a_vgpu_on_the_gpu_that_was_chosen(
    node: SimulatedNode, kubelet: FakeKubelet, kubelets: PluginKubelet, cluster: FakeCluster
) -> None:
    options = ("--plugin", "--compatible", MEM, "--extender")
    with Process(node, kubelet, cluster, *options) as plugin:
        here = written_gpus(cluster)
        total = here[0].memory_bytes // GIB
        with Extender(kubelet, cluster, "--policy", "spread") as extender:
            assert extender.bind(cluster.add_pod(gpu_pod("a", {MEM: 8}))) == ""
            (name,) = allocated_by(kubelets, MEM, 8)
            assert cluster.pod("a")["metadata"]["annotations"][assumed.ASSIGNED] == "true"
            assert extender.bind(cluster.add_pod(gpu_pod("b", {MEM: 4}, {MEM: 8}))) == ""
            with pytest.raises(grpc.RpcError, match=f"no pod that the extender assumed for {NODE} waits for 5"):
                allocated_by(kubelets, MEM, 5)
            second = [*allocated_by(kubelets, MEM, 4, skip=8), *allocated_by(kubelets, MEM, 8, skip=12)]
            first_one, *others = vgpus_of(node, [name, *second])
            assert first_one.gpu_uuid != others[0].gpu_uuid, "spread takes the other GPU"
            assert [one.spec.memory_bytes // GIB for one in (first_one, *others)] == [8, 4, 8]
            assert first_one.guarantee_ratio == pytest.approx(8 / total, abs=1e-4)
            pod = cluster.pod("a")["metadata"]
            assert (first_one.claim.name, first_one.claim.pods) == (f"plugin/{pod['uid']}.0", (pod["uid"],))
            assert first_one.claim.labels == {"namespace": "team-a", "pod": "a", "container": "c0"}
            with pytest.raises(grpc.RpcError, match="says how many GPUs the machine has"):
                allocated_by(kubelets, COUNT, 1)
            # The plugin dies between two containers of a pod.
            assert extender.bind(cluster.add_pod(gpu_pod("c", {MEM: 2}, {MEM: 2}))) == ""
            third = allocated_by(kubelets, MEM, 2, skip=20)
            plugin.kill()
            kubelets.registered.clear()
            plugin.start()
            fourth = allocated_by(kubelets, MEM, 2, skip=22)
            assert len({*third, *fourth}) == 2
            # A pod that is over gives its vGPU back.
            cluster.change_pod("b", {"status": {"phase": "Succeeded"}})
            cluster.delete_pod("c")

            def kept() -> list[str]:
                with node.link() as link:
                    return [one.vgpu_id for one in link.list()]

            eventually(lambda: kept() == [first_one.vgpu_id], "the vGPUs of pods that are over are removed")


@pytest.mark.slow
def test_hamis_words_are_vgpus_with_these_amounts(
    node: SimulatedNode, kubelet: FakeKubelet, kubelets: PluginKubelet, cluster: FakeCluster
) -> None:
    with Process(node, kubelet, cluster, "--plugin", "--compatible", f"{SHARE}=4", "--extender"):
        here = written_gpus(cluster)
        with Extender(kubelet, cluster) as extender:
            assert len(kubelets.devices(SHARE)) == 4 * len(here)
            limits = {SHARE: 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}
            assert extender.bind(cluster.add_pod(gpu_pod("a", limits))) == ""
            made = vgpus_of(node, allocated_by(kubelets, SHARE, 2))
            assert len({one.gpu_uuid for one in made}) == 2
            assert {(one.spec.memory_bytes // MIB, one.guarantee_ratio, one.limit_ratio) for one in made} == {
                (3000, 0.3, 0.3)
            }
            assert extender.bind(cluster.add_pod(gpu_pod("b", {SHARE: 1, "nvidia.com/gpumem-percentage": 50}))) == ""
            (half,) = vgpus_of(node, allocated_by(kubelets, SHARE, 1))
            assert (half.spec.memory_bytes, half.limit_ratio) == (here[0].memory_bytes // 2 // MIB * MIB, 1.0)
            assert half.guarantee_ratio == pytest.approx(0.5, abs=0.01)
            more = cluster.add_pod(gpu_pod("c", {SHARE: 2, "nvidia.com/gpucores": 60, "nvidia.com/gpumem": 500}))
            assert "asked for; of its 2 GPUs the emptiest has" in extender.bind(more)


@pytest.mark.slow
def test_what_the_node_promises_to_others_is_not_placed(
    node: SimulatedNode, kubelet: FakeKubelet, cluster: FakeCluster, kubelets: PluginKubelet
) -> None:
    with Process(node, kubelet, cluster, "--plugin", "--compatible", MEM, "--extender"):
        before = written_gpus(cluster)
        words = ["create", "--sm", "40", "--mem", "8G", "--gpu", "0"]
        subprocess.run(interpreter.command("vgpu.ctl", *words), env=node.environment, check=True, capture_output=True)
        after = eventually(lambda: _changed(cluster, before), "the plugin writes it at the node")
        assert (after[0].sm, after[0].offered_bytes) == (60, before[0].offered_bytes - 8 * GIB)


def _changed(cluster: FakeCluster, before: tuple[Any, ...]) -> tuple[Any, ...]:
    now = gpus.gpus_of(cluster.node())
    return () if now == before else now


@pytest.mark.parametrize("text", ["nvshare.com/gpu=4", "nvidia.com/gpu=0", "nvidia.com/gpu=65", "nvidia.com/gpumem"])
def test_what_no_extender_places_is_refused(text: str) -> None:
    with pytest.raises(VgpuError, match="is no resource that an extender places"):
        allocate.offered(text)
    assert allocate.offered(SHARE)[0].shares == allocate.DEFAULT_SHARES
