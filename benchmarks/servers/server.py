"""A model server of its own, which knows of no vGPU: transformers, a static cache, decode steps as a captured graph.

    python benchmarks/servers/server.py --layers 32 --cache-tokens 7680 --batch 8 --seed 1

The weights are random, of a fixed seed, and all kernels are deterministic ones. answering.py has its requests.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from benchmarks.servers.answering import serve

PROMPT_TOKENS = 64


class Server:
    def __init__(self, layers: int, batch: int, cache_tokens: int, seed: int, *, eager: bool = False) -> None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        self.config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=cache_tokens,
        )
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            self.model = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa").eval()
        self.batch, self.cache_tokens = batch, cache_tokens
        self.cache = self.new_cache()
        self.token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
        self.place = torch.zeros((1,), dtype=torch.long, device="cuda")
        self.host = torch.zeros((batch,), dtype=torch.long).pin_memory()
        self.prefill(torch.zeros((batch, PROMPT_TOKENS), dtype=torch.long, device="cuda"))
        self.decode = self.step if eager else self.capture().replay

    def new_cache(self) -> StaticCache:
        try:
            return StaticCache(config=self.config, max_cache_len=self.cache_tokens)
        except TypeError:
            return StaticCache(
                config=self.config,
                max_batch_size=self.batch,
                max_cache_len=self.cache_tokens,
                device="cuda",
                dtype=torch.bfloat16,
            )

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        out = self.model(
            input_ids=tokens,
            past_key_values=self.cache,
            cache_position=places,
            position_ids=places[None, :].expand(self.batch, -1),
            use_cache=True,
        )
        return out.logits[:, -1].float().argmax(-1, keepdim=True)

    def prefill(self, prompt: torch.Tensor) -> None:
        self.cache.reset()
        places = torch.arange(prompt.shape[1], device="cuda")
        self.token.copy_(self.forward(prompt, places))
        self.place.fill_(prompt.shape[1])

    def step(self) -> None:
        self.token.copy_(self.forward(self.token, self.place))
        self.place.add_(1)

    def capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def answer(self, count: int, seed: int | None = None) -> tuple[list[list[int]], list[float]]:
        tokens: list[list[int]] = []
        times: list[float] = []
        while len(tokens) < count:
            began = time.perf_counter()
            if seed is not None and not tokens:
                self.prefill(self.prompt(seed).cuda())
            else:
                self.decode()
            tokens.append(self.read())
            times.append(time.perf_counter() - began)
        return tokens, times

    def prompt(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.config.vocab_size, (self.batch, PROMPT_TOKENS), generator=generator)

    def sums(self) -> list[int]:
        return [int(weight.flatten().view(torch.int64).sum()) for weight in self.model.parameters()]

    def read(self) -> list[int]:
        self.host.copy_(self.token[:, 0], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return [int(token) for token in self.host]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 32), ("batch", 8), ("cache-tokens", 7680), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eager", action="store_true", help="no captured graph")
    args = parser.parse_args()
    server = Server(args.layers, args.batch, args.cache_tokens, args.seed, eager=args.eager)
    serve(server, torch.cuda.memory_reserved())


if __name__ == "__main__":
    main()
