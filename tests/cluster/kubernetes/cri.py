"""The kubelet's side of the container runtime interface: pods on the host's network, of an image of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc

from tests.cluster import engines, roots
from tests.cluster.containerd import Containerd
from tests.integration.node import PATIENCE_S, ROOT, eventually

IMAGE: Final = "localhost/probe:1"
PAUSE: Final = "localhost/pause:1"
_PROTO: Final = Path(__file__).with_name("cri.proto")
_CONFIG: Final = """
disabled_plugins = ["io.containerd.nri.v1.nri"]
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
cdi_spec_dirs = ["{devices}"]
restrict_oom_score_adj = true
"""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NAMESPACES: Final = {"network": "NODE", "pid": "CONTAINER"}


class Runtime:
    """Context manager: containerd with its CRI plugin, below ``folder``. It reads CDI devices from ``devices``."""

    def __init__(self, folder: Path, devices: Path, probe: Path) -> None:
        config = _CONFIG.format(folder=folder, pause=PAUSE, devices=devices)
        self.folder = folder
        self.containerd = Containerd(folder, config, "k8s.io")
        self._probe = probe
        self._pods: list[Pod] = []

    def __enter__(self) -> Runtime:
        pause = self.folder / "pause"
        pause.mkdir()
        roots.build(_PROTO.with_name("pause.c"), pause, "-static")
        self._messages, services = grpc.protos_and_services(str(_PROTO.relative_to(ROOT)))
        self.containerd.__enter__()
        self._channel = grpc.insecure_channel(f"unix:{self.containerd.address}")
        self._stub = services.RuntimeServiceStub(self._channel)
        self._await_answer()
        self.containerd.import_root(PAUSE, pause, "/pause")
        root = engines.make_root(self.folder, self._probe)
        engines.own_loader(root)
        self.containerd.import_root(IMAGE, root, "/probe")
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.containerd.__exit__()

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(self._messages, f"{method}Request")(**fields)
        return getattr(self._stub, method)(request, timeout=PATIENCE_S, wait_for_ready=True)

    def tried(self, method: str, **fields: Any) -> bool:
        """Whether the call succeeded."""
        with suppress(grpc.RpcError):
            self.call(method, **fields)
            return True
        return False

    def _await_answer(self) -> None:
        eventually(lambda: self.tried("ListPodSandbox"), "the CRI plugin has read what is there")

    def restart(self) -> None:
        self.containerd.kill()
        self.containerd.start()
        self._await_answer()

    def pod(self, uid: str = "") -> Pod:
        self._pods.append(Pod(self, uid or str(uuid4())))
        return self._pods[-1]

    def clear(self) -> None:
        for pod in self._pods:
            pod.remove()
        self._pods.clear()


class Pod:
    def __init__(self, runtime: Runtime, uid: str) -> None:
        self._runtime = runtime
        self.uid = uid
        self._cgroup = Path("kubepods/burstable", f"pod{uid}")
        self._logs = runtime.folder / "logs" / uid
        self._logs.mkdir(parents=True)
        self._config = {
            "metadata": {"name": "train-pod", "namespace": "team-a", "uid": uid},
            "log_directory": str(self._logs),
            "linux": {
                "cgroup_parent": f"/{self._cgroup}",
                "security_context": {"namespace_options": _NAMESPACES},
            },
        }
        self._id = runtime.call("RunPodSandbox", config=self._config).pod_sandbox_id

    def start(self, name: str, devices: Iterable[str], *command: str, user: int = 0) -> Container:
        """A container as a restricted pod has it. ``devices``: names of CDI devices."""
        security = {
            "capabilities": {"drop_capabilities": ["ALL"]},
            "namespace_options": _NAMESPACES,
            "run_as_user": {"value": user},
            "readonly_rootfs": True,
            "no_new_privs": True,
            "seccomp": {},
        }
        config = {
            "metadata": {"name": name},
            "image": {"image": IMAGE},
            "command": command,
            "log_path": f"{name}.log",
            "stdin": True,
            "linux": {"security_context": security},
            "CDI_devices": [{"name": device} for device in devices],
        }
        asked: Mapping[str, Any] = {"pod_sandbox_id": self._id, "config": config, "sandbox_config": self._config}
        made = self._runtime.call("CreateContainer", **asked).container_id
        self._runtime.call("StartContainer", container_id=made)
        return Container(self._runtime, made, self._logs / config["log_path"])

    def remove(self) -> None:
        """With its containers. It is no error if they are gone. A call fails where a container ends at that moment;
        a kubelet tries again."""
        for method in ("StopPodSandbox", "RemovePodSandbox"):
            eventually(lambda method=method: self._runtime.tried(method, pod_sandbox_id=self._id), method)
        for name in (self._cgroup, *self._cgroup.parents[:-1]):
            for path in (*_CGROUPS.glob(str(name)), *_CGROUPS.glob(f"*/{name}")):
                with suppress(OSError):  # another pod is below it
                    path.rmdir()


class Container:
    def __init__(self, runtime: Runtime, container_id: str, log: Path) -> None:
        self._runtime, self.id, self._log = runtime, container_id, log

    def line(self) -> str:
        """The first line that its program has printed, without containerd's time, stream and tag."""

        def lines() -> list[str]:
            return [line for line in self._log.read_text().splitlines(True) if line.endswith("\n")]

        return eventually(lines, "the container prints a line")[0].rstrip().split(" ", 3)[3]

    def execute(self, *words: str) -> str:
        ran = self._runtime.call("ExecSync", container_id=self.id, cmd=words, timeout=int(PATIENCE_S))
        return (ran.stdout + ran.stderr).decode().strip()

    def state(self) -> str:
        status = self._runtime.call("ContainerStatus", container_id=self.id).status
        return type(status).DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[status.state].name

    def stop(self) -> None:
        """With SIGKILL at once: a first process without a handler ignores SIGTERM."""
        self._runtime.call("StopContainer", container_id=self.id, timeout=0)
