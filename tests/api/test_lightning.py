"""The callback for PyTorch Lightning, with a small stand-in for Lightning: a Trainer that calls its callbacks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.integration.node import SimulatedNode
from vgpu.errors import ErrorCode, VgpuError
from vgpu.integrations import lightning


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))


class Trainer:
    def __init__(self, callback: Any, accumulate: int = 1, is_global_zero: bool = True) -> None:
        self.callback, self.accumulate, self.is_global_zero = callback, accumulate, is_global_zero
        self.loggers = [Logger(), Logger()]
        self.global_step = 0

    def fit(self, batches: int, before_batch: Callable[[int], object] = lambda index: None) -> list[int]:
        """The steps at which both loggers got something."""
        self.callback.on_train_start(self, object())
        for index in range(batches):
            before_batch(index)
            self.global_step = (index + 1) // self.accumulate
            self.callback.on_train_batch_end(self, object(), None, None, index)
        first, second = ([step for step, _ in logger.logged] for logger in self.loggers)
        assert first == second
        return first


class Callback:
    """What Lightning's has: a method for each moment, which does nothing."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No class of an earlier test, and none of an installed Lightning."""
    for name in ("lightning", *lightning.PACKAGES):
        monkeypatch.setitem(sys.modules, name, None)
    lightning.__dict__.pop(lightning.NAME, None)
    yield
    lightning.__dict__.pop(lightning.NAME, None)


@pytest.fixture(params=lightning.PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    made = ModuleType(name)
    made.Callback = type("Callback", (Callback,), {})  # type: ignore[attr-defined]
    parent = ModuleType(name.partition(".")[0])
    for stale in ("lightning", *lightning.PACKAGES):
        monkeypatch.delitem(sys.modules, stale, raising=False)
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, name, made)
    return name


@pytest.fixture
def inside(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> str:
    vgpu_id = node.create(sm_percent=30, memory_bytes="2G").vgpu_id
    monkeypatch.setenv("VGPU_ID", vgpu_id)
    return vgpu_id


def test_it_logs_the_readings_each_n_steps(package: str, inside: str) -> None:
    callback = lightning.VgpuStats(every_n_steps=2)
    assert isinstance(callback, sys.modules[package].Callback)
    trainer = Trainer(callback)
    assert trainer.fit(5) == [2, 4]
    assert trainer.loggers[0].logged[0][1]["vgpu/memory_limit_bytes"] == 2 << 30
    assert trainer.loggers[0].logged[0][1]["vgpu/guarantee_ratio"] == pytest.approx(0.3)
    assert callback.on_fit_end(trainer, None) is None


@pytest.mark.usefixtures("package", "inside")
def test_batches_of_one_step_are_logged_once() -> None:
    assert Trainer(lightning.VgpuStats(every_n_steps=1), accumulate=3).fit(9) == [1, 2, 3]


@pytest.mark.usefixtures("package", "inside")
def test_other_ranks_ask_nothing() -> None:
    assert Trainer(lightning.VgpuStats(1), is_global_zero=False).fit(3) == []


@pytest.mark.usefixtures("package", "node")
def test_outside_a_vgpu_it_does_nothing() -> None:
    assert Trainer(lightning.VgpuStats(1)).fit(3) == []


@pytest.mark.usefixtures("package")
def test_training_goes_on_without_the_vgpu(node: SimulatedNode, inside: str) -> None:
    def remove(index: int) -> None:
        if index == 1:
            with node.link() as link:
                link.remove(inside, force=True)

    with pytest.warns(UserWarning, match="no readings of the vGPU") as warned:
        assert Trainer(lightning.VgpuStats(1)).fit(4, remove) == [1]
    assert len(warned) == 1


@pytest.mark.usefixtures("package")
def test_it_can_be_pickled() -> None:
    callback = pickle.loads(pickle.dumps(lightning.VgpuStats(7, prefix="gpu_")))
    assert (callback.every_n_steps, callback.prefix) == (7, "gpu_")


@pytest.mark.usefixtures("package")
def test_zero_steps_are_refused() -> None:
    with pytest.raises(VgpuError, match="every_n_steps") as refused:
        lightning.VgpuStats(0)
    assert refused.value.code is ErrorCode.INVALID


def test_without_lightning_it_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="VgpuStats needs lightning, which is not installed; pip install lightning"):
        lightning.VgpuStats(1)
