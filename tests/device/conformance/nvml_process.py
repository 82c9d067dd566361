"""``NvmlGpu`` in a process of its own, where the simulated driver is the first in the library path: requests come as
pickles on standard input, and answers go to standard output.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable

from gpuserver.device.nvidia.nvml import NvmlGpu
from vgpu.errors import VgpuError


def main() -> None:
    gpu = NvmlGpu(0).__enter__()
    answers: dict[str, Callable[[], object]] = {
        "facts": lambda: gpu.facts,
        "capabilities": lambda: gpu.capabilities,
        "memory_use": gpu.memory_use,
        "activity": gpu.activity,
        "close": lambda: gpu.__exit__(None, None, None),
    }
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        refusal = None
        try:
            answer = answers[request]()
        except VgpuError as error:
            answer, refusal = None, (error.code, error.message)
        pickle.dump((answer, refusal), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
