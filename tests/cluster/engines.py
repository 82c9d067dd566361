"""Container engines with everything below a folder of their own, and a root file system without any image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cython_ext import __file__ as extension
from tests.cluster import roots
from tests.integration.node import eventually

REQUIRED: Final = bool(os.environ.get("REQUIRE_ENGINES"))
"""Releases: an engine that is missing is a failure."""
_CONFIG: Final = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
netns = "none"
"""
_NEWER: Final = Path(__file__).parents[2] / "build/engines/bin"
_PROGRAMS: Final = ("sh", "env", "sleep")
_LIBRARIES: Final = Path(extension).parent / "lib"


def make_root(folder: Path, probe: Path) -> Path:
    """A root with a shell, the probe, and the libraries that they and the hook need."""
    root = folder / "rootfs"
    for name in ("bin", "etc", "proc", "dev", "sys", "tmp", "run"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    for program in (*programs, probe):
        shutil.copy(program, root / ("bin" if program in programs else "") / program.name)
    hooked = (_LIBRARIES / "libvgpu_hook.so", *(_LIBRARIES / "sim").glob("*.so.1"))
    for library in _libraries((*programs, probe, *hooked)):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    return root


def own_loader(root: Path) -> str:
    """A loader that reads another file than ``/etc/ld.so.preload``, as an image may bring one; its path there."""
    [loader] = root.glob("lib*/ld-linux-*.so.*")
    data = loader.read_bytes()
    assert data.count(b"/etc/ld.so.preload\0") == 1
    own = root / "own-loader"
    own.write_bytes(data.replace(b"/etc/ld.so.preload\0", b"/etc/ld.so.preloaX\0"))
    own.chmod(0o755)
    return "/own-loader"


def _libraries(files: Iterable[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=True).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\t)(/\S+)", listed, re.MULTILINE)}


def podman(folder: Path) -> Path:
    """A podman that keeps to ``folder``, under its own name."""
    config, command = folder / "containers.conf", folder / "podman"
    config.write_text(_CONFIG)
    words = ["podman", "--root", folder / "store", "--runroot", folder / "run", "--tmpdir", folder / "tmp"]
    words[0] = shutil.which("podman") or ""
    line = shlex.join(map(str, [*words, "--runtime", "runc", "--cgroup-manager", "cgroupfs"]))
    command.write_text(f'#!/bin/sh\nCONTAINERS_CONF={config} exec {line} "$@"\n')
    command.chmod(0o755)
    return command


def docker_path() -> str:
    """PATH for Docker: that of ``make engines`` (newer.sh) if it is there, else the machine's."""
    return os.pathsep.join([str(_NEWER), os.environ["PATH"]]) if _NEWER.exists() else os.environ["PATH"]


class Dockerd:
    """Docker's daemon with everything below ``folder``, without networks. Context manager; the value is the path of a
    ``docker`` command of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "s"
        self._log = folder / "dockerd.log"

    def __enter__(self) -> Path:
        places = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "pid"}
        words = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "-H", f"unix://{self._socket}"]
        words += [str(word) for option, name in places.items() for word in (option, self._folder / name)]
        with self._log.open("wb") as log:
            environment = os.environ | {"PATH": docker_path()}
            self._daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        command = self._folder / "docker"
        command.write_text(
            f'#!/bin/sh\nexec {shutil.which("docker", path=docker_path())} -H unix://{self._socket} "$@"\n'
        )
        command.chmod(0o755)
        asked = [command, "version"]
        eventually(
            lambda: self._daemon.poll() is not None or subprocess.run(asked, capture_output=True).returncode == 0,
            "dockerd answers",
        )
        return command

    def __exit__(self, *_: object) -> None:
        self._daemon.terminate()
        self._daemon.wait(60)


def knows_devices(command: Path) -> bool:
    """Whether the engine takes CDI devices. Docker 28.2 and newer do so by default."""
    if command.name == "podman":
        return True
    asked = [command, "version", "--format", "{{.Server.Version}}"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return int(version.partition(".")[0]) >= 29 or version.startswith(("28.2", "28.3", "28.4", "28.5"))


def import_root(docker: Path, root: Path) -> str:
    """The image of ``root``."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run([docker, "import", "-", "probe"], stdin=tar.stdout, check=True, capture_output=True)
    return "probe"


def why_no_docker(folder: Path, probe: Path) -> str:
    """Empty: Docker runs containers here. Else why not."""
    if why := roots.is_possible():
        return why
    if missing := [name for name in ("docker", "dockerd", "runc") if shutil.which(name, path=docker_path()) is None]:
        return f"not installed: {', '.join(missing)}"
    with Dockerd(folder) as docker:
        tried = subprocess.run([docker, "info"], capture_output=True, text=True, check=False, timeout=60)
        if tried.returncode == 0:
            image = import_root(docker, make_root(folder / "trial", probe))
            words = [docker, "run", "--rm", "--network", "none", image, "/bin/env"]
            tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return "" if tried.returncode == 0 else f"docker runs no container here: {tried.stderr.strip()[-200:]}"


def why_no_podman(folder: Path, probe: Path) -> str:
    """Empty: podman runs containers here. Else why not."""
    if why := roots.is_possible():
        return why
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman and runc are not installed"
    root = make_root(folder / "trial", probe)
    words = [podman(folder), "run", "--rm", "--rootfs", f"{root}:O", "/bin/env"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return "" if tried.returncode == 0 else f"podman runs no container here: {tried.stderr.strip()[-200:]}"
