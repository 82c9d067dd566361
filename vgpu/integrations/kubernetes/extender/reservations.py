"""The decisions of the extender, pure: pods, nodes and the time go in, and nodes, scores and GPUs come out.

The annotations of pods say what each pod holds. The extender keeps what it has decided and not yet written beside
that. So it promises a GPU once, however many pods are bound at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes.dra import Object
from vgpu.integrations.kubernetes.extender import assumed
from vgpu.integrations.kubernetes.extender.asks import Ask, asks_of
from vgpu.integrations.kubernetes.extender.assumed import Held, Part
from vgpu.integrations.kubernetes.extender.gpus import NodeGpu, gpus_of
from vgpu.integrations.kubernetes.resources import MEMORY
from vgpu.placement import Gpu, Kind, Mix, Policy, Request, Room
from vgpu.share import PPM
from vgpu.units import counted

MOST_SCORE: Final = 10
"""The scheduler multiplies it by the extender's weight."""
_PPM_OF_PERCENT: Final = PPM // 100


@dataclass(frozen=True, slots=True)
class Fits:
    """Where a pod would go on a node. ``rank``: the policy's; the higher, the better."""

    parts: tuple[Part, ...]
    rank: float


@dataclass(frozen=True, slots=True)
class Assume:
    """Write these annotations at the pod, if there are any, and bind it."""

    held: Held
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Later:
    """Another pod comes first."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound there already."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What has to be on the same GPU: the containers of a pod under aliyun's name, or one container."""

    asks: tuple[Ask, ...]
    gpus: int

    def request(self, memory_bytes: int) -> Request:
        """For GPUs with so much memory."""
        each = [ask.on(memory_bytes) for ask in self.asks]
        time = sum(_time_ppm(one.sm) for one in each)
        return Request(time, sum(one.memory_bytes for one in each), gpus=self.gpus)


class Reservations:
    """``limit_s``: a pod that the kubelet does not allocate within this time loses its GPU."""

    def __init__(self, policy: Policy, limit_s: float) -> None:
        self._policy = policy
        self._limit_s = limit_s
        self.gpus: dict[str, tuple[NodeGpu, ...]] = {}
        """By the name of the node."""
        self._written: dict[str, Held] = {}
        self._deciding: dict[str, Held] = {}
        self._kinds: dict[tuple[str, int], Kind] = {}

    # --- what is

    def see_node(self, node: Object) -> None:
        found = gpus_of(node)
        name = node["metadata"]["name"]
        if found:
            self.gpus[name] = found
        else:
            self.gpus.pop(name, None)

    def lose_node(self, name: str) -> None:
        self.gpus.pop(name, None)

    def see_nodes(self, nodes: Iterable[Object]) -> None:
        """These are all."""
        self.gpus = {node["metadata"]["name"]: found for node in nodes if (found := gpus_of(node))}

    def see(self, pod: Object) -> None:
        """As the API server has it, or had it: an older version than the one that is known is left out."""
        uid, known = pod["metadata"]["uid"], self._written.get(pod["metadata"]["uid"])
        if known is not None and _is_older(str(pod["metadata"].get("resourceVersion", "")), known.version):
            return
        held = assumed.held_of(pod)
        if held is None:
            self._written.pop(uid, None)
        else:
            self._written[uid] = held

    def lose(self, uid: str) -> None:
        self._written.pop(uid, None)

    def see_pods(self, pods: Sequence[Object], version: str) -> None:
        """These are all of that version."""
        listed = {pod["metadata"]["uid"] for pod in pods}
        for uid, held in list(self._written.items()):
            if uid not in listed and not _is_older(version, held.version):
                del self._written[uid]
        for pod in pods:
            self.see(pod)

    def held(self, node: str | None = None) -> list[Held]:
        """The pods that hold GPUs, of one node or of all."""
        every = {**self._written, **self._deciding}.values()
        return [one for one in every if node is None or one.node == node]

    # --- what is decided

    def fits(self, pod: Object, node: str) -> Fits | str:
        """Or why it does not fit. ``VgpuError`` (invalid): it fits nowhere."""
        return self._fits(asks_of(pod), pod["metadata"].get("uid", ""), node, self._mix())

    def survey(self, pod: Object, nodes: Sequence[str]) -> dict[str, Fits | str]:
        """``fits`` for each of the nodes."""
        try:
            asks = asks_of(pod)
        except VgpuError as error:
            return dict.fromkeys(nodes, str(error))
        mix, uid = self._mix(), pod["metadata"].get("uid", "")
        return {node: self._fits(asks, uid, node, mix) for node in nodes}

    def scores(self, pod: Object, nodes: Sequence[str]) -> dict[str, int]:
        """0 to 10: the best of these nodes has 10, one that does not fit 0."""
        found = self.survey(pod, nodes)
        ranks = [one.rank for one in found.values() if isinstance(one, Fits)]
        least, most = min(ranks, default=0.0), max(ranks, default=0.0)

        def score(one: Fits | str) -> int:
            if isinstance(one, str):
                return 0
            return round(MOST_SCORE * (one.rank - least) / (most - least)) if most > least else MOST_SCORE

        return {node: score(one) for node, one in found.items()}

    def decide(self, pod: Object, node: str, now_s: float) -> Assume | Later | Refused | Bound:
        """What to do with a pod that the scheduler binds to ``node``. ``pod``: as the API server has it now."""
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        place = (pod.get("spec") or {}).get("nodeName")
        if place:
            return Bound() if place == node else Refused(f"the pod is bound to {place} already")
        if metadata.get("deletionTimestamp"):
            return Refused("the pod is being deleted")
        try:
            found = self.fits(pod, node)
        except VgpuError as error:
            return Refused(str(error))
        if isinstance(found, str):
            return Refused(found)
        held = Held(uid, metadata.get("namespace", ""), metadata["name"], node, found.parts, False, now_s)
        if not held.parts:
            return Assume(held, {})
        for other in self.held(node):
            if other.uid != uid and not other.assigned and (common := held.sizes & other.sizes):
                name, count = sorted(common)[0]
                return Later(f"the kubelet of {node} has not yet allocated {count} of {name} to {other}")
        written = assumed.written(held)
        for gpu in self.gpus.get(node, ()):
            if gpu.id == held.parts[0].gpu:
                written |= assumed.of_gpu(held, gpu.memory_bytes)
        return Assume(held, written)

    def begin(self, held: Held) -> None:
        """From here on the pod holds its GPUs, whatever is written."""
        self._deciding[held.uid] = held

    def end(self, uid: str) -> None:
        """What is written counts."""
        self._deciding.pop(uid, None)

    def overdue(self, now_s: float) -> list[Held]:
        """The pods that the kubelet has not allocated in time. A time that is to come is no time of this extender."""
        return [one for one in self.held() if not one.assigned and abs(now_s - one.assumed_s) > self._limit_s]

    # --- how

    def _mix(self) -> Mix:
        if not self._policy.uses_mix:
            return Mix(())
        return Mix([_request(part) for held in self.held() for part in held.parts])

    def left(self, node: str, without: str = "") -> Iterator[tuple[NodeGpu, Gpu]]:
        """Each GPU of the node, and what of it no pod holds. ``without``: the uid of a pod that does not count."""
        parts = [part for held in self.held(node) if held.uid != without for part in held.parts]
        for gpu in self.gpus.get(node, ()):
            mine = [_request(part) for part in parts if part.gpu in (gpu.id, str(gpu.index))]
            time = gpu.sm * _PPM_OF_PERCENT - sum(one.time_ppm for one in mine)
            yield gpu, Gpu(time, gpu.offered_bytes - sum(one.memory_bytes for one in mine))

    def _fits(self, asks: Sequence[Ask], uid: str, node: str, mix: Mix) -> Fits | str:
        if not asks:
            return Fits((), 0.0)
        left = {gpu.id: (gpu, room) for gpu, room in self.left(node, uid) if gpu.serving}
        if not left:
            return "it has no GPU that the extender knows" if node not in self.gpus else "none of its GPUs serves"
        parts: list[Part] = []
        rank = 0.0
        for wish in _wishes(asks):
            best = self._best(wish, left, mix)
            if best is None:
                return _why(wish, left.values())
            rank += best[0]
            for gpu in best[1]:
                parts += [_part(ask, gpu) for ask in wish.asks]
                request = wish.request(gpu.memory_bytes)
                room = left[gpu.id][1]
                less = Gpu(room.time_ppm - request.time_ppm, room.memory_bytes - request.memory_bytes)
                left[gpu.id] = gpu, less
        return Fits(tuple(parts), rank)

    def _best(
        self, wish: _Wish, left: Mapping[str, tuple[NodeGpu, Gpu]], mix: Mix
    ) -> tuple[float, list[NodeGpu]] | None:
        """GPUs of one model can be compared; those of a container are of one model."""
        found: list[tuple[float, list[NodeGpu]]] = []
        for model, memory in dict.fromkeys((gpu.model, gpu.memory_bytes) for gpu, _ in left.values()):
            alike = [(gpu, room) for gpu, room in left.values() if (gpu.model, gpu.memory_bytes) == (model, memory)]
            kind = self._kinds.setdefault((model, memory), Kind(model, memory))
            room = Room(kind, tuple(sorted(room for _, room in alike)))
            for option in room.options(wish.request(memory), self._policy.allows):
                used = list(alike)
                chosen = []
                for wanted in option.used:
                    at = next(at for at, (_, each) in enumerate(used) if each == wanted)
                    chosen.append(used.pop(at)[0])
                found.append((self._policy.rank(option, mix), chosen))
        return max(found, key=lambda one: one[0], default=None)


def _wishes(asks: Sequence[Ask]) -> Iterator[_Wish]:
    together = tuple(ask for ask in asks if ask.size[0] == MEMORY)
    if together:
        yield _Wish(together, 1)
    yield from (_Wish((ask,), ask.gpus) for ask in asks if ask.size[0] != MEMORY)


def _part(ask: Ask, gpu: NodeGpu) -> Part:
    each = ask.on(gpu.memory_bytes)
    return Part(ask.container, *ask.size, gpu.id, gpu.index, each.sm, each.memory_bytes, each.limited)


def _request(part: Part) -> Request:
    return Request(_time_ppm(part.sm), part.memory_bytes)


def _time_ppm(sm: float) -> int:
    """Rounded down, so that parts that are a whole in sum fit one."""
    return math.floor(sm * _PPM_OF_PERCENT)


def _why(wish: _Wish, left: Iterable[tuple[NodeGpu, Gpu]]) -> str:
    gpus = list(left)
    asked = wish.request(max(gpu.memory_bytes for gpu, _ in gpus))
    most = max(gpus, key=lambda one: (one[1].memory_bytes, one[1].time_ppm))[1]
    number = f"{wish.gpus} GPUs with {_amounts(asked)} each" if wish.gpus > 1 else _amounts(asked)
    return f"{number} asked for; of its {counted(len(gpus), 'GPU')} the emptiest has {_amounts(most)}"


def _amounts(room: Request | Gpu) -> str:
    return f"{max(0, room.memory_bytes) / 2**30:.4g} GiB and {max(0, room.time_ppm) / _PPM_OF_PERCENT:.4g} %"


def _is_older(version: str, than: str) -> bool:
    """Versions are whole numbers that grow; what is none is never older."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)
