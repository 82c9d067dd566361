"""What of a vGPU containers use: the directory that they mount, and its device for container engines (CDI).

Both are files, made anew at each start of the server: ``/var/run`` is empty after a boot. A vGPU works without them, so
no change of a vGPU fails for them.
"""

from __future__ import annotations

from contextlib import suppress

from client_hook.environment import hook_library, simulation_libraries
from client_hook.errors import HookError
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from vgpu.integrations import cdi, container
from vgpu.integrations.container import Mount, NodeFiles
from vgpu.loggers import get_logger

log = get_logger(__name__)


class Containers:
    """``offer`` makes the files of a vGPU or brings them up to date; ``withdraw`` removes them. A new server
    first removes the devices of vGPUs that are gone."""

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._paths = state.settings.paths
        self._files: NodeFiles | None = None
        if self._paths.cdi is not None:
            with suppress(OSError):
                cdi.sweep(self._paths.cdi)

    def offer(self, vgpu: Vgpu) -> None:
        vgpu_id = vgpu.record.vgpu_id
        try:
            if vgpu.mountable:
                self._make_directory(vgpu_id)
            if self._paths.cdi is not None:
                cdi.write(self._paths.cdi, vgpu_id, device_name(vgpu), self.mounts(vgpu))
        except (OSError, HookError) as error:
            log.warning("the vGPU is no device for container engines", vgpu=vgpu_id, reason=str(error))

    def withdraw(self, vgpu: Vgpu) -> None:
        directory = self._paths.attach_dir(vgpu.record.vgpu_id)
        with suppress(OSError):
            if self._paths.cdi is not None:
                cdi.remove(self._paths.cdi, vgpu.record.vgpu_id)
        with suppress(OSError):
            for path in directory.iterdir():
                path.unlink(missing_ok=True)
            directory.rmdir()

    def volumes(self, vgpu: Vgpu) -> tuple[str, ...]:
        """As ``docker run -v`` takes them; none if they cannot be had."""
        with suppress(OSError, HookError):
            return tuple(mount.volume for mount in self.mounts(vgpu))
        return ()

    def mounts(self, vgpu: Vgpu) -> list[Mount]:
        """What a container with this vGPU mounts. ``OSError``, ``HookError``: a file is missing or cannot be copied."""
        vgpu_id, spatial = vgpu.record.vgpu_id, vgpu.record.partition is not None
        directory = self._paths.attach_dir(vgpu_id) if vgpu.mountable else self._paths.vgpu_dir(vgpu_id)
        pipe = str(self._state.partitioner.directories.pipe) if spatial else ""
        return container.edits(vgpu_id, str(directory), self._node_files(), pipe)

    def _node_files(self) -> NodeFiles:
        if self._files is None:
            self._files = container.prepare(
                self._paths.container_files,
                hook_library(),
                simulated=self._paths.runtime / "sim" if self._state.settings.simulated else None,
                libraries=simulation_libraries(),
            )
        return self._files

    def _make_directory(self, vgpu_id: str) -> None:
        """An existing directory stays, since containers have it mounted. The file ``gpu`` has the index of the GPU, by
        which the hook sorts the vGPUs of a container."""
        directory = self._paths.attach_dir(vgpu_id)
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.parent.chmod(0o700)
        directory.mkdir(mode=0o755, exist_ok=True)
        directory.chmod(0o755)
        fresh = directory / ".gpu"
        fresh.write_text(f"{self._state.facts.index}\n")
        fresh.chmod(0o644)
        fresh.replace(directory / "gpu")


def device_name(vgpu: Vgpu) -> str | None:
    """The second name of its device. Names are unique for each owner, devices on the machine: so those of other owners
    than root carry the uid, as in ``1000.train``."""
    name, uid = vgpu.record.spec.name, vgpu.record.owner.uid
    return name if name is None or uid == 0 else f"{uid}.{name}"
