"""Cards from Pascal to Blackwell, as profiles of ``SimulatedGpu``. The figures are NVIDIA's, from its data sheets and
the table of compute capabilities; docs/reference/cards.md shows them, and a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuserver.device.base import Capabilities


@dataclass(frozen=True, slots=True)
class Profile:
    """One card. Its memory is the nominal size, of which a driver keeps a part for itself."""

    name: str
    architecture: str
    compute_capability: tuple[int, int]
    sm_count: int
    cuda_cores: int
    memory_gib: int
    preempts: bool = True
    """Kernels can be interrupted: from Pascal on."""
    partitions: bool = True
    """MPS limits a process to a part of the SMs: from Volta on."""
    checkpoints: bool = True
    """A driver with the checkpoint calls supports the card; they depend on the driver, not on the card."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib << 30

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.compute_capability, self.preempts, self.partitions, self.checkpoints)


PROFILES: Final = (
    Profile("Tesla P100 SXM2", "Pascal", (6, 0), 56, 3584, 16, partitions=False),
    Profile("Tesla P40", "Pascal", (6, 1), 30, 3840, 24, partitions=False),
    Profile("Tesla V100 SXM2", "Volta", (7, 0), 80, 5120, 32),
    Profile("Tesla T4", "Turing", (7, 5), 40, 2560, 16),
    Profile("A100 SXM4", "Ampere", (8, 0), 108, 6912, 80),
    Profile("A10", "Ampere", (8, 6), 72, 9216, 24),
    Profile("A40", "Ampere", (8, 6), 84, 10752, 48),
    Profile("L4", "Ada", (8, 9), 58, 7424, 24),
    Profile("L40S", "Ada", (8, 9), 142, 18176, 48),
    Profile("GeForce RTX 4090", "Ada", (8, 9), 128, 16384, 24),
    Profile("H100 SXM5", "Hopper", (9, 0), 132, 16896, 80),
    Profile("H200 SXM5", "Hopper", (9, 0), 132, 16896, 141),
    Profile("GeForce RTX 5090", "Blackwell", (12, 0), 170, 21760, 32),
    Profile("RTX PRO 6000 Blackwell", "Blackwell", (12, 0), 188, 24064, 96),
)
