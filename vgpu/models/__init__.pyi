from vgpu.models.replica import check as check
from vgpu.models.replica import open_model as open_model
from vgpu.models.tensors import attach as attach
from vgpu.models.tensors import load as load

__all__ = ["attach", "check", "load", "open_model"]
