"""Which module has which command of ``vgpuctl``. A command is imported, and its options are made, when it is called.

Completion of a command's name, and help on a narrow terminal, import all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
import typer.main

LAUNCHING: Final = frozenset({"exec", "ray-worker", "run"})
"""Commands that end with the exit code of a program; their own failures are 125."""
MODULES: Final = {
    "create": "vgpus",
    "ls": "vgpus",
    "inspect": "vgpus",
    "ps": "vgpus",
    "set": "vgpus",
    "suspend": "vgpus",
    "resume": "vgpus",
    "migrate": "vgpus",
    "rm": "vgpus",
    "prune": "vgpus",
    "wait": "vgpus",
    "exec": "programs",
    "deactivate": "programs",
    "run": "programs",
    "serve": "node",
    "stop": "node",
    "status": "node",
    "version": "node",
    "doctor": "doctor",
    "demo": "demo",
    "verify": "verify",
    "top": "observe.top",
    "dashboard": "observe.dashboard",
    "metrics": "observe.metrics",
    "trace": "observe.trace",
    "events": "observe.events",
    "usage": "observe.usage",
    "why": "observe.why",
    "logs": "observe.logs",
    "gpu": "gpus",
    "config": "config",
    "systemd": "systemd",
    "hook": "hook",
    "jupyter": "integrations.jupyter",
    "container": "integrations.container",
    "models": "integrations.models",
    "slurm": "integrations.slurm",
    "ray": "integrations.ray",
    "ray-worker": "integrations.ray",
    "kubelet": "integrations.kubelet",
    "extender": "integrations.extender",
    "simulate": "placement.simulate",
    "quota": "placement.quota",
    "queue": "placement.queue",
    "advise": "placement.advise",
    "support": "support",
}
"""Each module is one of ``vgpu.ctl``. Completion lists commands in this order."""
ONE_THREAD: Final = frozenset(
    {
        "create",
        "ls",
        "inspect",
        "ps",
        "set",
        "rm",
        "prune",
        "wait",
        "exec",
        "run",
        "ray-worker",
        "status",
        "gpu",
        "quota",
    }
)
"""Commands that read messages in one thread alone, so that ``vgpu.protocol.building`` may be deferred."""


class Commands(Mapping[str, Any]):
    """The commands by name."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _made(name, MODULES[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


def part(module: str) -> typer.Typer:
    """All commands of ``module``, none of which is made yet."""
    commands = typer.Typer(rich_markup_mode=None)
    import_module(f"vgpu.ctl.{module}").register(commands)
    return commands


def _made(name: str, module: str) -> Any:
    """The command alone: typer takes a millisecond or more for each option."""
    commands = part(module)
    commands.registered_commands = [one for one in commands.registered_commands if one.name == name]
    commands.registered_groups = [one for one in commands.registered_groups if one.name == name]
    return typer.main.get_group(commands).commands[name]
