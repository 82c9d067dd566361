"""A Slurm cluster of two nodes on this machine: its own daemons, everything below one folder. Each Slurm node has a
vGPU node of its own, with two simulated GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.integration.node import SimulatedNode, eventually
from vgpu.integrations.slurm import HOOKS

NODES: Final = ("n1", "n2")
_DAEMONS: Final = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
_CONF: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/doors/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu,shard
Prolog={folder}/prolog
TaskProlog={folder}/task-prolog
Epilog={folder}/epilog
PrologFlags=Alloc
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=2000 Gres=gpu:2,shard:200
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str:
    """Empty: Slurm's daemons can run here. Else why not."""
    if os.geteuid() != 0:
        return "only root starts Slurm's daemons"
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def free_ports(count: int) -> list[int]:
    """Consecutive ones."""
    for first in range(20000, 30000, 10):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no ports are free")


class Cluster:
    """Context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = {name: SimulatedNode(2) for name in NODES}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes.values():
                node.__enter__()
            self._configure()
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _configure(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o700)
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "munge/key").chmod(0o400)
        (folder / "doors").mkdir(mode=0o755)
        for node in self.nodes.values():
            node.directory.chmod(0o711)  # other users reach this node
        port, first, last = free_ports(3)
        conf = _CONF.format(folder=folder, host=host, port=port, first=first, last=last)
        (folder / "slurm.conf").write_text(conf)
        devices = []
        for node in NODES:
            for index in range(2):
                device = folder / f"gpu{index}"
                device.touch()
                devices.append(f"NodeName={node} Name=gpu File={device} Flags=nvidia_gpu_env")
                devices.append(f"NodeName={node} Name=shard Count=100 File={device}")
        (folder / "gres.conf").write_text("\n".join(sorted(devices)) + "\n")
        for hook in ("prolog", "task-prolog", "epilog"):
            self._write_hook(hook)

    def _write_hook(self, hook: str) -> None:
        """As an administrator writes it, and with the place of this Slurm node's vGPU node."""
        places = "".join(
            f"{name}) export VGPU_RUNTIME_DIR={node.paths.runtime} VGPU_STATE_DIR={node.paths.state};;\n"
            for name, node in self.nodes.items()
        )
        vgpuctl = Path(sys.executable).with_name("vgpuctl")
        script = self.folder / hook
        script.write_text(
            f"#!/bin/sh\nexport PATH={os.environ['PATH']} SLURM_CONF={self.folder}/slurm.conf\n"
            f'case "$SLURMD_NODENAME" in\n{places}esac\nexec 2>>{self.folder}/{hook}.errors\n'
            + HOOKS[hook].format(vgpuctl=vgpuctl, folder="$VGPU_RUNTIME_DIR/slurm", path=os.environ["PATH"])
            + "\n"
        )
        script.chmod(0o755)

    def _start(self) -> None:
        munge = self.folder / "munge"
        self._run("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={self.folder}/doors/munge",
                  f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        eventually((self.folder / "doors/munge").exists, "munge answers")
        self._run("slurmctld", "-D", "-c")
        for name in NODES:
            self.start_slurmd(name)
        eventually(self._is_idle, "the nodes are idle")

    def start_slurmd(self, name: str) -> subprocess.Popen[bytes]:
        return self._run("slurmd", "-D", "-N", name)

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))
        return self._daemons[-1]

    def _is_idle(self) -> bool:
        return self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)

    def ask(self, *words: str) -> str:
        asked = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        return asked.stdout

    def srun(self, *words: str, user: int = 0) -> subprocess.Popen[str]:
        """``srun`` as that user, its output kept."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["srun", "--quiet", *words],
            env=self.environment,
            stdout=pipe,
            stderr=pipe,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd="/",
            user=user or None,
            group=user or None,
            extra_groups=[] if user else None,
        )

    def sbatch(self, *words: str, command: str) -> str:
        """The job's id."""
        return self.ask("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *words, f"--wrap={command}").strip()

    def clear(self) -> None:
        self.ask("scancel", "--user=root")
        for job in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", job)
        eventually(lambda: not self.ask("squeue", "-h").strip(), "no job is left")
        for node in self.nodes.values():
            node.clear()
        eventually(self._is_idle, "the nodes are idle")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for file in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.errors")):
                print(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in self.nodes.values():
            node.__exit__(kind, error, trace)
