"""``vgpuctl slurm HOOK``: Slurm's Prolog, TaskProlog and Epilog, each a script of one line.

A job asks for shards: ``--gres=shard:30`` is 30 percent of one GPU, of its compute and of its memory. Slurm counts the
shards of each GPU, so its accounting is exact. ``--comment=vgpu:sm=10,mem=16G`` stays within them.

==============  ================================================================================================
``prolog``      root, before the job: makes the vGPU of the claim ``slurm/JOB.NODE`` for the job's user, and its file
``task-prolog`` the user, before each task: prints the variables that put the task into the vGPU
``epilog``      root, after the job: removes the vGPU; also those of jobs that Slurm does not know any more
==============  ================================================================================================

A Prolog that fails drains the node. So ``prolog`` exits with 0 where the node has no room: it holds the job, or cancels
it if it cannot be requeued, with the reason in the job's comment. Facts: slurm.conf(5), prolog_epilog.html, and runs of
Slurm 22.05.8.

A job waits for its hooks. So this module imports no pydantic and no typer, jobs without shards start no interpreter,
and the prolog leaves a shell script at ``slurm/JOB.NODE`` below the node's runtime directory, which is the task prolog.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from client_hook import interpreter
from client_hook.environment import Changes
from vgpu.api.link import Reading, open_link
from vgpu.api.programs import attachment, changes
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.blocking import client_socket

MOST_NODES: Final = 65_536
"""In one range of a host list."""
MOST_PERCENT: Final = 1e6
"""A number above it is a slip, and none that arithmetic should see."""
SHARDS: Final = 100
"""Of one GPU, in gres.conf."""
ANSWER_S: Final = 20.0
_COMMENT: Final = re.compile(r"(?:^|\s)vgpu:([a-z]+=[^,\s]+(?:,[a-z]+=[^,\s]+)*)")
_FACTS: Final = re.compile(r"^   NumNodes=.*?^   MinCPUsNode=", re.MULTILINE | re.DOTALL)
"""The part of ``scontrol -d show job`` about nodes. No word of it is a user's: names and comments stand outside."""
_BEGINNING: Final = re.compile(r"^   NumNodes=", re.MULTILINE)
_NODES: Final = re.compile(r"^ +Nodes=(\S+) .*?GRES=(\S*)", re.MULTILINE)
_GRES: Final = re.compile(r"(gpu|shard):(?:[A-Za-z][^:,()]*:)?(\d+)\(IDX:([0-9,-]+)\)")

HOOKS: Final = {
    "prolog": 'PATH={path}; export PATH; case "$(scontrol -d show job "$SLURM_JOB_ID" || echo shard:)" in '
    "*shard:*) exec {vgpuctl} slurm prolog;; esac",
    "task-prolog": 'F={folder}/$SLURM_JOB_ID.$SLURMD_NODENAME; [ ! -e "$F" ] || . "$F"',
    "epilog": "PATH={path}; export PATH; "
    '[ ! -e {folder}/"$SLURM_JOB_ID.$SLURMD_NODENAME" ] || exec {vgpuctl} slurm epilog',
}
"""One line of shell each. ``folder``: of the task prologs. ``path``: of Slurm's commands, since Slurm sets no PATH."""
REFUSED: Final = "exit 1\n"
"""The task prolog of a job without its vGPU: no task begins."""
CAUSED_BY_JOBS: Final = frozenset(
    {ErrorCode.INVALID, ErrorCode.NO_ROOM, ErrorCode.QUOTA, ErrorCode.EXISTS, ErrorCode.MODE, ErrorCode.FULL}
)
ON_NODES: Final = "CF,R,S,CG,SO,ST,SI,RS"
"""States of jobs that hold nodes; by default squeue leaves out suspended ones."""
CONFIG: Final = """# slurm.conf
GresTypes=gpu,shard
Prolog=/etc/slurm/vgpu-prolog
TaskProlog=/etc/slurm/vgpu-task-prolog
Epilog=/etc/slurm/vgpu-epilog
PrologFlags=Alloc
# NodeName=... Gres=gpu:{gpus},shard:{shards}

# gres.conf
{devices}

{hooks}
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a job asks of one GPU. ``gpu``: its index. ``memory``: as the user wrote it; "": as much as the shards."""

    gpu: int
    shards: int
    sm: float
    memory: str


def expanded(hosts: str) -> Iterator[str]:
    """The names in a host list: ``n[1-2,07],m`` is n1, n2, n07, m."""
    for name, ranges in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?,?", hosts):
        if not ranges:
            yield name
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            for number in range(int(first), min(int(last or first), int(first) + MOST_NODES) + 1):
                yield f"{name}{number:0{len(first)}d}"


def shards_on(text: str, node: str) -> tuple[int, int] | None:
    """GPU and shards of a job on this node, by ``scontrol -d show job``; None: the job has no shards there. Nodes that
    are alike share one line. ``VgpuError`` (invalid): a name or comment of the job imitates these lines."""
    if len(_BEGINNING.findall(text)) > 1:
        reason = "the job's name or comment has lines as Slurm prints them"
        raise VgpuError(ErrorCode.INVALID, reason, "sbatch --job-name=NAME")
    for hosts, gres in _NODES.findall("".join(_FACTS.findall(text))):
        if node in expanded(hosts):
            for kind, count, indices in _GRES.findall(gres):
                if kind == "shard":
                    return int(indices.split(",")[0].split("-")[0]), int(count)
    return None


def asked_by(comment: str, gpu: int, shards: int) -> Asked:
    """``VgpuError`` (invalid): the comment asks for more than the shards, or for what is not known."""
    found = _COMMENT.search(comment)
    wanted = dict(part.split("=", 1) for part in found[1].split(",")) if found else {}
    if unknown := wanted.keys() - {"sm", "mem"}:
        text = f"--comment=vgpu: has no {sorted(unknown)[0]}="
        raise VgpuError(ErrorCode.INVALID, text, "it may have sm= and mem=, as in --comment=vgpu:sm=10,mem=16G")
    try:
        sm = float(wanted.get("sm", shards * 100 / SHARDS))
        if not abs(sm) <= MOST_PERCENT:
            raise ValueError
    except ValueError:
        raise VgpuError(ErrorCode.INVALID, f"{wanted['sm']!r} is no percentage", "--comment=vgpu:sm=10") from None
    if sm * SHARDS > shards * 100:
        hint = f"sbatch --gres=shard:{-(-int(sm * SHARDS) // 100)}"
        raise VgpuError(ErrorCode.INVALID, f"sm={sm:g} is more than the {shards} shards of the job", hint)
    return Asked(gpu, shards, sm, wanted.get("mem", ""))


def main(words: Sequence[str]) -> int:
    hooks = {"prolog": prolog, "task-prolog": task_prolog, "epilog": epilog, "config": config}
    if len(words) != 1 or words[0] not in hooks:
        print(f"usage: vgpuctl slurm {'|'.join(hooks)}", file=sys.stderr)
        return 2
    try:
        return hooks[words[0]](os.environ)
    except VgpuError as error:
        print(f"vgpuctl slurm: {error}", file=sys.stderr)
        return 1


def prolog(environment: Mapping[str, str]) -> int:
    """0 for what a job can cause. ``VgpuError``: the machine's fault, for which Slurm drains it."""
    job, node = environment["SLURM_JOB_ID"], environment["SLURMD_NODENAME"]
    file = folder() / claim_uid(environment)
    file.parent.mkdir(mode=0o755, exist_ok=True)
    try:
        found = shards_on(_output("scontrol", "-d", "show", "job", job), node)
        if found is None:
            return 0
        _put(file, REFUSED)  # until there is a vGPU; and the epilog has something to do
        asked = asked_by(environment.get("SLURM_JOB_COMMENT", ""), *found)
        try:
            vgpu = _make(environment, asked)
        except VgpuError as error:
            if error.code is not ErrorCode.NO_ROOM or not _sweep(node):
                raise
            vgpu = _make(environment, asked)
    except VgpuError as error:
        if error.code not in CAUSED_BY_JOBS:
            raise
        _put(file, REFUSED)
        _hold(job, environment.get("SLURM_JOB_COMMENT", ""), str(error))
        return 0
    _put(file, script_of(attachment(vgpu).changes({}), vgpu["gpu_uuid"]))
    return 0


def folder() -> Path:
    """Of the task prologs, beside the control socket of the node."""
    return client_socket().parent / "slurm"


def _put(file: Path, text: str) -> None:
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(file)


def script_of(changes: Changes, gpu_uuid: str) -> str:
    """The task prolog of a job, in shell. ``changes``: those of an empty environment. A job's own libraries stay: the
    hook comes last among those to preload, the simulated driver first on the path. A job whose environment has a hook
    already takes the way by Python."""
    joined = {
        "LD_PRELOAD": "${LD_PRELOAD:+$LD_PRELOAD:}%s",
        "LD_LIBRARY_PATH": "%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
    }
    lines = [f"export {name}={joined.get(name, '%s') % _literal(value)}" for name, value in changes.items() if value]
    first = f'case "$LD_PRELOAD" in *libvgpu_hook*) exec {shlex.quote(vgpuctl())} slurm task-prolog;; esac'
    return "\n".join([first, "cat <<END", *lines, f"export CUDA_VISIBLE_DEVICES={gpu_uuid}", "END"]) + "\n"


def _literal(text: str) -> str:
    """As a here-document of the shell has it."""
    return re.sub(r"([\\$`])", r"\\\1", text)


def vgpuctl() -> str:
    """The command of this installation; Slurm's hooks may have another PATH."""
    beside = Path(interpreter.files()[0]).with_name("vgpuctl")
    return str(beside) if beside.exists() else "vgpuctl"


def claim_uid(environment: Mapping[str, str]) -> str:
    return f"{environment['SLURM_JOB_ID']}.{environment['SLURMD_NODENAME']}"


def _make(environment: Mapping[str, str], asked: Asked) -> Reading:
    from vgpu.api.node import Node
    from vgpu.units import parse_bytes

    node = Node()
    with node.open_link() as link:
        gpu = next((gpu for gpu in link.ask("gpus")["gpus"] if gpu["index"] == asked.gpu), None)
    if gpu is None:
        raise VgpuError(ErrorCode.NOT_FOUND, f"the node serves no GPU {asked.gpu}", "vgpuctl gpu ls")
    most = gpu["total_memory_bytes"] * asked.shards // SHARDS >> 20 << 20
    try:
        memory = parse_bytes(asked.memory) if asked.memory else most
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"mem={asked.memory}: {error}", "--comment=vgpu:mem=16G") from error
    if memory > most:
        text = f"mem={asked.memory} is more than the {asked.shards} shards of the job"
        raise VgpuError(ErrorCode.INVALID, text, "sbatch --gres=shard:N with a larger N")
    labels = {"job": environment["SLURM_JOB_ID"], "user": environment.get("SLURM_JOB_USER", "")}
    claim = {"kind": "slurm", "uid": claim_uid(environment), "labels": labels}
    owner = environment["SLURM_JOB_UID"] if os.geteuid() == 0 else None
    return node.create(sm=asked.sm, mem=memory, gpu=asked.gpu, owner=owner, keep=True, claim=claim).reading


def _hold(job: str, comment: str, reason: str) -> None:
    """The job waits, held, with the reason behind its own comment; one that cannot be requeued is cancelled."""
    text = "vgpu: " + re.sub(r"[^\w .,:;%/()+-]", "'", reason)[:200]
    own = comment.partition("vgpu: ")[0].rstrip()
    _run("scontrol", "update", f"job={job}", f"comment={own} {text}".replace("comment= ", "comment="))
    if _run("scontrol", "requeuehold", job).returncode != 0:
        _run("scancel", job)


def task_prolog(environment: Mapping[str, str]) -> int:
    """Lines that Slurm reads from the standard output of a TaskProlog."""
    with open_link() as link:
        vgpu = _of_claim(link, claim_uid(environment))
    if vgpu is None:
        return 0
    for name, value in changes(vgpu).items():
        print(f"unset {name}" if value is None else f"export {name}={value}")
    print(f"export CUDA_VISIBLE_DEVICES={vgpu['gpu_uuid']}")
    return 0


def epilog(environment: Mapping[str, str]) -> int:
    with open_link() as link:
        if (vgpu := _of_claim(link, claim_uid(environment))) is not None:
            _remove(link, vgpu["vgpu_id"])
    (folder() / claim_uid(environment)).unlink(missing_ok=True)
    _sweep(environment["SLURMD_NODENAME"])
    return 0


def _sweep(node: str) -> bool:
    """Remove the vGPUs of jobs that are not on this node any more, as after a crash of the machine. Whether there were
    any."""
    listed = _run("squeue", "--noheader", f"--nodelist={node}", f"--states={ON_NODES}", "--format=%A")
    if listed.returncode != 0:
        return False
    here = {f"{job}.{node}" for job in listed.stdout.split()}
    swept = False
    with open_link() as link:
        for vgpu in link.ask("list")["vgpus"]:
            claim = vgpu.get("claim") or {}
            uid = claim.get("uid", "")
            if claim.get("kind") == "slurm" and uid.endswith(f".{node}") and uid not in here:
                _remove(link, vgpu["vgpu_id"])
                (folder() / uid).unlink(missing_ok=True)
                swept = True
    return swept


def _remove(link: Any, vgpu_id: str) -> None:
    try:
        link.change("remove", vgpu=vgpu_id, force=True)
    except VgpuError as error:
        if error.code not in {ErrorCode.NOT_FOUND, ErrorCode.REMOVED}:
            raise


def _of_claim(link: Any, uid: str) -> dict[str, Any] | None:
    for vgpu in link.ask("list")["vgpus"]:
        claim = vgpu.get("claim") or {}
        if (claim.get("kind"), claim.get("uid")) == ("slurm", uid):
            return vgpu  # type: ignore[no-any-return]
    return None


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of Slurm; code 1 where it does not answer."""
    try:
        return subprocess.run(words, check=False, timeout=ANSWER_S, capture_output=True, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _output(*words: str) -> str:
    asked = _run(*words)
    if asked.returncode != 0:
        reason = f"{words[0]} does not answer: {asked.stderr.strip()}"
        raise VgpuError(ErrorCode.UNAVAILABLE, reason, "scontrol ping; is Slurm's bin on PATH?")
    return asked.stdout


def config(_: Mapping[str, str]) -> int:
    """The lines of Slurm's configuration for this machine."""
    with open_link() as link:
        gpus = link.ask("gpus")["gpus"]
    lines = [f"Name=gpu File=/dev/nvidia{gpu['index']}" for gpu in gpus]
    lines += [f"Name=shard Count={SHARDS} File=/dev/nvidia{gpu['index']}" for gpu in gpus]
    commands = shutil.which("scontrol")
    path = f"{Path(commands).parent}:/usr/bin:/bin" if commands else "/usr/local/bin:/usr/bin:/bin"
    places = {"vgpuctl": vgpuctl(), "folder": folder(), "path": path}
    scripts = [
        f"# /etc/slurm/vgpu-{name}, mode 0755\n#!/bin/sh\n{line.format(**places)}\n" for name, line in HOOKS.items()
    ]
    print(
        CONFIG.format(
            gpus=len(gpus), shards=SHARDS * len(gpus), devices="\n".join(lines), hooks="\n".join(scripts).rstrip()
        ),
        end="",
    )
    return 0
