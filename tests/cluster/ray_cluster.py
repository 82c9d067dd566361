"""A Ray cluster of two nodes on this machine, each with a node of st-vgpu: "one" has two simulated GPUs, "two" one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from client_hook import interpreter
from tests.integration.node import ROOT, SimulatedNode, eventually
from vgpu.protocol.messages import VgpuStatus

SIZES = {"one": 2, "two": 1}
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
_STORE_BYTES = 80 << 20
_ATTEMPTS = 2


def why_no_ray() -> str:
    return "" if find_spec("ray") else "ray is not installed: pip install --group engines"


class RayCluster:
    def __init__(self) -> None:
        self.nodes: dict[str, SimulatedNode] = {}
        self._exit = ExitStack()
        self.cluster: Any = None

    def __enter__(self) -> RayCluster:
        import pytest
        from ray.cluster_utils import Cluster

        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            folder = tempfile.mkdtemp(prefix="ray-")  # not pytest's tmp_path: a socket's path is short
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            patch.setenv("RAY_TMPDIR", folder)
            self.nodes = {name: stack.enter_context(SimulatedNode(count)) for name, count in SIZES.items()}
            self.cluster = Cluster()
            stack.callback(self.cluster.shutdown)
            for name in SIZES:
                self.add(name)
            stack.callback(_leave)
            _join(self.cluster.address)
            self._exit = stack.pop_all()
        return self

    def add(self, name: str, label: str = "") -> Any:
        """A node of Ray over the GPUs of ``name``. Tasks choose it by the resource ``on_LABEL``."""
        node = self.nodes[name]
        environment = node.environment | ENVIRONMENT
        words = interpreter.command("vgpu.ctl", "ray", "resources")
        shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        options = {
            "wait": True,
            "num_cpus": 8,
            "num_gpus": SIZES[name],
            "resources": json.loads(shown) | {f"on_{label or name}": 1000},
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "env_vars": {key: environment[key] for key in ("VGPU_RUNTIME_DIR", "VGPU_STATE_DIR", "PYTHONPATH")},
        }
        for _ in range(_ATTEMPTS):
            with suppress(Exception):  # Ray gives a node up after 30 s, which a busy machine may take
                return self.cluster.add_node(**options)
        return self.cluster.add_node(**options)

    def vgpus(self, name: str = "") -> list[VgpuStatus]:
        found: list[VgpuStatus] = []
        for node in [self.nodes[name]] if name else self.nodes.values():
            with node.link() as link:
                found += link.list()
        return found

    def is_empty(self) -> bool:
        return not self.vgpus()

    def clear(self) -> None:
        """Ray ends idle workers itself only where there are many."""
        eventually(self._is_clear, "no worker is left")

    def _is_clear(self) -> bool:
        for vgpu in self.vgpus():
            if vgpu.asker_pid:
                with suppress(ProcessLookupError):
                    os.kill(vgpu.asker_pid, signal.SIGKILL)
            else:
                for node in self.nodes.values():
                    node.clear()
        return self.is_empty()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)


def _join(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")


def _leave() -> None:
    import ray

    ray.shutdown()
