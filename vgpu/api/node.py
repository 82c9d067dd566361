"""``Node``: where vGPUs are made and found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack
from uuid import uuid4

from vgpu.api.handle import Vgpu, discard
from vgpu.api.link import Link, open_link, open_link_for_vgpu
from vgpu.api.options import Options, Percent, Size, fields_of
from vgpu.api.owner import uid_of
from vgpu.protocol.versions import USAGE_SINCE, refuse_older


class Node:
    """A node on this machine. ``path``: its control socket; by default the node that the environment names, at each
    call. Every method raises ``VgpuError``; ``unreachable``: no node answers."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)

    def open_link(self, *, for_new: bool = False) -> Link:
        """``for_new``: to make a vGPU, so a node may start by itself."""
        return open_link_for_vgpu(self.path) if for_new else open_link(self.path)

    def create(
        self,
        spec: Any = None,
        *,
        sm: Percent | None = None,
        mem: Size | None = None,
        name: str | None = None,
        gpu: int | str = "auto",
        owner: str | int | None = None,
        keep: bool = False,
        attach: Literal["owner", "mount"] = "owner",
        claim: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Vgpu:
        """A new vGPU, already admitting programs. If this call is interrupted, no vGPU stays. Where no node
        answers, one may start by itself, and ends after its last vGPU.

        ``sm``: percent of the GPU's compute. ``mem``: bytes or a text such as ``8G``; by default the same part as
        ``sm``. ``gpu``: "auto", an index or a UUID. ``owner``: as root, the user (name or uid) whose vGPU it will be.
        ``keep``: it stays when this process ends, and when a ``with`` block does. Otherwise the node removes it once
        this process has ended and no program is attached. ``attach`` "mount": containers of any user that have its
        directory mounted may use it (``Vgpu.mounts``). ``claim``: of an engine that may ask
        again, with the fields of ``vgpu.integrations.claims.Claim``; the same claim has the same vGPU. ``spec``: a
        ``VgpuSpec`` in place of the options.
        """
        fields = fields_of(Options, sm=sm, mem=mem, name=name, **options)
        if spec is not None:
            fields = spec.model_dump(mode="json", exclude_none=True) | fields
        request: dict[str, object] = {
            "spec": fields,
            "gpu": str(gpu),
            "request_id": uuid4().hex,
            "lifetime": "kept" if keep else "process",
        }
        if owner is not None:
            request["owner_uid"] = uid_of(owner)
        if attach != "owner":
            request["attach"] = attach
        if claim is not None:
            request["claim"] = claim
        with self.open_link(for_new=True) as link:
            vgpu = Vgpu(link.change("create", **request), self.open_link, removed_at_exit=not keep)
            try:
                link.change("confirm", request_id=request["request_id"])
            except BaseException:
                link.close()
                discard(vgpu.id, self.path)
                raise
        return vgpu

    def connect(self, vgpu: str) -> Vgpu:
        """The vGPU with this id, unambiguous prefix of one, or name. ``not-found``, ``ambiguous``."""
        with self.open_link() as link:
            return Vgpu(link.ask("inspect", vgpu=vgpu)["vgpu"], self.open_link)

    def usage(
        self, by: Literal["user", "vgpu", "claim"] = "user", *, since_unix_s: float = 0.0
    ) -> tuple[dict[str, Any], ...]:
        """What was promised and used since then, in rows as ``vgpuctl usage -o json`` has them."""
        with self.open_link() as link:
            refuse_older(link.welcome["version"] < USAGE_SINCE, "has no usage")
            return tuple(link.ask("usage", by=by, since_unix_s=since_unix_s)["rows"])

    def list(self) -> list[Vgpu]:
        """All vGPUs of the node."""
        with self.open_link() as link:
            return [Vgpu(reading, self.open_link) for reading in link.ask("list")["vgpus"]]
