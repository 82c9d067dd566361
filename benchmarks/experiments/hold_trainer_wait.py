"""A trainer whose stream waits at each layer while a word of the host's says so: ``hold_trainer.py --way word``.

    python -m benchmarks.experiments.hold_trainer_wait --work resnet50-train

It speaks like ``sharer.py``. PAUSING_WORD names the file, mapped by whoever writes the word too. What is queued stays
queued, so pauses cost no refill; a request waits for the kernels of one layer, or of the loss and the optimizer, before
which there is no wait.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.experiments.hold_trainer_pause import WORD, Word
from benchmarks.suite.workloads.catalogue import WORKS
from benchmarks.suite.workloads.cuda import TorchProgram
from benchmarks.suite.workloads.sharer import serve, steady

MAPPED: Final = 2  # cuMemHostRegister: with an address for the device
WAIT_EQ: Final = 1


class Waits:
    """Put into the current stream: what comes after runs when the word is 0. RuntimeError if the driver refuses."""

    def __init__(self, word: Word) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._address = ctypes.c_uint64()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(word.address), ctypes.c_size_t(mmap.PAGESIZE), MAPPED)
        self._call(
            "cuMemHostGetDevicePointer_v2", ctypes.byref(self._address), ctypes.c_void_p(word.address), ctypes.c_uint(0)
        )

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} said {code}")

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuStreamWaitValue32_v2", stream, self._address, ctypes.c_uint(0), ctypes.c_uint(WAIT_EQ))


def at_each_layer(wait: Callable[[], None]) -> None:
    """``wait()`` after each layer's forward kernels and before its backward ones, of all models in this process."""

    def forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if next(module.children(), None) is None and isinstance(output, torch.Tensor):
            wait()
            if output.requires_grad:
                output.register_hook(backward)

    def backward(gradient: torch.Tensor) -> None:
        wait()

    torch.nn.modules.module.register_module_forward_hook(forward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    work = WORKS[parser.parse_args().work]

    def build() -> TorchProgram:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # the context in which the word is registered
        at_each_layer(Waits(Word(os.environ[WORD])))
        return TorchProgram(work.name)

    serve(build, lambda program, window: {"work": work.name, **steady(work, program, window)})


if __name__ == "__main__":
    main()
