"""PyTorch tensors in memory that a model's owner keeps. PyTorch is imported when one of these is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.models.replica import WAIT_S, Model, open_model
from vgpu.models.table import Placed

TORCH_TYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_MOST_NAMED: Final = 5


def load(name: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
    """The model's tensors by name, on the GPU, in the owner's memory. It waits ``timeout_s`` for an owner that still
    loads. A write into one of them ends the program with an error of CUDA, where the driver has read-only access.

    Errors: ``VgpuError`` as of ``vgpu.models.open_model``; ``VgpuError`` (missing) without PyTorch.
    """
    torch = _torch()
    torch.cuda.init()
    model = open_model(name, timeout_s)
    return {tensor.name: tensor_of(torch, model, tensor) for tensor in model.table.tensors}


def attach(module: Any, name: str, timeout_s: float = WAIT_S, *, strict: bool = True) -> Any:
    """Put the model's tensors in the place of the parameters and buffers of ``module`` (a ``torch.nn.Module``), and
    move what else it has to the GPU. Returns ``module``, which cannot be trained. ``strict``: names have to agree.

    A module that was made on the CPU, or with its parameters on PyTorch's meta device, takes no GPU memory before.
    Errors: as of ``load``; ``VgpuError`` (invalid) for names that do not agree.
    """
    state = load(name, timeout_s)
    found = module.load_state_dict(state, strict=False, assign=True)
    if callable(tie := getattr(module, "tie_weights", None)):
        tie()
    missing = _left_out(module, state, found.missing_keys)
    if strict and (missing or found.unexpected_keys):
        raise VgpuError(
            ErrorCode.INVALID,
            f"the model {name} and the module do not agree: {_named('the model lacks', missing)}"
            f"{_named('the module lacks', found.unexpected_keys)}",
            "serve the files of this module, or call attach with strict=False",
        )
    empty = [key for key, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if empty:
        raise VgpuError(
            ErrorCode.INVALID,
            f"the module has tensors without content: {', '.join(empty[:_MOST_NAMED])}",
            "make its buffers on the CPU: accelerate.init_empty_weights(include_buffers=False)",
        )
    module.requires_grad_(requires_grad=False)
    device = next(iter(state.values())).device
    return module.to(device)


class Bytes:
    """Bytes of a model for PyTorch. A tensor made of it keeps it, and so the model's memory, alive."""

    def __init__(self, model: Model, tensor: Placed) -> None:
        self._model = model
        self.__cuda_array_interface__ = {
            "shape": (tensor.size_bytes,),
            "typestr": "|u1",  # NumPy has no bfloat16
            "data": (model.address(tensor), False),  # PyTorch takes no memory that says of itself that it is read-only
            "strides": None,
            "version": 3,
        }


def tensor_of(torch: Any, model: Model, tensor: Placed) -> Any:
    """A storage of its own for each tensor. Reason: libraries take tensors with the same storage for tied ones."""
    device = f"cuda:{model.ordinal}"
    dtype = getattr(torch, TORCH_TYPES[tensor.dtype], None)
    if dtype is None:
        raise VgpuError(
            ErrorCode.INVALID, f"this PyTorch has no type for {tensor.dtype}, of {tensor.name}", "install a newer one"
        )
    if tensor.size_bytes == 0:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    return torch.as_tensor(Bytes(model, tensor), device=device).view(dtype).view(tensor.shape)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise VgpuError(
            ErrorCode.MISSING, "vgpu.models.load gives tensors of PyTorch, which is not installed", "pip install torch"
        ) from error


def _left_out(module: Any, state: dict[str, Any], missing: list[str]) -> list[str]:
    """Of the keys that the files lack, those that no other one is tied to."""
    places = {tensor.data_ptr() for tensor in state.values()}
    now = module.state_dict()
    return [key for key in missing if key not in now or now[key].data_ptr() not in places]


def _named(what: str, keys: list[str]) -> str:
    return f"{what} {', '.join(keys[:_MOST_NAMED])}{', …' if len(keys) > _MOST_NAMED else ''}. " if keys else ""
