"""A private node for one benchmark: its own runtime and state directories, stopped and removed at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

START_S: Final = 120.0
"""On a machine where much else begins, too."""


def plain_environment(node: Node | None, gpu: int = 0) -> dict[str, str]:
    """The environment of a program without vGPU and hook: on real GPUs (None), or on a simulated one of ``node``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("VGPU_", "CUDA_MPS_"))}
    if node is None or not node.simulated:
        return own
    lines = node.run("create", "--gpu", str(gpu), "--sm", "1", "--mem", "64M", "-o", "env").splitlines()
    told = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    node.run("rm", told.pop("VGPU_ID"))
    del told["LD_PRELOAD"]
    return own | told


class Node:
    """Context manager: ``vgpuctl serve`` in a scratch directory.

    ``environment`` is what vgpuctl and applications need to reach it; ``vgpuctl`` is the command as argv;
    ``control_socket`` is for ``ControlLink``.
    Raises RuntimeError with the node's log if it does not come up within 30 s.
    """

    def __init__(
        self,
        mode: str = "temporal",
        simulate: int = 0,
        gpus: Iterable[int] | None = None,
        options: Iterable[str] = (),
    ) -> None:
        """``gpus``: indices; default: of a machine's own the one in ``$GPU``, or the first; of simulated ones all.
        ``options``: more of ``vgpuctl serve``."""
        self.simulated = simulate > 0
        self.directory = Path(tempfile.mkdtemp(prefix="vgpu-bench-"))
        self.environment = {
            **os.environ,
            "VGPU_RUNTIME_DIR": str(self.directory / "run"),
            "VGPU_STATE_DIR": str(self.directory / "state"),
        }
        self.control_socket = self.directory / "run" / "control.sock"
        self.vgpuctl = [sys.executable, "-m", "vgpu.ctl"]
        self.log = self.directory / "serve.log"
        if gpus is None:
            gpus = () if simulate else (int(os.environ.get("GPU", "0")),)
        alone = [argument for index in gpus for argument in ("--gpu", str(index))]
        arguments = ["serve", "--mode", mode, *(["--simulate", str(simulate)] if simulate else []), *alone, *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*self.vgpuctl, *arguments], env=self.environment, stdout=log, stderr=log)

    def __enter__(self) -> Node:
        deadline = time.monotonic() + START_S
        while subprocess.run(
            [*self.vgpuctl, "gpu", "ls"], env=self.environment, capture_output=True, check=False
        ).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"the node did not start:\n{self.tail()}")
            time.sleep(0.2)
        return self

    def run(self, *arguments: str, timeout: float = 60) -> str:
        """``vgpuctl ARGUMENTS``; its standard output. Raises CalledProcessError."""
        result = subprocess.run(
            [*self.vgpuctl, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if result.returncode:
            print(result.stderr, file=sys.stderr)
            result.check_returncode()
        return result.stdout

    def tail(self, count: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-count:] if self.log.exists() else ""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.tail(), file=sys.stderr)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
