"""The workloads by name: what a unit of their work is, how they are driven, and what stands in for them in a rehearsal.

``models.py`` builds them in PyTorch, ``stamped.py`` imitates them on the simulated GPU. Nothing here
needs either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["kernels", "training", "inference"]


@dataclass(frozen=True, slots=True)
class Work:
    """``units`` of ``unit`` per step, at most ``depth`` steps in flight.

    ``host_bound``: between its kernels the GPU waits for the host, so exclusive it is busy for less than all the time.
    ``kernels`` × ``kernel_ns`` and then ``host_ns`` of host time is the stand-in's step on a simulated H200.
    """

    name: str
    title: str
    kind: Kind
    units: float
    unit: str
    depth: int
    host_bound: bool = False
    kernels: int = 1
    kernel_ns: int = 500_000
    host_ns: int = 0


def _gemm(size: int, depth: int, kernel_ns: int, kernels: int = 1) -> Work:
    title, work = f"GEMM, bf16, {size}³", kernels * 2 * size**3 / 1e12
    return Work(f"gemm{size}", title, "kernels", work, "TFLOP/s", depth, kernels=kernels, kernel_ns=kernel_ns)


ELEMENTS: Final = 64 * 2**20
BERT_BATCH: Final = 8
BERT_TOKENS: Final = 128
RNNT_BATCH: Final = 8
TRAINING_BATCH: Final = 64
DECODED: Final = 256
"""Tokens that a decoder has in its cache, and looks back at for the next one."""

WORKS: Final = {
    work.name: work
    for work in (
        _gemm(2048, 32, 30_000, 8),  # one at a time, with an event each, the host would not keep up
        _gemm(4096, 64, 200_000),
        _gemm(16384, 4, 12_000_000),
        Work(
            "elementwise", "elementwise over 256 MiB", "kernels", 2 * 4 * ELEMENTS / 1e9, "GB/s", 64, kernel_ns=130_000
        ),
        Work(
            "resnet50-train",
            f"ResNet-50 training, bs {TRAINING_BATCH}, bf16 autocast",
            "training",
            TRAINING_BATCH,
            "img/s",
            3,
            kernels=56,
        ),
        Work(
            "resnet50-infer1",
            "ResNet-50 inference, bs 1, bf16",
            "inference",
            1,
            "img/s",
            1,
            host_bound=True,
            kernels=10,
            kernel_ns=100_000,
            host_ns=1_500_000,
        ),
        Work(
            "resnet50-infer8",
            "ResNet-50 inference, bs 8, bf16",
            "inference",
            8,
            "img/s",
            2,
            host_bound=True,
            kernels=10,
            kernel_ns=150_000,
        ),
        Work(
            "bert-infer",
            f"BERT-base inference, bs {BERT_BATCH}, {BERT_TOKENS} tokens, bf16",
            "inference",
            BERT_BATCH,
            "sequences/s",
            2,
            host_bound=True,
            kernels=12,
            kernel_ns=150_000,
        ),
        Work(
            "graph",
            "CUDA graph of ResNet-50 inference, bs 8, bf16",
            "kernels",
            8,
            "img/s",
            4,
            kernels=10,
            kernel_ns=100_000,
        ),
        Work("stamped", "kernels of 0.5 ms that note %globaltimer", "kernels", 1, "kernels/s", 32),
        Work("long-kernel", "one Triton kernel of about 30 ms", "kernels", 1, "kernels/s", 2, kernel_ns=30_000_000),
        Work(
            "resnet50-graph1",
            "CUDA graph of ResNet-50 inference, bs 1, bf16",
            "inference",
            1,
            "img/s",
            1,
            kernels=5,
            kernel_ns=200_000,
        ),
        Work(
            "decode-eager",
            "decoder of 1.2 B parameters, bs 1, bf16, eager, each token to the host",
            "inference",
            1,
            "tokens/s",
            1,
            host_bound=True,
            kernels=20,
            kernel_ns=40_000,
            host_ns=200_000,
        ),
        Work(
            "decode-graph",
            "the same decoder as one CUDA graph, each token to the host",
            "inference",
            1,
            "tokens/s",
            1,
            kernels=5,
            kernel_ns=200_000,
        ),
        Work(
            "vit-train",
            f"ViT-B/16 training, bs {TRAINING_BATCH}, bf16 autocast",
            "training",
            TRAINING_BATCH,
            "img/s",
            3,
            kernels=60,
        ),
        Work(
            "rnnt-infer",
            f"RNN-T, 5 + 2 LSTM layers and joint, bs {RNNT_BATCH}, fp16",
            "inference",
            RNNT_BATCH,
            "utterances/s",
            2,
            host_bound=True,
            kernels=20,
            kernel_ns=200_000,
        ),
    )
}
STAMPED: Final = "stamped"
"""The one that is no PyTorch program (``stamped.py``)."""
SHARED: Final = (
    "gemm4096",
    "resnet50-train",
    "elementwise",
    "gemm2048",
    "gemm16384",
    "resnet50-infer1",
    "resnet50-infer8",
    "bert-infer",
    "graph",
    "long-kernel",
)
"""What shares are measured with, the most telling first."""
PAIRED: Final = ("gemm4096", "resnet50-train")
"""... and throughput without a profiler."""
