"""A small language model of random weights that decodes greedily: ``make FOLDER`` writes its files; ``shared NAME`` and
``separate FOLDER`` compute with them, in the owner's memory or in memory of their own. Lines of JSON; a line on stdin
is a round."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS, SEED = 64, 200, 11
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
"""TinyLlama's: 1.1 billion weights, 2.05 GiB in bfloat16."""


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SHAPE)


def make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    say(bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def empty() -> Any:
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)


def loaded(kind: str, where: str) -> Any:
    import torch

    if kind == "shared":
        import vgpu.models

        return vgpu.models.attach(empty(), where)
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for path in sorted(Path(where).glob("*.safetensors")):
        state |= load_file(path, device="cuda")
    model = empty()
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    return model.requires_grad_(False).to(torch.device("cuda"))


def decode(model: Any, prompt: Any) -> tuple[list[int], float]:
    """The tokens, and how many a second."""
    import torch

    torch.cuda.synchronize()
    began = time.monotonic()
    found = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    tokens = found[0, PROMPT:].tolist()
    return tokens, TOKENS / (time.monotonic() - began)


def main() -> None:
    kind, where = sys.argv[1:]
    if kind == "make":
        make(Path(where))
        return
    import torch

    began = time.monotonic()
    model = loaded(kind, where).eval()
    torch.cuda.synchronize()
    torch.manual_seed(SEED)
    prompt = torch.randint(0, SHAPE["vocab_size"], (1, PROMPT)).cuda()
    seconds = time.monotonic() - began
    decode(model, prompt)
    say(load_seconds=round(seconds, 2), own_bytes=torch.cuda.memory_allocated())
    for line in sys.stdin:
        if line.strip() == "write":
            next(model.parameters()).data.fill_(1)
            torch.cuda.synchronize()
        tokens, pace = decode(model, prompt)
        say(tokens=tokens, pace=round(pace, 1), own_bytes=torch.cuda.memory_allocated())


if __name__ == "__main__":
    main()
