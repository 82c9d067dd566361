"""Creation of vGPUs for clients that may leave. A vGPU that no client will receive is taken back, and so is one whose
process has ended. ``gpuserver.core.admission.origin`` decides.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import trio

from gpuserver.core.admission.origin import CLAIM_S, NO_ASKER, Fate, Origin
from gpuserver.core.admission.registry import Owner
from gpuserver.runtime.lifecycle.brokers import ADMIT_S, Brokers
from gpuserver.runtime.lifecycle.removal import Removal
from gpuserver.runtime.lifecycle.suspension import Suspension
from gpuserver.runtime.memory.swapping import Swapping
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.state import GpuState, unwritten
from gpuserver.runtime.vgpus import Vgpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.integrations.claims import Claim, differences
from vgpu.loggers import get_logger
from vgpu.protocol.messages import Create
from vgpu.protocol.peer import is_running
from vgpu.spec import VgpuSpec
from vgpu.units import range_text

log = get_logger(__name__)

LOOK_AGAIN_S: Final = 0.1


class Held:
    """The vGPUs that were asked for on one link."""

    def __init__(self) -> None:
        self.vgpus: list[Vgpu] = []


class Creations:
    """``create`` admits, and starts the rest; ``finished`` waits for it; ``release`` ends a link's hold."""

    def __init__(
        self,
        state: GpuState,
        memory: MemoryWatch,
        brokers: Brokers,
        swapping: Swapping,
        suspension: Suspension,
        removal: Removal,
    ) -> None:
        self._state = state
        self._memory = memory
        self._brokers = brokers
        self._swapping = swapping
        self._suspension = suspension
        self._removal = removal

    async def create(self, create: Create, owner: Owner, asker: Process, held: Held) -> Vgpu:
        """Admitted. The same request id, or the same claim, from the same user gives the same vGPU. Errors: of
        ``Registry.create``; ``exists``: the claim has another vGPU than it asks for."""
        await self._memory.refresh()  # first: no task may run between the check for the request and the admission
        vgpu = await self.asked_before(owner.uid, create.request_id) or await self._claimed(owner.uid, create)
        if vgpu is None:
            vgpu = self._admit(create, owner, asker)
            self._state.nursery.start_soon(self._make, vgpu, create.spec)
        vgpu.holders.add(held)
        held.vgpus.append(vgpu)
        return vgpu

    async def asked_before(self, uid: int, request_id: str) -> Vgpu | None:
        """The vGPU that was made for this request."""
        return await self._present(lambda vgpu: vgpu.is_answer_to(uid, request_id)) if request_id else None

    async def _claimed(self, uid: int, create: Create) -> Vgpu | None:
        """The vGPU of the same claim, which gets the tenant, labels and pods of this request. ``VgpuError`` (exists):
        it is another one than ``create`` asks for."""
        claim = create.claim
        if claim is None:
            return None
        vgpu = await self._present(lambda vgpu: vgpu.is_of_claim(uid, claim))
        if vgpu is not None:
            refuse_other(create, claim, vgpu)
            if vgpu.origin.claim != claim:
                vgpu.origin = vgpu.origin.renamed(claim)
                await self._brokers.changed(vgpu)
                await self._state.persist()  # an old text does no harm; a pod that is not in it is asked about again
        return vgpu

    async def _present(self, matches: Callable[[Vgpu], bool]) -> Vgpu | None:
        """The vGPU that ``matches``. Waits for the end of one that is on its way out."""
        while found := next(filter(matches, self._state.vgpus.values()), None):
            if not found.removed.is_set():
                return found
            await trio.sleep(LOOK_AGAIN_S)
        return None

    def _admit(self, create: Create, owner: Owner, asker: Process) -> Vgpu:
        state = self._state
        of_process = create.lifetime == "process"
        if of_process and not asker.start_time:
            raise VgpuError(
                ErrorCode.INVALID,
                "the vGPU is to end with the process that asks for it, and that process is not known",
                "ask with lifetime kept",
            )
        vgpu_id = f"vgpu-{secrets.token_hex(4)}"
        state.require_descriptors()
        state.count_occupied()
        record = state.registry.create(vgpu_id, create.spec, owner, time.time_ns())
        try:
            vgpu = state.enlist(record, None)
        except BaseException:
            state.registry.remove(vgpu_id)
            raise
        vgpu.origin = Origin(
            create.request_id, False, asker if of_process else NO_ASKER, boot_id(), create.claim, create.attach
        )
        vgpu.made = trio.Event()
        state.apply_shares()
        state.nursery.start_soon(self._brokers.keep, vgpu)
        return vgpu

    async def _make(self, vgpu: Vgpu, spec: VgpuSpec) -> None:
        """All that comes after the admission. No asker that leaves cancels it: another link may hold it."""
        state, vgpu_id = self._state, vgpu.record.vgpu_id
        try:
            await self._make_ready(vgpu)
        except VgpuError as error:
            vgpu.unmade = error
        except Exception as error:
            log.exception("a vGPU could not be made", vgpu=vgpu_id)
            vgpu.unmade = VgpuError(ErrorCode.INTERNAL, f"an error of st-vgpu: {error!r}")
            await self._take_back(vgpu, f"{vgpu_id} could not be made")
        else:
            uid = vgpu.record.owner.uid
            state.record_event(EventType.CREATED, vgpu, f"{vgpu_id} created by uid {uid}", by_uid=uid, **summary(spec))
            self.watch(vgpu)
        finally:
            vgpu.made.set()

    async def _make_ready(self, vgpu: Vgpu) -> None:
        state, vgpu_id = self._state, vgpu.record.vgpu_id
        await self._await_door(vgpu)
        if not vgpu.admits.is_set():
            await self._take_back(vgpu, f"{vgpu_id} never admitted processes")
            raise VgpuError(
                ErrorCode.UNAVAILABLE,
                f"the broker of the new vGPU did not open its socket within {ADMIT_S:g} s",
                f"see the logs in {state.settings.paths.logs}",
            )
        await self._swapping.make_room()
        if not vgpu.removed.is_set():
            await self._suspension.probe(vgpu)
        if vgpu.removed.is_set() or not await state.persist(vgpu):
            self._refuse_removed(vgpu)
            await self._take_back(vgpu, f"{vgpu_id} could not be written into the journal")
            raise unwritten(state)
        self._refuse_removed(vgpu)

    async def _await_door(self, vgpu: Vgpu) -> None:
        """Until its broker admits processes, it is removed, or ``ADMIT_S`` have passed."""
        with trio.move_on_after(ADMIT_S):
            async with trio.open_nursery() as nursery:

                async def until(event: trio.Event) -> None:
                    await event.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, vgpu.admits)
                nursery.start_soon(until, vgpu.removed)
        self._refuse_removed(vgpu)

    def _refuse_removed(self, vgpu: Vgpu) -> None:
        if vgpu.removed.is_set():
            text = f"{vgpu.record.vgpu_id} was removed while it was made"
            raise VgpuError(ErrorCode.REMOVED, text, "ask again")

    async def finished(self, vgpu: Vgpu) -> None:
        """Made, and its door is open. ``VgpuError``: why it was not made."""
        await vgpu.made.wait()
        if vgpu.unmade is not None:
            raise vgpu.unmade
        await self._await_door(vgpu)  # after a restart of the server it was made by the one before

    async def confirm(self, uid: int, request_id: str) -> Vgpu:
        """Its asker has the answer. ``not-found``: it is gone, or was never made."""
        vgpu = await self.asked_before(uid, request_id)
        if vgpu is None:
            raise VgpuError(ErrorCode.NOT_FOUND, f"no vGPU was made for request {request_id!r}", "ask again")
        await self.finished(vgpu)
        await self.confirm_delivered(vgpu)
        return vgpu

    async def confirm_delivered(self, vgpu: Vgpu) -> None:
        if vgpu.origin.confirmed:
            return
        vgpu.origin = vgpu.origin.confirm()
        if not await self._state.persist():
            raise unwritten(self._state, f"{vgpu.record.vgpu_id} is made")

    # --- when they go

    def release(self, held: Held) -> None:
        """The link has ended."""
        for vgpu in held.vgpus:
            vgpu.holders.discard(held)
            if not vgpu.origin.confirmed and not vgpu.holders:
                self._state.nursery.start_soon(self._roll_back, vgpu)

    async def _roll_back(self, vgpu: Vgpu) -> None:
        if self._fate(vgpu) is Fate.UNCONFIRMED:
            await self._take_back(vgpu, f"{vgpu.record.vgpu_id} goes: its asker left before it had the answer")

    def watch(self, vgpu: Vgpu) -> None:
        """See to it that it goes in time; called once for each vGPU that is here."""
        if not vgpu.origin.confirmed or vgpu.origin.of_process:
            self._state.nursery.start_soon(self._watch, vgpu)

    async def _watch(self, vgpu: Vgpu) -> None:
        if vgpu.origin.of_process:
            await _until_ended(vgpu.origin)
        elif not vgpu.holders:  # restored
            await trio.sleep(CLAIM_S)
        else:
            return  # ``release`` does it
        while self._state.vgpus.get(vgpu.record.vgpu_id) is vgpu and not vgpu.removed.is_set():
            fate = self._fate(vgpu)
            if fate is Fate.ASKER_ENDED:
                text = f"{vgpu.record.vgpu_id} goes: process {vgpu.origin.asker.pid}, for which it was made, has ended"
                await self._take_back(vgpu, text)
            elif fate is Fate.UNCONFIRMED:
                await self._roll_back(vgpu)
            elif not vgpu.origin.of_process:
                return
            await trio.sleep(LOOK_AGAIN_S)

    def _fate(self, vgpu: Vgpu) -> Fate:
        # Before the broker has brought the page, processes may be attached that this server does not know.
        attached = vgpu.activity is None or bool(vgpu.alive or vgpu.programs)
        return vgpu.origin.fate(held=bool(vgpu.holders), asker_lives=lives(vgpu.origin), attached=attached)

    async def _take_back(self, vgpu: Vgpu, text: str) -> None:
        if not vgpu.removed.is_set():
            with suppress(VgpuError):  # it moves to another GPU just now, or is removed already
                await self._removal.remove(vgpu, EventType.REMOVED, text)


def refuse_other(create: Create, claim: Claim, vgpu: Vgpu) -> None:
    """``VgpuError`` (exists): the claim's vGPU is not what ``create`` asks for."""
    vgpu_id, attach = vgpu.record.vgpu_id, vgpu.origin.attach
    different = dict(differences(create.spec, vgpu.record.spec))
    if attach != create.attach:
        different["attach"] = (create.attach, attach)
    if different:
        fields = ", ".join(f"{name} {asked!r}, not {made!r}" for name, (asked, made) in different.items())
        text = f"the claim {claim.name} has {vgpu_id} already, and asks for another vGPU: {fields}"
        raise VgpuError(ErrorCode.EXISTS, text, f"vgpuctl set {vgpu_id}; or vgpuctl rm {vgpu_id}, then ask again")


@cache
def boot_id() -> str:
    """Pids and start times are names within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def lives(origin: Origin) -> bool:
    return origin.boot_id == boot_id() and is_running(origin.asker)


async def _until_ended(origin: Origin) -> None:
    """Until the asker has ended; at once if it has, or the machine was started anew since."""
    if not lives(origin):
        return
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(origin.asker.pid)
        try:
            if lives(origin):  # the pidfd is this very process's
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)


def summary(spec: VgpuSpec) -> dict[str, int | float | str]:
    """What of a specification belongs into the log."""
    said = spec.model_dump(mode="json", exclude_defaults=True)
    return {name: _in_short(name, value) for name, value in said.items() if value is not None}


def _in_short(name: str, value: Any) -> int | float | str:
    if not isinstance(value, list):
        return value  # type: ignore[no-any-return]
    return ", ".join(value) if name == "resume_on" else range_text(value, is_size=name.endswith("_bytes"))
