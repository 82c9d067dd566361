"""An API server in memory (kmock), and a kubelet that knows its own side of the gRPC services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc
import httpx
from kmock._internal.apps import Server

from client_hook import interpreter
from tests.cluster.kubernetes.emulator import APPLY, Emulator
from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from vgpu.integrations.kubernetes import wire
from vgpu.integrations.kubernetes.kubelet import serve

NODE: Final = "worker-1"
PACKAGE: Final = wire.DRA.rpartition(".")[0]
_API: Final = "/apis/resource.k8s.io/v1"


class FakeCluster:
    """Context manager: an API server in a thread. It knows no rules; it keeps objects."""

    def __enter__(self) -> FakeCluster:
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(ready),), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self._post("/api/v1/nodes", {"metadata": {"name": NODE, "uid": str(uuid4())}})
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        async with Emulator() as handler, Server(handler) as server:
            self._handler = handler
            handler.resources["v1/nodes"] = {"namespaced": False, "kind": "Node"}
            handler.resources["v1/pods"] = {"namespaced": True, "kind": "Pod"}
            for kind, namespaced in (("ResourceSlice", False), ("ResourceClaim", True)):
                plural = f"resource.k8s.io/v1/{kind.lower()}s"
                handler.resources[plural] = {"namespaced": namespaced, "kind": kind}
            self.url = str(server.url)
            ready.set()
            await self._ended.wait()

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._client.post(path, json=body).raise_for_status()

    @property
    def applied(self) -> list[tuple[str, str]]:
        """Path and field manager of each server-side apply."""
        return [
            (request.url.path, request.params["fieldManager"])
            for request in self._handler
            if request.headers.get("Content-Type") == APPLY
        ]

    def add(self, claim: Mapping[str, Any]) -> None:
        self._post(f"{_API}/namespaces/{claim['metadata']['namespace']}/resourceclaims", claim)

    @property
    def bindings(self) -> list[tuple[str, str]]:
        """Pod and node of each binding, in their order."""
        return list(self._handler.bindings)

    def add_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        self._post(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", pod)
        return self.pod(pod["metadata"]["name"])

    def pod(self, name: str, namespace: str = "team-a") -> dict[str, Any]:
        """As the API server has it now."""
        return dict(self._client.get(f"/api/v1/namespaces/{namespace}/pods/{name}").raise_for_status().json())

    def change_pod(self, name: str, change: Mapping[str, Any], namespace: str = "team-a") -> None:
        self._client.patch(f"/api/v1/namespaces/{namespace}/pods/{name}", json=change).raise_for_status()

    def delete_pod(self, name: str, namespace: str = "team-a") -> None:
        self._client.delete(f"/api/v1/namespaces/{namespace}/pods/{name}").raise_for_status()

    def node(self, name: str = NODE) -> dict[str, Any]:
        return dict(self._client.get(f"/api/v1/nodes/{name}").raise_for_status().json())

    def add_node(self, node: Mapping[str, Any]) -> None:
        self._post("/api/v1/nodes", node)

    def reserve(self, claim: Mapping[str, Any], *pods: str) -> None:
        """For the pods with these uids."""
        reserved = [{"resource": "pods", "name": f"pod-{uid[:8]}", "uid": uid} for uid in pods]
        self._client.patch(self._path(claim), json={"status": {"reservedFor": reserved}}).raise_for_status()

    def release(self, claim: Mapping[str, Any]) -> None:
        """No pod has it any more."""
        self._client.patch(self._path(claim), json={"status": {"reservedFor": []}}).raise_for_status()

    def delete(self, claim: Mapping[str, Any]) -> None:
        self._client.delete(self._path(claim)).raise_for_status()

    def _path(self, claim: Mapping[str, Any]) -> str:
        metadata = claim["metadata"]
        return f"{_API}/namespaces/{metadata['namespace']}/resourceclaims/{metadata['name']}"

    def claim(self, claim: Mapping[str, Any]) -> dict[str, Any]:
        """As the API server has it now."""
        return dict(self._client.get(self._path(claim)).raise_for_status().json())

    def slices(self) -> list[dict[str, Any]]:
        return list(self._client.get(f"{_API}/resourceslices").json()["items"])

    def delete_slices(self) -> None:
        for one in self.slices():
            self._client.delete(f"{_API}/resourceslices/{one['metadata']['name']}").raise_for_status()


def gpu_pod(name: str, *containers: Mapping[str, int], namespace: str = "team-a") -> dict[str, Any]:
    """A pod that no scheduler has seen. ``containers``: the limits of each."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": str(uuid4())},
        "spec": {
            "containers": [
                {"name": f"c{at}", "image": "i", "resources": {"limits": {key: str(n) for key, n in limits.items()}}}
                for at, limits in enumerate(containers)
            ]
        },
        "status": {"phase": "Pending"},
    }


def claim_of(
    *amounts: tuple[str, str, str],
    name: str = "train",
    config: Sequence[Mapping[str, Any]] = (),
    node: str = NODE,
    uid: str | None = None,
) -> dict[str, Any]:
    """A claim that the scheduler has allocated, as the API server shows it. ``amounts``: device, sm and memory of each
    result."""
    results = [
        {
            "request": f"vgpu-{number}",
            "driver": "vgpu.dev",
            "pool": node,
            "device": device,
            "consumedCapacity": {"sm": sm, "memory": memory},
            "shareID": str(uuid4()),
        }
        for number, (device, sm, memory) in enumerate(amounts)
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "team-a", "uid": uid or str(uuid4())},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": results, "config": list(config)}},
            "reservedFor": [{"resource": "pods", "name": f"{name}-pod", "uid": str(uuid4())}],
        },
    }


def pod_of(claim: dict[str, Any]) -> str:
    """The uid of the pod for which it is reserved."""
    (one,) = claim["status"]["reservedFor"]
    return str(one["uid"])


class FakeKubelet:
    """The kubelet's side. ``folder``: a short path, since sockets lie below it. A driver in a container has it at
    ``seen_as``."""

    def __init__(self, folder: Path, seen_as: Path | None = None) -> None:
        self.folder = folder
        self._seen_as = seen_as or folder
        for name in ("plugins_registry", "plugins", "device-plugins", "pod-resources"):
            (folder / name).mkdir(exist_ok=True)

    def register(self) -> Any:
        """What a driver says of itself, once a socket of one answers. It is then registered."""
        return eventually(self._registered, "the driver is registered")

    def _registered(self) -> Any:
        for path in (self.folder / "plugins_registry").glob("*-reg.sock"):
            with suppress(grpc.RpcError), wire.Client(wire.REGISTRATION, path) as driver:
                info = driver.GetInfo(wire.message("pluginregistration.InfoRequest")(), timeout=PATIENCE_S)
                status = wire.message("pluginregistration.RegistrationStatus")(plugin_registered=True)
                driver.NotifyRegistrationStatus(status, timeout=PATIENCE_S)
                self._endpoint = self.folder / Path(info.endpoint).relative_to(self._seen_as)
                return info
        return None

    def _call(self, method: str, claims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        said = [{key: claim["metadata"][key] for key in ("namespace", "uid", "name")} for claim in claims]
        request = wire.message(f"{PACKAGE}.{method}Request")(claims=said)
        with wire.Client(wire.DRA, self._endpoint) as driver:
            return dict(getattr(driver, method)(request, timeout=PATIENCE_S, wait_for_ready=True).claims)

    @contextmanager
    def health(self) -> Iterator[dict[tuple[str, str], str]]:
        """The health by pool and device, as the driver's stream has said it last."""
        info = self.register()
        assert wire.DRA_HEALTH in info.supported_versions
        states: dict[tuple[str, str], str] = {}
        with wire.Client(wire.DRA_HEALTH, self._endpoint) as driver:
            stream = driver.NodeWatchResources(wire.message("v1.NodeWatchResourcesRequest")(), wait_for_ready=True)

            def read() -> None:
                with suppress(grpc.RpcError):
                    for answer in stream:
                        for one in answer.devices:
                            word = type(one).DESCRIPTOR.fields_by_name["health"].enum_type.values[one.health].name
                            states[one.device.pool_name, one.device.device_name] = word

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            yield states
            stream.cancel()
            reader.join(PATIENCE_S)

    def prepare(self, *claims: Mapping[str, Any]) -> dict[str, Any]:
        """The answers by the uid of the claim."""
        return self._call("NodePrepareResources", claims)

    def unprepare(self, *claims: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("NodeUnprepareResources", claims)

    def vgpus(self, claim: Mapping[str, Any]) -> list[str]:
        """The ids of the vGPUs of a claim, which is prepared until it has them, as a kubelet does."""

        def prepared() -> list[str] | None:
            with suppress(grpc.RpcError):
                self.register()
                answer = self.prepare(claim)[claim["metadata"]["uid"]]
                return None if answer.error else ids_of(answer)
            return None

        return eventually(prepared, "the claim is prepared")


def ids_of(answer: Any) -> list[str]:
    return [name.partition("=")[2] for device in answer.devices for name in device.cdi_device_ids]


class PluginKubelet:
    """Context manager: the kubelet's side of device plugins and of pod resources. It may stop and start again; as a
    kubelet, it then removes all sockets in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registered: dict[str, Path] = {}
        self.held: dict[str, list[str]] = {}
        """Devices by the name of a pod."""

    def __enter__(self) -> PluginKubelet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.registered.clear()
        for path in (self.folder / "device-plugins").iterdir():
            path.unlink()
        listening = (
            ("device-plugins", wire.PLUGIN_REGISTRATION, {"Register": self._register}),
            ("pod-resources", wire.POD_RESOURCES, {"List": self._list}),
        )
        self._servers = [
            serve(self.folder / name / "kubelet.sock", [wire.handlers(service, methods)])
            for name, service, methods in listening
        ]

    def stop(self) -> None:
        for server in self._servers:
            server.stop(None).wait()

    def _register(self, request: Any) -> Any:
        assert request.version == "v1beta1"
        assert request.options.get_preferred_allocation_available
        self.registered[request.resource_name] = self.folder / "device-plugins" / request.endpoint
        return wire.message("v1beta1.Empty")()

    def _list(self, _: Any) -> Any:
        pods = [
            {
                "name": pod,
                "namespace": "team-a",
                "containers": [{"name": "train", "devices": [{"resource_name": "r", "device_ids": devices}]}],
            }
            for pod, devices in self.held.items()
        ]
        return wire.message("v1.ListPodResourcesResponse")(pod_resources=pods)

    def plugin(self, resource: str) -> wire.Client:
        path = eventually(lambda: self.registered.get(resource), f"{resource} is registered")
        return wire.Client(wire.PLUGIN, path)

    def devices(self, resource: str) -> dict[str, str]:
        """Their health by their id, as the plugin says it first."""
        with self.plugin(resource) as plugin:
            stream = plugin.ListAndWatch(wire.message("v1beta1.Empty")(), timeout=PATIENCE_S, wait_for_ready=True)
            for answer in stream:
                if answer.devices:
                    stream.cancel()
                    return {device.ID: device.health for device in answer.devices}
        return {}

    def allocate(self, resource: str, *devices: str) -> list[str]:
        """The CDI devices of a container."""
        request = wire.message("v1beta1.AllocateRequest")(container_requests=[{"devices_ids": devices}])
        with self.plugin(resource) as plugin:
            answer = plugin.Allocate(request, timeout=PATIENCE_S, wait_for_ready=True)
        return [device.name for one in answer.container_responses for device in one.cdi_devices]

    def prefer(self, resource: str, available: Sequence[str], size: int) -> list[str]:
        asked = {"available_deviceIDs": available, "allocation_size": size}
        request = wire.message("v1beta1.PreferredAllocationRequest")(container_requests=[asked])
        with self.plugin(resource) as plugin:
            answer = plugin.GetPreferredAllocation(request, timeout=PATIENCE_S, wait_for_ready=True)
        return list(answer.container_responses[0].deviceIDs)


def kubeconfig(kubelet: FakeKubelet, cluster: FakeCluster) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": cluster.url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path = kubelet.folder / "config"
    path.write_text(json.dumps(config))
    return path


class Process:
    """Context manager: ``vgpuctl kubelet``."""

    def __init__(self, node: SimulatedNode, kubelet: FakeKubelet, cluster: FakeCluster, *options: str) -> None:
        path = kubeconfig(kubelet, cluster)
        self._log = kubelet.folder / "log"
        self._environment = node.environment | {"KUBECONFIG": str(path)}
        words = ["kubelet", "--node-name", NODE, "--folder", str(kubelet.folder), *options]
        self._command = interpreter.command("vgpu.ctl", *words)

    def __enter__(self) -> Process:
        self.start()
        return self

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def logs(self) -> str:
        return self._log.read_text()

    def __exit__(self, *_: object) -> None:
        """pytest shows what is printed here if the test fails."""
        ended = self.process.poll()
        if ended is None:
            self.kill()
        print(self.logs(), f"exit code: {ended}")
