"""The built-in model: a Llama with random weights, under a megabyte, generated without torch and without a network.

The weights are scaled so that greedy output varies over the vocabulary and from one seed to another. The embeddings are
small beside layers of gain 1: otherwise a tied head would answer every token with itself. The last norm spreads the
logits. The model has at least two heads of 64, a size that every attention backend has, and one head for each
tensor-parallel rank.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from genserve.tensors.safetensors import StoredTensor, write_safetensors

Checkpoint = dict[str, StoredTensor]
"""Tensors by their names in the checkpoint."""

VOCABULARY: Final = 512
MAX_MODEL_LEN: Final = 2048
_LAYERS: Final = 2
_HIDDEN: Final = 128
_HEAD: Final = 64
_SPECIALS: Final = ("<|pad|>", "<|start|>", "<|end|>")
_SEEDS: Final = {"a": 1, "b": 2}


def checkpoints(num_ranks: int) -> dict[str, Checkpoint]:
    """Two checkpoints of the model, "a" and "b", which only have their shapes in common."""
    return {name: _tensors(seed, max(2, num_ranks)) for name, seed in _SEEDS.items()}


def write(directory: Path, tensors: Checkpoint) -> Path:
    """Writes a checkpoint directory for vLLM, with a tokenizer. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    num_heads = tensors["model.layers.0.self_attn.q_proj.weight"].shape[0] // _HEAD
    end = VOCABULARY - 1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": end,
        "pad_token_id": VOCABULARY - 3,
        "dtype": "bfloat16",
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "max_position_embeddings": MAX_MODEL_LEN,
        "num_attention_heads": num_heads,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": num_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": end})
    _write_tokenizer(directory)
    write_safetensors(directory / "model.safetensors", tensors.values())
    return directory


def _tensors(seed: int, num_heads: int) -> Checkpoint:
    import numpy as np

    random = np.random.default_rng(seed)
    tensors: Checkpoint = {}

    def add(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        values = random.normal(mean, std, shape).astype("<f4")
        halves = (values.view("<u4") >> 16).astype("<u2")  # bfloat16 is the upper half of a float32
        data = memoryview(halves.tobytes())
        tensors[name] = StoredTensor(name, "BF16", shape, data)

    add("model.embed_tokens.weight", VOCABULARY, _HIDDEN, std=0.02)
    add("model.norm.weight", _HIDDEN, std=0.1, mean=2 / (0.02 * math.sqrt(_HIDDEN)))
    for layer in range(_LAYERS):
        prefix, width = f"model.layers.{layer}", num_heads * _HEAD
        add(f"{prefix}.input_layernorm.weight", _HIDDEN, std=0.1, mean=1.0)
        add(f"{prefix}.post_attention_layernorm.weight", _HIDDEN, std=0.1, mean=1.0)
        for projection in "qkv":
            gain = 1.0 if projection == "v" else 1.5  # attention selects instead of averaging
            add(f"{prefix}.self_attn.{projection}_proj.weight", width, _HIDDEN, std=gain / math.sqrt(_HIDDEN))
        add(f"{prefix}.self_attn.o_proj.weight", _HIDDEN, width, std=1 / math.sqrt(width))
        add(f"{prefix}.mlp.gate_proj.weight", 2 * _HIDDEN, _HIDDEN, std=2 / math.sqrt(_HIDDEN))
        add(f"{prefix}.mlp.up_proj.weight", 2 * _HIDDEN, _HIDDEN, std=1 / math.sqrt(_HIDDEN))
        add(f"{prefix}.mlp.down_proj.weight", _HIDDEN, 2 * _HIDDEN, std=1 / math.sqrt(2 * _HIDDEN))
    return tensors


def _write_tokenizer(directory: Path) -> None:
    """Byte-level vocabulary: the 256 bytes, names for the other entries, and the special tokens."""
    tokens = _byte_characters()
    tokens += [f"word{number}" for number in range(VOCABULARY - len(tokens) - len(_SPECIALS))]
    first_special = len(tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    added = [
        {
            "id": first_special + number,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, token in enumerate(_SPECIALS)
    ]
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    pad, start, end = _SPECIALS
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_MODEL_LEN}
    special = {"pad_token": pad, "bos_token": start, "eos_token": end}
    _write_json(directory / "tokenizer_config.json", {**settings, **special})


def _byte_characters() -> list[str]:
    """The characters that byte-level tokenizers use for bytes (GPT-2's table): printable ones stay, the others are from
    U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
