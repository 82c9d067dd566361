"""Starts a node: its command line, its process, and the wait until it serves. It needs neither typer nor rich."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from client_hook import interpreter
from vgpu.ctl.exit_codes import Exit
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.paths import NodePaths, unusable
from vgpu.protocol.messages import NodeStatus

if TYPE_CHECKING:
    from vgpu.config import Config

START_UP_S: Final = 30.0
"""The creation of a context on a cold driver takes seconds. A node that has not answered by then never will."""
SECOND_TRY_S: Final = 3.0
"""A GPU Server that failed may serve when it is started again."""


def node_command(
    simulate: int,
    mode: str,
    gpus: Iterable[int] = (),
    host_memory_bytes: int | None = None,
    *,
    period_ns: int | None = None,
    window_ns: int | None = None,
    others: Mapping[int, Mapping[str, str | int | None]] | None = None,
    limits: str = "{}",
    take: bool = False,
    unmanaged: str = "report",
    placement: str = "spread",
    quotas: str = "{}",
    queue: str = "{}",
) -> list[str]:
    """The argv of a supervisor for ``simulate`` simulated GPUs (0: the real ones); ``gpus``: only these indices;
    ``host_memory_bytes``: for what is swapped out; ``others``: fields of ``Sharing`` for GPUs that are shared in
    another way; ``limits``: of one user, as ``Limits.as_option`` writes them; ``quotas``: as
    ``Quotas.as_option`` writes them; ``queue``: as ``QueueRules.as_option`` does."""
    command = interpreter.command("vgpu.node", "--mode", mode)
    command += [] if unmanaged == "report" else ["--unmanaged", unmanaged]
    command += [] if placement == "spread" else ["--placement", placement]
    values = {"--host-memory": host_memory_bytes, "--period": period_ns, "--window": window_ns}
    for option, value in ({"--simulate": simulate or None} | values).items():
        command += [] if value is None else [option, str(value)]
    command += ["--take"] if take else []
    for index in gpus:
        command += ["--gpu", str(index)]
    command += ["--quotas", quotas] if quotas != "{}" else []
    command += ["--queue", queue] if queue != "{}" else []
    command += ["--limits", limits] if limits != "{}" else []
    return command + (["--others", json.dumps(others)] if others else [])


def configured_command(config: Config, *, take: bool = False) -> list[str]:
    """The argv of a supervisor as ``config`` has it."""
    serve = config.serve
    others = {
        index: {
            "mode": gpu.mode or serve.mode,
            "period_ns": gpu.period_ns or serve.period_ns,
            "window_ns": gpu.window_ns or serve.window_ns,
        }
        for index, gpu in config.gpu.items()
    }
    return node_command(
        serve.simulate,
        serve.mode,
        serve.gpus or (),
        serve.host_memory_bytes,
        period_ns=serve.period_ns,
        window_ns=serve.window_ns,
        others=others,
        limits=config.limits.as_option(),
        take=take,
        unmanaged=serve.unmanaged,
        placement=serve.placement,
        quotas=config.quota.as_option(),
        queue=config.queue.as_option(),
    )


def start(command: list[str], paths: NodePaths) -> subprocess.Popen[bytes]:
    """The process of a node in the background, in a session of its own. Its output goes to the log of ``paths``.
    ``VgpuError`` (unavailable): that cannot be written."""
    log = paths.node_log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        raise unusable(log, error, "VGPU_STATE_DIR") from error
    with file as output:
        return subprocess.Popen(
            command,
            env=interpreter.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_until_serving(process: subprocess.Popen[bytes], log: Path, control_socket: Path | None = None) -> NodeStatus:
    """The status of the node that ``process`` has become, once it serves a GPU or has failed to for ``SECOND_TRY_S``.
    ``VgpuError`` if it ends or is silent for ``START_UP_S``."""
    deadline, answered = time.monotonic() + START_UP_S, 0.0
    while True:
        if process.poll() is not None:
            raise did_not_start(log, process.returncode)
        try:
            with ControlLink(control_socket) as node:
                if node.welcome.pid == process.pid:
                    status = node.status()
                    answered = answered or time.monotonic()
                    if not all_failed(status) or time.monotonic() > answered + SECOND_TRY_S:
                        return status
        except VgpuError as error:
            if error.code not in {ErrorCode.UNREACHABLE, ErrorCode.UNAVAILABLE}:
                raise
        if time.monotonic() > deadline:
            process.terminate()
            raise VgpuError(ErrorCode.TIMEOUT, f"the node did not answer within {START_UP_S:g} s", f"less {log}")
        time.sleep(0.2 if answered else 0.02)


def all_failed(status: NodeStatus) -> bool:
    return all(gpu.state == "failed" for gpu in status.gpus)


def did_not_start(log: Path, exit_code: int = Exit.FAILURE) -> VgpuError:
    """The error of a node that ended with ``exit_code`` before it answered: its last line in ``log``, and its hint if
    it had one. ``Exit.REFUSED``: another node runs, and ``vgpuctl`` exits as it does without ``--detach``."""
    # Python draws a frame of these around a group of exceptions.
    lines = [line.strip(" +-|") for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line] or ["it said nothing"]
    hint = said.pop().removeprefix("→ ") if said[-1].startswith("→ ") else f"vgpuctl doctor, or less {log}"
    reason = said[-1]
    code = ErrorCode.EXISTS if exit_code == Exit.REFUSED else ErrorCode.UNAVAILABLE
    return VgpuError(code, f"the node did not start: {reason.removeprefix('vgpuctl: ')}", hint)
