"""The Python API: ``import vgpu`` (docs/reference/python.md).

Every name is imported when it is first used, so that ``import vgpu`` costs nothing. ``__init__.pyi`` has their types.
"""

_HOMES = {
    "ErrorCode": "vgpu.errors:ErrorCode",
    "Node": "vgpu.api.node:Node",
    "Vgpu": "vgpu.api.handle:Vgpu",
    "VgpuError": "vgpu.errors:VgpuError",
    "VgpuSpec": "vgpu.spec:VgpuSpec",
    "aio": "vgpu.aio",
    "connect": "vgpu.api.toplevel:connect",
    "create": "vgpu.api.toplevel:create",
    "current": "vgpu.api.toplevel:current",
    "dask": "vgpu.dask",
    "list": "vgpu.api.toplevel:list_vgpus",
    "models": "vgpu.models",
    "load_ipython_extension": "vgpu.integrations.ipython:load_ipython_extension",
    "ray": "vgpu.ray",
    "require": "vgpu.api.require:require",
    "testing": "vgpu.testing",
}

__all__ = [
    "ErrorCode",
    "Node",
    "Vgpu",
    "VgpuError",
    "VgpuSpec",
    "aio",
    "connect",
    "create",
    "current",
    "list",
    "require",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vgpu' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES[name].partition(":")
    found = import_module(module)
    globals()[name] = value = getattr(found, attribute) if attribute else found
    return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *_HOMES})
