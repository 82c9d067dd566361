"""``%load_ext vgpu``: the magic ``%vgpu`` shows and changes the vGPU of a notebook."""

from __future__ import annotations

import shlex
from typing import Any

from vgpu.api.handle import Vgpu
from vgpu.api.stats import Stats
from vgpu.api.toplevel import current
from vgpu.errors import VgpuError

USAGE = """%vgpu                       what this notebook's vGPU has and uses
%vgpu resize sm=50 mem=8G   change it while the notebook runs"""


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext vgpu``."""
    shell.register_magic_function(_magic, magic_name="vgpu")


def _magic(line: str) -> None:
    try:
        print(answer(line))
    except TypeError as error:  # an option that no vGPU has
        print(f"vgpu: {error}\n{USAGE}")
    except VgpuError as error:
        print(f"vgpu: {error.message}" + (f"\n  → {error.hint}" if error.hint else ""))


def answer(line: str) -> str:
    """The text for ``%vgpu LINE``. ``VgpuError``: the node's refusal."""
    words = shlex.split(line)
    if words and words[0] != "resize":
        return USAGE
    vgpu = current()
    if vgpu is None:
        return "This notebook is in no vGPU. vgpuctl jupyter install makes a kernel that is."
    if words:
        changes = dict(word.partition("=")[::2] for word in words[1:])
        vgpu.resize(**changes)  # type: ignore[arg-type]
    return _in_words(vgpu, vgpu.stats())


def _in_words(vgpu: Vgpu, now: Stats) -> str:
    name = f"{vgpu.id} ({vgpu.name})" if vgpu.name else vgpu.id
    return (
        f"{name} on GPU {now.gpu_index}: {now.state}\n"
        f"compute  {now.busy_ratio:.0%} used of {now.guarantee_ratio:.0%} promised, {now.limit_ratio:.0%} at most\n"
        f"memory   {now.memory_used_bytes / 2**30:.2f} of {now.memory_limit_bytes / 2**30:.2f} GiB"
    )
