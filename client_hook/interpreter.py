"""How an interpreter of ours starts: the only place in the product that names ``sys.executable``.

Python would import from the current directory, from PYTHONPATH and from the user's site before its own library. A
``json.py`` there would run in the name of the node. So every start is isolated (``-I``), and its environment has no
PYTHON* variable. ``client_hook/bootstrap.py`` then finds this very copy of st-vgpu, which may lie in a user's site.

This module imports nothing but ``os`` and ``sys``: ``vgpuctl`` uses it before it is isolated itself.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is a module that PYTHONPATH may replace
    from collections.abc import Mapping
    from typing import NoReturn

BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")  # noqa: PTH100, PTH118, PTH120
"""No pathlib: see above."""


LANGUAGE = "python"
"""As Jupyter names it."""


def command(module: str, *arguments: str) -> list[str]:
    """The argv that runs ``module`` of this copy of st-vgpu as a program."""
    return [sys.executable, "-I", BOOTSTRAP, module, *arguments]


def files() -> tuple[str, str]:
    """What every process of ours begins with: the interpreter, and this copy's first module."""
    return sys.executable, BOOTSTRAP


def same_command() -> list[str]:
    """The argv with which this process was started, for a program of a user that starts itself again."""
    return [sys.executable, *sys.orig_argv[1:]]


def users_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """The argv that runs ``module`` as a program of a user, with ``python`` or else this interpreter. It is no process
    of ours, so it is not isolated."""
    return [python or sys.executable, "-m", module, *arguments]


def place() -> tuple[str, str]:
    """The folder of this interpreter, and its name there: where another machine of the same image has them."""
    folder, name = os.path.split(sys.executable)
    return folder, LANGUAGE if os.path.exists(os.path.join(folder, LANGUAGE)) else name  # noqa: PTH110, PTH118


def running_first(module: str, argument: str, script: list[str]) -> list[str]:
    """Options and script of a user's interpreter, so that ``module`` runs with ``argument``, and the script in it."""
    return ["-m", module, argument, *script]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without Python's own variables, for processes of ours and for their children."""
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}


def is_isolated() -> bool:
    """Whether this process ignores PYTHON* variables, the current directory and the user's site."""
    return bool(sys.flags.isolated)


def become(module: str, *arguments: str) -> NoReturn:
    """This process becomes an isolated one that runs ``module``. It keeps its environment, for programs that it starts
    for a user."""
    argv = command(module, *arguments)
    os.execv(argv[0], argv)
