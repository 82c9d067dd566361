"""Where a node keeps its sockets and its journal. ``VGPU_RUNTIME_DIR`` and ``VGPU_STATE_DIR`` place a node. Several
nodes can run on one machine, in directories of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vgpu.errors import ErrorCode, VgpuError

UMASK: Final = 0o022
"""Of the node, its servers and brokers, whatever a shell has: users reach their own vGPUs on root's node. Private files
have a mode of their own."""
VGPU_ID: Final = re.compile(r"vgpu-[0-9a-f]{8}")


SYSTEM_RUNTIME: Final = Path("/run/vgpu")
"""Of root's node, by default. A client of a user without a node finds root's node there."""


CDI_DIR: Final = Path("/var/run/cdi")
"""Where Docker, podman and containerd look for devices by default."""


@dataclass(frozen=True, slots=True)
class NodePaths:
    """``runtime``: sockets, gone after a reboot. ``state``: journals and logs, kept."""

    runtime: Path
    state: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, uid: int | None = None) -> NodePaths:
        """The node that ``environment`` points at; root's default is the system's node, a user's default their own."""
        root = (os.getuid() if uid is None else uid) == 0
        runtime = environment.get("VGPU_RUNTIME_DIR") or default_runtime_dir(environment, root=root)
        state = environment.get("VGPU_STATE_DIR") or (
            "/var/lib/vgpu"
            if root
            else f"{environment.get('XDG_STATE_HOME') or environment.get('HOME', '/tmp') + '/.local/state'}/vgpu"
        )
        return cls(Path(runtime).absolute(), Path(state).absolute())

    @property
    def control_socket(self) -> Path:
        return self.runtime / "control.sock"

    @property
    def node_lock(self) -> Path:
        """In a directory of the node alone: a user that can open a file can lock it."""
        return self.runtime / "gpus" / "node.lock"

    def gpu_dir(self, index: int) -> Path:
        return self.runtime / "gpus" / str(index)

    def server_socket(self, index: int) -> Path:
        return self.gpu_dir(index) / "server.sock"

    def vgpu_dir(self, vgpu_id: str) -> Path:
        return self.runtime / "vgpus" / vgpu_id

    def broker_socket(self, vgpu_id: str) -> Path:
        return self.vgpu_dir(vgpu_id) / "broker.sock"

    def vgpu_server(self, vgpu_id: str) -> Path:
        """A link to the socket of the GPU Server that the vGPU belongs to; it moves with the vGPU. It is not in the
        directory where processes attach. Reason: a container may have that directory mounted, and root in the container
        may replace the files there."""
        return self.broker_dir(vgpu_id) / "server.sock"

    def old_vgpu_server(self, vgpu_id: str) -> Path:
        """Where brokers of the first releases expect that link."""
        return self.vgpu_dir(vgpu_id) / "server.sock"

    def name_link(self, owner_uid: int, name: str) -> Path:
        """A link to the id of the owner's vGPU of that name."""
        return self.runtime / "names" / str(owner_uid) / name

    def attach_dir(self, vgpu_id: str) -> Path:
        """The directory that a container has mounted. Its parent admits the node's user alone, so only a mount leads
        there."""
        return self.runtime / "attach" / vgpu_id

    def mount_socket(self, vgpu_id: str) -> Path:
        return self.attach_dir(vgpu_id) / "broker.sock"

    @property
    def longest_sockets(self) -> tuple[Path, ...]:
        """The paths of sockets that are longest in a node."""
        vgpu_id, slot = "vgpu-00000000", 63
        return self.vgpu_dir(vgpu_id) / f"broker.{slot}.sock", self.broker_alive(vgpu_id)

    def broker_dir(self, vgpu_id: str) -> Path:
        """The broker's own directory; no container has it mounted."""
        return self.runtime / "brokers" / vgpu_id

    def broker_alive(self, vgpu_id: str) -> Path:
        """A socket at which the vGPU's broker listens, and sends nothing: the kernel says which process that is."""
        return self.broker_dir(vgpu_id) / "alive.sock"

    def journal(self, gpu_uuid: str) -> Path:
        return self.state / f"{gpu_uuid}.sqlite"

    @property
    def database(self) -> Path:
        """Queue and history (vgpu/node/database.py)."""
        return self.state / "node.db"

    @property
    def container_files(self) -> Path:
        """The files that every container has mounted (vgpu/integrations/container.py). Not below ``runtime``: ``/run``
        is often mounted ``noexec``, and a container's mount would inherit that."""
        return self.state / "container"

    @property
    def cdi(self) -> Path | None:
        """Where container engines find devices. ``VGPU_CDI_DIR`` names it; "": the node writes no devices. By default
        the node of the system writes to ``/var/run/cdi``."""
        given = os.environ.get("VGPU_CDI_DIR")
        if given is not None:
            return Path(given).absolute() if given else None
        return CDI_DIR if self.runtime == SYSTEM_RUNTIME and os.geteuid() == 0 else None

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def node_log(self) -> Path:
        """The log of a detached node. Any other node inherits its stderr."""
        return self.logs / "node.log"

    def server_log(self, index: int) -> Path:
        return self.logs / f"gpu-{index}.log"

    @property
    def events(self) -> Path:
        return self.state / "events.jsonl"

    @property
    def program_events(self) -> Path:
        """Events that programs cause, as often as they like."""
        return self.state / "events-programs.jsonl"


def unusable(path: Path, error: OSError, variable: str) -> VgpuError:
    """The error of a node that cannot have ``path``, which ``variable`` places."""
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    return VgpuError(
        ErrorCode.UNAVAILABLE, f"{path} cannot be used: {reason}", f"set {variable} to a directory of your own"
    )


def default_runtime_dir(environment: Mapping[str, str], *, root: bool) -> str:
    if root:
        return str(SYSTEM_RUNTIME)
    return f"{environment.get('XDG_RUNTIME_DIR') or f'/tmp/vgpu-{os.getuid()}'}/vgpu"
