"""The manifests: the strict schemas of Kubernetes, and what they say of the command. No API server has read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from kubernetes_validate import validate

from vgpu.ctl.commands import part
from vgpu.integrations.kubernetes.dra import DRIVER
from vgpu.integrations.kubernetes.extender import assumed
from vgpu.integrations.kubernetes.extender.app import PREFIXES
from vgpu.integrations.kubernetes.extender.asks import ALLOCATED, NAMES
from vgpu.integrations.kubernetes.extender.process import TURN_S
from vgpu.integrations.kubernetes.profiles import parse_all
from vgpu.placement import POLICIES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = ("capacity", "extender", "profiles", "plugin", "simulated")
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
"""From the first with resource.k8s.io/v1 to the newest that kubernetes-validate has."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def whole() -> list[dict[str, Any]]:
    """Every object that stands in a file of its own."""
    folders = [FOLDER / "base", *(FOLDER / "overlays" / name for name in OVERLAYS)]
    paths = [folder / name for folder in folders for name in _kustomization(folder)["resources"]]
    return [one for path in paths if path.is_file() for one in documents(path)]


def _kustomization(folder: Path) -> dict[str, Any]:
    (one,) = documents(folder / "kustomization.yaml")
    return one


@cache
def built(overlay: str) -> tuple[dict[str, Any], ...]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, check=True
    )
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_passes_the_strict_schema(version: str) -> None:
    kinds = [one["kind"] for one in whole()]
    assert {"DaemonSet", "DeviceClass", "ClusterRole", "ValidatingAdmissionPolicy"} <= set(kinds)
    for one in whole():
        validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_overlay_passes_the_strict_schema(overlay: str, version: str) -> None:
    for one in built(overlay):
        validate(one, version, strict=True)


def test_a_field_that_kubernetes_lacks_fails() -> None:
    """The control of the tests above."""
    (one,) = (one for one in whole() if one["kind"] == "DaemonSet")
    one["spec"]["template"]["spec"]["containers"][0]["volumesMounts"] = []
    with pytest.raises(Exception, match="volumesMounts"):
        validate(one, VERSIONS[-1], strict=True)


def kubelet_arguments(overlay: str) -> list[str]:
    (daemon,) = (one for one in built(overlay) if one["kind"] == "DaemonSet")
    containers = daemon["spec"]["template"]["spec"]["containers"]
    (own,) = (one for one in containers if one["command"] == ["vgpuctl", "kubelet"])
    return list(own["args"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_arguments_are_the_commands(overlay: str) -> None:
    command: Any = typer.main.get_command(part("integrations.kubelet"))
    with command.make_context("kubelet", kubelet_arguments(overlay)) as context:
        assert context.params["plugin"] is (overlay in {"plugin", "extender"})
        assert context.params["dra"] is (overlay not in {"plugin", "extender"})
        assert context.params["extender"] is (overlay == "extender")


def test_each_profile_has_a_class() -> None:
    arguments = kubelet_arguments("profiles")
    names = {one.name for one in parse_all(arguments[arguments.index("--profiles") + 1])}
    classes = {one["metadata"]["name"]: one["spec"] for one in built("profiles") if one["kind"] == "DeviceClass"}
    assert classes.keys() == {"vgpu.dev", *(f"{name}.vgpu.dev" for name in names)}
    for name in names:
        assert classes[f"{name}.vgpu.dev"]["extendedResourceName"] == f"vgpu.dev/{name}"
        assert f'"{name}"' in classes[f"{name}.vgpu.dev"]["selectors"][0]["cel"]["expression"]


def test_every_volume_is_mounted_and_every_mount_is_a_volume() -> None:
    for overlay in OVERLAYS:
        (daemon,) = (one for one in built(overlay) if one["kind"] == "DaemonSet")
        pod = daemon["spec"]["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_policy_names_the_account_of_the_driver() -> None:
    accounts = [one["metadata"] for one in whole() if one["kind"] == "ServiceAccount"]
    assert {one["name"] for one in accounts} == {"vgpu-kubelet", "vgpu-extender"}
    policies = yaml.safe_dump_all([one for one in whole() if one["kind"] == "ValidatingAdmissionPolicy"], width=1000)
    for account in accounts:
        assert f"system:serviceaccount:{account['namespace']}:{account['name']}" in policies


def rights_of(name: str) -> dict[str, Any]:
    (role,) = (one for one in whole() if (one["kind"], one["metadata"]["name"]) == ("ClusterRole", name))
    return {one["resources"][0]: one for one in role["rules"]}


def deployment() -> dict[str, Any]:
    (one,) = (one for one in built("extender") if one["kind"] == "Deployment")
    return dict(one)


def test_there_is_one_extender_at_a_time_and_its_arguments_are_the_commands() -> None:
    spec = deployment()["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    (container,) = spec["template"]["spec"]["containers"]
    command: Any = typer.main.get_command(part("integrations.extender"))
    with command.make_context("extender", list(container["args"])) as context:
        port = container["ports"][0]["containerPort"]
        assert context.params["listen"] == f"0.0.0.0:{port}"
        assert context.params["policy"] in POLICIES
        files = [context.params[name] for name in ("tls_cert", "tls_key", "tls_client_ca")]
        assert {str(one.parent) for one in files} == {container["volumeMounts"][0]["mountPath"]}


def test_the_schedulers_configuration_is_the_extenders() -> None:
    (configuration,) = documents(FOLDER / "overlays/extender/scheduler.yaml")
    (extender,) = configuration["extenders"]
    (service,) = (one for one in built("extender") if one["kind"] == "Service")
    place = (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    )
    prefix, verbs = extender["urlPrefix"].removeprefix(f"https://{place}"), ("filter", "prioritize", "bind")
    assert prefix in PREFIXES
    assert [extender[f"{verb}Verb"] for verb in verbs] == list(verbs)
    assert float(extender["httpTimeout"].removesuffix("s")) > TURN_S
    managed = {one["name"]: one["ignoredByScheduler"] for one in extender["managedResources"]}
    assert managed == {name: name not in ALLOCATED for name in NAMES}


def test_extender_and_plugin_have_the_rights_that_they_use() -> None:
    rights = rights_of("vgpu-extender")
    assert rights["pods"]["verbs"] == ["get", "list", "watch", "patch"]
    assert rights["pods/binding"]["verbs"] == ["create"]
    assert rights["nodes"]["verbs"] == ["get", "list", "watch"]
    assert rights_of("vgpu-kubelet-assigned")["pods"]["verbs"] == ["get", "list", "patch"]
    assert rights_of("vgpu-kubelet-assigned")["nodes"]["verbs"] == ["get", "patch"]
    policies = yaml.safe_dump_all(documents(FOLDER / "overlays/extender/policies.yaml"), width=1000)
    assert all(f"'{name}'" in policies or f"''{name}''" in policies for name in assumed.ALL)


def test_the_driver_may_write_its_own_entries_of_a_claims_status() -> None:
    rights = rights_of("vgpu-kubelet")
    assert "patch" in rights["resourceclaims/status"]["verbs"]
    assert rights["resourceclaims/driver"]["resourceNames"] == [DRIVER]
    assert "associated-node:patch" in rights["resourceclaims/driver"]["verbs"]


def test_the_image_has_the_command_of_the_manifests() -> None:
    """Its lines are read here; test_image.py builds it."""
    lines = (ROOT / "deploy/Containerfile").read_text().splitlines()
    said = [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]
    assert [word for word, _ in said] == ["ARG", "FROM", "COPY", "RUN", "ENTRYPOINT", "CMD"]
    words = dict(said)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = words["COPY"].split()[0]
    assert wheel == f"dist/{project['name'].replace('-', '_')}-*.whl"
    (extra,) = re.findall(r"\[(\w+)\]", words["RUN"])
    assert extra in project["optional-dependencies"]
    (daemon,) = (one for one in whole() if one["kind"] == "DaemonSet")
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    assert json.loads(words["CMD"]) == container["command"]
    assert container["image"].partition(":")[0] == project["name"]
