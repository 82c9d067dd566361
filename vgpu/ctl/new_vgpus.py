"""The link over which `vgpuctl` makes vGPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu.ctl.exit_codes import say

if TYPE_CHECKING:
    from vgpu.node.link import ControlLink


def node_for_vgpu() -> ControlLink:
    """A link for a new vGPU. Where no node answers, one may start by itself; a line on stderr names it."""
    from vgpu.node import ondemand
    from vgpu.node.link import PATIENT_S, ControlLink

    return ondemand.link(lambda: ControlLink(timeout_s=PATIENT_S), say)
