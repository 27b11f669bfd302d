"""The user's own checkpoint, and a second version of it to push.

A real second checkpoint would have to be made and stored. Instead, "b" is the first one with one norm scaled. No cold
start tells what it should generate, but it differs from "a", and "a" pushed over it must equal the checkpoint that was
started on.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from genserve.doctor.room import BF16_BYTES, ModelSize
from genserve.doctor.trial.tiny_model import Checkpoint
from genserve.errors import InvalidFieldError
from genserve.tensors.safetensors import StoredTensor, read_checkpoint

_FACTOR: Final = 2.0
# A norm before a layer: scaling the last one would only scale the logits.
_NORM: Final = re.compile(r"\blayers\.\d+\..*norm.*\.weight$|\bh\.\d+\.ln_\d\.weight$")


def checkpoints(path: str) -> dict[str, Checkpoint]:
    """The checkpoint as "a", and its changed copy as "b". The bytes stay in the files. Raises InvalidFieldError if the
    path is not a checkpoint directory."""
    if not Path(path, "config.json").is_file():
        raise InvalidFieldError.of("model", f"{path!a} is not a directory with a checkpoint and its config.json")
    try:
        tensors = {tensor.name: tensor for tensor in read_checkpoint(Path(path))}
    except ValueError as error:
        raise InvalidFieldError.of("model", str(error)) from error
    norm = next((tensor for name, tensor in tensors.items() if _NORM.search(name) and _can_scale(tensor)), None)
    if norm is None:
        raise InvalidFieldError.of(
            "model", f"{path} has no norm in a layer that could be scaled to make a second version"
        )
    return {"a": tensors, "b": {**tensors, norm.name: scaled(norm, _FACTOR)}}


def size_of(path: str, tensors: Checkpoint) -> ModelSize:
    """The sizes of the model that matter, on all ranks together. The checkpoint has a tied head once, as the engine.
    Raises InvalidFieldError if the configuration cannot be read."""
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidFieldError.of("model", f"{path}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidFieldError.of("model", f"{path}/config.json is not a JSON object")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise InvalidFieldError.of("model", f"text_config in {path}/config.json is not a JSON object")
    sizes = [len(tensor.data) for tensor in tensors.values()]
    return ModelSize(Path(path).name, sum(sizes), max(sizes, default=0), _kv_bytes_per_token(text))


def scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
    """The tensor times a factor, rounded towards zero."""
    import numpy as np

    if tensor.dtype == "BF16":
        values = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        product = (values.view("<f4") * np.float32(factor)).view("<u4") >> 16
        data = product.astype("<u2")
    else:
        kind = {"F16": "<f2", "F32": "<f4"}[tensor.dtype]
        data = (np.frombuffer(tensor.data, kind) * factor).astype(kind)
    return StoredTensor(tensor.name, tensor.dtype, tensor.shape, memoryview(data.tobytes()))


def _can_scale(tensor: StoredTensor) -> bool:
    return tensor.dtype in ("BF16", "F16", "F32") and len(tensor.shape) == 1 and len(tensor.data) > 0


def _kv_bytes_per_token(config: dict[str, Any]) -> float:
    """The size of a token's keys and values for plain attention in bf16: an upper bound for others. 0 if the
    configuration does not tell."""
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim")
    heads, kv_heads, layers, hidden, head = (_count(config.get(name)) for name in names)
    return 2.0 * BF16_BYTES * (kv_heads or heads) * layers * (head or (hidden // heads if heads else 0))


def _count(value: object) -> int:
    """The value if it is a number above 0, else 0."""
    return max(0, value) if isinstance(value, int) else 0
