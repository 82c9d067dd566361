"""vgpuctl doctor: what is missing on this machine or wrong with its node, and what to type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.options import Output, OutputOption
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from client_hook.doctor import Finding
    from vgpu.node.health import Health, NoAnswer, Unit
    from vgpu.paths import NodePaths
    from vgpu.protocol.meters import GpuMeters

_STYLES: Final = {"ok": "green", "note": "yellow", "missing": "bold red"}
ANSWER_S: Final = 3.0


def doctor(form: OutputOption = Output.TABLE) -> int:
    """Check this machine and its node, and say what to type.

    Exits with 1 if something has to be put right.
    """
    from client_hook.doctor import Verdict
    from vgpu.ctl.present import output

    findings = list(examined())
    missing = [finding for finding in findings if finding.verdict is Verdict.MISSING]
    if form is Output.JSON:
        output.print_json({"ok": not missing, "findings": [as_dict(finding) for finding in findings]})
    else:
        _print(findings)
        print()
        print(f"{len(missing)} to put right." if missing else "Nothing is missing.")
    return Exit.FAILURE if missing else Exit.OK


def examined() -> Iterator[Finding]:
    """All findings: about this machine, and about its node."""
    from client_hook import doctor as machine
    from client_hook import process_env
    from vgpu.ctl.hook import user_installation
    from vgpu.node import health
    from vgpu.paths import NodePaths

    paths = NodePaths.from_environment()
    yield from machine.diagnose(machine.probe(paths.runtime, paths.state, user_installation()))
    node = look(paths)
    state = Path(node.status.state_dir) if isinstance(node, health.Health) else paths.state
    yield from process_env.diagnose(process_env.probe(state))
    answers = isinstance(node, health.Health)
    yield from health.service(unit(), answers=answers)
    yield from health.diagnose(node) if isinstance(node, health.Health) else health.silent(node)


def look(paths: NodePaths) -> Health | NoAnswer:
    """The state of the node of ``paths``."""
    from vgpu.ctl.node import software_version
    from vgpu.node.health import Health
    from vgpu.node.link import ControlLink

    try:
        with ControlLink(paths.control_socket, timeout_s=ANSWER_S) as node:
            folders = _folders(paths.runtime)  # before the vGPUs: of one that is made meanwhile there is no folder yet
            status, vgpus, processes = node.status(), node.list(), node.processes().processes
            meters: tuple[GpuMeters, ...] = ()
            with suppress(VgpuError):  # an older node has none
                meters = node.meter().gpus
    except VgpuError as error:
        return _silence(error, paths)
    return Health(
        status=status,
        software=software_version(),
        vgpus=vgpus,
        processes=processes,
        meters=meters,
        folders=folders,
        vgpu_id=os.environ.get("VGPU_ID", ""),
        lost=tuple(str(one) for one in (Path(status.state_dir), Path(status.state_dir, "logs")) if _is_gone(one))[:1],
    )


def _is_gone(directory: Path) -> bool:
    """Whether it does not exist. A directory that is only closed to this user does exist."""
    try:
        directory.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _silence(error: VgpuError, paths: NodePaths) -> NoAnswer:
    from client_hook.doctor import node_uid
    from vgpu.node.health import NoAnswer

    if error.code is ErrorCode.NOT_YOURS:
        return NoAnswer(error.message, error.hint)
    answering, dead = [], []
    for socket in _listed(paths.runtime / "gpus", "*/server.sock"):
        if node_uid(socket) is not None:
            answering.append(int(socket.parent.name))
        else:
            dead.append(str(socket))
    return NoAnswer(
        error.message,
        error.hint,
        servers=tuple(sorted(answering)),
        sockets=tuple(dead),
        folders=_folders(paths.runtime),
        locked=_locked(paths.node_lock),
    )


def _folders(runtime: Path) -> tuple[str, ...]:
    return tuple(path.name for path in _listed(runtime / "vgpus", "vgpu-*"))


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern)) if os.access(folder, os.R_OK | os.X_OK) else []
    except OSError:
        return []


def _locked(path: Path) -> bool:
    import fcntl

    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def unit() -> Unit | None:
    """The node's unit, of the system or of this user; None where there is no systemd, or no such unit."""
    import shutil
    import subprocess

    from vgpu.node.health import Unit

    if not shutil.which("systemctl"):
        return None
    wanted = "LoadState,ActiveState,SubState,UnitFileState,Result"
    for manager in ("--system", "--user"):
        command = ["systemctl", manager, "show", "vgpu.service", f"--property={wanted}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        if shown.get("LoadState") == "loaded":
            return Unit(
                active=shown.get("ActiveState", "unknown"),
                sub=shown.get("SubState", "unknown"),
                enabled=shown.get("UnitFileState") or "not enabled",
                result=shown.get("Result", ""),
                manager="--user" if manager == "--user" else "",
            )
    return None


def as_dict(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "verdict": finding.verdict, "found": finding.found, "fix": finding.fix}


def _print(findings: list[Finding]) -> None:
    from vgpu.ctl.present.output import GAP, Cell, Column, Row, print_table, wrapped

    indent = len("missing") + max(len(finding.check) for finding in findings) + 2 * len(GAP)
    rows: list[Row] = []
    for finding in findings:
        first, *more = wrapped(finding.found, indent)
        rows.append((Cell(finding.verdict, _STYLES[finding.verdict]), finding.check, first))
        rows += [("", "", line) for line in more]
        rows += [("", "", Cell(line, "dim")) for line in wrapped(f"→ {finding.fix}" if finding.fix else "", indent)]
    print_table((Column("STATE"), Column("CHECK"), Column("FOUND")), rows)


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
