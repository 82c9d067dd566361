"""The PID namespace in which a node runs.

A node learns from the kernel which process connects (SO_PEERCRED). A process outside the node's PID namespace has the
pid 0 there. So a node belongs into the host's PID namespace, the only one from which every process is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""The inode of the host's: the kernel's PROC_PID_INIT_INO, the same on every machine and since Linux 3.8."""
ALLOW: Final = "VGPU_ALLOW_PID_NAMESPACE"
REMEDY: Final = (
    "give the node's container the host's process ids: --pid host, or hostPID: true in a pod; "
    f"{ALLOW}=1 if all its programs run in that namespace, too"
)


def is_foreign_pid_namespace(root: Path = Path("/")) -> bool:
    """Whether this process is in another PID namespace than the host's. A kernel without them has one alone."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino != INITIAL_PID_NAMESPACE
    except OSError:
        return False


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that a node may run in such a namespace."""
    return environment.get(ALLOW, "") == "1"
