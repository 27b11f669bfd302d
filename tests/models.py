"""Tiny checkpoints for tests: random weights, real format, the same bytes for the same arguments.

Written directly (no transformers), so that one takes milliseconds. The weights are scaled so that greedy output wanders
over the vocabulary instead of repeating a token, and so that it tells one seed, or one perturbation, from another.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import ByteLevel as ByteLevelProcessor

PAD_TOKEN, START_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # the last ids of the vocabulary
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_qwen3(directory: Path, **options: Any) -> Path:
    """A random Qwen3 checkpoint in `directory`; `options` as for `_tiny`. 0.5 M parameters, 1 MB, as it stands."""
    return _tiny(directory, "Qwen3ForCausalLM", "qwen3", **options)


def tiny_qwen2(directory: Path, **options: Any) -> Path:
    """A random Qwen2 checkpoint in `directory`, with biases on q, k and v; `options` as for `_tiny`."""
    return _tiny(directory, "Qwen2ForCausalLM", "qwen2", **options)


def perturbed(source: Path, directory: Path, seed: int, scale: float = 0.1) -> Path:
    """A copy of the checkpoint `source` in which every tensor has got noise of `scale` times its root mean square.

    The noise depends on `seed` and the names alone. Tensors keep name, shape and dtype; other files are copied.
    """
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for shard in sorted(source.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in sorted(tensors):
            value = tensors[name].float()
            noise = torch.randn(value.shape, generator=generator) * value.square().mean().sqrt() * scale
            tensors[name] = (value + noise).to(tensors[name].dtype)
        save_file(tensors, directory / shard.name, metadata={"format": "pt"})
    return directory


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory, or of one safetensors file, by its name in the checkpoint; on the CPU."""
    shards = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def _tiny(
    directory: Path,
    architecture: str,
    model_type: str,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    dtype: str = "bfloat16",
    tie: bool = True,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write config, weights and tokenizer. `num_kv_heads` bounds the tensor parallel size; `vocab` is at least 259."""
    directory.mkdir(parents=True, exist_ok=True)
    eos, pad = vocab - 1, vocab - 3
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": eos,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": tie,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    _write_tokenizer(directory, vocab, max_position_embeddings)

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        value = torch.randn(shape, generator=generator) * std + mean
        tensors[name] = value.to(getattr(torch, dtype))

    # Small embeddings beside layers of gain 1: were the token's own embedding the larger part of the last hidden state,
    # a tied head would answer every token with itself. The final norm brings the logits to a spread of about 2.
    add("model.embed_tokens.weight", vocab, hidden, std=0.02)
    add("model.norm.weight", hidden, std=0.1, mean=2 / (0.02 * math.sqrt(hidden)))
    if not tie:
        add("lm_head.weight", vocab, hidden, std=0.02)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        add(f"{prefix}.input_layernorm.weight", hidden, std=0.1, mean=1.0)
        add(f"{prefix}.post_attention_layernorm.weight", hidden, std=0.1, mean=1.0)
        for projection, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            name = f"{prefix}.self_attn.{projection}"
            add(f"{name}_proj.weight", heads * head_dim, hidden, std=1 / math.sqrt(hidden))
            if model_type == "qwen2":
                add(f"{name}_proj.bias", heads * head_dim, std=0.1)
            elif projection != "v":
                add(f"{name}_norm.weight", head_dim, std=0.1, mean=1.5)  # above 1: attention picks, not averages
        add(f"{prefix}.self_attn.o_proj.weight", hidden, num_heads * head_dim, std=1 / math.sqrt(num_heads * head_dim))
        add(f"{prefix}.mlp.gate_proj.weight", 2 * hidden, hidden, std=2 / math.sqrt(hidden))
        add(f"{prefix}.mlp.up_proj.weight", 2 * hidden, hidden, std=1 / math.sqrt(hidden))
        add(f"{prefix}.mlp.down_proj.weight", hidden, 2 * hidden, std=1 / math.sqrt(2 * hidden))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write_tokenizer(directory: Path, vocab: int, max_length: int) -> None:
    """A byte-level BPE: the 256 bytes, then pairs of frequent letters, then the three special tokens."""
    specials = [PAD_TOKEN, START_TOKEN, EOS_TOKEN]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "Ġetaoinshrdlucmfwyp.,ETAOINSHRD"  # Ġ is how byte-level BPE writes a space
    pairs = [(first, second) for first in letters for second in letters[1:]]
    merges = pairs[: vocab - len(tokens) - len(specials)]
    tokens += [first + second for first, second in merges]
    if len(tokens) + len(specials) != vocab:
        raise ValueError(f"a vocabulary of {vocab} is outside what the tokenizer can fill: 259 to {259 + len(pairs)}")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "additional_special_tokens": [START_TOKEN],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,  # would change text on its way back
            "model_max_length": max_length,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
