"""vGPUs for Dask: ``dask worker ADDRESS --preload vgpu.dask --sm 30 --mem 8G`` (docs/howto/dask.md).

Dask imports this module twice. In the process that starts workers, it sets the variables that load the hook into
them. In each worker it makes a vGPU for that process, before the worker registers with the scheduler. Nothing here
imports Dask.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Unpack, get_type_hints

import click

from vgpu.api.handle import discard
from vgpu.api.node import Node
from vgpu.api.options import Options, Percent, Size, fields_of, words_of
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import late

PRELOAD: Final = "vgpu.dask"
ATTRIBUTE: Final = "vgpu"
"""Of Dask's worker: its vGPU."""


def options(
    sm: Percent | None = None,
    mem: Size | None = None,
    *,
    gpu: int | str = "auto",
    wait: float = late.WAIT_S,
    **more: Unpack[Options],
) -> dict[str, Any]:
    """Options of ``LocalCluster`` and of ``Nanny``, whose workers then have vGPUs: ``LocalCluster(**options(sm=30))``.

    ``sm``, ``mem``, ``gpu`` and the other options: as ``vgpu.create``. ``wait``: how many seconds a worker waits where
    there is no room. ``VgpuError`` (invalid): no vGPU can be so.
    """
    from vgpu.spec import VgpuSpec

    VgpuSpec.parse(**fields_of(Options, sm=sm, mem=mem, **more))
    words = words_of({"sm": sm, "mem": mem, "gpu": gpu, "wait": wait, **more})
    return {"preload": [PRELOAD], "preload_argv": words, "preload_nanny": [PRELOAD]}


class _Preload(click.Command):
    """Parsed by ``dask worker`` itself, in the process that starts workers, and again in each of these processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_size = bool(args)  # a nanny of LocalCluster has none
        rest = super().parse_args(ctx, args)
        try:
            if has_size:
                _check(ctx.params)
            if not (ctx.resilient_parsing or late.is_hooked()):
                _load_hook_into_children()
        except VgpuError as error:
            raise click.ClickException(str(error)) from error
        return rest


def _check(given: Mapping[str, Any]) -> None:
    from vgpu.spec import VgpuSpec

    VgpuSpec.parse(**fields_of(Options, **{name: given[name] for name in given.keys() - {"gpu", "wait"}}))


def _load_hook_into_children() -> None:
    for name, value in late.hooked().items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


async def _setup(server: Any, *, gpu: str, wait: float, **given: Any) -> None:
    """Dask goes on after any ``Exception`` of a preload. A worker without its vGPU would have the whole GPU. So its
    process ends at once, before the scheduler knows of it."""
    if hasattr(server, "pre_spawn_env"):  # a nanny: no task runs in it
        return
    try:
        if not late.is_hooked():
            raise VgpuError(
                ErrorCode.UNAVAILABLE,
                "this worker was started without the hook of st-vgpu",
                "LocalCluster(**vgpu.dask.options(sm=30)), or vgpuctl run --sm 30 -- dask worker --no-nanny",
            )
        wanted = {name: value for name, value in given.items() if value is not None}
        vgpu = await asyncio.to_thread(late.patiently, lambda: Node().create(gpu=gpu, **wanted), wait)
    except VgpuError as error:
        print(f"vgpu: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.environ.update({name: value for name, value in vgpu.environ_changes().items() if value is not None})
    setattr(server, ATTRIBUTE, vgpu)


def dask_teardown(server: Any) -> None:
    """The worker closes. A worker that is killed comes not so far, and the node removes the vGPU with its process."""
    if vgpu := getattr(server, ATTRIBUTE, None):
        discard(vgpu.id, None)


def _declared() -> list[click.Parameter]:
    """The options of ``vgpu.create``, as ``vgpuctl create`` has them."""
    kinds = get_type_hints(Options)
    flags = {name for name, kind in kinds.items() if kind is bool}
    names = ["sm", "mem", "name", *kinds]
    declared: list[click.Parameter] = [
        click.Option([f"--{name.replace('_', '-')}", name], is_flag=name in flags, default=None) for name in names
    ]
    return [
        *declared,
        click.Option(["--gpu"], default="auto"),
        click.Option(["--wait"], type=click.FloatRange(min=0), default=late.WAIT_S),
    ]


dask_setup = _Preload("vgpu.dask", callback=_setup, params=_declared())
