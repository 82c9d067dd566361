"""The decisions of the scheduler extender: examples, and any order of events against an API server of a few lines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.cluster.kubernetes.cluster import gpu_pod
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations.kubernetes.extender import assumed, gpus
from vgpu.integrations.kubernetes.extender.asks import asks_of
from vgpu.integrations.kubernetes.extender.assumed import Held
from vgpu.integrations.kubernetes.extender.messages import Arguments, filtered, inspected
from vgpu.integrations.kubernetes.extender.reservations import Assume, Bound, Fits, Later, Refused, Reservations
from vgpu.placement import POLICIES

GIB = 1 << 30
MIB = 1 << 20
MEM = "aliyun.com/gpu-mem"
SHARE = "nvidia.com/gpu"
LIMIT_S = 120.0


def node(name: str = "n1", count: int = 2, gibibytes: int = 16) -> dict[str, Any]:
    """As under aliyun's own plugin."""
    status = {"allocatable": {MEM: str(count * gibibytes), "aliyun.com/gpu-count": str(count)}}
    return {"metadata": {"name": name}, "status": status}


def published(name: str, *memory: int, **fields: Any) -> dict[str, Any]:
    read = [
        {
            "uuid": f"GPU-{at}",
            "index": at,
            "name": "H200",
            "total_memory_bytes": each,
            "guaranteed_ratio": 0.0,
            "guaranteed_memory_bytes": 0,
            "state": "serving",
        }
        | fields
        for at, each in enumerate(memory)
    ]
    return {"metadata": {"name": name, "annotations": {gpus.ANNOTATION: gpus.published(read, [])}}}


def reservations(policy: str, *nodes: dict[str, Any]) -> Reservations:
    made = Reservations(POLICIES[policy], LIMIT_S)
    for one in nodes:
        made.see_node(one)
    return made


def written(pod: dict[str, Any], decision: Any, *, assigned: bool = False) -> dict[str, Any]:
    """The pod as the API server has it after a bind."""
    assert isinstance(decision, Assume), decision
    done = copy.deepcopy(pod)
    done["metadata"]["annotations"] = dict(decision.annotations)
    if assigned:
        done["metadata"]["annotations"][assumed.ASSIGNED] = "true"
    done["spec"]["nodeName"] = decision.held.node
    return done


# --- what a pod asks for


def test_hamis_words_are_amounts() -> None:
    (ask,) = asks_of(gpu_pod("a", {SHARE: 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}))
    assert (ask.gpus, ask.size) == (2, (SHARE, 2))
    each = ask.on(80 * GIB)
    assert (each.sm, each.memory_bytes, each.limited) == (30.0, 3000 * MIB, True)
    (ask,) = asks_of(gpu_pod("a", {SHARE: 1, "nvidia.com/gpumem-percentage": 25}))
    each = ask.on(80 * GIB)
    assert (each.sm, each.memory_bytes, each.limited) == (25.0, 20 * GIB, False)
    (ask,) = asks_of(gpu_pod("a", {SHARE: 1}))
    assert ask.on(80 * GIB).memory_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"nvidia.com/gpumem": 3000}, "without nvidia.com/gpu"),
        ({SHARE: 1, MEM: 2}, "two vGPUs in one"),
        ({SHARE: 1, "nvidia.com/gpucores": 130}, "more than 100 percent"),
        ({SHARE: 1, "nvidia.com/gpumem": 8}, "64 MiB are the least"),
        ({SHARE: 99}, "16 are the most"),
    ],
)
def test_what_no_vgpu_can_be_fits_no_node_and_says_why(limits: dict[str, int], words: str) -> None:
    pod = gpu_pod("a", limits)
    with pytest.raises(VgpuError, match=words):
        asks_of(pod)
    found = reservations("fit", node()).survey(pod, ["n1"])
    assert words in str(found["n1"])
    decision = reservations("fit", node()).decide(pod, "n1", 0.0)
    assert isinstance(decision, Refused)
    assert words in decision.reason


def test_an_init_container_with_a_gpu_is_refused() -> None:
    pod = gpu_pod("a", {MEM: 1})
    pod["spec"]["initContainers"] = pod["spec"]["containers"]
    with pytest.raises(VgpuError, match="init containers get no vGPU"):
        asks_of(pod)


def test_a_pod_without_a_gpu_fits_everywhere_and_is_only_bound() -> None:
    here, pod = reservations("fit"), gpu_pod("a", {})
    assert here.survey(pod, ["n1"]) == {"n1": Fits((), 0.0)}
    decision = here.decide(pod, "n1", 0.0)
    assert isinstance(decision, Assume)
    assert decision.annotations == {}


# --- nodes


def test_what_is_promised_outside_of_kubernetes_is_not_offered() -> None:
    busy = published("n1", 80 * GIB, guaranteed_ratio=0.4, guaranteed_memory_bytes=60 * GIB)
    (gpu,) = gpus.gpus_of(busy)
    assert (gpu.uuid, gpu.sm, gpu.offered_bytes) == ("GPU-0", 60, 20 * GIB)
    found = reservations("fit", busy).survey(gpu_pod("a", {MEM: 30}), ["n1"])
    assert "30 GiB and 37.5 % asked for; of its 1 GPU the emptiest has 20 GiB and 60 %" in str(found["n1"])


@pytest.mark.parametrize("text", ["", "x", "{}", '[{"uuid":1}]', "[[]]"])
def test_an_annotation_that_is_no_list_of_gpus_is_none(text: str) -> None:
    assert gpus.gpus_of({"metadata": {"name": "n", "annotations": {gpus.ANNOTATION: text}}}) == ()


def test_a_gpu_whose_server_is_down_and_an_unknown_node_take_no_pod() -> None:
    here = reservations("fit", published("n1", 80 * GIB, state="failed"))
    found = here.survey(gpu_pod("a", {MEM: 1}), ["n1", "n2"])
    assert found == {"n1": "none of its GPUs serves", "n2": "it has no GPU that the extender knows"}


# --- where a pod goes


def test_the_policy_chooses_the_gpu_and_scores_the_nodes() -> None:
    for policy, index, best in (("pack", 0, "n1"), ("spread", 1, "n2")):
        here = reservations(policy, node("n1"), node("n2"))
        first = gpu_pod("first", {MEM: 8})
        here.see(written(first, here.decide(first, "n1", 0.0), assigned=True))
        second = gpu_pod("second", {MEM: 4})
        decision = here.decide(second, "n1", 1.0)
        assert isinstance(decision, Assume)
        assert decision.held.parts[0].index == index
        scores = here.scores(second, ["n1", "n2", "n3"])
        assert scores[best] == 10
        assert scores["n3"] == 0
        assert policy == "spread" or scores["n2"] == 0


def test_containers_of_a_pod_share_a_gpu_under_aliyuns_name_and_have_their_own_under_hamis() -> None:
    here = reservations("spread", node("n1", 2, 16))
    decision = here.decide(gpu_pod("a", {MEM: 8}, {MEM: 8}), "n1", 0.0)
    assert isinstance(decision, Assume)
    assert [part.index for part in decision.held.parts] == [0, 0]
    assert decision.annotations["ALIYUN_COM_GPU_MEM_IDX"] == "0"
    assert decision.annotations["ALIYUN_COM_GPU_MEM_POD"] == "16"
    assert decision.annotations["ALIYUN_COM_GPU_MEM_DEV"] == "16"
    assert isinstance(here.decide(gpu_pod("b", {MEM: 9}, {MEM: 8}), "n1", 0.0), Refused)
    decision = here.decide(gpu_pod("c", {SHARE: 2, "nvidia.com/gpumem": 4096}), "n1", 0.0)
    assert isinstance(decision, Assume)
    assert sorted(part.index for part in decision.held.parts) == [0, 1]
    assert "ALIYUN_COM_GPU_MEM_IDX" not in decision.annotations
    assert isinstance(here.decide(gpu_pod("d", {SHARE: 3}), "n1", 0.0), Refused)


def test_parts_that_are_a_whole_in_sum_fit_a_gpu() -> None:
    here = reservations("pack", node("n1", 1, 6))
    for name in "abcdef":
        pod = gpu_pod(name, {MEM: 1})
        here.see(written(pod, here.decide(pod, "n1", 0.0), assigned=True))
    assert isinstance(here.decide(gpu_pod("g", {MEM: 1}), "n1", 0.0), Refused)


def test_one_pod_of_a_size_waits_on_a_node_at_a_time() -> None:
    here = reservations("pack", node("n1"), node("n2"))
    first = gpu_pod("first", {MEM: 2})
    decision = here.decide(first, "n1", 0.0)
    here.see(written(first, decision))
    other = here.decide(gpu_pod("b", {MEM: 2}), "n1", 1.0)
    assert other == Later("the kubelet of n1 has not yet allocated 2 of aliyun.com/gpu-mem to team-a/first")
    assert isinstance(here.decide(gpu_pod("c", {MEM: 3}), "n1", 1.0), Assume)
    assert isinstance(here.decide(gpu_pod("d", {MEM: 2}), "n2", 1.0), Assume)
    here.see(written(first, decision, assigned=True))
    assert isinstance(here.decide(gpu_pod("b", {MEM: 2}), "n1", 1.0), Assume)


def test_a_pod_that_is_bound_or_goes_is_not_bound_again() -> None:
    here, pod = reservations("pack", node("n1")), gpu_pod("a", {MEM: 2})
    pod["spec"]["nodeName"] = "n1"
    assert here.decide(pod, "n1", 0.0) == Bound()
    assert here.decide(pod, "n2", 0.0) == Refused("the pod is bound to n1 already")
    goes = gpu_pod("b", {MEM: 2})
    goes["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert here.decide(goes, "n1", 0.0) == Refused("the pod is being deleted")


def test_a_pod_that_is_over_or_gone_holds_nothing() -> None:
    for end in ("Succeeded", "Failed", "gone"):
        here, pod = reservations("pack", node("n1", 1, 4)), gpu_pod("a", {MEM: 4})
        bound = written(pod, here.decide(pod, "n1", 0.0), assigned=True)
        here.see(bound)
        assert isinstance(here.decide(gpu_pod("b", {MEM: 4}), "n1", 0.0), Refused)
        if end == "gone":
            here.lose(pod["metadata"]["uid"])
        else:
            here.see(bound | {"status": {"phase": end}})
        assert isinstance(here.decide(gpu_pod("b", {MEM: 4}), "n1", 0.0), Assume)


def test_an_older_version_of_a_pod_changes_nothing() -> None:
    here, pod = reservations("pack", node("n1", 1, 4)), gpu_pod("a", {MEM: 4})
    bound = written(pod, here.decide(pod, "n1", 0.0))
    bound["metadata"]["resourceVersion"] = "12"
    pod["metadata"]["resourceVersion"] = "9"
    here.see(bound)
    here.see(pod)
    here.see_pods([], "11")
    assert len(here.held("n1")) == 1
    here.see_pods([], "13")
    assert here.held("n1") == []


def test_a_pod_of_aliyuns_own_extender_counts() -> None:
    here, pod = reservations("pack", node("n1", 2, 16)), gpu_pod("old", {MEM: 10})
    said = {"IDX": "1", "POD": "10", "DEV": "16", "ASSIGNED": "true", "ASSUME_TIME": "1700000000000000000"}
    pod["metadata"]["annotations"] = {f"ALIYUN_COM_GPU_MEM_{name}": value for name, value in said.items()}
    pod["spec"]["nodeName"] = "n1"
    here.see(pod)
    (_, first), (_, second) = here.left("n1")
    assert (first.memory_bytes, second.memory_bytes) == (16 * GIB, 6 * GIB)


@pytest.mark.parametrize(
    "text", ["", "x", '{"node":"n1","vgpus":[{}]}', '{"node":1,"vgpus":[]}', '{"node":"n1","vgpus":[[1]]}']
)
def test_an_annotation_that_somebody_made_up_holds_nothing(text: str) -> None:
    pod = gpu_pod("a", {MEM: 1})
    pod["metadata"]["annotations"] = {assumed.ASSUMED: text, assumed.ASSUME_TIME: "1"}
    assert assumed.held_of(pod) is None
    pod["metadata"]["annotations"] = {assumed.ASSUMED: '{"node":"n1","vgpus":[]}', assumed.ASSUME_TIME: "9" * 999}
    assert assumed.held_of(pod) is None


def test_an_unbound_pod_that_says_it_is_assigned_is_overdue_like_others() -> None:
    here, pod = reservations("pack", node("n1")), gpu_pod("a", {MEM: 4})
    claimed = written(pod, here.decide(pod, "n1", 9e9), assigned=True)
    del claimed["spec"]["nodeName"]
    here.see(claimed)
    assert [str(one) for one in here.overdue(0.0)] == ["team-a/a"]


# --- what the scheduler gets


def test_the_answer_has_the_form_of_the_question() -> None:
    here, pod = reservations("pack", node("n1", 1, 4), node("n2", 1, 8)), gpu_pod("a", {MEM: 6})
    asked = Arguments.model_validate({"pod": pod, "nodenames": ["n1", "n2"]})
    answer = filtered(asked, here.survey(asked.pod, asked.names))
    assert answer["NodeNames"] == ["n2"]
    assert answer["Nodes"] is None
    assert answer["FailedNodes"].keys() == {"n1"}
    whole = {"kind": "NodeList", "items": [node("n1", 1, 4), node("n2", 1, 8)]}
    asked = Arguments.model_validate({"Pod": pod, "Nodes": whole, "NodeNames": None})
    answer = filtered(asked, here.survey(asked.pod, asked.names))
    assert answer["Nodes"] == whole | {"items": [node("n2", 1, 8)]}
    assert answer["NodeNames"] is None


def test_inspect_says_who_holds_what() -> None:
    here, pod = reservations("pack", node("n1", 2, 16)), gpu_pod("a", {MEM: 4})
    here.see(written(pod, here.decide(pod, "n1", 0.0)))
    (found,) = inspected(here, ["n1"])["nodes"]
    assert (found["totalMiB"], found["usedMiB"]) == (32 * 1024, 4 * 1024)
    first, second = found["gpus"]
    assert (first["usedMiB"], first["usedPercent"], second["pods"]) == (4 * 1024, 25.0, [])
    assert first["pods"][0] | {"uid": ""} == {
        "namespace": "team-a",
        "name": "a",
        "uid": "",
        "container": "c0",
        "usedMiB": 4 * 1024,
        "percent": 25.0,
        "assigned": False,
    }


# --- what the kubelet's question means


def test_the_kubelet_gets_the_pod_of_its_size_or_an_error() -> None:
    here = reservations("pack", node("n1"))
    small, large = gpu_pod("small", {MEM: 2}), gpu_pod("large", {MEM: 3}, {MEM: 1})
    pods = [written(one, here.decide(one, "n1", 0.0)) for one in (small, large)]
    found = assumed.answer(pods, "n1", (MEM, 3), frozenset())
    assert (found.held.name, found.container, list(found.parts), found.last) == ("large", "c0", [0], False)
    made = frozenset({assumed.claim_uid(found.held, 0)})
    found = assumed.answer(pods, "n1", (MEM, 1), made)
    assert (found.held.name, found.container, list(found.parts), found.last) == ("large", "c1", [1], True)
    with pytest.raises(VgpuError, match="no pod that the extender assumed for n1 waits for 3") as caught:
        assumed.answer(pods, "n1", (MEM, 3), made)
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(VgpuError, match="no pod that the extender assumed for n2"):
        assumed.answer(pods, "n2", (MEM, 3), made)
    twin = gpu_pod("twin", {MEM: 2})
    pods.append(written(twin, reservations("pack", node("n1")).decide(twin, "n1", 0.0)))
    with pytest.raises(VgpuError, match="team-a/small and team-a/twin both wait for 2") as caught:
        assumed.answer(pods, "n1", (MEM, 2), made)
    assert caught.value.code is ErrorCode.AMBIGUOUS


def test_a_pod_that_no_extender_placed_gets_no_other_pods_vgpu() -> None:
    here = reservations("pack", node("n1"))
    waiting = gpu_pod("waits", {MEM: 2})
    placed = written(waiting, here.decide(waiting, "n1", 0.0))
    stray = gpu_pod("stray", {MEM: 2})
    stray["spec"]["nodeName"] = "n1"
    with pytest.raises(VgpuError, match=r"team-a/stray asks for 2 of .* on n1, and no extender placed it") as caught:
        assumed.answer([placed, stray], "n1", (MEM, 2), frozenset())
    assert caught.value.code is ErrorCode.AMBIGUOUS
    stray["status"] = {"phase": "Failed"}
    assert assumed.answer([placed, stray], "n1", (MEM, 2), frozenset()).held.name == "waits"
    stray["status"] = {"phase": "Pending"}
    assert placed["spec"]["nodeName"] == "n1"
    other = gpu_pod("other", {MEM: 1})
    other["spec"]["nodeName"] = "n1"
    assert assumed.answer([placed, other], "n1", (MEM, 2), frozenset()).held.name == "waits"


# --- any order of events


class Cluster(RuleBasedStateMachine):
    """The extender's steps, one by one, with deaths between any two; a kubelet; a watch that lags behind. ``pods``: the
    API server's, which refuses what was read at another version."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [node("n1", 2, 8), node("n2", 1, 8)]
        self.pods: dict[str, dict[str, Any]] = {}
        self.version, self.now_s, self.number = 0, 1000.0, 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[tuple[str, Held, dict[str, Any]]] = []
        """Of binds under way: what comes next, for which decision, and the pod as it was read."""
        self.vgpus: dict[str, tuple[str, str, int]] = {}
        """By claim: node, GPU and memory of what the node has made."""
        self.begin()

    def begin(self) -> None:
        self.reservations = reservations("fit", *self.nodes)
        self.reservations.see_pods(copy.deepcopy(list(self.pods.values())), str(self.version))
        self.events.clear()
        self.steps.clear()

    def write(self, pod: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.pods[pod["metadata"]["uid"]] = pod
        self.events.append(("MODIFIED", copy.deepcopy(pod)))
        return copy.deepcopy(pod)

    def is_as_read(self, pod: dict[str, Any]) -> bool:
        here = self.pods.get(pod["metadata"]["uid"])
        return here is not None and here["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"]

    def annotated(self, read: dict[str, Any], annotations: Any) -> dict[str, Any]:
        pod = copy.deepcopy(self.pods[read["metadata"]["uid"]])
        both = {**pod["metadata"].get("annotations", {}), **annotations}
        pod["metadata"]["annotations"] = {name: value for name, value in both.items() if value is not None}
        return self.write(pod)

    @rule(limits=st.sampled_from([{MEM: 1}, {MEM: 3}, {MEM: 8}, {SHARE: 1, "nvidia.com/gpumem": 2048}, {SHARE: 2}]))
    def create(self, limits: dict[str, int]) -> None:
        self.number += 1
        if SHARE in limits and limits[SHARE] == 2:
            limits = limits | {"nvidia.com/gpumem-percentage": 30, "nvidia.com/gpucores": 40}
        pod = gpu_pod(f"p{self.number}", limits)
        pod["metadata"]["uid"] = f"u{self.number}"
        self.write(pod)

    def one(self, data: Any, *, bound: bool) -> dict[str, Any] | None:
        found = [pod for pod in self.pods.values() if bool(pod["spec"].get("nodeName")) is bound]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), name=st.sampled_from(["n1", "n2"]))
    def bind_begins(self, data: Any, name: str) -> None:
        pod = self.one(data, bound=False)
        if pod is None or any(held.uid == pod["metadata"]["uid"] for _, held, _ in self.steps):
            return
        read = copy.deepcopy(pod)
        match self.reservations.decide(read, name, self.now_s):
            case Assume(held, annotations):
                self.reservations.begin(held)
                self.steps.append(("annotate", held, read | {"written": dict(annotations)}))
            case Refused(reason):
                assert reason

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def bind_goes_on(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.steps) - 1))
        step, held, read = self.steps.pop(at)
        if not self.is_as_read(read):
            self.give_back(held, bound_too=False)
        elif step == "annotate":
            pod = self.annotated(read, read["written"])
            self.reservations.see(pod)
            self.steps.append(("bind", held, pod))
        else:
            pod = copy.deepcopy(self.pods[held.uid])
            pod["spec"]["nodeName"] = held.node
            self.write(pod)
            self.reservations.end(held.uid)

    def give_back(self, held: Held, *, bound_too: bool) -> None:
        pod = self.pods.get(held.uid)
        if pod is None:
            self.reservations.lose(held.uid)
        else:
            self.reservations.see(copy.deepcopy(pod))
            if assumed.is_waiting(pod) and (bound_too or not pod["spec"].get("nodeName")):
                self.reservations.see(self.annotated(pod, assumed.taken_back()))
        self.reservations.end(held.uid)

    @rule()
    def the_extender_dies(self) -> None:
        self.begin()

    @rule(seconds=st.sampled_from([1.0, LIMIT_S + 1]))
    def time_goes_on(self, seconds: float) -> None:
        self.now_s += seconds
        for held in self.reservations.overdue(self.now_s):
            if not any(other.uid == held.uid for _, other, _ in self.steps):
                self.give_back(held, bound_too=True)

    @precondition(lambda self: self.events)
    @rule()
    def the_watch_goes_on(self) -> None:
        event, pod = self.events.pop(0)
        if event == "DELETED":
            self.reservations.lose(pod["metadata"]["uid"])
        else:
            self.reservations.see(pod)

    @rule(data=st.data())
    def the_kubelet_allocates(self, data: Any) -> None:
        pod = self.one(data, bound=True)
        if pod is None or pod["status"]["phase"] != "Pending":
            return
        (ask,) = asks_of(pod)
        try:
            found = assumed.answer(list(self.pods.values()), pod["spec"]["nodeName"], ask.size, frozenset(self.vgpus))
        except VgpuError as error:
            if error.code is not ErrorCode.NOT_FOUND:  # one pod waits at most, and the extender placed each
                raise AssertionError(str(error)) from error
            self.end(pod, "Failed")
            return
        assert found.last
        for at, part in found.parts.items():
            claim = assumed.claim_uid(found.held, at)
            self.vgpus[claim] = (found.held.node, part.gpu, part.memory_bytes)
        self.annotated(self.pods[found.held.uid], {assumed.ASSIGNED: "true"})

    @rule(data=st.data(), phase=st.sampled_from(["Succeeded", "Failed", ""]))
    def a_pod_ends(self, data: Any, phase: str) -> None:
        if not self.pods:
            return
        self.end(data.draw(st.sampled_from(list(self.pods.values()))), phase)

    def end(self, pod: dict[str, Any], phase: str) -> None:
        """ "": it is gone. The plugin removes its vGPUs when it needs their room."""
        uid = pod["metadata"]["uid"]
        if phase:
            self.write(copy.deepcopy(pod) | {"status": {"phase": phase}})
        else:
            del self.pods[uid]
            self.version += 1
            self.events.append(("DELETED", pod))
        self.vgpus = {claim: one for claim, one in self.vgpus.items() if not claim.startswith(f"{uid}.")}

    @invariant()
    def no_gpu_is_over_capacity(self) -> None:
        fresh = reservations("fit", *self.nodes)
        fresh.see_pods(list(self.pods.values()), str(self.version))
        for name in ("n1", "n2"):
            for gpu, left in fresh.left(name):
                assert left.memory_bytes >= 0, f"GPU {gpu.index} of {name}"
                assert left.time_ppm >= 0, f"GPU {gpu.index} of {name}"
        used: dict[tuple[str, str], int] = {}
        for place, gpu_id, memory in self.vgpus.values():
            used[place, gpu_id] = used.get((place, gpu_id), 0) + memory
        assert all(memory <= 8 * GIB for memory in used.values())

    @invariant()
    def one_pod_of_a_size_waits_on_a_node(self) -> None:
        waiting = [held for pod in self.pods.values() if (held := assumed.held_of(pod)) and not held.assigned]
        each = [(held.node, size) for held in waiting for size in held.sizes]
        assert len(each) == len(set(each))


TestCluster = Cluster.TestCase
