"""Slurm's own daemons with our three hooks: a job's shards are its vGPU, and nothing is left after it.

Skipped where Slurm is not installed. ``REQUIRE_ENGINES=1`` makes that a failure.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster import engines
from tests.cluster.slurm import NODES, Cluster, why_no_slurm
from tests.integration.node import eventually
from vgpu.errors import VgpuError
from vgpu.integrations import slurm
from vgpu.protocol.messages import VgpuStatus

# --- pure


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("a,b-1,c", ["a", "b-1", "c"]),
    ],
)
def test_a_host_list_names_nodes(hosts: str, names: list[str]) -> None:
    assert list(slurm.expanded(hosts)) == names


SHOWN = """   NumNodes=4 NumCPUs=4 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=shard:60
     Nodes=n[1-2] CPU_IDs=1 Mem=0 GRES=shard:30(IDX:0)
     Nodes=n7 CPU_IDs=0-3 Mem=0 GRES=gpu:h100:2(IDX:0-1)
     Nodes=n8 CPU_IDs=0 Mem=0 GRES=shard:h100:45(IDX:3)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""


def test_the_shards_of_a_job_on_a_node() -> None:
    found = {node: slurm.shards_on(SHOWN, node) for node in ("n1", "n2", "n3", "n7", "n8")}
    assert found == {"n1": (0, 30), "n2": (0, 30), "n3": None, "n7": None, "n8": (3, 45)}


FORGED = "     Nodes=n3 CPU_IDs=0 Mem=0 GRES=shard:100(IDX:0)"


@pytest.mark.parametrize("name", [FORGED.strip(), f"x\n{FORGED}", f"x\n{FORGED}\n   MinCPUsNode=1"])
def test_a_jobs_name_and_comment_give_no_shards(name: str) -> None:
    text = f"JobId=7 JobName={name}\n   UserId=me(1000)\n{SHOWN}   Command=/x\n   Comment={name}\n"
    assert slurm.shards_on(text, "n3") is None
    assert slurm.shards_on(text, "n1") == (0, 30)


def test_a_name_that_imitates_slurm_is_refused() -> None:
    with pytest.raises(VgpuError, match="as Slurm prints them"):
        slurm.shards_on(f"JobId=7 JobName=x\n   NumNodes=1\n{FORGED}\n{SHOWN}", "n3")


def test_a_range_of_hosts_has_an_end() -> None:
    assert "n3" not in slurm.expanded("n[5-99999999999]")


@given(st.integers(1, 100), st.integers(1, 100))
def test_a_comment_stays_within_the_shards(shards: int, sm: int) -> None:
    comment = f"for a paper vgpu:sm={sm},mem=2G thanks"
    if sm <= shards:
        assert slurm.asked_by(comment, 1, shards) == slurm.Asked(1, shards, float(sm), "2G")
    else:
        with pytest.raises(VgpuError, match=f"more than the {shards} shards"):
            slurm.asked_by(comment, 1, shards)
    assert slurm.asked_by("a comment", 1, shards) == slurm.Asked(1, shards, float(shards), "")


@pytest.mark.parametrize("comment", ["gpu=1", "sm=much", "sm=inf", "sm=nan", "sm=1e308", "sm=99"])
def test_a_comment_that_is_not_known_is_refused(comment: str) -> None:
    with pytest.raises(VgpuError):
        slurm.asked_by(f"vgpu:{comment}", 0, 30)


def shell(script: str, **environment: str) -> str:
    given = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", **environment}
    done = subprocess.run(["sh", "-c", script], env=given, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_a_job_without_shards_starts_no_interpreter(tmp_path: Path) -> None:
    hooks = {
        name: line.format(vgpuctl="echo vgpuctl", folder=tmp_path, path="$PATH") for name, line in slurm.HOOKS.items()
    }
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\necho ' Nodes=n1 GRES=gpu:1(IDX:0)'\n")
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    assert [shell(line, PATH=path) for line in hooks.values()] == ["", "", ""]
    scontrol.write_text("#!/bin/sh\necho ' Nodes=n1 GRES=shard:30(IDX:0)'\n")
    assert shell(hooks["prolog"], PATH=path) == "vgpuctl slurm prolog\n"
    scontrol.write_text("#!/bin/sh\nexit 1\n")  # vgpuctl reports why
    assert shell(hooks["prolog"], PATH=path) == "vgpuctl slurm prolog\n"
    (tmp_path / "7.n1").write_text("echo export A=1")
    assert shell(hooks["task-prolog"], PATH=path) == "export A=1\n"
    assert shell(hooks["epilog"], PATH=path) == "vgpuctl slurm epilog\n"


@pytest.mark.parametrize("path", ["/opt/vgpu", "/opt/a $HOME `id` \\n"])
def test_the_task_prolog_keeps_a_jobs_own_libraries(path: str) -> None:
    script = slurm.script_of({"VGPU_ID": "vgpu-1", "LD_PRELOAD": f"{path}/hook.so", "LD_LIBRARY_PATH": path}, "GPU-1")
    last = "export CUDA_VISIBLE_DEVICES=GPU-1"
    alone = ["export VGPU_ID=vgpu-1", f"export LD_PRELOAD={path}/hook.so", f"export LD_LIBRARY_PATH={path}", last]
    assert shell(script).splitlines() == alone
    preload, paths = f"export LD_PRELOAD=/a.so $B:{path}/hook.so", f"export LD_LIBRARY_PATH={path}:/l"
    said = shell(f"LD_PRELOAD='/a.so $B' LD_LIBRARY_PATH=/l\n{script}")
    assert said.splitlines() == ["export VGPU_ID=vgpu-1", preload, paths, last]


def test_a_job_from_inside_a_vgpu_takes_the_way_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "vgpuctl", lambda: "/bin/echo")
    script = slurm.script_of({"LD_PRELOAD": "/x/libvgpu_hook.so"}, "GPU-1")
    assert shell(f"LD_PRELOAD=/y/libvgpu_hook.so\n{script}").endswith("slurm task-prolog\n")


# --- with Slurm


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := why_no_slurm():
        pytest.fail(why) if engines.REQUIRED else pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    for part in (folder, *list(folder.parents)[:3]):
        part.chmod(part.stat().st_mode | 0o711)  # a user's srun reads slurm.conf
    with Cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture(scope="module")
def program(probe: Path) -> str:
    """The probe, where every user can run it."""
    for part in (probe, *list(probe.parents)[:3]):
        part.chmod(part.stat().st_mode | 0o755)
    return str(probe)


def vgpus(cluster: Cluster) -> list[VgpuStatus]:
    found: list[VgpuStatus] = []
    for node in cluster.nodes.values():
        with node.link() as link:
            found += link.list()
    return found


def is_empty(cluster: Cluster) -> bool:
    return not vgpus(cluster)


slow = pytest.mark.slow


@slow
def test_a_jobs_shards_are_its_vgpu(cluster: Cluster, program: str) -> None:
    out, error = cluster.srun("--gres=shard:30", program, "1024").communicate(timeout=60)
    memory = 143_771 * 30 // 100
    assert out.strip() == f"init 0 context 0 devices 1 total {memory} allocated 0", error
    eventually(lambda: is_empty(cluster), "the vGPU goes with the job")


@slow
def test_a_comment_asks_for_less(cluster: Cluster, program: str) -> None:
    job = cluster.srun("--gres=shard:30", "--comment=vgpu:sm=10,mem=4G", "sh", "-c", f"{program}; sleep 60")
    (vgpu,) = eventually(lambda: vgpus(cluster), "the vGPU is made")
    assert (vgpu.spec.sm_percent, vgpu.memory_limit_bytes) == (10, 4 << 30)
    job.terminate()
    job.communicate(timeout=60)


def can_run_vgpuctl(user: int) -> bool:
    """Not where the interpreter lies in root's home."""
    tried = subprocess.run([sys.executable, "-c", ""], user=user, check=False, capture_output=True, cwd="/")
    return tried.returncode == 0


@slow
def test_a_users_job_has_a_vgpu_of_the_user(cluster: Cluster, program: str) -> None:
    try:
        usable = can_run_vgpuctl(1)
    except PermissionError:
        usable = False
    if not usable:
        pytest.skip("other users cannot run this interpreter")
    out, error = cluster.srun("--gres=shard:20", program, user=1).communicate(timeout=60)
    assert out.startswith("init 0 context 0 devices 1"), error


@slow
def test_a_job_on_two_nodes_has_a_vgpu_on_each(cluster: Cluster) -> None:
    job = cluster.srun("--nodes=2", "--ntasks=2", "--gres=shard:30", "sh", "-c", "sleep 60")
    eventually(lambda: len(vgpus(cluster)) == 2, "both are made")
    assert {vgpu.claim.uid.partition(".")[2] for vgpu in vgpus(cluster) if vgpu.claim} == set(NODES)
    job.terminate()
    job.communicate(timeout=60)
    eventually(lambda: is_empty(cluster), "both go")


@slow
def test_jobs_fill_the_gpus_that_slurm_chose(cluster: Cluster) -> None:
    jobs = [cluster.sbatch("--gres=shard:60", "--nodelist=n1", command="sleep 60") for _ in range(2)]
    eventually(lambda: len(vgpus(cluster)) == 2, "both run")
    assert {vgpu.gpu_index for vgpu in vgpus(cluster)} == {0, 1}
    cluster.ask("scancel", *jobs)
    eventually(lambda: is_empty(cluster), "both go")


@slow
def test_a_job_without_room_is_held_with_the_reason(cluster: Cluster) -> None:
    """Someone else's vGPU takes what Slurm counts as free. The node is not drained."""
    for gpu in "01":
        cluster.nodes["n1"].create(gpu, sm_percent="90", memory_bytes="1G")
    job = cluster.sbatch("--gres=shard:30", "--nodelist=n1", "--requeue", "--comment=mine", command="sleep 60")
    eventually(lambda: "Priority=0 " in cluster.ask("scontrol", "show", "job", job), "it is held")
    shown = cluster.ask("scontrol", "show", "job", job)
    assert re.search(r"Comment=mine vgpu: .*GPU [01]", shown), shown
    assert "drain" not in cluster.ask("sinfo", "-h", "-N", "-o", "%T")


@slow
def test_a_suspended_job_keeps_its_vgpu(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=shard:30", "--nodelist=n1", command="sleep 600")
    (vgpu,) = eventually(lambda: vgpus(cluster), "it runs")
    cluster.ask("scontrol", "suspend", job)
    eventually(lambda: "SUSPENDED" in cluster.ask("scontrol", "show", "job", job), "it is suspended")
    cluster.srun("--gres=shard:5", "--nodelist=n1", "true").communicate(timeout=60)
    eventually(lambda: len(vgpus(cluster)) == 1, "the other one's goes")
    assert vgpus(cluster)[0].vgpu_id == vgpu.vgpu_id
    cluster.ask("scancel", job)
    eventually(lambda: is_empty(cluster), "it goes with its job")


@slow
def test_leftovers_of_a_lost_machine_make_room(cluster: Cluster) -> None:
    """Else each job would be held, and no epilog would run."""
    from vgpu.integrations.claims import Claim
    from vgpu.spec import VgpuSpec

    with cluster.nodes["n1"].link() as link:
        for gpu in "01":
            spec = VgpuSpec.parse(sm_percent="100", memory_bytes="100G")
            link.create(spec, gpu, claim=Claim("slurm", f"9999{gpu}.n1", labels={"job": f"9999{gpu}"}))
    out, error = cluster.srun("--gres=shard:30", "--nodelist=n1", "sh", "-c", "echo $VGPU_ID").communicate(timeout=60)
    assert out.startswith("vgpu-"), error
    eventually(lambda: is_empty(cluster), "all are gone")


@slow
def test_a_job_of_more_than_its_shards_is_held(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=shard:10", "--comment=vgpu:sm=50", "--requeue", command="sleep 60")
    eventually(lambda: "more than the 10 shards" in cluster.ask("scontrol", "show", "job", job), "it is held")
    assert is_empty(cluster)


@slow
def test_a_killed_slurmd_leaves_nothing(cluster: Cluster) -> None:
    job = cluster.sbatch("--gres=shard:30", "--nodelist=n2", command="sleep 600")
    eventually(lambda: vgpus(cluster), "it runs")
    pid = int((cluster.folder / "n2.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    cluster.start_slurmd("n2")
    cluster.ask("scancel", job)
    eventually(lambda: is_empty(cluster), "the epilog runs")


@slow
def test_the_epilog_removes_what_earlier_jobs_left(cluster: Cluster) -> None:
    """A machine that lost its power ran no epilog."""
    from vgpu.integrations.claims import Claim
    from vgpu.spec import VgpuSpec

    with cluster.nodes["n1"].link() as link:
        spec = VgpuSpec.parse(sm_percent="10", memory_bytes="1G")
        link.create(spec, claim=Claim("slurm", "99999.n1", labels={"job": "99999"}))
    cluster.srun("--gres=shard:5", "--nodelist=n1", "true").communicate(timeout=60)
    eventually(lambda: is_empty(cluster), "it is removed")


@slow
def test_a_job_without_shards_has_no_vgpu(cluster: Cluster) -> None:
    out, _ = cluster.srun("sh", "-c", "echo vgpu=$VGPU_ID").communicate(timeout=60)
    assert out.strip() == "vgpu="
    assert is_empty(cluster)
