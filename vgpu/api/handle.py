"""``Vgpu``: one vGPU, as a Python program has it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from vgpu.api import programs
from vgpu.api.link import Link, Reading, open_link
from vgpu.api.options import Changes, Percent, Size, fields_of
from vgpu.api.stats import Stats
from vgpu.api.triggers import Moment, triggers_of
from vgpu.errors import ErrorCode, VgpuError

_GONE = frozenset({ErrorCode.NOT_FOUND, ErrorCode.REMOVED, ErrorCode.UNREACHABLE})


class Vgpu:
    """A vGPU of a node. ``create``, ``connect`` and ``list`` make handles; any thread may use one.

    As a context manager it is removed at the end, with ``force``, if ``create`` made it. Every method raises
    ``VgpuError``, whose ``code`` is an ``ErrorCode``.
    """

    def __init__(self, reading: Reading, open_link: Callable[[], Link], *, removed_at_exit: bool = False) -> None:
        self.id: str = reading["vgpu_id"]
        """What programs get as ``VGPU_ID``."""
        self.reading = reading
        """The node's latest answer."""
        self._open_link = open_link
        self._removed_at_exit = removed_at_exit

    @property
    def name(self) -> str | None:
        return self.reading["name"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Vgpu {self.id}{f' ({self.name})' if self.name else ''} on GPU {self.reading['gpu_index']}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A node that is gone has recorded the vGPU, and the next one removes it once this process has ended."""
        if self._removed_at_exit:
            try:
                self.remove(force=True)
            except VgpuError as refusal:
                if refusal.code not in _GONE:
                    raise

    # --- programs

    def environ(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a program in this vGPU: ``inherited``, by default ``os.environ``, with what it needs."""
        return programs.environment(self.reading, inherited)

    def environ_changes(self) -> dict[str, str | None]:
        """Only the variables that ``environ`` sets, or unsets (None)."""
        return programs.changes(self.reading)

    def run(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` in this vGPU. ``VgpuError`` (invalid): the program would not load the hook."""
        return subprocess.run(command, env=programs.prepared(self.reading, command, env), **options)

    def popen(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` in this vGPU. Errors: as ``run``."""
        return subprocess.Popen(command, env=programs.prepared(self.reading, command, env), **options)

    # --- the vGPU itself

    def stats(self) -> Stats:
        """What it has and uses now."""
        with self._open_link() as link:
            self.reading = link.ask("inspect", vgpu=self.id)["vgpu"]
        return Stats.of(self.reading)

    def mounts(self) -> list[str]:
        """What a container with this vGPU mounts, as ``docker run -v`` and ``podman run -v`` take it."""
        with self._open_link() as link:
            return list(link.ask("inspect", vgpu=self.id)["mounts"])

    def resize(self, *, sm: Percent | None = None, mem: Size | None = None, **changes: Unpack[Changes]) -> None:
        """Change it while programs run. What is not given stays as it is."""
        wanted = fields_of(Changes, sm=sm, mem=mem, **changes)
        if not wanted:
            raise VgpuError(ErrorCode.INVALID, "nothing to change", 'resize(sm=50, mem="16G")')
        self._change("set", changes=wanted)

    def suspend(self, *, resume_on: str | Sequence[str] = (), resume_at: Moment | None = None) -> None:
        """Pause its programs and free their GPU memory. Temporal mode. Without a trigger it stays so until ``resume``.

        ``resume_on``: ``call`` (a CUDA call of one of its programs), ``tcp:8000`` (a connection to that port), or
        several. ``resume_at``: ``90m``, ``08:30``, a ``datetime``, a ``timedelta``, or seconds since 1970."""
        self._change("suspend", **triggers_of(resume_on, resume_at, self._open_link))

    def resume(self) -> None:
        """Bring it back."""
        self._change("resume")

    def migrate(self, gpu: int | str) -> None:
        """Move it, with its running programs, to another GPU: an index or a UUID. Temporal mode."""
        self._change("migrate", gpu=str(gpu))

    def remove(self, *, force: bool = False) -> None:
        """``in-use``: programs run in it. ``force``: their next GPU call fails."""
        self._change("remove", force=force)

    def _change(self, op: str, **fields: object) -> None:
        with self._open_link() as link:
            self.reading = link.change(op, vgpu=self.id, **fields)


def discard(vgpu_id: str, path: Path | None) -> None:
    """Remove a vGPU whose handle no caller will have, on a link of its own. If the node does not answer, it removes the
    vGPU once this process has ended."""
    with suppress(VgpuError), open_link(path) as link:
        link.change("remove", vgpu=vgpu_id, force=True)
