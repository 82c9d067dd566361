"""What a node should have after any sequence of actions: the model that the soak compares it with. Pure.

The model knows each vGPU with its size, GPU and state, and the programs in it. Every request may be asked again after
a lost answer: names are never used twice, so a second creation finds the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final

MIB: Final = 1 << 20
WHOLE_PERCENT: Final = 100
MOST_VGPUS: Final = 12
MOST_PROGRAMS: Final = 10
SIZES_MIB: Final = (256, 512, 1024)
PROGRAM_KINDS: Final = ("worker", "worker", "worker", "dies", "forks", "execs", "threads")
VICTIMS: Final = ("broker", "server", "node", "program")


@dataclass(slots=True)
class Expected:
    """One vGPU. ``damaged``: a program has written at random into its activity page, so only its removal is judged."""

    vgpu_id: str
    name: str
    gpu: int
    sm_percent: int
    memory_bytes: int
    suspended: bool = False
    damaged: bool = False
    pids: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Action:
    """``kind`` names a method of the performer; ``vgpu`` is an id, or empty."""

    kind: str
    vgpu: str = ""
    number: int = 0
    choice: str = ""


class World:
    """``fits`` is the model's admission: the time of a GPU is promised once."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.vgpus: dict[str, Expected] = {}
        self._made = 0

    def next_name(self) -> str:
        self._made += 1
        return f"soak{self._made}"

    def promised(self, gpu: int, but: str = "") -> int:
        """Percent of one GPU's time. A suspended vGPU has given its promise back."""
        return sum(
            vgpu.sm_percent
            for vgpu in self.vgpus.values()
            if vgpu.gpu == gpu and not vgpu.suspended and vgpu.vgpu_id != but
        )

    def fits(self, gpu: int, sm_percent: int, but: str = "") -> bool:
        return self.promised(gpu, but) + sm_percent <= WHOLE_PERCENT

    def choose(self, random: Random) -> Action:
        """The next action, weighted so that all states are visited."""
        usable = [vgpu for vgpu in self.vgpus.values() if not vgpu.damaged]
        awake = [vgpu for vgpu in usable if not vgpu.suspended]
        asleep = [vgpu for vgpu in usable if vgpu.suspended]
        programs = sum(len(vgpu.pids) for vgpu in self.vgpus.values())
        options: list[tuple[int, Action]] = [(2, Action("hostile_frames", number=random.randrange(1 << 30)))]
        if len(self.vgpus) < MOST_VGPUS:
            options.append((6, Action("create", number=random.choice((5, 10, 20, 30)))))
        if self.vgpus:
            one = random.choice(list(self.vgpus.values()))
            options.append((3, Action("remove", one.vgpu_id)))
            options.append((3, Action("kill", one.vgpu_id, choice=random.choice(VICTIMS))))
            options.append((3, Action("stop_a_while", one.vgpu_id, choice=random.choice(VICTIMS))))
            options.append((2, Action("hostile_peer", one.vgpu_id, random.randrange(1 << 30))))
        if usable:
            one = random.choice(usable)
            options.append((3, Action("resize", one.vgpu_id, random.choice((5, 10, 20, 30)))))
        if awake:
            one = random.choice(awake)
            options.append((2, Action("suspend", one.vgpu_id)))
            options.append((1, Action("scribble", one.vgpu_id, random.randrange(1 << 30))))
            if self.gpus > 1:
                options.append((2, Action("migrate", one.vgpu_id, (one.gpu + 1) % self.gpus)))
            if programs < MOST_PROGRAMS:
                choice = random.choice(PROGRAM_KINDS)
                options.append((9, Action("start", one.vgpu_id, random.randrange(1 << 30), choice)))
        if asleep:
            options.append((4, Action("resume", random.choice(asleep).vgpu_id)))
        [(_, action)] = random.choices(options, [weight for weight, _ in options])
        return action

    # --- what an answer means

    def created(self, vgpu: Expected) -> None:
        assert vgpu.vgpu_id not in self.vgpus, f"{vgpu.vgpu_id} was made twice"
        self.vgpus[vgpu.vgpu_id] = vgpu

    def removed(self, vgpu_id: str) -> Expected:
        return self.vgpus.pop(vgpu_id)
