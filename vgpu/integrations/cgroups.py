"""Which container and pod a process runs in, by the text of its ``/proc/PID/cgroup``. Pure, but for ``of_process``.

The kernel writes that text, so that a container cannot choose it. Engines name a cgroup after the id of its container.
A user of the host names the cgroups below their own slice, so that no pod is read there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CONTAINER: Final = re.compile(r"(?:.*[:-])?(?<![0-9a-f])([0-9a-f]{64})(?:\.scope)?")
"""``ID`` below ``docker``, ``docker-ID.scope``, ``libpod-ID``, ``cri-containerd-ID.scope``, ``crio-ID.scope``,
``SLICE:cri-containerd:ID``, ``nerdctl-ID.scope``."""
_MONITOR: Final = "-conmon-"
"""The engine's own process beside a container has a cgroup with the container's id, too."""
_UUID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}"
_POD: Final = re.compile(rf"(?:.*-)?pod({_UUID}|[0-9a-f]{{32}})(?:\.slice)?(?::.*)?")
_OF_A_USER: Final = re.compile(r"user\.slice|user@\d+\.service")


@dataclass(frozen=True, slots=True)
class Place:
    """``containers``: ids, the outermost first, which is the one that the host's engine knows. ``pod``: the uid of the
    Kubernetes pod, the outermost one; "": none."""

    containers: tuple[str, ...] = ()
    pod: str = ""

    def __str__(self) -> str:
        """As messages have it: ``container 0123456789ab of pod UID``; "": neither."""
        container = f"container {self.containers[-1][:12]}" if self.containers else ""
        pod = f"pod {self.pod}" if self.pod else ""
        return " of ".join(filter(None, (container, pod)))


NOWHERE: Final = Place()


def place_in(text: str) -> Place:
    """By the content of a ``/proc/PID/cgroup``, of cgroup v1, v2 or both: each line is ``NUMBER:CONTROLLERS:PATH``."""
    best = NOWHERE
    for line in text.splitlines():
        found = _place(line.split(":", 2)[-1].split("/"))
        if (len(found.containers), len(found.pod)) > (len(best.containers), len(best.pod)):
            best = found
    return best


def _place(parts: list[str]) -> Place:
    containers, pod, is_a_users = [], "", False
    for part in parts:
        is_a_users = is_a_users or _OF_A_USER.fullmatch(part) is not None
        if (match := _CONTAINER.fullmatch(part)) and _MONITOR not in part:
            containers.append(match[1])
        if not pod and not is_a_users and (match := _POD.fullmatch(part)):
            pod = match[1].replace("_", "-")
    return Place(tuple(containers), pod)


def of_process(pid: int, proc: Path = Path("/proc")) -> Place:
    """Of this process; of one that has ended, no place."""
    try:
        return place_in((proc / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return NOWHERE
