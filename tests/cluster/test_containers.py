"""Programs in containers: in namespaces and a root of their own, without a variable, under any user. The mounts are
those that engines get; tests/cluster/test_engines.py runs the engines themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import Run
from tests.integration.node import SimulatedNode, eventually
from vgpu.integrations import cdi, container
from vgpu.integrations.claims import Attach
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges, VgpuSpec

GIB = 1 << 30
NO_DEVICE = 100


def made(node: SimulatedNode, attach: Attach = "mount", gpu: str = "auto", **fields: str) -> VgpuStatus:
    spec = VgpuSpec.parse(**({"sm_percent": "30", "memory_bytes": "8G"} | fields))
    with node.link() as link:
        return link.create(spec, gpu, attach=attach)


def volumes(node: SimulatedNode, *vgpus: VgpuStatus) -> list[str]:
    with node.link() as link:
        found = [volume for vgpu in vgpus for volume in link.inspect(vgpu.vgpu_id).mounts]
    return list(dict.fromkeys(found))


def said(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=60)
    return (out + error).strip()


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("remapped", [False, True], ids=["", "remapped"])
def test_a_program_without_a_variable_has_the_vgpu(node: SimulatedNode, start: Run, uid: int, remapped: bool) -> None:
    vgpu = made(node)
    program = start(volumes(node, vgpu), "/probe", "1024", "8192", uid=uid, remapped=remapped)
    assert said(program) == "init 0 context 0 devices 1 total 8192 allocated 0 allocated 2"


def test_a_program_in_a_container_is_listed_with_its_pid_on_the_host(node: SimulatedNode, start: Run) -> None:
    vgpu = made(node)
    program = start(volumes(node, vgpu), "/probe", "wait")
    assert program.stdout is not None
    assert program.stdout.readline().startswith("init 0")
    with node.link() as link:
        (process,) = link.processes().processes
    assert (process.vgpu_id, Path(f"/proc/{process.pid}/comm").read_text()) == (vgpu.vgpu_id, "probe\n")
    program.kill()
    eventually(lambda: node.reading(vgpu.vgpu_id).processes == 0, "its end is known")  # type: ignore[union-attr]


def test_the_vgpu_of_an_owner_admits_no_other_user_of_a_container(node: SimulatedNode, start: Run) -> None:
    vgpu = made(node, "owner")
    mounted = volumes(node, vgpu)
    assert said(start(mounted, "/probe")).startswith("init 0 context 0 devices 1 total 8192")
    answer = said(start(mounted, "/probe", uid=1000))
    assert f"init {NO_DEVICE}" in answer
    assert "admits programs of its owner alone" in answer


def test_vgpus_of_a_container_stand_in_the_order_of_their_gpus(node: SimulatedNode, start: Run) -> None:
    second, first = made(node, gpu="1", memory_bytes="3G"), made(node, gpu="0", memory_bytes="5G")
    both = volumes(node, second, first)
    assert said(start(both, "/probe")) == "init 0 context 0 devices 2 total 5120"
    chosen = said(start(both, "/usr/bin/env", f"VGPU_ID={second.vgpu_id}", "/probe"))
    assert chosen == "init 0 context 0 devices 1 total 3072"


def test_an_engines_number_of_the_gpu_selects_the_only_vgpu(node: SimulatedNode, start: Run) -> None:
    """Slurm and Ray set the index of the GPU on the host."""
    mounted = volumes(node, made(node, gpu="1"))
    for number in "01":
        answer = said(start(mounted, "/usr/bin/env", f"CUDA_VISIBLE_DEVICES={number}", "/probe"))
        assert answer.startswith("init 0 context 0 devices 1")
    assert f"init {NO_DEVICE}" in said(start(mounted, "/usr/bin/env", "CUDA_VISIBLE_DEVICES=2", "/probe"))


def test_a_container_whose_vgpu_was_removed_says_so(node: SimulatedNode, start: Run) -> None:
    vgpu = made(node)
    shell = start(volumes(node, vgpu), "/bin/sh", "-c", "echo ready; read line; exec /probe")
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    with node.link() as link:
        link.remove(vgpu.vgpu_id)
    out, error = shell.communicate("\n", timeout=60)
    assert "the vGPU of this container, was removed" in error
    assert out == f"init {NO_DEVICE}\n"


def test_a_program_waits_for_a_broker_that_starts_again(node: SimulatedNode, start: Run) -> None:
    vgpu = made(node)
    os.kill(node.server_pid(vgpu.gpu_index), signal.SIGKILL)
    assert vgpu.broker_pid is not None
    os.kill(vgpu.broker_pid, signal.SIGKILL)
    assert said(start(volumes(node, vgpu), "/probe")).startswith("init 0 context 0 devices 1")


def test_only_a_mount_leads_to_a_vgpu_of_containers(node: SimulatedNode) -> None:
    vgpu = made(node)
    attach = node.paths.attach_dir(vgpu.vgpu_id)
    assert stat.S_IMODE(attach.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(attach.stat().st_mode) == 0o755
    assert stat.S_IMODE((attach / "broker.sock").stat().st_mode) == 0o666
    assert stat.S_IMODE(node.paths.broker_socket(vgpu.vgpu_id).stat().st_mode) == 0o600
    with node.link() as link:
        link.remove(vgpu.vgpu_id)
    assert not attach.exists()


def test_swapped_memory_of_containers_is_no_other_vgpus(node: SimulatedNode) -> None:
    """Vgpus of one owner share a store in the host's memory; vGPUs that containers mount do not."""
    apart = [made(node, oversubscribe="swap", memory_bytes="1G") for _ in range(2)]
    shared = [made(node, "owner", oversubscribe="swap", memory_bytes="1G") for _ in range(2)]

    def store(vgpu: VgpuStatus) -> str:
        """The name of the store that the vGPU's broker hands out."""
        pid = node.reading(vgpu.vgpu_id).broker_pid  # type: ignore[union-attr]
        files = Path(f"/proc/{pid}/fd").iterdir()
        (inode,) = {file.stat().st_ino for file in files if "store" in str(file.readlink())}
        return str(inode)

    assert len({store(vgpu) for vgpu in apart}) == 2
    assert apart[0].gpu_index != apart[1].gpu_index or store(apart[0]) not in map(store, shared)
    same_gpu = [vgpu for vgpu in shared if vgpu.gpu_index == shared[0].gpu_index]
    assert len({store(vgpu) for vgpu in same_gpu}) == 1


# --- devices for engines (CDI)


def device_file(node: SimulatedNode, vgpu: VgpuStatus) -> Path:
    assert node.paths.cdi is not None
    return cdi.file_of(node.paths.cdi, vgpu.vgpu_id)


def test_each_vgpu_is_a_device_for_container_engines(node: SimulatedNode) -> None:
    vgpu = made(node, name="train")
    file = device_file(node, vgpu)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    written = json.loads(file.read_text())
    assert (written["cdiVersion"], written["kind"]) == ("0.5.0", "vgpu.dev/vgpu")
    assert [device["name"] for device in written["devices"]] == [vgpu.vgpu_id, "train"]
    mounts = written["devices"][0]["containerEdits"]["mounts"]
    assert [f"{m['hostPath']}:{m['containerPath']}" for m in mounts] == [
        volume.removesuffix(":ro") for volume in volumes(node, vgpu)
    ]
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges(name="infer"))
    assert [device["name"] for device in json.loads(file.read_text())["devices"]] == [vgpu.vgpu_id, "infer"]
    with node.link() as link:
        link.remove(vgpu.vgpu_id)
    assert not file.exists()


def test_devices_are_written_again_after_a_boot(node: SimulatedNode) -> None:
    """/var/run is empty then, and restart policies start containers at once."""
    vgpu = made(node)
    shutil.rmtree(device_file(node, vgpu).parent)
    os.kill(node.server_pid(vgpu.gpu_index), signal.SIGKILL)
    eventually(device_file(node, vgpu).exists, "the device is written")


def test_the_devices_of_lost_vgpus_go_with_the_next_start(node: SimulatedNode, tmp_path: Path) -> None:
    vgpu = made(node)
    folder = device_file(node, vgpu).parent
    cdi.write(
        folder, "vgpu-00000000", "train", [container.Mount(str(tmp_path / "lost"), "/run/vgpu/here/vgpu-00000000")]
    )
    others = folder / "vgpu.dev-vgpu_other.json"
    others.write_text('{"devices": []}')
    os.kill(node.server_pid(vgpu.gpu_index), signal.SIGKILL)
    eventually(lambda: not cdi.file_of(folder, "vgpu-00000000").exists(), "the device is removed")
    assert device_file(node, vgpu).exists()
    assert others.exists()
    others.unlink()


def test_a_name_that_two_users_give_stays_the_first_devices(tmp_path: Path) -> None:
    """An engine would refuse both."""

    def names(vgpu_id: str) -> list[str]:
        cdi.write(tmp_path, vgpu_id, "train", [container.Mount("/x", "/y")])
        return [device["name"] for device in json.loads(cdi.file_of(tmp_path, vgpu_id).read_text())["devices"]]

    (tmp_path / "vgpu.dev-vgpu_broken.json").write_text("{")
    assert names("vgpu-1") == ["vgpu-1", "train"]
    assert names("vgpu-2") == ["vgpu-2"]
    assert names("vgpu-1") == ["vgpu-1", "train"]
    cdi.remove(tmp_path, "vgpu-1")
    assert names("vgpu-2") == ["vgpu-2", "train"]


def test_the_hook_is_no_file_below_run(node: SimulatedNode) -> None:
    """Many systems mount /run noexec, and the mount of a container would inherit that."""
    for volume in volumes(node, made(node)):
        source, target, *_ = volume.split(":")
        if target.endswith((".so", ".so.1")):
            assert Path(source).is_relative_to(node.paths.state)
            assert os.access(source, os.X_OK)


def test_the_preload_file_names_the_very_mount_of_the_hook(node: SimulatedNode) -> None:
    mounts = dict(reversed(volume.split(":")[:2]) for volume in volumes(node, made(node)))
    preloaded = Path(mounts[container.PRELOAD]).read_text().split()
    assert preloaded[0] == container.HOOK
    assert all(Path(mounts[path]).is_file() for path in preloaded)


@pytest.mark.parametrize(
    ("quota", "spins"), [("50000 100000", 0), ("300000 100000", 0), ("1600000 100000", 1), ("max 100000", 1)]
)
def test_a_container_with_a_small_cpu_quota_does_not_spin(
    node: SimulatedNode, start: Run, tmp_path: Path, quota: str, spins: int
) -> None:
    """A hook that spins on a quota of one core is throttled while it holds a lease."""
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "hook.log").touch()
    mounts = [f"{tmp_path}/cpu.max:/sys/fs/cgroup/cpu.max:ro", f"{tmp_path}/hook.log:/hook.log"]
    program = start([*volumes(node, made(node)), *mounts], "/usr/bin/env", "VGPU_HOOK_LOG=/hook.log", "/probe")
    assert said(program).startswith("init 0")
    (line,) = (line for line in (tmp_path / "hook.log").read_text().splitlines() if "cores, spins" in line)
    assert int(line.split()[-1]) == (spins if len(os.sched_getaffinity(0)) >= 4 else 0)
    allowed, period = quota.split()
    cores = len(os.sched_getaffinity(0)) if allowed == "max" else int(allowed) // int(period)
    assert int(line.split()[-2]) == min(cores, len(os.sched_getaffinity(0)))


# --- rules of paths


def test_a_rule_of_paths_holds_in_a_container(node: SimulatedNode, start: Run) -> None:
    """Without a shell: it would set PATH itself."""
    mounted = volumes(node, made(node))
    given = ("PATH=/bin", "VGPU_PREPEND_PATH=/first", "VGPU_APPEND_PATH=/last")
    answer = said(start(mounted, "/usr/bin/env", *given, "/usr/bin/env"))
    assert "PATH=/first:/bin:/last" in answer.splitlines()


def test_a_program_with_more_rights_than_its_user_gets_no_rule(node: SimulatedNode, start: Run, tmp_path: Path) -> None:
    """Else a user would have root's programs preload a library. The hook itself is loaded: it asks for a GPU."""
    setuid = tmp_path / "env"
    shutil.copy("/usr/bin/env", setuid)
    setuid.chmod(0o4755)
    mounted = [*volumes(node, made(node)), f"{setuid}:/setuid-env:ro"]
    given = ("PATH=/bin", "VGPU_PREPEND_PATH=/first", "VGPU_APPEND_LD_PRELOAD=/last.so")
    users, roots = (
        said(start(mounted, "/usr/bin/env", *given, program, uid=1000)).splitlines()
        for program in ("/usr/bin/env", "/setuid-env")
    )
    assert {"PATH=/first:/bin", "LD_PRELOAD=/last.so"} <= set(users)
    assert "PATH=/bin" in roots
    assert not [line for line in roots if line.startswith("LD_PRELOAD=")]
