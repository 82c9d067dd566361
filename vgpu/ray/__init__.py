"""vGPUs for Ray: the options of a task or an actor that runs in a vGPU (docs/howto/ray.md).

``@ray.remote(**vgpu.ray.vgpu(sm=30, mem="8G"))`` asks for a vGPU by its size. ``@ray.remote(**vgpu.ray.gpus(0.3))``
asks for a part of the GPU that Ray assigns. Nothing here imports Ray.

Ray starts each worker by ``py_executable``. That is ``vgpuctl ray-worker``, which becomes the worker, inside the vGPU.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any, Final, Unpack

from client_hook import interpreter
from vgpu.api.options import Options, Percent, Size, fields_of, words_of
from vgpu.errors import ErrorCode, VgpuError

SM: Final = "vgpu_sm"
"""Ray's resource: percent of compute. ``vgpu_sm_0``: of GPU 0."""
MEMORY: Final = "vgpu_mem_mib"
MIB: Final = 1 << 20
NO_SET: Final = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Ray leaves ``CUDA_VISIBLE_DEVICES`` as it is. Some releases hide every GPU from a task without ``num_gpus``."""
TAKEN: Final = frozenset({"py_executable", "container", "image_uri", "nsight", "_nsight", "_rocprof_sys"})
"""Fields of a ``runtime_env`` that say what Ray executes in place of ``py_executable``."""
HIDDEN: Final = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Ray hides every GPU from a task without ``num_gpus``."""


def vgpu(
    sm: Percent | None = None,
    mem: Size | None = None,
    *,
    gpu: int | str = "auto",
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Options of Ray for a task or an actor in a vGPU of its own: ``@ray.remote(**vgpu(sm=30, mem="8G"))``.

    ``sm``, ``mem``, ``gpu`` and the other options are those of ``vgpu.create``. ``gpu``: an index also asks for Ray's
    resource of that GPU. ``resources``, ``runtime_env``: Ray's own, which these are joined with.
    ``VgpuError`` (invalid): no vGPU can be so.
    """
    from vgpu.spec import VgpuSpec

    spec = VgpuSpec.parse(**fields_of(Options, sm=sm, mem=mem, **options))
    wanted = {SM: math.ceil(spec.compute_ratio * 100)}
    if spec.memory_bytes is not None:
        wanted[MEMORY] = -(-spec.memory_bytes // MIB)
    if str(gpu).isdecimal():
        wanted[f"{SM}_{gpu}"] = wanted[SM]
    words = words_of({"sm": sm, "mem": mem, **options})
    words += [] if gpu == "auto" else ["--gpu", str(gpu)]
    return {
        "resources": {**(resources or {}), **wanted},
        "runtime_env": _joined(runtime_env, words, {NO_SET: "1"}),
    }


def gpus(
    num_gpus: float, *, runtime_env: Mapping[str, Any] | None = None, **options: Unpack[Options]
) -> dict[str, Any]:
    """Options of Ray for a task or an actor that is held to ``num_gpus`` of a GPU, its compute and its memory:
    ``@ray.remote(**gpus(0.3))``. Ray chooses the GPU. The rest: as ``runtime_env``."""
    from vgpu.spec import VgpuSpec

    VgpuSpec.parse(fraction=min(num_gpus, 1.0))
    return {"num_gpus": num_gpus, "runtime_env": fractions(runtime_env, **options)}


def fractions(runtime_env: Mapping[str, Any] | None = None, **options: Unpack[Options]) -> dict[str, Any]:
    """A ``runtime_env`` in which ``num_gpus=0.3`` is a vGPU with 30 percent of the GPU that Ray assigns. It serves a
    task, an actor, or all of a job: ``ray.init(runtime_env=vgpu.ray.fractions())``.

    A task without ``num_gpus`` sees no GPU. ``runtime_env``: Ray's own, which this is joined with. Other options: as
    ``vgpu.create``, but for the size.
    """
    from vgpu.spec import VgpuSpec

    VgpuSpec.parse(**fields_of(Options, sm=100, **options))
    return _joined(runtime_env, ["--num-gpus", *words_of(options)], {HIDDEN: "1"})


def _joined(given: Mapping[str, Any] | None, words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """``given`` with our ``py_executable`` and ``variables``. PATH begins with the folder of this interpreter, so a
    node of the same image finds ``vgpuctl`` and ``python`` without an activated environment."""
    made = dict(given or {})
    if taken := TAKEN & made.keys():
        raise VgpuError(
            ErrorCode.INVALID,
            f"runtime_env has {sorted(taken)[0]} already, and a vGPU needs py_executable",
            "leave it out",
        )
    folder, python = interpreter.place()
    own = {"PATH": f"{folder}:${{PATH}}", **variables}
    made["env_vars"] = own | dict(made.get("env_vars") or {})
    made["py_executable"] = shlex.join(["vgpuctl", "ray-worker", *words, "--", python])
    return made
