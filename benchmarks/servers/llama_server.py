"""A server of llama.cpp (package llama-cpp-python), which knows of no vGPU; for ``benchmarks.servers --program``.

    python benchmarks/servers/llama_server.py --layers 8 --cache-tokens 32768 --seed 1

The model is a GGUF file of random weights, written once per seed and size into the folder for temporary files. Its
requests are those of answering.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import Llama, llama_supports_gpu_offload

from benchmarks.servers.answering import serve

WIDTH, INNER, HEADS, CACHE_HEADS, WORDS = 4096, 14336, 32, 8, 32000
PROMPT_TOKENS = 64


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (WORDS, WIDTH), "output.weight": (WORDS, WIDTH)}
    small = WIDTH // HEADS * CACHE_HEADS
    for layer in range(layers):
        parts = {"attn_q": (WIDTH, WIDTH), "attn_k": (small, WIDTH), "attn_v": (small, WIDTH)}
        parts |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
        parts["ffn_down"] = (WIDTH, INNER)
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def write_model(path: Path, layers: int, seed: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 16)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(CACHE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("llama")
    special = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    words = [*special, *(b"word%d" % number for number in range(WORDS - len(special)))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (WORDS - len(special))
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types(kinds)
    random = np.random.default_rng(seed)
    some = (random.standard_normal(1 << 24, dtype=np.float32) * 0.02).astype(np.float16)
    for number, (name, shape) in enumerate(tensors(layers).items()):
        size = int(np.prod(shape))
        weights = np.resize(np.roll(some, 1009 * number), size)  # a part of it, again and again
        writer.add_tensor(name, weights.reshape(shape))
    for name in (f"blk.{layer}.{part}_norm.weight" for layer in range(layers) for part in ("attn", "ffn")):
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model(layers: int, seed: int) -> Path:
    path = Path(tempfile.gettempdir()) / f"random-llama-{layers}-{seed}.gguf"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        write_model(new, layers, seed)
        new.rename(path)
    return path


class Server:
    def __init__(self, layers: int, cache_tokens: int, seed: int, gpu_layers: int) -> None:
        path = model(layers, seed)
        self.llama = Llama(
            str(path), n_gpu_layers=gpu_layers, n_ctx=cache_tokens, n_batch=512, use_mmap=False, verbose=False
        )
        cache = 2 * 2 * layers * cache_tokens * WIDTH // HEADS * CACHE_HEADS
        self.owned = path.stat().st_size + cache if gpu_layers else 0

    def answer(self, count: int, seed: int | None = None) -> tuple[list[list[int]], list[float]]:
        tokens: list[list[int]] = []
        times: list[float] = []
        while len(tokens) < count:
            began = time.perf_counter()
            if seed is not None and not tokens:
                self.llama.reset()
                self.last = [int(t) for t in np.random.default_rng(seed).integers(300, WORDS, PROMPT_TOKENS)]
            self.llama.eval(self.last)
            self.last = [int(self.llama.sample(temp=0.0))]
            tokens.append(self.last)
            times.append(time.perf_counter() - began)
        return tokens, times

    def sums(self) -> list[int]:
        """Of the cache after a prompt: all weights have a part in it."""
        self.answer(4, 7)
        state = self.llama.save_state()
        return [zlib.crc32(state.llama_state)]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("cache-tokens", 32768), ("seed", 1), ("gpu-layers", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.gpu_layers and not llama_supports_gpu_offload():
        sys.exit("llama.cpp sees no GPU")
    server = Server(args.layers, args.cache_tokens, args.seed, args.gpu_layers)
    server.answer(2, 0)
    serve(server, server.owned)


if __name__ == "__main__":
    main()
