"""vgpuctl config and config check: the values of the configuration file, and the defaults of all others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vgpu.ctl.exit_codes import Exit, say
from vgpu.ctl.options import Output, OutputOption, explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu.config import Loaded
    from vgpu.quotas.quota import Quota

_FILE = """The file is $VGPU_CONFIG; else /etc/vgpu/config.toml for root, ~/.config/vgpu/config.toml for a user:

    [serve]
    mode = "temporal"        # auto, spatial
    gpus = [0, 1]            # else all
    host_memory = "64G"      # for what is swapped out
    unmanaged = "suspend"    # programs past the hook

    [gpu.1]
    mode = "spatial"
    period = "40ms"
    window = "12ms"

    [dashboard]
    listen = "127.0.0.1:7080"
    containers = "unix:///run/docker.sock"

    [image.train]            # the dashboard may start it
    image = "example/train:1"
    sm = 30
    mem = "8G"

    [metrics]
    listen = "127.0.0.1:9835"

    [limits]
    vgpus_per_user = 64      # on each GPU

    [quota]                  # of each user; also quota.user.ann,
    sm_total = 100           # quota.group.students, quota.claim.dra
    idle_limit = "2h"        # then it is removed, after a warning

Options of serve override the file."""

config_app = typer.Typer(
    invoke_without_command=True,
    help="The configuration file: what is in force, and from where.",
    epilog=explained(_FILE),
)


@config_app.callback()
def show(ctx: typer.Context, form: OutputOption = Output.TABLE) -> None:
    """What serve begins with, unless its command line says otherwise, and where that stands."""
    if ctx.invoked_subcommand is not None:
        return
    from vgpu.config import find, load
    from vgpu.ctl.present import output

    loaded = load()
    settings = list(_settings(loaded))
    if form is Output.JSON:
        output.print_json(
            {
                "file": None if loaded.path is None else str(loaded.path),
                "settings": [{"key": key, "value": value, "source": source} for key, value, source in settings],
            }
        )
        return
    print(f"file: {loaded.path or f'{find()}, which is not there'}")
    print()
    columns = (output.Column("KEY"), output.Column("VALUE", elastic=True), output.Column("FROM", elastic=True))
    output.print_table(columns, [(key, _shown(key, value), source) for key, value, source in settings])


@config_app.command("check")
def check(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Else the one that serve would read.")] = None,
) -> Exit:
    """Print every error in a configuration file, by line.

    Exits with 2 if there is one.
    """
    from vgpu.config import Config, find, parse, retired
    from vgpu.errors import ErrorCode, VgpuError

    path = file or find()
    try:
        found = parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise VgpuError(ErrorCode.INVALID, f"cannot read {path}: {reason}") from error
    if isinstance(found, Config):
        for problem in retired(path.read_text()):
            say(problem.at(path))
        print(f"{path}: all right")
        return Exit.OK
    for problem in found:
        say(problem.at(path))
    return Exit.USAGE


@config_app.command("reload")
def reload(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Else the one that serve would read.")] = None,
) -> None:
    """Give the running node the quotas of the configuration file.

    The vGPUs that there are stay. All other sections take effect with the next serve.
    """
    from vgpu.config import load
    from vgpu.node.link import ControlLink
    from vgpu.units import counted

    loaded = load(file)
    with ControlLink() as node:
        found = node.set_quotas(loaded.config.quota, loaded.config.queue)
    source = loaded.path or "no file"
    print(f"{source}: {counted(found.sections, 'section')} of quotas in force")
    if found.over:
        say(f"more than the quota allows now, and kept: {', '.join(found.over)}")


@config_app.command("example")
def example() -> None:
    """Print an example file: every key, as a comment."""
    from vgpu.data_files import shipped

    print(shipped("config.toml").read_text(), end="")


def _settings(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """(key as in the file, value in plain units, where it comes from), in the order of the file."""
    from vgpu.paths import NodePaths

    config = loaded.config
    for section in ("serve", "dashboard", "metrics", "limits", "queue"):
        model = getattr(config, section)
        for name, field in type(model).model_fields.items():
            key = field.alias or name
            yield f"{section}.{key}", getattr(model, name), loaded.source(section, key)
    for index, gpu in sorted(config.gpu.items()):
        for name, field in type(gpu).model_fields.items():
            key = field.alias or name
            value = getattr(gpu, name)
            if value is None:
                yield f"gpu.{index}.{key}", getattr(config.serve, name), f"serve.{key}"
            else:
                yield f"gpu.{index}.{key}", value, loaded.source("gpu", str(index), key)
    for name, image in config.image.items():
        for field_name, field in type(image).model_fields.items():
            key = field.alias or field_name
            yield f"image.{name}.{key}", getattr(image, field_name), loaded.source("image", name, key)
    quotas = config.quota
    sections: list[tuple[tuple[str, ...], Quota]] = [((), quotas.everyone)]
    for kind in ("user", "group", "claim"):
        sections += [((kind, name), quota) for name, quota in getattr(quotas, kind).items()]
    for place, quota in sections:
        for key, value in quota.model_dump(mode="json", by_alias=True, exclude_none=True).items():
            yield ".".join(("quota", *place, key)), value, loaded.source("quota", *place, key)
    paths = NodePaths.from_environment()
    for key, variable in (("runtime", "VGPU_RUNTIME_DIR"), ("state", "VGPU_STATE_DIR")):
        yield f"{key} directory", str(getattr(paths, key)), f"${variable}" if os.environ.get(variable) else "default"


_UNSET = {
    "serve.gpus": "all",
    "serve.host_memory": "half of the host's",
    "period": "as set last",
    "window": "as set last",
    "listen": "the command's own",
    "containers": "none",
    "command": "the image's own",
    "mem": "the same part as sm",
    "mode": "any",
    "network": "the engine's own",
}
"""What holds where a value is None, by the whole key or by its last part."""


def _shown(key: str, value: Any) -> str:
    from vgpu.units import format_bytes, format_duration

    last = key.rpartition(".")[2]
    if key.startswith("quota."):
        from vgpu.ctl.placement.quota import in_words

        return in_words(last, value)
    if value is None or value == ():
        return _UNSET.get(key) or _UNSET.get(last, "")
    if last in {"period", "window", "patience"}:
        return format_duration(value)
    if last in {"host_memory", "mem"}:
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def register(app: typer.Typer) -> None:
    app.add_typer(config_app, name="config")
