"""Tiny checkpoints of the kinds of models that `models` does not have: latent attention, linear attention,
gpt-oss, and layers that draft. Random weights under the names that published checkpoints have.

Sizes are the smallest that vLLM's GPU kernels take: latent attention has the ranks and head sizes of DeepSeek, linear
attention heads of 128, and experts a width of 128.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import models

VOCAB = 512
HIDDEN = 256
NUM_LAYERS = 2
BASE: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": VOCAB - 3,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""What their configurations have in common."""


class Weights:
    """Random tensors of one checkpoint in the making: bfloat16 where nothing else is said."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, std: float, mean: float = 0.0, dtype: str = "bfloat16") -> None:
        """A tensor of normally distributed values."""
        value = torch.randn(shape, generator=self._generator) * std + mean
        self.tensors[name] = value.to(getattr(torch, dtype))

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False) -> None:
        """A layer that keeps the spread of its inputs, times `gain`."""
        self.add(f"{name}.weight", rows, columns, std=gain / math.sqrt(columns))
        if bias:
            self.add(f"{name}.bias", rows, std=0.1)

    def norms(self, prefix: str, size: int, *names: str, mean: float = 1.0) -> None:
        """Weights of normalisations."""
        for name in names:
            self.add(f"{prefix}.{name}.weight", size, std=0.1, mean=mean)

    def mlp(self, prefix: str, width: int) -> None:
        """A gated one on the hidden size, like each expert."""
        self.linear(f"{prefix}.gate_proj", width, HIDDEN, gain=2)
        self.linear(f"{prefix}.up_proj", width, HIDDEN)
        self.linear(f"{prefix}.down_proj", HIDDEN, width)

    def ends(self, prefix: str = "model", *, norm_offset: float = 0.0) -> None:
        """Embedding, final norm and head, scaled as in `tests.support.models`."""
        self.add(f"{prefix}.embed_tokens.weight", VOCAB, HIDDEN, std=0.02)
        mean = 2 / (0.02 * math.sqrt(HIDDEN)) - norm_offset
        self.add(f"{prefix}.norm.weight", HIDDEN, std=0.1, mean=mean)
        self.add("lm_head.weight", VOCAB, HIDDEN, std=0.02)


def write(directory: Path, config: dict[str, Any], weights: Weights, more_tokens: tuple[str, ...] = ()) -> Path:
    """Config, weights and tokenizer, which has `more_tokens` before the three special ones."""
    directory.mkdir(parents=True, exist_ok=True)
    models.write_json(directory / "config.json", config)
    special = {key: BASE[key] for key in ("eos_token_id", "pad_token_id")}
    models.write_json(directory / "generation_config.json", special)
    models.write_tokenizer(directory, VOCAB, BASE["max_position_embeddings"], more_tokens)
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tiny_mla(directory: Path, *, seed: int = 0) -> Path:
    """DeepSeek-V3: latent attention in both layers, experts with a bias of their routing in the second."""
    heads, q_rank, kv_rank, nope, rope, value, experts, width = 16, 128, 512, 128, 64, 128, 4, 128
    config = {
        **BASE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    weights = Weights(seed)
    weights.ends()
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights.norms(prefix, HIDDEN, "input_layernorm", "post_attention_layernorm")
        weights.linear(f"{prefix}.self_attn.q_a_proj", q_rank, HIDDEN)
        weights.norms(f"{prefix}.self_attn", q_rank, "q_a_layernorm")
        weights.linear(f"{prefix}.self_attn.q_b_proj", heads * (nope + rope), q_rank)
        weights.linear(f"{prefix}.self_attn.kv_a_proj_with_mqa", kv_rank + rope, HIDDEN)
        weights.norms(f"{prefix}.self_attn", kv_rank, "kv_a_layernorm")
        weights.linear(f"{prefix}.self_attn.kv_b_proj", heads * (nope + value), kv_rank)
        weights.linear(f"{prefix}.self_attn.o_proj", HIDDEN, heads * value)
        if layer == 0:
            weights.mlp(f"{prefix}.mlp", 2 * HIDDEN)
            continue
        weights.linear(f"{prefix}.mlp.gate", experts, HIDDEN)
        weights.add(f"{prefix}.mlp.gate.e_score_correction_bias", experts, std=0.1, dtype="float32")
        weights.mlp(f"{prefix}.mlp.shared_experts", width)
        for expert in range(experts):
            weights.mlp(f"{prefix}.mlp.experts.{expert}", width)
    return write(directory, config, weights)


def tiny_gdn(directory: Path, *, seed: int = 0) -> Path:
    """Qwen3-Next: a gated delta net in the first layer, attention with an output gate in the second, experts in both.
    Its norms add one to what is stored."""
    heads, kv_heads, head, experts, width = 4, 2, 64, 4, 128
    keys, values, state = 2, 4, 128  # heads of the delta net, and their size
    config = {
        **BASE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": state,
        "linear_value_head_dim": state,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    weights = Weights(seed)
    weights.ends(norm_offset=1.0)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights.norms(prefix, HIDDEN, "input_layernorm", "post_attention_layernorm", mean=0.0)
        if layer == 0:
            mixer, width_all = f"{prefix}.linear_attn", (2 * keys + values) * state
            weights.linear(f"{mixer}.in_proj_qkvz", width_all + values * state, HIDDEN)
            weights.linear(f"{mixer}.in_proj_ba", 2 * values, HIDDEN)
            weights.add(f"{mixer}.conv1d.weight", width_all, 1, 4, std=0.5)
            weights.add(f"{mixer}.dt_bias", values, std=0.1, mean=1.0)
            weights.add(f"{mixer}.A_log", values, std=0.3)
            weights.norms(mixer, state, "norm")
            weights.linear(f"{mixer}.out_proj", HIDDEN, values * state)
        else:
            mixer = f"{prefix}.self_attn"
            weights.linear(f"{mixer}.q_proj", 2 * heads * head, HIDDEN)  # queries and their gates
            weights.linear(f"{mixer}.k_proj", kv_heads * head, HIDDEN)
            weights.linear(f"{mixer}.v_proj", kv_heads * head, HIDDEN)
            weights.norms(mixer, head, "q_norm", "k_norm", mean=0.5)
            weights.linear(f"{mixer}.o_proj", HIDDEN, heads * head)
        weights.linear(f"{prefix}.mlp.gate", experts, HIDDEN)
        weights.linear(f"{prefix}.mlp.shared_expert_gate", 1, HIDDEN)
        weights.mlp(f"{prefix}.mlp.shared_expert", width)
        for expert in range(experts):
            weights.mlp(f"{prefix}.mlp.experts.{expert}", width)
    return write(directory, config, weights)


def tiny_gpt_oss(directory: Path, *, seed: int = 0, mxfp4: bool = True) -> Path:
    """gpt-oss: attention with sinks and biases, every other layer in a window, and experts whose gates and values
    alternate in one tensor. `mxfp4`: experts in 4 bits, in blocks of 32 with a power of two, as they are published."""
    heads, kv_heads, head, experts, width = 8, 2, 64, 4, HIDDEN
    config = {
        **BASE,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": width,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 1024,
            "truncate": False,
        },
    }
    weights = Weights(seed)
    weights.ends()
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights.norms(prefix, HIDDEN, "input_layernorm", "post_attention_layernorm")
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights.linear(f"{prefix}.self_attn.{name}_proj", count * head, HIDDEN, bias=True)
        weights.linear(f"{prefix}.self_attn.o_proj", HIDDEN, heads * head, bias=True)
        weights.add(f"{prefix}.self_attn.sinks", heads, std=1.0)
        weights.linear(f"{prefix}.mlp.router", experts, HIDDEN, bias=True)
        for name, inputs, outputs in (("gate_up_proj", HIDDEN, 2 * width), ("down_proj", width, HIDDEN)):
            expert = f"{prefix}.mlp.experts.{name}"
            weights.add(f"{expert}_bias", experts, outputs, std=0.1)
            if mxfp4:
                weights.tensors |= _mxfp4(expert, experts, outputs, inputs, seed + layer)
            else:
                weights.add(expert, experts, inputs, outputs, std=1 / math.sqrt(inputs))
    if mxfp4:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return write(directory, config, weights)


def _mxfp4(name: str, experts: int, outputs: int, inputs: int, seed: int) -> dict[str, torch.Tensor]:
    """Two values of 4 bits in a byte, in blocks of 32 along the inputs; scales are exponents with a bias of 127."""
    generator = torch.Generator().manual_seed(seed + len(name))
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    # Values have a root mean square of about 2.9.
    exponent = 127 + round(math.log2(1 / (2.9 * math.sqrt(inputs))))
    scales = torch.randint(exponent - 1, exponent + 1, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def tiny_mtp(directory: Path, *, seed: int = 0) -> Path:
    """MiMo: a Qwen2 with one more layer that drafts the token after the next, in the same checkpoint. That layer is
    like the last one of the model, so that some of its drafts are right."""
    models.tiny_qwen2(directory, seed=seed, tie=False)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    models.write_json(directory / "config.json", config)
    hidden, last, drafting = config["hidden_size"], config["num_hidden_layers"] - 1, "model.mtp_layers.0"
    tensors = models.load_tensors(directory)
    weights = Weights(seed)
    for name in sorted(tensors):
        if name.startswith(f"model.layers.{last}."):
            weights.tensors[name.replace(f"model.layers.{last}", drafting)] = tensors[name].clone()
    weights.norms(drafting, hidden, "token_layernorm", "hidden_layernorm")
    weights.add(f"{drafting}.final_layernorm.weight", hidden, std=0.1, mean=2 / (0.02 * math.sqrt(hidden)))
    weights.linear(f"{drafting}.input_proj", hidden, 2 * hidden)
    save_file({**tensors, **weights.tensors}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
