"""The workloads in PyTorch: random weights and inputs, made once. Each builder returns a step to be called again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.suite.workloads.catalogue import (
    BERT_BATCH,
    BERT_TOKENS,
    DECODED,
    ELEMENTS,
    RNNT_BATCH,
    TRAINING_BATCH,
    WORKS,
)
from benchmarks.suite.workloads.notes import Notes

Step = Callable[[], object]


def gemm(size: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=torch.bfloat16)

        def step() -> None:
            for _ in range(WORKS[f"gemm{size}"].kernels):
                torch.mm(a, b, out=out)

        return step

    return build


def elementwise(device: torch.device) -> Step:
    x = torch.randn(ELEMENTS, device=device)
    y = torch.empty_like(x)
    return lambda: torch.mul(x, 1.0001, out=y)


def resnet_training(device: torch.device) -> Step:
    import torchvision

    return classifier_training(torchvision.models.resnet50(), device)


def vit_training(device: torch.device) -> Step:
    import torchvision

    return classifier_training(torchvision.models.vit_b_16(), device)


def classifier_training(model: torch.nn.Module, device: torch.device, batch: int = TRAINING_BATCH) -> Step:
    """Of images of 224 × 224, into 1000 classes."""
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def resnet_inference(batch: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        import torchvision

        like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        model = torchvision.models.resnet50().to(**like).to(memory_format=torch.channels_last).eval()
        images = torch.randn(batch, 3, 224, 224, **like).to(memory_format=torch.channels_last)
        return in_inference_mode(lambda: model(images))

    return build


def bert(device: torch.device) -> Step:
    from transformers import BertConfig, BertModel

    config = BertConfig()
    model = BertModel(config).to(device=device, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, config.vocab_size, (BERT_BATCH, BERT_TOKENS), device=device)
    attended = torch.ones_like(tokens)
    return in_inference_mode(lambda: model(input_ids=tokens, attention_mask=attended))


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Of a decoder: attention of 32 heads over 8 pairs of keys and values, and a gated network, each behind a norm."""

    def __init__(self, width: int, heads: int, pairs: int, hidden: int) -> None:
        super().__init__()
        self.shape, size = (heads, pairs), width // heads
        self.before, self.after = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.queries, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys, self.values = (torch.nn.Linear(width, pairs * size, bias=False) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)
        self.register_buffer("cache", torch.randn(2, 1, pairs, DECODED, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, pairs = self.shape
        normed = self.before(x)
        query = self.queries(normed).view(1, 1, heads, -1).transpose(1, 2)
        for kept, projected in zip(self.cache, (self.keys, self.values), strict=True):
            kept[:, :, -1] = projected(normed).view(1, pairs, -1)
        seen = torch.nn.functional.scaled_dot_product_attention(query, *self.cache, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        normed = self.after(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """As large as a Llama of a billion parameters."""

    def __init__(self, width: int = 2048, layers: int = 16, words: int = 128_256) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.layers = torch.nn.Sequential(*(Layer(width, 32, 8, 4 * width) for _ in range(layers)))
        self.norm = torch.nn.RMSNorm(width)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """The most probable next token."""
        found = self.norm(self.layers(self.embedding(token)))
        return torch.nn.functional.linear(found, self.embedding.weight).argmax(-1)


def decoder(device: torch.device) -> Step:
    """A step makes one token of the one before, always at the same place, and copies it to the host."""
    with device:
        model = Decoder().to(torch.bfloat16).eval()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    told = torch.zeros(1, 1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def step() -> None:
        token.copy_(model(token))
        told.copy_(token, non_blocking=True)

    return in_inference_mode(step)


class Transducer(torch.nn.Module):  # type: ignore[misc]
    """As large as MLPerf's RNN-T: two LSTM layers, pairs of frames stacked, three more; a predictor; a joint."""

    def __init__(self) -> None:
        super().__init__()
        self.near = torch.nn.LSTM(240, 1024, 2, batch_first=True)
        self.far = torch.nn.LSTM(2048, 1024, 3, batch_first=True)
        self.embedding = torch.nn.Embedding(29, 320)
        self.predictor = torch.nn.LSTM(320, 320, 2, batch_first=True)
        self.joint = torch.nn.Sequential(torch.nn.Linear(1344, 512), torch.nn.ReLU(), torch.nn.Linear(512, 29))

    def forward(self, frames: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        heard = self.near(frames)[0]
        heard = self.far(heard.reshape(heard.shape[0], heard.shape[1] // 2, 2048))[0]
        said = self.predictor(self.embedding(letters))[0]
        pairs = [
            heard.unsqueeze(2).expand(-1, -1, said.shape[1], -1),
            said.unsqueeze(1).expand(-1, heard.shape[1], -1, -1),
        ]
        return self.joint(torch.cat(pairs, -1))


def transducer(device: torch.device) -> Step:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = Transducer().to(device=device, dtype=dtype).eval()
    frames = torch.randn(RNNT_BATCH, 256, 240, device=device, dtype=dtype)
    letters = torch.randint(0, 29, (RNNT_BATCH, 32), device=device)
    return in_inference_mode(lambda: model(frames, letters))


class Replay:
    """A step that is one CUDA graph, and notes when it begins and ends."""

    def __init__(self, graph: torch.cuda.CUDAGraph, notes: Notes) -> None:
        self.notes = notes
        self._replay: Step = graph.replay

    def __call__(self) -> object:
        return self._replay()


def captured(build: Callable[[torch.device], Step]) -> Callable[[torch.device], Step]:
    """The step of ``build`` as one CUDA graph."""

    def captured_build(device: torch.device) -> Step:
        step, notes = build(device), Notes(device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose and allocate before the capture
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            notes.note()
            step()
            notes.note()
        return Replay(graph, notes)

    return captured_build


def long_kernel(device: torch.device) -> Step:
    from benchmarks.suite.workloads.long_kernel import spin

    return spin(device)


def in_inference_mode(step: Step) -> Step:
    def quiet() -> object:
        with torch.inference_mode():
            return step()

    return quiet


BUILDERS: Final[dict[str, Callable[[torch.device], Step]]] = {
    "gemm2048": gemm(2048),
    "gemm4096": gemm(4096),
    "gemm16384": gemm(16384),
    "elementwise": elementwise,
    "resnet50-train": resnet_training,
    "vit-train": vit_training,
    "resnet50-infer1": resnet_inference(1),
    "resnet50-infer8": resnet_inference(8),
    "bert-infer": bert,
    "graph": captured(resnet_inference(8)),
    "resnet50-graph1": captured(resnet_inference(1)),
    "long-kernel": long_kernel,
    "rnnt-infer": transducer,
    "decode-eager": decoder,
    "decode-graph": captured(decoder),
}
"""By the catalogue's names."""
