"""What the GPU Server needs from the devices of a vendor, as Protocols, and the records that they answer with.

All calls block, some of them for milliseconds or longer, so the runtime makes them in threads. A ``Device`` may be
called from several threads at once. A ``Partitioner`` and a ``Checkpointer`` get one call at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from gpuserver.device.pidfd import Target
from vgpu.enums import PriorityName
from vgpu.identity import Process

SM_COUNT_UNKNOWN: Final = 0


# --- the device


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change while a GPU is there."""

    index: int
    """Its number on this machine, from 0."""
    uuid: str
    """Its name for life: ``GPU-`` and 32 hexadecimal digits in five groups."""
    name: str
    total_memory_bytes: int
    sm_count: int
    """``SM_COUNT_UNKNOWN``: this driver does not report it."""
    numa_node: int | None = None
    """Of the host's memory that is next to it; None: it is not known."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a GPU and its driver can do. False: it cannot, or the driver does not report it."""

    compute_capability: tuple[int, int] | None = None
    """(major, minor); None: the driver does not report it."""
    preempts: bool = False
    """The GPU interrupts a running kernel, so time slices of several processes end on time."""
    partitions: bool = False
    """A ``Partitioner`` can limit a process to a part of the SMs: spatial mode."""
    checkpoints: bool = False
    """The driver has the calls that a ``Checkpointer`` makes: suspending a vGPU."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The device memory in use at one moment."""

    used_bytes: int
    """On the whole GPU, by any process."""
    by_pid: dict[int, int]
    """The bytes of each process, in any kind of context, by its pid in this PID namespace. A process whose figure the
    driver does not report has 0: the driver still holds something for it."""


@dataclass(frozen=True, slots=True)
class Activity:
    """How busy the whole GPU is, whichever processes use it. None: this driver or GPU does not report it."""

    utilization_ratio: float | None = None
    """The part of the driver's last sample in which a kernel ran, 0–1. A sample covers a second or less."""
    memory_utilization_ratio: float | None = None
    """The part of that sample in which memory was read or written, 0–1."""
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None


class Device(Protocol):
    """One GPU that was opened. It is closed by the context manager that gave it."""

    @property
    def facts(self) -> GpuFacts: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def memory_use(self) -> MemoryUse:
        """The memory in use now. A process is listed as long as the driver holds memory for it, also after its death.

        Errors: ``VgpuError`` (unavailable): there is no reading now, or never again (the GPU is lost).
        """

    def activity(self) -> Activity:
        """How busy the GPU is. It never fails: a value that cannot be read is None."""


# --- partitions of its SMs


@dataclass(frozen=True, slots=True)
class MpsDirectories:
    """Where processes find the partitioner: CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY."""

    pipe: Path
    log: Path

    def make(self) -> None:
        """Create both. Reason for the modes: processes of the vGPUs' owners reach the pipes, whatever our umask is. MPS
        itself checks their users."""
        for directory in (self.pipe, self.log):
            missing = [parent for parent in directory.parents if not parent.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for parent in missing:
                parent.chmod(0o711)
            directory.chmod(0o755)


@dataclass(frozen=True, slots=True)
class PartitionerStatus:
    """The processes of a partitioner that run."""

    daemon: Process | None
    """None: it does not run."""
    servers: frozenset[Process] = frozenset()
    """The servers that the daemon has reported. A server that dies takes all processes of its vGPUs with it."""


class Partitioner(Protocol):
    """What spatial mode needs: a daemon that limits each process of one GPU to a part of the SMs."""

    directories: MpsDirectories

    @property
    def most_processes(self) -> int:
        """The most processes that may be attached at once, over all vGPUs of the GPU."""

    def client_priority(self, priority: PriorityName) -> str:
        """What a process of a vGPU with ``priority`` has as CUDA_MPS_CLIENT_PRIORITY."""

    def start(self) -> None:
        """Start the daemon. Idempotent: a daemon that runs is kept, and one that died is replaced.

        Errors: ``VgpuError`` (mode) with the reason, and what to do.
        """

    def stop(self) -> None:
        """End the daemon. Idempotent. Precondition: no process is attached."""

    def status(self, *, serving: bool) -> PartitionerStatus:
        """The processes that run now. ``serving``: processes are attached, so the daemon has a server to report."""


# --- checkpoints of processes


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """The result of one action on all processes of a vGPU."""

    reason: str
    """"": the action was done. Else why it was not, as one sentence for the user."""
    stuck: tuple[int, ...]
    """The pids that neither run nor are suspended."""
    seconds: float
    """How long the driver took."""


CheckpointAction = Literal["probe", "suspend", "resume"]


@dataclass(frozen=True, slots=True)
class Onto:
    """A move between GPUs, by their UUIDs: from ``old`` to ``new``."""

    old: str
    new: str

    @classmethod
    def parse(cls, text: str) -> Onto:
        old, _, new = text.partition("=")
        return cls(old, new)

    def of(self, uuid: str) -> str:
        """The GPU that takes the place of ``uuid``. ``old`` and ``new`` change places; all others stay."""
        return {self.old: self.new, self.new: self.old}.get(uuid, uuid)


class Checkpointer(Protocol):
    """What suspending a vGPU needs: the device state of whole processes goes to host memory, and back."""

    def run(
        self, action: CheckpointAction, targets: Sequence[Target] = (), onto: Onto | None = None
    ) -> CheckpointOutcome:
        """Do ``action`` to all ``targets`` or to none; it takes seconds for tens of GiB.

        ``probe``: nothing happens; the outcome says whether this driver can suspend at all. ``suspend``: the processes
        stop, and own no device memory afterwards. ``resume``: they run again. ``onto``: they come from another GPU.

        A target that has ended counts as done. Each action may be repeated, whatever became of an earlier one. It never
        raises: every failure is an outcome with a reason.
        """
