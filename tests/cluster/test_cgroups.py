"""The container and the pod of a process, by lines of ``/proc/PID/cgroup``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.integrations.cgroups import Place, of_process, place_in

A, B = "851cb38b655a86973bae8130812b06ec5ef62cc4f5aac28c3da34f695c10d2e4", "0123456789abcdef" * 4
POD = "1b7c4d8e-3f2a-4c5b-9d6e-7f8a9b0c1d2e"
SLICED = POD.replace("-", "_")
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICED}.slice"


USER = "/user.slice/user-1000.slice/user@1000.service/user.slice"
SERVICE = "/system.slice/containerd.service"
RECORDED = f"9:name=systemd:/libpod_parent/libpod-{A}\n0::/libpod_parent/libpod-{A}\n"
KIND = f"/kubelet.slice{BURSTABLE.replace('kubepods', 'kubelet-kubepods')}"


@pytest.mark.parametrize(
    ("text", "containers", "pod"),
    [
        pytest.param(RECORDED, (A,), "", id="podman 4.3, recorded"),
        pytest.param(f"4:memory:/libpod_parent/libpod-{A}\n0::/\n", (A,), "", id="podman, v1 alone"),
        pytest.param(f"0::/machine.slice/libpod-{A}.scope/container\n", (A,), "", id="podman, v2, systemd"),
        pytest.param(f"0::{USER}/libpod-{A}.scope\n", (A,), "", id="podman, rootless"),
        pytest.param(f"0::/machine.slice/libpod-conmon-{A}.scope\n", (), "", id="podman's monitor"),
        pytest.param("8:pids:/libpod_parent/conmon\n0::/\n", (), "", id="podman's monitor, recorded"),
        pytest.param(f"12:memory:/docker/{A}\n1:name=systemd:/docker/{A}\n", (A,), "", id="docker, v1"),
        pytest.param(f"0::/system.slice/docker-{A}.scope\n", (A,), "", id="docker, v2"),
        pytest.param(f"0::/docker/{A}/docker/{B}\n", (A, B), "", id="docker in docker"),
        pytest.param(f"0::/system.slice/nerdctl-{A}.scope\n", (A,), "", id="nerdctl"),
        pytest.param(f"0::{BURSTABLE}/cri-containerd-{A}.scope\n", (A,), POD, id="containerd's CRI, systemd"),
        pytest.param(f"5:cpu:/kubepods/burstable/pod{POD}/{A}\n", (A,), POD, id="CRI, cgroupfs"),
        pytest.param(f"5:cpu:/kubepods/pod{POD}/{A}\n", (A,), POD, id="a guaranteed pod"),
        pytest.param(f"0::{BURSTABLE}/crio-{A}.scope\n", (A,), POD, id="CRI-O"),
        pytest.param(f"0::{BURSTABLE}/crio-conmon-{A}.scope\n", (), POD, id="CRI-O's monitor"),
        pytest.param(
            f"1:name=systemd:{SERVICE}/kubepods-pod{SLICED}.slice:cri-containerd:{A}\n",
            (A,),
            POD,
            id="three words",
        ),
        pytest.param(f"0::{KIND}/cri-containerd-{A}.scope\n", (A,), POD, id="kind"),
        pytest.param(f"0::/kubepods/pod{'0' * 32}/{A}\n", (A,), "0" * 32, id="a static pod"),
        pytest.param(
            f"5:cpu:/kubepods/pod{POD}/{A}/pod{'0' * 32}/{B}\n", (A, B), POD, id="a cgroup that a pod has named"
        ),
        pytest.param("0::/user.slice/user-1000.slice/session-3.scope\n", (), "", id="a login"),
        pytest.param(f"0::{USER}/kubepods-pod{POD}.slice/x.scope\n", (), "", id="a user names a pod"),
        pytest.param(f"1:name=systemd:{USER}/pod{POD}\n0::/\n", (), "", id="a user names a pod, v1"),
        pytest.param(f"0::/kubepods/pod{POD}/{A}/user.slice/x\n", (A,), POD, id="a user's slice in a pod"),
        pytest.param("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n", (), "", id="Slurm"),
        pytest.param(f"0::/system.slice/docker-{A}0.scope\n", (), "", id="65 digits"),
        pytest.param("", (), "", id="nothing"),
        pytest.param("nonsense", (), "", id="no cgroup"),
    ],
)
def test_engines_name_a_cgroup_after_its_container(text: str, containers: tuple[str, ...], pod: str) -> None:
    assert place_in(text) == Place(containers, pod)


IDS = st.text("0123456789abcdef", min_size=64, max_size=64)
PARTS = st.text(st.characters(blacklist_characters="/\n\r", blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=30)
FORMS = ["{}", "docker-{}.scope", "libpod-{}", "libpod-{}.scope", "cri-containerd-{}.scope", "crio-{}.scope", "a:b:{}"]


@given(above=st.lists(PARTS, max_size=4), container=IDS, form=st.sampled_from(FORMS), below=st.lists(PARTS, max_size=2))
def test_a_container_is_found_whatever_is_above_and_below(
    above: list[str], container: str, form: str, below: list[str]
) -> None:
    path = "/".join(["", *above, form.format(container), *below])
    assert place_in(f"3:cpu,cpuacct:{path}\n").containers == (container,)


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    place = place_in(text)
    assert all(len(container) == 64 for container in place.containers)
    assert len(str(place)) < 100


def test_a_place_is_named_for_people(tmp_path: Path) -> None:
    assert str(Place((A, B), POD)) == f"container {B[:12]} of pod {POD}"
    assert str(Place((A,))) == f"container {A[:12]}"
    assert str(Place((), POD)) == f"pod {POD}"
    assert str(Place()) == ""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::/docker/{A}\n")
    assert of_process(7, tmp_path) == Place((A,))
    assert of_process(8, tmp_path) == Place()
    assert of_process(os.getpid()).pod == ""
