"""The kernel specification that ``vgpuctl jupyter install`` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from client_hook import interpreter


def kernels_dir(environment: dict[str, str]) -> Path:
    """Where Jupyter finds this user's kernels."""
    data = environment.get("JUPYTER_DATA_DIR")
    if not data:
        share = environment.get("XDG_DATA_HOME") or f"{environment.get('HOME', '/')}/.local/share"
        data = f"{share}/jupyter"
    return Path(data, "kernels")


def install(name: str, sm: str, mem: str | None, gpu: str, python: str) -> Path:
    """Write the specification of kernel ``name``; returns its folder. ``OSError``."""
    folder = kernels_dir(dict(os.environ)) / name
    config = {"sm": sm, "gpu": gpu} | ({"mem": mem} if mem else {})
    share = f"{sm} %" + (f", {mem}" if mem else "")
    spec = {
        "argv": interpreter.users_command("ipykernel_launcher", "-f", "{connection_file}", python=python),
        "display_name": f"Python in a vGPU ({share})",
        "language": interpreter.LANGUAGE,
        "metadata": {"kernel_provisioner": {"provisioner_name": "vgpu", "config": config}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
    return folder
