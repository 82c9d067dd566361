"""What PyTorch is given, by a module in its place: PyTorch itself runs in tests/gpu/test_models.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vgpu.errors import ErrorCode, VgpuError
from vgpu.models import tensors
from vgpu.models.table import Placed

BASE = 1 << 40
ROWS = (
    Placed("w", "BF16", (3, 5), 256, 30),
    Placed("s", "F32", (), 512, 4),
    Placed("e", "F16", (0, 4), 768, 0),
)


class Tensor:
    def __init__(self, place: int, dtype: str = "uint8", shape: tuple[int, ...] = ()) -> None:
        self.place, self.dtype, self.shape, self.device, self.is_meta = place, dtype, shape, "cuda:0", False

    def view(self, what: Any) -> Tensor:
        return Tensor(self.place, *((what, self.shape) if isinstance(what, str) else (self.dtype, what)))

    def data_ptr(self) -> int:
        return self.place


class Torch:
    cuda = SimpleNamespace(init=lambda: None)

    def __init__(self) -> None:
        self.kept: list[Any] = []
        for name in set(tensors.TORCH_TYPES.values()) - {"float8_e8m0fnu"}:
            setattr(self, name, name)

    def as_tensor(self, data: Any, device: str) -> Tensor:
        self.kept.append(data)
        interface = data.__cuda_array_interface__
        assert (interface["typestr"], interface["strides"], device) == ("|u1", None, "cuda:1")
        return Tensor(interface["data"][0], "uint8", interface["shape"])

    def empty(self, shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
        return Tensor(0, dtype, shape)


class Module:
    """Has ``keys``; ``tied`` is one that gets the place of the first."""

    def __init__(self, *keys: str, tied: str = "", meta: str = "") -> None:
        self.keys, self.tied, self.trained, self.moved_to = keys, tied, True, ""
        self.state = {key: Tensor(1) for key in (*keys, *filter(None, (tied,)))}
        for key in filter(None, (meta,)):
            self.state[key] = Tensor(2)
            self.state[key].is_meta = True

    def load_state_dict(self, state: dict[str, Tensor], *, strict: bool, assign: bool) -> Any:
        assert (strict, assign) == (False, True)
        missing = [key for key in self.state if key not in state]
        unexpected = [key for key in state if key not in self.state]
        self.state |= {key: tensor for key, tensor in state.items() if key in self.state}
        return SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)

    def tie_weights(self) -> None:
        if self.tied:
            self.state[self.tied] = self.state[self.keys[0]]

    def state_dict(self) -> dict[str, Tensor]:
        return self.state

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self.state.items())

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return []

    def requires_grad_(self, *, requires_grad: bool) -> None:
        self.trained = requires_grad

    def to(self, device: str) -> Module:
        self.moved_to = device
        return self


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    found = Torch()
    monkeypatch.setitem(sys.modules, "torch", found)  # type: ignore[arg-type]
    model = SimpleNamespace(table=SimpleNamespace(tensors=ROWS), address=lambda row: BASE + row.offset, ordinal=1)
    monkeypatch.setattr(tensors, "open_model", lambda name, timeout_s: model)
    return found


def test_each_tensor_is_where_the_owner_has_it(torch: Torch) -> None:
    found = tensors.load("m")
    assert {name: (one.place, one.dtype, one.shape) for name, one in found.items()} == {
        "w": (BASE + 256, "bfloat16", (3, 5)),
        "s": (BASE + 512, "float32", ()),
        "e": (0, "float16", (0, 4)),
    }
    assert [data.__cuda_array_interface__["shape"] for data in torch.kept] == [(30,), (4,)]


def test_a_module_gets_the_tensors_and_is_moved_to_their_gpu(torch: Torch) -> None:
    module = Module("w", "s", "e", tied="head")
    assert tensors.attach(module, "m") is module
    assert module.state["head"] is module.state["w"]
    assert (module.state["w"].place, module.trained, module.moved_to) == (BASE + 256, False, "cuda:0")


def test_names_that_do_not_agree_are_named(torch: Torch) -> None:
    with pytest.raises(VgpuError, match=r"the model lacks x\. the module lacks e\.") as caught:
        tensors.attach(Module("w", "s", "x"), "m")
    assert caught.value.code is ErrorCode.INVALID
    assert tensors.attach(Module("w", "s", "x"), "m", strict=False)
    with pytest.raises(VgpuError, match="tensors without content: inv_freq"):
        tensors.attach(Module("w", "s", "e", meta="inv_freq"), "m", strict=False)


def test_what_is_missing_is_named(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(address=lambda row: BASE, ordinal=0)
    with pytest.raises(VgpuError, match="no type for F8_E8M0, of w"):
        tensors.tensor_of(torch, model, Placed("w", "F8_E8M0", (1,), 0, 1))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(VgpuError, match="PyTorch, which is not installed") as caught:
        tensors.load("m")
    assert caught.value.code is ErrorCode.MISSING
