"""Quotas with real processes: exact beside many askers and across crashes, reloaded, and the reclaim of idle vGPUs."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.commands import vgpuctl
from tests.integration.node import SimulatedNode, eventually
from tests.integration.users import ALICE, BOB, as_user, needs_root, opened
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.quotas.quota import Quotas
from vgpu.spec import VgpuChanges, VgpuSpec

SMALL = {"sm_percent": 10, "memory_bytes": "1G"}
OWN = str(os.geteuid())


def options(**quota: object) -> tuple[str, ...]:
    """The node's own user is exempt, but for a section of its own."""
    return "--quotas", json.dumps({"user": {OWN: quota}})


def asked(node: SimulatedNode, **fields: object) -> str:
    """The new vGPU's id, or the code of the refusal."""
    try:
        return node.create(**(SMALL | fields)).vgpu_id
    except VgpuError as error:
        return error.code


def found(node: SimulatedNode) -> tuple[VgpuStatus, ...]:
    with node.link() as link:
        return link.list()


def test_many_askers_at_once_get_exactly_the_quota() -> None:
    with SimulatedNode(3, "temporal", *options(sm_total=70, vgpus=12)) as node:
        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(lambda _: asked(node), range(20)))
        assert found.count(ErrorCode.QUOTA) == 13
        with node.link() as link:
            held = link.quota().held
            assert (held.sm_percent, held.vgpus) == (70, 7)
            link.remove(next(one for one in found if one.startswith("vgpu-")))
        assert asked(node).startswith("vgpu-")
        assert asked(node) == ErrorCode.QUOTA


@pytest.mark.slow
def test_a_crash_of_the_node_or_of_a_server_gives_nothing_away() -> None:
    with SimulatedNode(2, "temporal", *options(vgpus=3)) as node:
        made = [asked(node) for _ in range(3)]
        assert all(one.startswith("vgpu-") for one in made)
        node.kill_node()
        node.start()
        assert asked(node) == ErrorCode.QUOTA
        with node.link() as link:
            for gpu in link.gpus():
                assert gpu.server_pid is not None
                os.kill(gpu.server_pid, signal.SIGKILL)
        answers = []
        eventually(lambda: answers.append(asked(node)) or answers[-1] != ErrorCode.UNAVAILABLE, "the next servers")
        assert answers[-1] == ErrorCode.QUOTA


def test_a_change_is_held_against_the_quota_too() -> None:
    with (
        SimulatedNode(1, "temporal", *options(sm=40, sm_total=60, mem_total="4G", ttl="1h")) as node,
        node.link() as link,
    ):
        first, second = node.create(**SMALL), node.create(**SMALL)
        assert first.spec.ttl_ns == 3600 * 10**9
        for fields in ({"sm_percent": 41}, {"memory_bytes": "4G"}, {"ttl_ns": "2h"}):
            with pytest.raises(VgpuError) as refused:
                link.set(first.vgpu_id, VgpuChanges.parse(**fields))
            assert refused.value.code is ErrorCode.QUOTA, fields
        assert link.set(first.vgpu_id, VgpuChanges.parse(sm_percent=40)).spec.sm_percent == 40
        with pytest.raises(VgpuError, match="40 % of the 60 %"):
            link.set(second.vgpu_id, VgpuChanges.parse(sm_percent=30))
        link.set_quotas(Quotas.model_validate({"user": {OWN: {"sm_total": 5}}}))
        assert link.set(first.vgpu_id, VgpuChanges.parse(sm_percent=20)).spec.sm_percent == 20


def test_quotas_are_reloaded_from_the_file_and_what_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with SimulatedNode(1) as node:
        made = [asked(node), asked(node)]
        file.write_text(f"[quota.user.{OWN}]\nvgpus = 1\n")
        done = vgpuctl(node, "config", "reload", str(file))
        assert done.stdout == f"{file}: 1 section of quotas in force\n"
        assert all(one in done.stderr for one in made)
        refused = vgpuctl(node, "create", "--sm", "10", "--mem", "1G", code=4)
        assert "has 2 vGPUs of the 1 that the quota of user" in refused.stderr
        assert "vgpuctl quota" in refused.stderr
        table = vgpuctl(node, "quota").stdout.split()
        assert table[:5] == ["QUOTA", "VALUE", "USED", "LEFT", "OF"]
        file.write_text("[quota]\nvgpus = 'many'\n")
        assert ":2: quota.vgpus" in vgpuctl(node, "config", "reload", str(file), code=2).stderr
        file.write_text("")
        vgpuctl(node, "config", "reload", str(file))
        assert asked(node).startswith("vgpu-")


def test_the_same_request_again_is_held_against_the_quota() -> None:
    """If its vGPU goes meanwhile, the GPU Server makes another one."""
    with SimulatedNode(1, "temporal", *options(sm=20)) as node, node.link() as link:
        made = link.create(VgpuSpec.parse(**SMALL), request_id="once")
        assert link.create(VgpuSpec.parse(**SMALL), request_id="once").vgpu_id == made.vgpu_id
        with pytest.raises(VgpuError) as refused:
            link.create(VgpuSpec.parse(**(SMALL | {"sm_percent": 90})), request_id="once")
        assert refused.value.code is ErrorCode.QUOTA


def test_a_share_that_is_not_said_is_the_default_one(tmp_path: Path) -> None:
    with SimulatedNode(1, "temporal", *options(default_sm=15, default_mem="2G")) as node:
        made = json.loads(vgpuctl(node, "create", "-o", "json").stdout)
        assert (made["spec"]["sm_percent"], made["spec"]["memory_bytes"]) == (15, 2 << 30)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["remove", "suspend"])
def test_an_idle_vgpu_is_warned_about_and_reclaimed_and_one_in_use_stays(action: str) -> None:
    with SimulatedNode(1, "temporal", *options(idle_limit="8s", idle_warning="3s", idle_action=action)) as node:
        idle, busy = node.create(**SMALL), node.create(**SMALL)
        node.attach(busy.vgpu_id)
        with node.link() as link:

            def kinds(vgpu_id: str) -> list[str]:
                return [event.kind for event in link.events(vgpu_id)]

            eventually(lambda: "idle" in kinds(idle.vgpu_id), "the warning")
            now = node.reading(idle.vgpu_id)
            assert now is not None
            assert "unless a program uses the GPU" in now.warnings[-1]
            eventually(lambda: "reclaimed" in kinds(idle.vgpu_id), "the reclaim")
            assert kinds(idle.vgpu_id).index("idle") < kinds(idle.vgpu_id).index("reclaimed")
            found = {vgpu.vgpu_id: vgpu.state for vgpu in link.list()}
            assert found.get(idle.vgpu_id) == (None if action == "remove" else "suspended")
            assert busy.vgpu_id in found
            assert "idle" not in kinds(busy.vgpu_id)


@needs_root
def test_each_user_has_a_quota_of_its_own_and_sees_no_others() -> None:
    quota = json.dumps({"vgpus": 1, "user": {str(BOB): {"vgpus": 2}}})
    with SimulatedNode(1, "temporal", "--quotas", quota) as node:
        opened(node)

        def make(uid: int) -> str:
            def act() -> str:
                try:
                    with ControlLink(node.paths.control_socket) as link:
                        return link.create(VgpuSpec.parse(**SMALL)).vgpu_id
                except VgpuError as error:
                    return error.code

            return str(as_user(uid, act))

        assert [make(ALICE) == "quota" for _ in range(2)] == [False, True]
        assert [make(BOB) == "quota" for _ in range(3)] == [False, False, True]

        def peek() -> str:
            try:
                with ControlLink(node.paths.control_socket) as link:
                    link.quota(BOB)
            except VgpuError as error:
                return error.code
            return ""

        assert as_user(ALICE, peek) == "not-yours"

        theirs = next(vgpu.vgpu_id for vgpu in found(node) if vgpu.owner_uid == BOB)

        def resize() -> str:
            try:
                with ControlLink(node.paths.control_socket) as link:
                    link.set(theirs, VgpuChanges.parse(sm_percent=50))
            except VgpuError as error:
                return error.code
            return ""

        assert as_user(ALICE, resize) == "not-yours"
        assert [asked(node).startswith("vgpu-") for _ in range(3)] == [True] * 3
