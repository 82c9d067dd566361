"""The DRA driver: it makes the vGPUs of a claim when the kubelet prepares it, and removes them afterwards.

It keeps nothing: the claims are the API server's, and the node's journals say which vGPU has which claim. So an answer
is the same after the end of any process. Two calls for one claim wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import cdi
from vgpu.integrations.kubernetes import dra, podfacts, status, wire
from vgpu.integrations.kubernetes.dra import Made, Object, Report, Wanted
from vgpu.integrations.kubernetes.objects import Cluster
from vgpu.integrations.kubernetes.profiles import Profile
from vgpu.loggers import get_logger

log = get_logger(__name__)
AT_ONCE: Final = 16
_PACKAGE: Final = wire.DRA.rpartition(".")[0]
_Prepared = wire.message(f"{_PACKAGE}.NodePrepareResourceResponse")
_PreparedAll = wire.message(f"{_PACKAGE}.NodePrepareResourcesResponse")
_Unprepared = wire.message(f"{_PACKAGE}.NodeUnprepareResourceResponse")
_UnpreparedAll = wire.message(f"{_PACKAGE}.NodeUnprepareResourcesResponse")
_Device = wire.message(f"{_PACKAGE}.Device")
_GONE: Final = frozenset({ErrorCode.NOT_FOUND, ErrorCode.REMOVED})


class Locks:
    """One lock for each name, while a thread holds it or waits for it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        with self._guard:
            lock, count = self._held.get(name, (threading.Lock(), 0))
            self._held[name] = lock, count + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, count = self._held.pop(name)
                if count > 1:
                    self._held[name] = lock, count - 1


class Driver:
    """``cluster``: the API server. ``node``: the vGPU node of this machine."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self._cluster = cluster
        self._node = node
        self._locks = Locks()
        self._published: list[dict[str, Any]] | None = None

    # --- the kubelet's calls

    def prepare(self, request: Any) -> Any:
        """An error of one claim is that claim's answer."""
        return _PreparedAll(claims=_each(request.claims, self._prepare_or_say))

    def unprepare(self, request: Any) -> Any:
        return _UnpreparedAll(claims=_each(request.claims, self._unprepare_or_say))

    def _prepare_or_say(self, claim: Any) -> Any:
        try:
            with self._locks.hold(claim.uid):
                return _Prepared(devices=self._prepare(claim))
        except VgpuError as error:
            log.warning("a claim is not prepared", claim=f"{claim.namespace}/{claim.name}", reason=str(error))
            return _Prepared(error=str(error))

    def _unprepare_or_say(self, claim: Any) -> Any:
        try:
            with self._locks.hold(claim.uid):
                for made in self._made_for(claim.uid):
                    self._remove(made, force=True)
                self._unsay(claim)
            return _Unprepared()
        except VgpuError as error:
            log.warning("a claim is not unprepared", claim=f"{claim.namespace}/{claim.name}", reason=str(error))
            return _Unprepared(error=str(error))

    def _unsay(self, asked: Any) -> None:
        claim = {"metadata": {"name": asked.name, "namespace": asked.namespace, "uid": asked.uid}}
        try:
            self._cluster.say(claim, [])
        except VgpuError as error:  # the API server drops the entries itself when it frees the claim's devices
            name = _name(claim["metadata"])
            log.warning("the status of a claim still has its vGPU", claim=name, reason=str(error))

    def _prepare(self, asked: Any) -> list[Any]:
        claim = self._cluster.claim(asked.namespace, asked.name)
        name = f"{asked.namespace}/{asked.name}"
        if claim is None or claim["metadata"]["uid"] != asked.uid:
            raise VgpuError(ErrorCode.NOT_FOUND, f"the API server has no claim {name} with the uid {asked.uid}")
        if not dra.is_reserved(claim):
            raise VgpuError(ErrorCode.INVALID, f"no pod has reserved the claim {name}")
        with self._node.open_link() as link:
            gpus, vgpus = link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())
        wanted = dra.wanted_of(claim, self._cluster.node, gpus)
        made = [(one, self._found(one, vgpus) or self._make(one)) for one in wanted]
        self._name_pods(made)
        self._say_or_log(claim, made)
        return [self._device(one, vgpu) for one, vgpu in made]

    def _say_or_log(self, claim: Object, made: Sequence[tuple[Wanted, Object]]) -> None:
        """Programs do not need the status, so the claim is prepared without it. The reconcile writes it later."""
        try:
            self._say(claim, made)
        except VgpuError as error:
            log.warning("the status of a claim is not written", claim=_name(claim["metadata"]), reason=str(error))

    def _say(self, claim: Object, made: Sequence[tuple[Wanted, Object]]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        entries = status.devices(self._cluster.node, made, now)
        if not status.is_said(claim, self._cluster.node, entries):
            self._cluster.say(claim, entries)

    @staticmethod
    def _found(wanted: Wanted, vgpus: Iterable[Object]) -> Object | None:
        """A vGPU is the claim's even if its size was changed since: the container has it."""
        mine = {"kind": wanted.claim.kind, "uid": wanted.claim.uid}
        return next((vgpu for vgpu in vgpus if mine.items() <= (vgpu.get("claim") or {}).items()), None)

    def _make(self, wanted: Wanted) -> Object:
        made = self._node.create(wanted.spec, gpu=wanted.gpu, keep=True, attach="mount", claim=asdict(wanted.claim))
        log.info("a claim has a vGPU", claim=wanted.claim.name, vgpu=made.id, gpu=wanted.gpu)
        return made.reading

    def _device(self, wanted: Wanted, vgpu: Object) -> Any:
        gpu = [] if vgpu["simulated"] else [f"nvidia.com/gpu={vgpu['gpu_uuid']}"]
        return _Device(
            request_names=[wanted.request],
            pool_name=self._cluster.node,
            device_name=wanted.device,
            cdi_device_ids=[*gpu, f"{cdi.KIND}={vgpu['vgpu_id']}"],
            share_id=wanted.share_id,
        )

    # --- levels

    def reconcile(self, now: Callable[[], float] = time.time) -> None:
        """Remove the vGPUs of claims that are gone, and bring the others up to date. ``VgpuError``: the node or the API
        server does not answer."""
        made = dra.made_of(self._listed())
        claims = {one.claim_uid: one for one in made}
        kept = {uid for uid, one in claims.items() if self._kept(one) is not None}
        for action in dra.reconcile([one.uid for one in made if one.claim_uid in kept], made, now()):
            if isinstance(action, Report):
                log.warning("programs run in a vGPU whose claim is gone", vgpu=action.vgpu.vgpu_id)
            else:
                self._remove_unwanted(action.vgpu)

    def _kept(self, made: Made) -> Object | None:
        """The claim of a vGPU that keeps it, with all that the two say of each other; None: the vGPU has none."""
        with self._locks.hold(made.claim_uid):
            claim = self._wanting(made)
            if claim is not None:
                self._bring_up_to_date(claim)
        return claim

    def _bring_up_to_date(self, claim: Object) -> None:
        with self._node.open_link() as link:
            gpus, vgpus = link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())
        try:
            wanted = dra.wanted_of(claim, self._cluster.node, gpus)
        except VgpuError as error:  # of a GPU that the node does not serve now
            log.warning("a claim is not as its vGPUs", claim=_name(claim["metadata"]), reason=str(error))
            return
        made = [(one, vgpu) for one in wanted if (vgpu := self._found(one, vgpus))]
        self._name_pods(made)
        self._say_or_log(claim, made)

    def admit_pods(self) -> None:
        """Ask about the claims at whose vGPUs processes of unknown pods wait. A claim that is prepared may get more
        pods, and the kubelet does not say so. ``VgpuError``: the node or the API server does not answer."""
        awaited = dra.made_of(vgpu for vgpu in self._listed() if vgpu.get("awaited_pods"))
        for one in {one.claim_uid: one for one in awaited}.values():
            self._kept(one)

    def _name_pods(self, made: Iterable[tuple[Wanted, Object]]) -> None:
        """The vGPUs admit the processes of the claim's pods."""
        for wanted, vgpu in made:
            pods = None if wanted.claim.pods is None else list(wanted.claim.pods)
            if vgpu["claim"].get("pods") != pods:
                with self._node.open_link() as link:
                    podfacts.rename(link, vgpu, pods=pods)

    def _remove_unwanted(self, made: Made) -> None:
        """A pod may have reserved the claim since. The node refuses to remove a vGPU in which a program runs."""
        with self._locks.hold(made.claim_uid):
            if self._wanting(made) is None:
                self._remove(made, force=False)

    def _wanting(self, made: Made) -> Object | None:
        """The claim of a vGPU, if a pod may use it here."""
        claim = self._cluster.claim(made.namespace, made.name)
        if claim is None or claim["metadata"]["uid"] != made.claim_uid:
            return None
        return claim if dra.is_reserved(claim) and dra.results_of(claim, self._cluster.node) else None

    def publish(self, profiles: Sequence[Profile] = (), *, check: bool = False) -> None:
        """Bring the node's slices up to date. ``check``: also if nothing changed here, since the kubelet removes the
        slices of drivers that it does not see. ``VgpuError``."""
        with self._node.open_link() as link:
            gpus, vgpus = link.ask("gpus")["gpus"], dra.own(link.ask("list")["vgpus"], os.geteuid())
        specs = dra.slices(self._cluster.node, gpus, vgpus, profiles)
        changed = specs != self._published
        if (changed or check) and self._cluster.publish(specs, changed=changed):
            log.info("the node's slices are published", devices=sum(len(one.get("devices", ())) for one in specs))
        self._published = specs

    # --- the node

    def _listed(self) -> list[Object]:
        with self._node.open_link() as link:
            return dra.own(link.ask("list")["vgpus"], os.geteuid())

    def _made_for(self, claim_uid: str) -> list[Made]:
        return [one for one in dra.made_of(self._listed()) if one.claim_uid == claim_uid]

    def _remove(self, made: Made, *, force: bool) -> None:
        try:
            with self._node.open_link() as link:
                link.change("remove", vgpu=made.vgpu_id, force=force)
            log.info("the vGPU of a claim is removed", claim=made.uid, vgpu=made.vgpu_id)
        except VgpuError as error:
            if error.code not in _GONE and (force or error.code is not ErrorCode.IN_USE):
                raise


def _name(metadata: Object) -> str:
    return f"{metadata['namespace']}/{metadata['name']}"


def _each(claims: Sequence[Any], answer: Callable[[Any], Any]) -> dict[str, Any]:
    """The answer of each claim by its uid; the claims do not wait for each other."""
    if not claims:
        return {}
    with ThreadPoolExecutor(min(AT_ONCE, len(claims))) as pool:
        return dict(zip([claim.uid for claim in claims], pool.map(answer, claims), strict=True))
