"""The image of deploy/Containerfile, made without a registry: its base is a minimal Debian of ``mmdebstrap``, and pip
has the packages in a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.integration.node import ROOT

NAME: Final = "st-vgpu:latest"
MANIFESTS: Final = ROOT / "deploy/kubernetes"
_BASE: Final = ROOT / "build/image/bookworm.tar"
"""Kept until ``make clean``: it takes half a minute."""
_VERSION: Final = "import sys; print('%d.%d' % sys.version_info[:2])"
_PIP: Final = """
[global]
no-index = true
find-links = /wheelhouse
break-system-packages = true
"""


class Missing(Exception):
    """What the image is made of does not answer."""


def _fetched(words: Sequence[str | Path]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{Path(words[0]).name} gets nothing: {done.stderr.strip()[-200:]}")


def _base() -> Path:
    if not _BASE.exists():
        if shutil.which("mmdebstrap") is None:
            raise Missing("mmdebstrap is not installed")
        _BASE.parent.mkdir(parents=True, exist_ok=True)
        part = _BASE.with_suffix(".part.tar")
        options = ["--variant=minbase", "--aptopt=Acquire::Check-Valid-Until false", "--include=python3-pip"]
        options += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
        _fetched(["mmdebstrap", "--quiet", *options, "bookworm", part])
        part.rename(_BASE)
    return _BASE


class Image:
    """``podman``: the engine's command, which has the image under ``NAME`` after ``build``."""

    def __init__(self, podman: Path) -> None:
        self._podman = podman

    def engine(self, *words: str | Path) -> str:
        done = subprocess.run([self._podman, *words], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    def logs(self, name: str) -> str:
        """What a container has printed, its stderr too."""
        command, pipe = [self._podman, "logs", name], subprocess.PIPE
        return subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False, timeout=60).stdout

    def run(self, *words: str) -> str:
        """What a command prints in a container that cannot write."""
        return self.engine("run", "--rm", "--network", "none", "--read-only", NAME, *words)

    def build(self, wheel: Path, folder: Path) -> None:
        """By the line of docs/howto/kubernetes.md, but for where the base and the packages come from. ``Missing``: they
        do not come."""
        base, wheelhouse, pip, context = "localhost/base:1", folder / "wheelhouse", folder / "pip.conf", folder / "here"
        self.engine("import", "--quiet", _base(), base)
        version = self.engine("run", "--rm", "--network", "none", base, "python3", "-c", _VERSION)
        choice = ["--quiet", "--retries", "0", "--only-binary", ":all:", "--python-version", version]
        _fetched([sys.executable, "-m", "pip", "download", *choice, "--dest", wheelhouse, f"{wheel}[kubernetes]"])
        pip.write_text(_PIP)
        (context / "dist").mkdir(parents=True)
        shutil.copy(wheel, context / "dist")
        offline = ["--network", "none", "--build-arg", f"BASE={base}", "--pull-never", "--layers=false"]
        offline += ["--volume", f"{wheelhouse}:/wheelhouse:ro", "--volume", f"{pip}:/etc/pip.conf:ro"]
        self.engine("build", *offline, "--file", ROOT / "deploy/Containerfile", "--tag", NAME, context)


class DaemonPod:
    """Context manager: the containers of the DaemonSet, as its manifest says. ``overlay``: a file whose containers are
    added. ``host``: which folder is which of the host's. ``fields``: what the fields of the pod are. ``kubeconfig``
    stands for a service account."""

    def __init__(
        self, image: Image, host: Mapping[str, Path], fields: Mapping[str, str], kubeconfig: Path, overlay: str = ""
    ) -> None:
        self._image, self._host, self._fields, self._kubeconfig = image, host, fields, kubeconfig
        paths = [MANIFESTS / "base/daemonset.yaml", *([MANIFESTS / overlay] if overlay else [])]
        pods = [yaml.safe_load(path.read_text())["spec"]["template"]["spec"] for path in paths]
        self._shares_pids = any(pod.get("hostPID") for pod in pods)
        self._volumes = {one["name"]: one["hostPath"]["path"] for pod in pods for one in pod["volumes"]}
        self._containers = [one for pod in pods for one in pod["containers"]]

    def __enter__(self) -> DaemonPod:
        for container in self._containers:
            words = [*container["command"], *container["args"]]
            self._image.engine("run", "--detach", "--name", container["name"], *self._flags(container), NAME, *words)
        return self

    def __exit__(self, *_: object) -> None:
        """pytest shows what is printed here if the test fails."""
        for container in self._containers:
            print(self._image.logs(container["name"]))
            self._image.engine("rm", "--force", "--time", "60", container["name"])

    def _flags(self, container: Mapping[str, Any]) -> list[str]:
        security = container["securityContext"]
        flags = ["--network", "host", "--volume", f"{self._kubeconfig}:/kubeconfig:ro", "--env=KUBECONFIG=/kubeconfig"]
        flags += ["--pid", "host"] if self._shares_pids else []
        flags += ["--privileged"] if security.get("privileged") else []
        flags += ["--read-only", "--read-only-tmpfs=false"] if security.get("readOnlyRootFilesystem") else []
        flags += [f"--cap-drop={name}" for name in security.get("capabilities", {}).get("drop", ())]
        flags += ["--security-opt=no-new-privileges"] if security.get("allowPrivilegeEscalation") is False else []
        flags += [f"--user={security['runAsUser']}"] if "runAsUser" in security else []
        if memory := container.get("resources", {}).get("limits", {}).get("memory"):
            flags.append(f"--memory={memory.removesuffix('i')}")
        for one in container["env"]:
            value = one["value"] if "value" in one else self._fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            flags.append(f"--env={one['name']}={value}")
        for mount in container["volumeMounts"]:
            kept = ":ro" if mount.get("readOnly") else ""
            flags.append(f"--volume={self._host[self._volumes[mount['name']]]}:{mount['mountPath']}{kept}")
        return flags

    def stop(self, name: str) -> int:
        """The exit code of the container after SIGTERM."""
        self._image.engine("stop", "--time", "60", name)
        return int(self._image.engine("inspect", "--format", "{{.State.ExitCode}}", name))
