"""Tiny checkpoints in the quantised formats that are published for GPUs, made from a dense one of `models`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import models

_E4M3_MAX = 448.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs lies in which four bits of an int32, from the lowest on."""


def fp8_static(source: Path, directory: Path) -> Path:
    """FP8 with one scale for each linear's weights, and one for its inputs."""

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().max() / _E4M3_MAX
        return {
            f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
            f"{name}.weight_scale": scale.float(),
            f"{name}.input_scale": scale.new_tensor(8 / _E4M3_MAX).float() * (1 + weight.abs().mean().float()),
        }

    return _packed(source, directory, {"quant_method": "fp8", "activation_scheme": "static"}, pack)


def fp8_blocks(source: Path, directory: Path) -> Path:
    """FP8 with a scale for each block of 128 x 128 weights, as DeepSeek and Qwen publish it."""
    size = 128

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = (-(-length // size) for length in weight.shape)
        padded = weight.new_zeros(rows * size, columns * size)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.view(rows, size, columns, size).abs().amax((1, 3)) / _E4M3_MAX
        wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
        return {
            f"{name}.weight": (weight / wide).to(torch.float8_e4m3fn),
            f"{name}.weight_scale_inv": scale.float(),
        }

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
    return _packed(source, directory, config, pack)


def awq(source: Path, directory: Path, group_size: int = 64) -> Path:
    """AWQ: 4 bits with a zero point for each group of inputs."""

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight.shape
        groups = weight.t().view(inputs // group_size, group_size, outputs)
        low, high = groups.amin(1), groups.amax(1)
        scale = ((high - low) / 15).clamp_min(1e-5)
        zero = (-low / scale).round().clamp(0, 15)
        values = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15).view(inputs, outputs)
        return {
            f"{name}.qweight": _int4(values),
            f"{name}.qzeros": _int4(zero),
            f"{name}.scales": scale.to(torch.float16).contiguous(),
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return _packed(source, directory, config, pack)


def _int4(values: torch.Tensor) -> torch.Tensor:
    """float [rows, columns] of 0 to 15 -> int32 [rows, columns / 8]."""
    eights = values.to(torch.int64).view(len(values), -1, 8)
    packed = sum(eights[..., column] << 4 * place for place, column in enumerate(_AWQ_ORDER))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int32).contiguous()  # wraps round above 2^31


def _packed(
    source: Path,
    directory: Path,
    quantisation: dict[str, Any],
    pack: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
) -> Path:
    """A copy of the checkpoint `source` with the linears of its layers packed, and this quantisation in its config."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in models.load_tensors(source).items():
        is_linear = ".layers." in name and name.endswith("_proj.weight")
        tensors |= pack(name.removesuffix(".weight"), tensor.float()) if is_linear else {name: tensor}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    models.write_json(directory / "config.json", {**config, "quantization_config": quantisation})
    return directory
