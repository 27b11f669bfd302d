"""The checkpoints of the scenarios: tiny models with random weights, parts of them, and an adapter."""

import hashlib
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import adapters, models

Tensors = dict[str, torch.Tensor]


def make(directory: Path) -> dict[str, str]:
    """Paths by the names that scenarios use."""
    a = models.tiny_qwen3(directory / "a", seed=0, hidden=256, dtype="float32")
    b = models.perturbed(a, directory / "b", seed=1, scale=0.5)
    of_a, of_b = models.load_tensors(a), models.load_tensors(b)
    names = sorted(of_b)
    half = names[: len(names) // 2]
    renamed = {name.replace("model.norm", "model.norms"): tensor for name, tensor in of_b.items()}
    adapter = adapters.adapter(a, seed=2)
    return {
        "a": str(a),
        "b": str(b),
        "half_of_b": _saved({name: of_b[name] for name in half}, directory / "half_of_b.safetensors"),
        "rest_of_b": _saved({name: of_b[name] for name in names if name not in half}, directory / "rest.safetensors"),
        "renamed": _saved(renamed, directory / "renamed.safetensors"),
        "reshaped": _saved({**of_a, "model.norm.weight": torch.ones(7)}, directory / "reshaped.safetensors"),
        "adapter": str(adapters.saved(adapter, directory / "adapter")),
        "merged": str(_model(adapters.merged(a, adapter), a, directory / "merged")),
    }


def _saved(tensors: Tensors, path: Path) -> str:
    save_file(tensors, path)
    return str(path)


def _model(tensors: Tensors, like: Path, directory: Path) -> Path:
    shutil.copytree(like, directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@cache
def sha256_of(directory: str) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, by name."""
    tensors = models.load_tensors(Path(directory))
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


@cache
def num_bytes_of(directory: str) -> int:
    """The size of all tensors."""
    return sum(int(tensor.nbytes) for tensor in models.load_tensors(Path(directory)).values())


@dataclass(frozen=True, slots=True)
class Greedy:
    """The most likely tokens, one after the other, with their log-probabilities and as text."""

    token_ids: list[int]
    logprobs: list[float]
    text: str


def greedy(directory: str, prompt: str | list[Any], num_tokens: int) -> Greedy:
    """What Hugging Face Transformers finds, for a prompt of token ids, text or messages."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        prompt = str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens, logprobs = _most_likely(directory, tuple(ids), num_tokens)
    return Greedy(tokens, logprobs, str(tokenizer.decode(tokens, skip_special_tokens=True)))


@cache
def _most_likely(directory: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(num_tokens):
            best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
    return tokens[len(prompt) :], logprobs
