"""A node of real processes on simulated GPUs, for one test or, cleared after each, for several."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from client_hook import interpreter
from tests.integration import process
from vgpu.ctl.programs import attachment
from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.paths import NodePaths
from vgpu.protocol.messages import ModeChoice, VgpuStatus
from vgpu.spec import VgpuSpec

PATIENCE_S = 60.0  # generous: only a hang takes that long
ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """What ``look`` gives once it gives something. Polls: the thing happens in another process."""
    deadline = time.monotonic() + patience_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s:g} s"
        time.sleep(0.01)


class SimulatedNode:
    """Context manager: ``python -m vgpu.node --simulate COUNT`` in directories of its own; everything ends with it."""

    def __init__(self, count: int = 1, mode: ModeChoice = "temporal", *options: str, hasty: bool = False) -> None:
        """``hasty``: a server that was killed is started again at once, however often (tests/integration/hasty.py)."""
        # Not pytest's tmp_path: a socket's path has 107 characters at most.
        self.directory = Path(tempfile.mkdtemp(prefix="vgpu-test-"))
        self.paths = NodePaths(self.directory / "run", self.directory / "state")
        self.environment = os.environ | {
            "VGPU_RUNTIME_DIR": str(self.paths.runtime),
            "VGPU_STATE_DIR": str(self.paths.state),
            "PYTHONPATH": str(ROOT),
            "VGPU_LOG": "json",
        }
        self._mode: ModeChoice = mode
        self.argv = [sys.executable, "-m", "tests.integration.hasty"] if hasty else interpreter.command("vgpu.node")
        self.argv += ["--simulate", str(count), "--mode", mode, *options]
        self._started: list[subprocess.Popen[str]] = []
        self._children: list[process.Child] = []

    def __enter__(self) -> SimulatedNode:
        try:
            self.start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def start(self) -> None:
        """Also after ``kill_node``: another supervisor, over what the first has left."""
        with (self.directory / "node.log").open("ab") as log:
            self.supervisor = subprocess.Popen(self.argv, env=self.environment, stdout=log, stderr=log)
        eventually(self._answers, "the node's first answer", 2 * PATIENCE_S)

    def _answers(self) -> bool:
        assert self.supervisor.poll() is None, self.logs()
        with suppress(VgpuError), self.link() as link:
            return link.welcome.pid == self.supervisor.pid
        return False

    def link(self) -> ControlLink:
        return ControlLink(self.paths.control_socket, timeout_s=PATIENCE_S)

    def create(self, gpu: str = "auto", **fields: Any) -> VgpuStatus:
        with self.link() as link:
            return link.create(VgpuSpec.parse(**fields), gpu)

    def reading(self, vgpu_id: str) -> VgpuStatus | None:
        with suppress(VgpuError), self.link() as link:
            return next((vgpu for vgpu in link.list() if vgpu.vgpu_id == vgpu_id), None)
        return None

    def attach(self, vgpu_id: str, *, use: bool = True) -> process.Child:
        """A process of its own in the vGPU; ``use``: it wants tokens all the time."""
        child = process.Child(self.paths.broker_socket(vgpu_id), self.environment, use=use)
        self._children.append(child)
        child.await_attached()
        return child

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A command beside the node, in its environment unless ``env`` gives another. Ended with the node, or by
        ``clear``, if its test has not ended it."""
        chosen: dict[str, Any] = {"env": self.environment, "cwd": ROOT} | options
        self._started.append(subprocess.Popen(argv, text=True, **chosen))
        return self._started[-1]

    def program(self, vgpu: VgpuStatus | Sequence[VgpuStatus], body: str, *arguments: str) -> subprocess.Popen[str]:
        """Python under the real hook, in one vGPU or several, that is talked to by lines. Ended as ``popen``'s."""
        vgpus = [vgpu] if isinstance(vgpu, VgpuStatus) else vgpu
        pipe = subprocess.PIPE
        environment = attachment(vgpus).environment(self.environment)
        return self.popen([sys.executable, "-c", body, *arguments], env=environment, stdin=pipe, stdout=pipe)

    def end_started(self) -> None:
        """What a test that failed has left would run on beside the next ones, and fail one of them as a warning."""
        for started in self._started:
            started.kill()
            started.wait()
            for pipe in (started.stdin, started.stdout, started.stderr):
                with suppress(OSError):  # what was never flushed has no reader any more
                    if pipe is not None:
                        pipe.close()
            started.stdin = started.stdout = started.stderr = None  # its test may end it again
        self._started.clear()
        for child in self._children:
            child.kill()
        self._children.clear()

    def server_pid(self, gpu: int = 0) -> int:
        """Never 0, which kill would take for this process's own group."""

        def known() -> int | None:
            with self.link() as link:
                return link.gpus()[gpu].server_pid

        return eventually(known, "the GPU's server runs")

    def clear(self) -> None:
        """As it was at its start, for the next test: nobody on its GPUs, and these in the mode that they had. Journals
        and logs remember more, and a GPU's period and window stay."""
        self.end_started()

        def empty() -> bool:
            with suppress(VgpuError), self.link() as link:  # a server may have been killed a moment ago
                for vgpu in link.list():
                    link.remove(vgpu.vgpu_id, force=True)
                now = link.gpus()
                left = any(gpu.vgpus or gpu.processes or gpu.host_memory_bytes for gpu in now)
                return not left and all(gpu.state == "serving" for gpu in now)
            return False

        eventually(empty, "the node's being empty")
        with self.link() as link:
            for gpu in link.gpus():
                if gpu.mode != self._mode:
                    link.set_gpu(str(gpu.index), mode=self._mode)

    def kill_node(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()

    def logs(self) -> str:
        files = [self.directory / "node.log", *sorted(self.paths.logs.glob("*.log"))]
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files if file.exists()
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.logs(), file=sys.stderr)
        self.end_started()
        if self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGTERM)
            try:
                self.supervisor.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.supervisor.kill()
                self.supervisor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
