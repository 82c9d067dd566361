"""The parts of a bundle, and how each is read. Each may fail by itself."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.paths import NodePaths
from vgpu.printable import harmless, printable_json
from vgpu.support.redaction import (
    short_command,
    told_environment,
    without_commands,
    without_process_names,
    without_secrets,
)

LOG_BYTES: Final = 1 << 20
EVENTS: Final = 2000
ANSWER_S: Final = 5.0
COMMAND_S: Final = 20.0
TRACE_NS: Final = 1_000_000_000
MOST_INSPECTED: Final = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """``read`` returns the text of the file ``name``. If it raises, the bundle lacks the file and notes the error."""

    name: str
    read: Callable[[], str]


class Node:
    """The node. Once it does not answer, it is not asked any more."""

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths
        self._silence: VgpuError | None = None

    def ask(self, question: Callable[[ControlLink], T]) -> T:
        if self._silence is not None:
            raise self._silence
        try:
            with ControlLink(self._paths.control_socket, timeout_s=ANSWER_S) as link:
                return question(link)
        except VgpuError as error:
            if error.code in {ErrorCode.UNREACHABLE, ErrorCode.TIMEOUT, ErrorCode.NOT_YOURS}:
                self._silence = error
            raise

    @property
    def state(self) -> Path:
        try:
            return Path(self.ask(lambda link: link.status()).state_dir)
        except VgpuError:
            return self._paths.state

    def owners(self) -> set[int]:
        """The users of the vGPUs and programs that the node knows of."""
        try:
            vgpus, gpus = self.ask(lambda link: link.list()), self.ask(lambda link: link.gpus())
        except VgpuError:
            return set()
        return {vgpu.owner_uid for vgpu in vgpus} | {one.uid for gpu in gpus for one in gpu.outside}


def parts(node: Node, paths: NodePaths, *, trace: bool) -> Iterator[Part]:
    """The parts, in the order in which a maintainer reads. The generator reads the node and the folders as it goes."""
    yield Part("versions.json", _versions)
    yield Part("doctor.json", _doctor)
    yield Part("environment.json", lambda: _json(told_environment(os.environ)))
    for path in _configurations():
        yield Part(f"config/{path.name}", partial(_configuration, path))
    if shutil.which("nvidia-smi"):
        yield Part("nvidia-smi.txt", lambda: without_process_names(_output("nvidia-smi", "-q")))
    yield Part("status.json", lambda: _json(_dump(node.ask(lambda link: link.status()))))
    yield Part("gpus.json", lambda: _json([_dump(gpu) for gpu in node.ask(lambda link: link.gpus())]))
    yield Part("vgpus.json", lambda: _json([_dump(vgpu) for vgpu in node.ask(lambda link: link.list())]))
    yield Part("processes.json", partial(_processes, node))
    for vgpu_id in _vgpu_ids(node):
        yield Part(f"inspect/{vgpu_id}.json", partial(_inspected, node, vgpu_id))
    yield Part("metrics.json", partial(_metrics, node))
    yield Part("events.jsonl", partial(_events, node))
    state = node.state
    for source, files in _logs(state / "logs").items():
        yield Part(f"logs/{source}", partial(_tail, files))
    if command := _journal(node, state):
        yield Part("logs/journal.txt", lambda: without_commands(_output(*command, "-n", "2000", "--no-pager")))
    yield Part("folders.txt", lambda: _listing(paths.runtime) + _listing(state))
    if trace:
        yield Part("trace.json", partial(_trace, node, paths))


def _json(value: Any) -> str:
    return printable_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n"


def _dump(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json")
    return dumped


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


# --- the machine ----------------------------------------------------------------------------------------------------


def _versions() -> str:
    from importlib.metadata import distributions

    from client_hook.doctor import probe_driver

    installed = {dist.metadata["Name"]: dist.version for dist in distributions()}
    ours = ("st-vgpu", "trio", "pydantic", "msgpack", "nvidia-ml-py", "typer", "rich", "structlog")
    memory = {line.split(":")[0]: line.split(":")[1].strip() for line in _lines("/proc/meminfo")[:3]}
    return _json(
        {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": sys.version,
            "platform": platform.platform(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "glibc": " ".join(platform.libc_ver()),
            "distribution": _distribution(),
            "cpus": os.cpu_count(),
            "memory": memory,
            "packages": {name: installed.get(name, "not installed") for name in ours},
            "driver": asdict(probe_driver()),
            "hooks": _hooks(),
        }
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _hooks() -> dict[str, str]:
    """The digests of all copies of the hook, by which versions can be distinguished."""
    import hashlib

    from client_hook.environment import hook_library
    from client_hook.errors import HookError
    from client_hook.install import SystemInstallation
    from client_hook.path_rules import HOOK_NAME

    copies = [Path.home() / ".local/lib/vgpu" / HOOK_NAME, SystemInstallation().library]
    try:
        copies.insert(0, hook_library())
    except HookError as error:
        return {"built": error.message}
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in copies if path.is_file()}


def _doctor() -> str:
    from vgpu.ctl.doctor import as_dict, examined

    return _json([as_dict(finding) for finding in examined()])


def _configurations(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The existing configuration files of this user and the machine, and the units."""
    own = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '/nonexistent')}/.config"
    candidates = [
        Path(environment.get("VGPU_CONFIG") or "/etc/vgpu/config.toml"),
        Path(own, "vgpu", "config.toml"),
        Path("/etc/systemd/system/vgpu.service"),
        Path("/usr/lib/systemd/system/vgpu.service"),
        Path(own, "systemd", "user", "vgpu.service"),
    ]
    found: dict[str, Path] = {}
    for path in candidates:
        if path.is_file():
            found.setdefault(path.name, path)  # the first one is the one that counts
    return list(found.values())


def _configuration(path: Path) -> str:
    return f"# {path}\n{without_secrets(path.read_text(errors='replace'))}"


def _listing(folder: Path) -> str:
    """As ``ls -lR``, without the names of the owners."""
    lines = [f"{folder}:"]
    for path in sorted(folder.rglob("*")):
        there = path.lstat()
        when = datetime.fromtimestamp(there.st_mtime, UTC).isoformat(timespec="seconds")
        mode = stat.filemode(there.st_mode)
        lines.append(f"{mode} {there.st_uid:>6} {there.st_size:>12} {when} {path.relative_to(folder)}")
    return "\n".join(lines) + "\n\n"


# --- the node -------------------------------------------------------------------------------------------------------


def _vgpu_ids(node: Node) -> list[str]:
    try:
        return [vgpu.vgpu_id for vgpu in node.ask(lambda link: link.list())][:MOST_INSPECTED]
    except VgpuError:
        return []


def _short(process: dict[str, Any]) -> dict[str, Any]:
    return process | {"command": short_command(process["command"])}


def _processes(node: Node) -> str:
    """As ``ps --all``: with processes that are in no vGPU."""
    inside = node.ask(lambda link: link.processes()).processes
    outside = [one for gpu in node.ask(lambda link: link.gpus()) for one in gpu.outside]
    return _json([_short(_dump(one)) for one in (*inside, *outside)])


def _inspected(node: Node, vgpu_id: str) -> str:
    detail = _dump(node.ask(lambda link: link.inspect(vgpu_id)))
    return _json(detail | {"processes": [_short(process) for process in detail["processes"]]})


def _metrics(node: Node) -> str:
    metering = _dump(node.ask(lambda link: link.meter()))
    return _json(metering | {"processes": [_short(process) for process in metering["processes"]]})


def _events(node: Node) -> str:
    """The events of the node; if it does not answer, those in its files."""
    try:
        events = list(node.ask(lambda link: link.events(most=EVENTS)))
    except VgpuError:
        from vgpu.node.events import EventFile

        files = (node.state / "events.jsonl", node.state / "events-programs.jsonl")
        written = [event for file in files for event in EventFile(file).read(EVENTS)]
        events = sorted(written, key=lambda event: event.at_unix_s)[-EVENTS:]
    return "".join(without_commands(event.model_dump_json()) + "\n" for event in events)


def _logs(folder: Path) -> dict[str, list[Path]]:
    """The logs by name, each with the one before it."""
    try:
        found = sorted(path for path in folder.iterdir() if path.name.endswith(".log"))
    except FileNotFoundError:
        return {}
    except PermissionError:
        return {"node.log": [folder / "node.log"]}  # an attempt to read it then reports the reason
    return {path.name: [path.with_name(f"{path.name}.1"), path] for path in found}


def _tail(files: list[Path]) -> str:
    data = b""
    for path in files:
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                data += file.read()
        except FileNotFoundError:
            if path == files[-1]:
                raise
    return harmless(without_commands(data[-LOG_BYTES:].decode(errors="replace")))


def _journal(node: Node, state: Path) -> list[str]:
    """The command that prints the node's lines in the journal; none if the node does not log there."""
    from vgpu.ctl.observe.logs import elsewhere

    try:
        pid = node.ask(lambda link: link.welcome.pid)
    except VgpuError:
        return []
    _, command = elsewhere(pid, state / "logs")
    return command.split() if command and shutil.which("journalctl") else []


def _trace(node: Node, paths: NodePaths) -> str:
    from vgpu.trace.chrome import chrome_trace
    from vgpu.trace.collect import collect

    gpus = [str(gpu.index) for gpu in node.ask(lambda link: link.gpus()) if gpu.state == "serving"]
    if not gpus:
        raise VgpuError(ErrorCode.UNAVAILABLE, "no GPU is served at this moment")
    recordings, errors = collect(gpus, TRACE_NS, lambda passed_s: None, paths.control_socket)
    for gpu, error in errors.items():
        raise VgpuError(error.code, f"GPU {gpu}: {error.message}")
    return printable_json(json.dumps(chrome_trace(recordings), separators=(",", ":"), ensure_ascii=False))
