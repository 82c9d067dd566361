"""``python -m vgpu.ray.worker TOLD SCRIPT ...``: Ray's own worker, with one thing changed.

``{"refusal": TEXT}``: there is no vGPU, and the worker ends with that text as soon as Ray could give it a task. So the
task fails with the reason. ``{"template": SPEC, "wait_s": SECONDS}``: the worker makes its vGPU when Ray assigns a GPU.

Ray assigns a GPU to a worker that is running already, and the task's code comes after. The hook reads ``VGPU_ID`` at
``cuInit``, so it is early enough to set it then. Ray's modules are imported by name: mypy has no use for their types.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from vgpu.errors import VgpuError


def main() -> None:
    told, script = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120
    if "refusal" in told:
        _refuse(told["refusal"])
    else:
        _share(Share(told["template"], told["wait_s"]))
    runpy.run_path(script, run_name="__main__")


def _refuse(reason: str) -> None:
    def main_loop(worker: Any) -> None:
        worker.core_worker.drain_and_exit_worker("system", reason)
        worker.core_worker.run_task_loop()

    import_module("ray._private.worker").Worker.main_loop = main_loop


class Share:
    """The vGPUs of this worker: one on each GPU that Ray has assigned."""

    def __init__(self, template: Mapping[str, Any], wait_s: float) -> None:
        self._template = template
        self._wait_s = wait_s
        self._has: tuple[tuple[str, ...], float] | None = None

    def take(self, gpus: Sequence[str], amount: float) -> dict[str, str]:
        """Variables of a worker with ``amount`` of the GPU, or with all of several. ``VgpuError``: as ``create``."""
        from vgpu.ray import room
        from vgpu.spec import VgpuSpec

        wanted = (tuple(gpus), amount)
        if self._has == wanted:
            return {}
        if self._has is not None:
            raise _other_share(*self._has)
        percent = round(min(amount / len(gpus), 1.0) * 100, 4)
        spec = VgpuSpec.parse(**{**self._template, "sm_percent": percent})
        claim = room.worker_id(sys.argv)
        made = [room.create(spec, gpu, f"{claim}.{at}", self._wait_s) for at, gpu in enumerate(gpus)]
        self._has = wanted
        variables = {"VGPU_ID": ",".join(vgpu.id for vgpu in made)}
        if len(made) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(vgpu.reading["gpu_uuid"] for vgpu in made)
        return variables | {"VGPU_RUNTIME_DIR": made[0].reading["environment"]["VGPU_RUNTIME_DIR"]}


def _other_share(gpus: Sequence[str], amount: float) -> VgpuError:
    from vgpu.errors import ErrorCode

    return VgpuError(
        ErrorCode.IN_USE,
        f"this worker has {amount:g} of GPU {', '.join(gpus)}, and its task asks for another share",
        "give num_gpus in @ray.remote: then Ray starts a worker for each task",
    )


def _share(share: Share) -> None:
    manager = import_module("ray._private.accelerators").NvidiaGPUAcceleratorManager
    manager.set_current_process_visible_accelerator_ids = staticmethod(
        _assigning(share, manager.set_current_process_visible_accelerator_ids)
    )


def _assigning(share: Share, theirs: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    def assign(gpus: list[str]) -> None:
        theirs(gpus)
        if not gpus:
            return
        amount = import_module("ray").get_runtime_context().get_assigned_resources().get("GPU", len(gpus))
        try:
            os.environ.update(share.take(gpus, amount))
        except VgpuError as error:
            print(f"vgpu: {error}", file=sys.stderr, flush=True)
            import_module("ray._raylet").raise_sys_exit_with_custom_error_message(str(error), exit_code=1)

    return assign


if __name__ == "__main__":
    main()
