"""The user's own checkpoint, and a second version of it to push.

A second checkpoint of its size would have to be made and kept somewhere. "b" is the first one with a norm of it scaled
instead: what it should say is not known from a cold start, but it says something else than "a", and "a" pushed over it
must be what was started on.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from genserve.doctor.room.size import BF16_BYTES, ModelSize
from genserve.doctor.trial.tiny_model import Checkpoint
from genserve.errors import InvalidFieldError
from genserve.tensors.safetensors import StoredTensor, read_checkpoint

_FACTOR: Final = 2.0
# A norm before a layer: to scale the last one would only scale the logits.
_NORM: Final = re.compile(r"\blayers\.\d+\..*norm.*\.weight$|\bh\.\d+\.ln_\d\.weight$")


def checkpoints(path: str) -> dict[str, Checkpoint]:
    """The checkpoint as "a", and as "b" what was made of it; the bytes stay in the files. Raises InvalidFieldError for
    what is not a checkpoint directory."""
    if not Path(path, "config.json").is_file():
        raise InvalidFieldError.of("model", f"{path!a} is not a directory with a checkpoint and its config.json")
    try:
        tensors = {tensor.name: tensor for tensor in read_checkpoint(Path(path))}
    except ValueError as error:
        raise InvalidFieldError.of("model", str(error)) from error
    norm = next((tensor for name, tensor in tensors.items() if _NORM.search(name) and _can_scale(tensor)), None)
    if norm is None:
        raise InvalidFieldError.of(
            "model", f"{path} has no norm of a layer that could be scaled to have another version"
        )
    return {"a": tensors, "b": {**tensors, norm.name: scaled(norm, _FACTOR)}}


def size_of(path: str, tensors: Checkpoint) -> ModelSize:
    """What of it takes room, on all ranks together. A tied head lies in the checkpoint once, as in the engine. Raises
    InvalidFieldError when the configuration cannot be read."""
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
    """Of plain attention in bf16; an upper bound for what keeps less. 0 where the configuration does not say."""
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim")
    heads, kv_heads, layers, hidden, head = (_count(config.get(name)) for name in names)
    return 2.0 * BF16_BYTES * (kv_heads or heads) * layers * (head or (hidden // heads if heads else 0))


def _count(value: object) -> int:
    """0 for anything but a number above it."""
    return max(0, value) if isinstance(value, int) else 0
