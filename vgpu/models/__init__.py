"""One copy of a model's weights on a GPU for several programs (docs/howto/model-sharing.md).

An owner, ``vgpuctl models serve NAME FILE...``, keeps the tensors of safetensors files in one allocation. Replicas map
that allocation read-only: ``vgpu.models.load("NAME")`` gives PyTorch tensors, ``vgpu.models.attach(module, "NAME")``
puts them into a module. The owner's vGPU is charged with the memory, the replicas' vGPUs are not.
"""

from importlib import import_module

_HOMES = {
    "attach": "vgpu.models.tensors",
    "check": "vgpu.models.replica",
    "load": "vgpu.models.tensors",
    "open_model": "vgpu.models.replica",
}
__all__ = ["attach", "check", "load", "open_model"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vgpu.models' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value
