"""The process of a simulated node."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from client_hook import interpreter
from client_hook.namespaces import ALLOW
from vgpu.api.node import Node
from vgpu.node.starting import node_command, wait_until_serving
from vgpu.paths import NodePaths

_STOP_S: Final = 30.0
_LONGEST_BASE: Final = 40
"""The path of a socket has 107 characters at most, and TMPDIR is that long on some build machines."""


@contextmanager
def started(gpus: int, mode: str) -> Iterator[Node]:
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_BASE else "/tmp"
    with tempfile.TemporaryDirectory(prefix="vgpu-testing-", dir=base, ignore_cleanup_errors=True) as directory:
        place = NodePaths(Path(directory, "run"), Path(directory, "state"))
        log = Path(directory, "node.log")
        environment = interpreter.environment(os.environ) | {
            "VGPU_RUNTIME_DIR": str(place.runtime),
            "VGPU_STATE_DIR": str(place.state),
            ALLOW: "1",  # its programs are children of this process, and so in the same namespace
        }
        for name in ("VGPU_ID", "LD_PRELOAD"):  # this process may be in a vGPU itself
            environment.pop(name, None)
        with log.open("wb") as output:
            process = subprocess.Popen(
                node_command(gpus, mode),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the tests, and they end the node
            )
        try:
            wait_until_serving(process, log, place.control_socket)
            yield Node(place.control_socket)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the node to end, so that it ends its servers and brokers; a node that is killed leaves them behind."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
        return
    process.kill()
    process.wait()
