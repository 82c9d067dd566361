"""The description of a vGPU that its broker gets (``Adopt``)."""

from __future__ import annotations

from gpuserver.core.admission.registry import VgpuRecord
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.broker.places import keep_places
from vgpu.protocol.broker import Adopt


def describe(state: GpuState, vgpu: Vgpu) -> Adopt:
    """What the broker of ``vgpu`` has to know now."""
    record = vgpu.record
    spatial = record.partition is not None
    vgpu.published_places = kept_places(state) if spatial else ()
    claim = vgpu.origin.claim
    limited = record.partition is not None and not record.spec.burst
    return Adopt(
        vgpu_id=record.vgpu_id,
        key=record.key,
        generation=vgpu.generation,
        owner_uid=record.owner.uid,
        share_gid=record.owner.share_gid,
        mode="spatial" if spatial else "temporal",
        gpu_index=state.facts.index,
        gpu_uuid=state.facts.uuid,
        simulated=state.settings.simulated,
        sm_percent=record.spec.compute_ratio * 100,
        mps_pipe_directory=str(state.partitioner.directories.pipe) if spatial else "",
        mps_log_directory=str(state.partitioner.directories.log) if spatial else "",
        mps_active_thread_percentage=record.partition.percent_text if limited and record.partition else "",
        # The only device that the daemon shows is number 0, whatever the GPU's index.
        mps_pinned_memory_limit=f"0={record.most_per_process_bytes >> 20}M" if spatial else "",
        mps_client_priority=state.partitioner.client_priority(record.spec.priority) if spatial else "",
        sm_planned=sms_planned(record),
        memory_planned_bytes=record.most_per_process_bytes if spatial else 0,
        most_processes=state.partitioner.most_processes if spatial else 0,
        suspended=vgpu.quiesced and not vgpu.idle_suspended,
        wakes=bool(vgpu.standby.triggers),
        places=vgpu.published_places,
        mount_door=str(state.settings.paths.mount_socket(record.vgpu_id)) if vgpu.mountable else "",
        pods=None if claim is None else claim.pods,
    )


def kept_places(state: GpuState) -> tuple[tuple[int, int], ...]:
    """How many of the processes that the MPS server takes are kept for each vGPU."""
    granted = {vgpu.record.key: vgpu.record.partition for vgpu in state.vgpus.values()}
    shares = {key: partition.percent / 100 for key, partition in granted.items() if partition is not None}
    percent_kept = state.settings.limits.mps_places_kept_percent
    return tuple(keep_places(state.partitioner.most_processes, shares, percent_kept).items())


def sms_planned(record: VgpuRecord) -> int:
    """The number of SMs to which MPS should limit each process of the vGPU; 0: MPS does not limit them."""
    granted = record.partition
    if granted is None or record.spec.burst or granted.granted_sms == granted.sm_count:
        return 0
    return granted.granted_sms
