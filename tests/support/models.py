"""Tiny checkpoints for tests: random weights, real format, the same bytes for the same arguments.

Written directly (no transformers), so that one takes milliseconds. The weights are scaled so that greedy output wanders
over the vocabulary instead of repeating a token, and so that it tells one seed, or one perturbation, from another.
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
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


def tiny_qwen3_moe(directory: Path, *, seed: int = 0, num_experts: int = 4, **options: Any) -> Path:
    """A random Qwen3-MoE checkpoint in `directory`, with two of the experts at work; `options` as for `_tiny`."""
    _tiny(directory, "Qwen3MoeForCausalLM", "qwen3_moe", seed=seed, **options)
    config = json.loads((directory / "config.json").read_text())
    hidden, width = config["hidden_size"], config["hidden_size"]
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    write_json(directory / "config.json", {**config, **experts, "norm_topk_prob": True})

    tensors = {name: tensor for name, tensor in load_tensors(directory).items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    gains = {"gate_proj": 2, "up_proj": 1, "down_proj": 1}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp"
        random = torch.randn(num_experts, hidden, generator=generator) / math.sqrt(hidden)
        tensors[f"{prefix}.gate.weight"] = random.to(getattr(torch, config["dtype"]))
        for expert in range(num_experts):
            for name, shape in shapes.items():
                random = torch.randn(shape, generator=generator) * gains[name] / math.sqrt(shape[1])
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = random.to(getattr(torch, config["dtype"]))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def in_types(source: Path, directory: Path, dtypes: Sequence[str]) -> Path:
    """A copy of the checkpoint `source` whose tensors have, in turn, each of the types; the configuration's type stays.
    Adds noise that is lost in bfloat16 but may decide how a value is rounded to it."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors = load_tensors(source)
    generator = torch.Generator().manual_seed(0)
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        noise = torch.rand(tensor.shape, generator=generator) * 2**-8
        tensors[name] = (tensor.float() * (1 + noise)).to(getattr(torch, dtypes[i % len(dtypes)]))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quantised(source: Path, directory: Path, kv_scale: float) -> Path:
    """A copy of the dense checkpoint `source`, quantised in every way that vLLM's CPU backend takes from compressed
    tensors: q, k and v to int8, o to int4 in groups, gate and up to FP8, and down not at all. Keys and values are
    cached as FP8, by scales of about `kv_scale`."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_tensors(source).items():
        if re.search(r"[qkv]_proj.weight", name):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}
        elif re.search(r"(gate|up)_proj.weight", name):
            scale = tensor.float().abs().amax(1, keepdim=True) / 448
            tensors |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        elif "o_proj" in name:
            tensors |= _packed_int4(name, tensor.float(), group_size=32)
        else:
            tensors[name] = tensor
        if "o_proj" in name:
            attention = name.removesuffix("o_proj.weight")
            tensors |= {f"{attention}{key}_scale": torch.tensor([kv_scale * n]) for n, key in ((2, "k"), (3, "v"))}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    groups = [
        ("int-quantized", "re:.*[qkv]_proj", _scheme(8, "int", "channel"), _scheme(8, "int", "token", dynamic=True)),
        (
            "float-quantized",
            "re:.*(gate|up)_proj",
            _scheme(8, "float", "channel"),
            _scheme(8, "float", "token", dynamic=True),
        ),
        ("pack-quantized", "re:.*o_proj", {**_scheme(4, "int", "group"), "group_size": 32}, None),
    ]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*down_proj"],
        "kv_cache_scheme": _scheme(8, "float", "tensor"),
        "config_groups": {
            f"group_{i}": {"format": kind, "targets": [target], "weights": weights, "input_activations": inputs}
            for i, (kind, target, weights, inputs) in enumerate(groups)
        },
    }
    write_json(directory / "config.json", config)
    return directory


def _scheme(num_bits: int, kind: str, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def _packed_int4(name: str, weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """As compressed-tensors packs: eight values of a row in one int32, offset by 8."""
    grouped = weight.view(len(weight), -1, group_size)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    values = (grouped / scale).round().to(torch.int32).view(len(weight), -1, 8) + 8
    packed = sum(values[..., i] << 4 * i for i in range(8))
    return {
        f"{name}_packed": packed,
        f"{name}_scale": scale.squeeze(-1).to(torch.bfloat16),
        f"{name}_shape": torch.tensor(weight.shape),
    }


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
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    write_tokenizer(directory, vocab, max_position_embeddings)

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


def write_tokenizer(directory: Path, vocab: int, max_length: int, more: Sequence[str] = ()) -> None:
    """A byte-level BPE: the 256 bytes, then pairs of frequent letters, then special tokens: `more`, and the three."""
    specials = [*more, PAD_TOKEN, START_TOKEN, EOS_TOKEN]
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
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "additional_special_tokens": [*more, START_TOKEN],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,  # would change text on its way back
            "model_max_length": max_length,
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As transformers writes its files."""
    path.write_text(json.dumps(content, indent=2) + "\n")
