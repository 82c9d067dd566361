"""``VgpuStats``: a callback of PyTorch Lightning that logs the vGPU's readings beside the loss.

The class is made when it is first asked for, from ``lightning`` or ``pytorch_lightning``: from the one that the program
has imported, since a Trainer expects callbacks of its own package.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from vgpu.api.toplevel import current
from vgpu.errors import ErrorCode, VgpuError
from vgpu.extras import MissingExtraError

if TYPE_CHECKING:
    from vgpu.api.handle import Vgpu

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
NAME: Final = "VgpuStats"


class Logging:
    """``every_n_steps``: optimizer steps from one reading to the next. ``prefix``: of each metric's name.

    Outside a vGPU it does nothing. A reading that fails is left out, with one warning for the run.
    """

    def __init__(self, every_n_steps: int = 50, prefix: str = "vgpu/") -> None:
        if every_n_steps < 1:
            raise VgpuError(ErrorCode.INVALID, f"every_n_steps: {every_n_steps} is less than 1", "every_n_steps=50")
        super().__init__()
        self.every_n_steps = every_n_steps
        self.prefix = prefix
        self._vgpu: Vgpu | None = None
        self._logged_step = 0
        self._warned = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:  # the loggers of other ranks write nothing
            return
        try:
            self._vgpu = current()
        except VgpuError as error:
            self._warn(error)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if self._vgpu is None or step % self.every_n_steps or step == self._logged_step:
            return
        self._logged_step = step
        try:
            metrics = self._vgpu.stats().metrics(self.prefix)
        except VgpuError as error:
            self._warn(error)
            return
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _warn(self, error: VgpuError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"no readings of the vGPU: {error}", stacklevel=2)


def _base() -> Any:
    """The class ``Callback`` of the package that the program uses."""
    for package in sorted(PACKAGES, key=lambda package: package not in sys.modules):
        try:
            return import_module(package).Callback
        except ModuleNotFoundError as error:
            if error.name is None or not package.startswith(error.name):
                raise
    raise MissingExtraError(
        ErrorCode.MISSING, f"{NAME} needs lightning, which is not installed", "pip install lightning"
    )


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A name of this module: a strategy that starts processes pickles the callback.
    made = type(NAME, (Logging, _base()), {"__module__": __name__, "__doc__": Logging.__doc__})
    globals()[NAME] = made
    return made
