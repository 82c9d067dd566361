"""After a quiet moment: shares, ledgers, the card, processes, descriptors, sockets, memfds and journals, each against
the model. What is compared comes from outside of the node: /proc, the card's own file, SQLite, the file system."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from cython_ext.simengine import Engine
from tests.integration.node import eventually
from tests.soak.actions import Performer
from tests.soak.model import Expected

SETTLE_S: Final = 120.0
DESCRIPTORS_OF_VGPU: Final = 12
"""The most that a GPU Server keeps for one vGPU: pages, its broker's pidfd and link, those of its programs."""
SPARE_DESCRIPTORS: Final = 24
MODULES: Final = {
    "tests.integration.hasty": "node",
    "gpuserver": "gpuserver",
    "vgpu.broker": "broker",
    "vgpu.broker.template": "template",
}
SHARE_TRIES: Final = 8
SHARE_S: Final = 1.5
TOLERANCE: Final = 0.06
STARVED: Final = 0.8


def cores_waited_for_us() -> int:
    """For how long some process of this machine has waited for a core, since boot. 0: the kernel does not say."""
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return 0
    return int(some.rpartition("total=")[2])


class Checks:
    def __init__(self, performer: Performer) -> None:
        self._performer = performer
        self._node, self._world = performer.node, performer.world
        self._fewest: dict[str, int] = {}
        self.shares: list[float] = []

    # --- one quiet moment

    def compare(self) -> None:
        owned = self._rest()
        last: list[str] = []

        def same() -> bool:
            last[:] = self._differences(owned)
            return not last

        try:
            eventually(same, "agreement with the model", SETTLE_S)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *last])) from error
        self._descriptors()
        self._check_shares(owned)
        for pid in owned:
            self._say(pid, "go")

    def _rest(self) -> dict[int, int]:
        """The workers of vGPUs that run stand still. The bytes of each by pid."""
        performer = self._performer
        performer.stopped.wait()
        for vgpu in [vgpu for vgpu in self._world.vgpus.values() if vgpu.damaged]:
            performer.remove(vgpu.vgpu_id)
        for pid in list(performer.programs):
            ended = performer.programs[pid].poll() is not None
            if ended or pid not in performer.workers:
                performer.end(pid)
        return {pid: owned for pid in self._awake() if (owned := self._say(pid, "rest")) is not None}

    def _awake(self) -> list[int]:
        running = [vgpu for vgpu in self._world.vgpus.values() if not vgpu.suspended]
        return [pid for vgpu in running for pid in sorted(vgpu.pids)]

    def _say(self, pid: int, line: str) -> int | None:
        """None: it has died."""
        popen = self._performer.programs[pid]
        assert popen.stdin is not None
        assert popen.stdout is not None
        try:
            popen.stdin.write(f"{line}\n")
            popen.stdin.flush()
            answer = popen.stdout.readline().strip()
            if answer == "started":
                answer = popen.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer:
            return int(answer)
        self._performer.end(pid)
        return None

    def _differences(self, owned: dict[int, int]) -> list[str]:
        node, world = self._node, self._world
        with node.link() as link:
            vgpus, processes, gpus = link.list(), link.processes().processes, link.gpus()
        wanted = {v.vgpu_id: (v.name, v.gpu, v.sm_percent, v.memory_bytes, v.suspended) for v in world.vgpus.values()}
        listed = {
            v.vgpu_id: (v.name, v.gpu_index, v.spec.sm_percent, v.memory_limit_bytes, v.state == "suspended")
            for v in vgpus
        }
        running = {v.vgpu_id for v in world.vgpus.values() if not v.suspended}
        # Children of programs, too: one that is suspended outlives the program that started it.
        asleep = {process.pid for process in processes if process.vgpu_id not in running}
        per_gpu = [sorted(v.vgpu_id for v in world.vgpus.values() if v.gpu == gpu) for gpu in range(world.gpus)]
        compared: list[tuple[str, object, object]] = [
            ("vGPUs", listed, wanted),
            ("GPUs", [gpu.state for gpu in gpus], ["serving"] * world.gpus),
            ("ledgers", {p.pid: p.memory_bytes for p in processes if p.vgpu_id in running}, owned),
            # Suspension holds up an allocation half-way: its reservation stays until the vGPU is resumed.
            ("reserved", {v.vgpu_id: n for v in vgpus if (n := v.memory_reserved_bytes) and v.vgpu_id in running}, {}),
            ("journals", [self._journal(gpu.uuid) for gpu in gpus], per_gpu),
            ("directories", sorted(path.name for path in (node.paths.runtime / "vgpus").iterdir()), sorted(wanted)),
            ("processes of ours", self._ours(), self._wanted_processes()),
        ]
        for index in range(world.gpus):
            card = Engine(node.paths.runtime / "sim", index)
            card.refresh()
            shown = {pid: taken - card.context_bytes for pid, _, taken, *_ in card.contexts().values()}
            mine = {pid: owned[pid] for v in world.vgpus.values() if v.gpu == index for pid in v.pids if pid in owned}
            compared.append((f"card {index}", {pid: n for pid, n in shown.items() if pid not in asleep}, mine))
        return [f"{what}: {found}, wanted {expected}" for what, found, expected in compared if found != expected]

    def _journal(self, uuid: str) -> list[str]:
        path = self._node.paths.journal(uuid)
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
            return sorted(row[0] for row in journal.execute("SELECT vgpu_id FROM vgpu"))

    # --- processes and descriptors, from /proc

    def _processes(self) -> dict[int, str]:
        """Those of this node, by the directory in their environment, and what each of them is."""
        mark = f"VGPU_RUNTIME_DIR={self._node.paths.runtime}\0".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if mark not in (entry / "environ").read_bytes() + b"\0":
                    continue
            except OSError:
                continue
            roles = [MODULES[argument] for argument in arguments if argument in MODULES]
            if roles:
                found[int(entry.name)] = roles[0]
        return found

    def _wanted_processes(self) -> dict[str, int]:
        gpus = self._world.gpus
        return {"node": 1, "gpuserver": gpus, "broker": len(self._world.vgpus), "template": gpus}

    def _ours(self) -> dict[str, int]:
        roles = list(self._processes().values())
        return {role: roles.count(role) for role in MODULES.values()}

    def _descriptors(self) -> None:
        """Per process no more than at the first quiet moment, but for what each vGPU takes."""
        vgpus = len(self._world.vgpus)
        for pid, role in self._processes().items():
            try:
                links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            count = len(links) - DESCRIPTORS_OF_VGPU * vgpus * (role == "gpuserver")
            fewest = self._fewest.setdefault(role, count)
            assert count <= max(fewest, 0) + SPARE_DESCRIPTORS, f"{role} {pid} has {len(links)} descriptors: {links}"
            memfds = sum("memfd:" in link for link in links)
            most = {"node": 0, "template": 0, "broker": 5, "gpuserver": 4 * vgpus + 4}[role]
            assert memfds <= most, f"{role} {pid} has {memfds} memfds for {vgpus} vGPUs"

    # --- shares

    def _check_shares(self, owned: dict[int, int]) -> None:
        """Each of the workers alone in its vGPU keeps the GPU busy for the vGPU's percent of the time. A host that
        stalls takes time from a program, so one good window of several is enough; none may be above its limit."""
        alone = [v for v in self._world.vgpus.values() if not v.suspended and len(v.pids & owned.keys()) == 1]
        if not alone:
            return
        pids = [next(iter(v.pids & owned.keys())) for v in alone]
        for pid in pids:
            if self._say(pid, "greed") is None:
                return
        try:
            self._measure(alone)
        finally:
            for pid in pids:
                if pid in self._performer.programs:
                    self._say(pid, "rest")

    def _measure(self, vgpus: list[Expected]) -> None:
        """Each has its percent in one window at least, or in all since the first; in all together none has more. A host
        that stalls may charge several windows at once, and the vGPU then waits for the next ones. Where programs wait
        for a core nearly all the time, they cannot use what they are given: then each has a tenth of its percent."""
        missing = {vgpu.vgpu_id: vgpu.sm_percent / 100 for vgpu in vgpus}
        wanted = dict(missing)
        seen: dict[str, list[float]] = {vgpu_id: [] for vgpu_id in wanted}
        begun, first, waited_us = time.monotonic(), self._busy_ns(), cores_waited_for_us()
        began, before = begun, first
        for _ in range(SHARE_TRIES):
            time.sleep(SHARE_S)
            now, after = time.monotonic(), self._busy_ns()
            for vgpu_id, part in wanted.items():
                had = (after[vgpu_id] - before[vgpu_id]) / (now - began) / 1e9
                seen[vgpu_id].append(round(had, 3))
                since_begun = (after[vgpu_id] - first[vgpu_id]) / (now - begun) / 1e9
                error = min(abs(had - part), abs(since_begun - part))
                if vgpu_id in missing and error <= TOLERANCE:
                    self.shares.append(error)
                    del missing[vgpu_id]
            began, before = now, after
            if not missing:
                break
        took_ns = (began - begun) * 1e9
        if cores_waited_for_us() - waited_us > STARVED * took_ns / 1e3:
            missing = {v: part for v, part in missing.items() if (before[v] - first[v]) / took_ns < part / 10}
        wrong = {
            v for v, part in wanted.items() if (before[v] - first[v]) / took_ns > part + TOLERANCE
        } | missing.keys()
        if wrong:
            said = [f"{vgpu_id} had {seen[vgpu_id]} of its GPU, for {wanted[vgpu_id]:g}" for vgpu_id in sorted(wrong)]
            raise AssertionError("\n".join([*said, *self._details()]))

    def _details(self) -> list[str]:
        """Every vGPU and process, as the node shows it."""
        with self._node.link() as link:
            return [one.model_dump_json(exclude_defaults=True) for one in (*link.list(), *link.processes().processes)]

    def _busy_ns(self) -> dict[str, int]:
        with self._node.link() as link:
            return {vgpu.vgpu_id: vgpu.busy_ns for vgpu in link.list()}

    # --- the end of all programs

    def end_all(self) -> None:
        performer = self._performer
        for pid in list(performer.programs):
            performer.end(pid)
        for vgpu in list(self._world.vgpus.values()):
            if vgpu.suspended:
                performer.remove(vgpu.vgpu_id)
        self.compare()
