"""Checks of a LoRA adapter before a worker gets it. Pure.

vLLM checks the rest when it loads the adapter: which modules can have an adapter, and which features of PEFT it
supports.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from genserve.errors import InvalidFieldError
from genserve.tensors.inserted_names import HALVES, MAGNITUDE, PEFT_PREFIX
from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec, bounded
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.wire.bounds import check_text

_INSTEAD = "train without it, or merge the adapter and push the weights"
# Features that add to an adapter, or change what its tensors mean. vLLM refuses or ignores them when it loads one.
_NOT_SERVED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of the adapter's own",
    "alora_invocation_tokens": "Activated LoRA",
    "trainable_token_indices": "single rows of embeddings",
    "layer_replication": "repeated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
# PEFT stacks the adapters of all experts of such a module, so a tensor has the rank times the number of experts.
_STACKED = (".experts", ".experts.base_layer")
# vLLM loads these layers whole, for classifiers.
_SAVED_MODULES = ("score", "classifier")
_SAVED = tuple(f".{module}.{kind}" for module in _SAVED_MODULES for kind in ("weight", "bias"))
# vLLM's workers match each key of a pattern, as a regular expression, with each module's name, while the engine stands
# still. Keys of this form are names, with what PEFT adds to some of them, and are matched fast.
_PATTERNS = ("rank_pattern", "alpha_pattern")
_PATTERN_KEY = re.compile(r"\^?(?:\.\*(?:\\\.)?)?(?:[\w-]|\\?\.|\\-)+\$?")
_MAX_KEY_CHARS = 256
_MAX_PATTERN_KEYS = 400  # the regex package caches 500; it would compile more of them again for each module
_FLOAT32_MAX = 3.4028234663852886e38  # vLLM multiplies float32 tensors by these numbers: a larger one would be infinity
_IN_RANGE = "in the range of float32"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """PEFT's adapter_config.json: its text, and the ranks that its modules may have: `r` and those of rank_pattern."""

    text: str
    ranks: frozenset[int]

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(self.ranks)

    @classmethod
    def parse(cls, text: str, max_rank: int, field: str) -> "LoraConfig":
        """Reads the text. Raises InvalidFieldError; `field` is the path of the text in the request."""
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidFieldError.of(field, f"is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise InvalidFieldError.of(field, "is not a JSON object")
        lacking = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
        if lacking:
            raise InvalidFieldError.of(field, f"lacks {', '.join(lacking)}, which PEFT's adapter_config.json has")
        wrong = list(_wrong_types(config))
        if wrong:
            raise InvalidFieldError.of(field, "; ".join(wrong))
        features = "; ".join(_not_served(config))
        if features:
            raise InvalidFieldError.of(field, f"has what vLLM's adapters do not have: {features}: {_INSTEAD}")
        ranks = list(_ranks(config))
        if not all(type(rank) is int and rank > 0 for rank in ranks):
            raise InvalidFieldError.of(field, "r and the ranks of rank_pattern must be whole numbers above 0")
        if max(ranks) > max_rank:
            raise InvalidFieldError.of(field, f"has rank {max(ranks)}, the daemon runs with --max-lora-rank {max_rank}")
        return cls(text, frozenset(ranks))


def check_lora_name(name: str, field: str) -> None:
    """Raises InvalidFieldError for an invalid name of an adapter."""
    if not name:
        raise InvalidFieldError.of(field, "must not be empty")
    check_text(name, field)


def largest_adapter_bytes(checkpoint: CheckpointIndex, rank: int) -> int:
    """The size of an adapter for every matrix of the checkpoint, in float32, as PEFT may save it."""
    shapes = [tensor.shape for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
    return sum(4 * rank * prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in shapes)


def lora_issues(manifest: Manifest, checkpoint: CheckpointIndex | None, config: LoraConfig) -> list[PushIssue]:
    """The reasons why the tensors do not fit the configuration and the checkpoint's model. Each A needs a B of the same
    rank, which the configuration has, and a module of their size that no other pair is for. vLLM would silently ignore
    tensors without a module, and all but the last for one module, and scale by the configuration's rank in any case."""
    specs = {spec.name: spec for spec in manifest.tensors}
    weights = {} if checkpoint is None else checkpoint.tensors
    if not any(_weight_name(name) in weights for name in specs):
        weights = {}  # named as in the model and not as in the checkpoint, or quantised: only vLLM can check
    return bounded(_issues(specs, weights, config.ranks))


def _issues(
    specs: Mapping[str, TensorSpec], weights: Mapping[str, CheckpointTensor], ranks: frozenset[int]
) -> Iterator[PushIssue]:
    first: dict[str, str] = {}
    for name, spec in specs.items():
        if (other_name := first.setdefault(_part(name), name)) != name:
            yield PushIssue(name, f"is for the same part of the model as {other_name[:256]!r}: push one of them")
            continue
        a, b = next((pair for pair in HALVES if pair[0] in name or pair[1] in name), ("", ""))
        if not a:
            if not name.endswith(_SAVED):
                yield PushIssue(name, _what_else(name))
            continue
        if a == ".lora_A." and (last := name.partition(a if a in name else b)[2]) != "weight":
            yield PushIssue(name, _what_half(last))
            continue
        is_a = a in name
        other = specs.get(name.replace(a, b) if is_a else name.replace(b, a))
        if other is None:
            yield PushIssue(name, f"is missing its {'B' if is_a else 'A'}")
        elif len(spec.shape) == len(other.shape) == 2 and is_a and spec.shape[0] != other.shape[1]:
            yield PushIssue(name, f"has rank {spec.shape[0]}, and its B {other.shape[1]}")
        elif len(spec.shape) == 2 and is_a and not _is_of_rank(name, spec.shape[0], ranks):
            yield PushIssue(name, f"has rank {spec.shape[0]}, {_named(ranks)}")
        elif weights and a == ".lora_A.":  # adapters of embeddings are transposed, and most models support none
            yield from _misfit(spec, weights.get(_weight_name(name)), dim=1 if is_a else 0)


def _part(name: str) -> str:
    """The part of the model that vLLM uses a tensor for. Of two tensors for one part it keeps one."""
    if name.endswith(_SAVED):
        return ".".join(name.rsplit(".", 2)[1:])
    name = name.replace(PEFT_PREFIX, "") if name.startswith(PEFT_PREFIX) else name
    return name.replace(".lora_embedding_", ".lora_").removesuffix(".weight")


def _what_else(name: str) -> str:
    """Why a tensor is refused that is neither an A nor a B."""
    if MAGNITUDE in name:
        return f"belongs to DoRA (use_dora), which vLLM does not support: {_INSTEAD}"
    if name.endswith(".trainable_tokens_delta"):
        return f"has single rows of embeddings (trainable_token_indices), which vLLM does not load: {_INSTEAD}"
    if name.endswith(".bias"):
        return f"is a bias, which PEFT trains beside an adapter (bias); vLLM loads none: {_INSTEAD}"
    if name.endswith(".weight"):
        return f"is a whole layer, which PEFT trains beside an adapter (modules_to_save); vLLM loads none: {_INSTEAD}"
    return "is not a tensor of an adapter: PEFT's names have .lora_A. or .lora_B. in them"


def _what_half(last: str) -> str:
    """Why an A or a B is refused whose name has more or less than `weight` after it."""
    if last == "bias":
        return f"is a bias of an adapter (lora_bias), which vLLM does not support: {_INSTEAD}"
    return (
        f"has {last[:256]!r} after .lora_A. or .lora_B., not 'weight': push what peft.get_peft_model_state_dict returns"
    )


def _is_of_rank(name: str, rank: int, ranks: frozenset[int]) -> bool:
    if name.partition(".lora_A.")[0].endswith(_STACKED):
        return rank > 0 and any(rank % each == 0 for each in ranks)
    return rank in ranks


def _named(ranks: frozenset[int]) -> str:
    fields = "r" if len(ranks) == 1 else "r and rank_pattern"
    return f"the adapter's configuration has {fields} = {', '.join(map(str, sorted(ranks)))}"


def _misfit(spec: TensorSpec, weight: CheckpointTensor | None, dim: int) -> Iterator[PushIssue]:
    if weight is None:
        yield PushIssue(spec.name, "belongs to a module that the checkpoint does not have")
    elif len(spec.shape) == len(weight.shape) == 2 and spec.shape[dim] != weight.shape[dim]:
        size, expected = spec.shape[dim], weight.shape[dim]
        yield PushIssue(spec.name, f"has {size} {'columns' if dim else 'rows'}, the module's weight has {expected}")


def _weight_name(name: str) -> str:
    """The checkpoint's name of the weight that a tensor of an adapter belongs to."""
    module = name.removeprefix(PEFT_PREFIX)
    for half in (".lora_A.weight", ".lora_B.weight"):
        module = module.removesuffix(half)
    return f"{module}.weight"


def _wrong_types(config: dict[str, Any]) -> Iterator[str]:
    """Values of a wrong type that vLLM would compute with, or fail on, in its workers. `parse` checks the ranks."""
    for name in _PATTERNS:
        if not isinstance(config.get(name), dict | None):
            yield f"{name} must be an object"
        yield from _wrong_keys(name, _pattern(config, name))
    if (num_keys := len({key for name in _PATTERNS for key in _pattern(config, name)})) > _MAX_PATTERN_KEYS:
        ends = "write keys that several modules' names end with"
        yield f"rank_pattern and alpha_pattern have {num_keys} keys, the limit is {_MAX_PATTERN_KEYS}: {ends}"
    if not _is_number(config["lora_alpha"]):
        yield f"lora_alpha must be a number {_IN_RANGE}"
    if not all(map(_is_number, _pattern(config, "alpha_pattern").values())):
        yield f"the values of alpha_pattern must be numbers {_IN_RANGE}"
    if not isinstance(config.get("bias", "none"), str):
        yield 'bias must be "none", as PEFT writes it'


def _wrong_keys(name: str, keys: Collection[str]) -> Iterator[str]:
    """Why the first bad key of a pattern is refused: it may take long to match, or is no valid pattern."""
    for key in keys:
        if len(key) > _MAX_KEY_CHARS:
            size = f"has {len(key)} characters, the limit is {_MAX_KEY_CHARS}"
            yield f"{name}: {key[:64]!r}... {size}: write the end of a module's name"
            return
        if not _PATTERN_KEY.fullmatch(key):
            plain = "write only that, such as 'self_attn.q_proj', one key for each"
            yield f"{name}: {key[:64]!r} is not just a module's name or the end of one: {plain}"
            return


def _not_served(config: dict[str, Any]) -> Iterator[str]:
    """The features of PEFT that the adapter uses and vLLM refuses."""
    for name, what in _NOT_SERVED.items():
        if config.get(name):
            yield f"{name}: {what}"
    if config.get("bias", "none") != "none":
        yield "bias: biases of the model's layers"
    saved = config.get("modules_to_save")
    if saved and not (isinstance(saved, list) and all(module in _SAVED_MODULES for module in saved)):
        yield "modules_to_save: whole layers"


def _is_number(value: object) -> bool:
    # JSON has numbers that no float can hold, and Python's parser takes NaN.
    return type(value) in (int, float) and abs(value) <= _FLOAT32_MAX  # type: ignore[arg-type]


def _ranks(config: dict[str, Any]) -> Iterator[Any]:
    yield config["r"]
    yield from _pattern(config, "rank_pattern").values()


def _pattern(config: dict[str, Any], name: str) -> dict[str, Any]:
    pattern = config.get(name)
    return pattern if isinstance(pattern, dict) else {}
