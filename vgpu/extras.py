"""The optional packages (``pip install "st-vgpu[web]"``): which commands need them, and what is said without them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

from vgpu.errors import ErrorCode, VgpuError

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "aio": ("anyio",),
    "containers": ("httpx",),
    "kubernetes": ("grpc", "google.protobuf", "lightkube", "httpx2", "fastapi", "hypercorn"),
    "metrics": ("prometheus_client", "fastapi", "hypercorn"),
    "plot": ("matplotlib",),
    "top": ("textual",),
    "web": ("fastapi", "hypercorn", "prometheus_client", "swagger_ui_bundle", "jinja2"),
}
"""By extra: the modules that it installs and this project imports."""


class MissingExtraError(VgpuError, ImportError):
    """An optional package is not installed. Callers may catch it as an ``ImportError``, too."""


def need(what: str, extra: str, *modules: str) -> None:
    """``MissingExtraError`` if one of ``modules`` is missing; default: all of the extra. Nothing is imported."""
    missing = [module for module in modules or MODULES[extra] if not _is_here(module)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            ErrorCode.MISSING,
            f"{what} needs {_listed(missing)}, which {are} not installed",
            f'pip install "st-vgpu[{extra}]"',
        )


def _is_here(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
