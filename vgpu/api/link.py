"""``Link``: a link to a node whose answers are plain dictionaries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.blocking import BlockingLink
from vgpu.protocol.versions import PROTOCOL_VERSION, REQUEST_IDS_SINCE

ANSWER_S: Final = 60.0
"""For the handshake and for readings: on a busy machine a node may take its time."""
Reading = dict[str, Any]


def open_link(path: Path | None = None, *, timeout_s: float = ANSWER_S) -> Link:
    """A link to the node at ``path``, by default the environment's. ``VgpuError`` (unreachable): no node answers."""
    return Link(path, timeout_s=timeout_s)


def open_link_for_vgpu(path: Path | None = None) -> Link:
    """As ``open_link``, to make a vGPU. Where the environment's node does not answer, one starts if it may; a line on
    stderr names it."""
    try:
        return open_link(path)
    except VgpuError as error:
        if path is not None or error.code is not ErrorCode.UNREACHABLE:
            raise
    from vgpu.node import ondemand  # it loads pydantic, which only this case needs

    return ondemand.link(open_link, lambda text: print(text, file=sys.stderr))


class Link(BlockingLink):
    """A link that has shaken hands. Not for several threads at once, except ``hang_up``."""

    def __init__(self, path: Path | None = None, *, timeout_s: float = ANSWER_S) -> None:
        super().__init__(path, timeout_s=timeout_s)
        try:
            hello = {"version": PROTOCOL_VERSION, "oldest_version": REQUEST_IDS_SINCE, "role": "control"}
            self.welcome = self.ask("hello", **hello)
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **fields: object) -> Reading:
        """The node's answer to one request. ``VgpuError``: the node's reason, unreachable, or timeout."""
        request_id = self._fresh_id()
        self._send_message({"op": op, "id": request_id, **fields})
        return self._checked(self._receive(), request_id)

    def change(self, op: str, **fields: object) -> Reading:
        """As ``ask``, for a change: the node bounds it, and this end waits for as long as the node is there."""
        self._socket.settimeout(None)
        try:
            return self.ask(op, **fields)
        finally:
            self._socket.settimeout(self._timeout_s)
