"""containerd 2 with everything below a folder of its own, and archives of images, without a registry."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.cluster import engines, roots
from tests.integration.node import eventually

_PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def why_not() -> str:
    """Empty: a containerd that knows CDI devices is here. Else why not."""
    if why := roots.is_possible():
        return why
    if missing := [name for name in ("containerd", "ctr") if shutil.which(name, path=engines.docker_path()) is None]:
        return f"not installed: {', '.join(missing)}"
    words = [shutil.which("containerd", path=engines.docker_path()) or "", "--version"]
    version = re.search(r" v?(\d+)\.\d", subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    is_new = version is not None and int(version[1]) >= 2
    return "" if is_new else "containerd knows CDI devices from 2.0 on; make engines gets it"


class Containerd:
    """Context manager: the daemon, with everything below ``folder``. ``config``: lines of its configuration."""

    def __init__(self, folder: Path, config: str = "", namespace: str = "default") -> None:
        self.address = folder / "address"
        self._namespace = namespace
        self._environment = os.environ | {"PATH": engines.docker_path()}
        self._log = folder / "log"
        path = folder / "config.toml"
        path.write_text(f"version = 3\n{config}")
        places = [f"--{name}={folder / name}" for name in ("root", "state", "address")]
        self._command = ["containerd", f"--config={path}", *places]

    def __enter__(self) -> Containerd:
        self.start()
        return self

    def start(self) -> None:
        """Also after ``kill``: over what the first one has left."""
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        eventually(lambda: self._daemon.poll() is not None or self.ctr("version").returncode == 0, "containerd answers")
        assert self._daemon.poll() is None, self.logs()

    def kill(self) -> None:
        self._daemon.kill()
        self._daemon.wait()

    def __exit__(self, *_: object) -> None:
        for name in self.ctr("task", "ls", "-q").stdout.split():
            self.ctr("task", "rm", "--force", name)
        self._daemon.send_signal(signal.SIGTERM)
        self._daemon.wait(60)

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = ["ctr", "--address", str(self.address), "--namespace", self._namespace, *words]
        return subprocess.run(argv, env=self._environment, capture_output=True, text=True, check=False, timeout=120)

    def import_root(self, name: str, root: Path, command: str) -> None:
        """An image of one layer."""
        archive = archive_of(name, root, command)
        imported = self.ctr("images", "import", str(archive))
        assert imported.returncode == 0, imported.stderr

    def logs(self) -> str:
        return self._log.read_text()[-4000:]


def archive_of(name: str, root: Path, command: str) -> Path:
    """The archive of an image called ``name``, as ``docker save`` writes it, beside ``root``."""
    folder = root.with_name(f"{root.name}-image")
    folder.mkdir()
    layer = folder / "layer.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(layer), "."], check=True)
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    config = {
        "architecture": _PROCESSORS[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [command]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest: list[dict[str, Any]] = [{"Config": "config.json", "RepoTags": [name], "Layers": [layer.name]}]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    archive = folder.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(archive), "."], check=True)
    return archive
