"""A tiny checkpoint of a model that sees images: Idefics3, the family of SmolVLM, which needs no torchvision."""

import math
from pathlib import Path
from typing import Any

from tests.support import models
from tests.support.kinds import BASE, HIDDEN, NUM_LAYERS, VOCAB, Weights, write

_TOWER, _PATCH, _IMAGE, _SCALE = 128, 16, 64, 2
_NUM_PATCHES = (_IMAGE // _PATCH) ** 2
_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
IMAGE_PLACEHOLDER = "<image>"


def tiny_vlm(directory: Path, *, seed: int = 0) -> Path:
    """A vision tower of two layers, a projection, and a Llama. Images are of 64 x 64 pixels and take 4 tokens."""
    heads, kv_heads, head = 4, 2, 64
    llama = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head}
    first = VOCAB - 3 - len(_TOKENS)  # special tokens are the last ones
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "bfloat16",
        "image_token_id": first + _TOKENS.index(IMAGE_PLACEHOLDER),
        "scale_factor": _SCALE,
        "tie_word_embeddings": False,
        "pad_token_id": BASE["pad_token_id"],
        "text_config": {**BASE, **llama, "model_type": "llama", "mlp_bias": False},
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": _TOWER,
            "intermediate_size": 2 * _TOWER,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": _IMAGE,
            "patch_size": _PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
    }
    weights = Weights(seed)
    weights.ends("model.text_model")
    for layer in range(NUM_LAYERS):
        prefix = f"model.text_model.layers.{layer}"
        weights.norms(prefix, HIDDEN, "input_layernorm", "post_attention_layernorm")
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights.linear(f"{prefix}.self_attn.{name}_proj", count * head, HIDDEN)
        weights.linear(f"{prefix}.self_attn.o_proj", HIDDEN, heads * head)
        weights.mlp(f"{prefix}.mlp", 2 * HIDDEN)
    _tower(weights, "model.vision_model")
    weights.linear("model.connector.modality_projection.proj", HIDDEN, _TOWER * _SCALE**2)
    write(directory, config, weights, _TOKENS)
    _write_processor(directory)
    return directory


def _tower(weights: Weights, prefix: str) -> None:
    inputs = 3 * _PATCH**2
    embeddings = f"{prefix}.embeddings"
    weights.add(f"{embeddings}.patch_embedding.weight", _TOWER, 3, _PATCH, _PATCH, std=1 / math.sqrt(inputs))
    weights.add(f"{embeddings}.patch_embedding.bias", _TOWER, std=0.1)
    weights.add(f"{embeddings}.position_embedding.weight", _NUM_PATCHES, _TOWER, std=0.5)
    norms = [f"{prefix}.post_layernorm"]
    for layer in range(NUM_LAYERS):
        block = f"{prefix}.encoder.layers.{layer}"
        norms += [f"{block}.layer_norm1", f"{block}.layer_norm2"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights.linear(f"{block}.self_attn.{name}", _TOWER, _TOWER, bias=True)
        weights.linear(f"{block}.mlp.fc1", 2 * _TOWER, _TOWER, bias=True)
        weights.linear(f"{block}.mlp.fc2", _TOWER, 2 * _TOWER, bias=True)
    for norm in norms:
        weights.add(f"{norm}.weight", _TOWER, std=0.1, mean=1.0)
        weights.add(f"{norm}.bias", _TOWER, std=0.1)


def _write_processor(directory: Path) -> None:
    processor = {"processor_class": "Idefics3Processor"}
    image: dict[str, Any] = {
        **processor,
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": _IMAGE},
        "max_image_size": {"longest_edge": _IMAGE},
        "do_image_splitting": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    models.write_json(directory / "preprocessor_config.json", image)
    models.write_json(directory / "processor_config.json", {**processor, "image_seq_len": _NUM_PATCHES // _SCALE**2})
