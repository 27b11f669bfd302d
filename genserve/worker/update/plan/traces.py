"""What a loader leaves on Python's objects: attributes of a model's modules and parts, and of its parameters."""

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
# Objects of these packages are looked into where a container has them; as attributes of a module they are parts.
_ENTERED = ("vllm.model_executor.", "vllm.models.", "vllm.v1.attention.")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Trace:
    """An attribute that a loader has set to a plain value: numbers, strings, and containers of them. `note` is equal
    for two traces that leave the same."""

    owner: Any
    key: str
    value: Any
    note: tuple[Any, ...]

    def leave(self) -> None:
        """Sets it again."""
        vars(self.owner)[self.key] = copy.deepcopy(self.value)


class Attributes:
    """The attributes of objects, as they were when this was made."""

    def __init__(self, owners: Iterable[Any]) -> None:
        """`owners`: those objects, each once."""
        self._kept: list[Any] = []  # while they are there, no other object gets the id of one of them
        self._before = [(owner, self._noted_of(owner)) for owner in owners]

    def traces(self) -> list[Trace]:
        """What has changed since. Raises ValueError naming an attribute whose value is not plain, or is gone."""
        found: list[Trace] = []
        for owner, before in self._before:
            now = self._noted_of(owner)
            for key in before.keys() | now.keys():
                if before.get(key, _ABSENT) == now.get(key, _ABSENT):
                    continue
                if key not in now or not _is_plain(vars(owner)[key]):
                    raise ValueError(f"it changes {key} of a {type(owner).__name__}")
                found.append(Trace(owner, key, copy.deepcopy(vars(owner)[key]), (id(owner), key, now[key])))
        return found

    def _noted_of(self, owner: Any) -> dict[str, Any]:
        return {key: self._noted(value, frozenset()) for key, value in list(vars(owner).items())}

    def _noted(self, value: Any, within: frozenset[int]) -> Any:
        """Equal for two values that cannot be told from each other. `within`: the ids of what is around the value."""
        kind = type(value)
        if isinstance(value, _ATOMS):
            return kind, str(value) if kind is float else value  # 0.0 and -0.0 are equal
        self._kept.append(value)
        if id(value) in within:
            return id(value)
        within |= {id(value)}
        if isinstance(value, Mapping):
            return kind, [(self._noted(key, within), self._noted(each, within)) for key, each in value.items()]
        if isinstance(value, list | tuple | deque):
            return kind, [self._noted(each, within) for each in value]
        if isinstance(value, set | frozenset):
            return kind, {each if isinstance(each, _ATOMS) else id(each) for each in value}
        if len(within) > 1 and _is_entered(kind) and hasattr(value, "__dict__"):
            return id(value), [(key, self._noted(each, within)) for key, each in list(vars(value).items())]
        return id(value)


def _is_entered(kind: type) -> bool:
    return kind.__module__.startswith(_ENTERED) and not issubclass(kind, nn.Module | QuantizationConfig)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(each) for item in value.items() for each in item)
    if type(value) in (list, tuple, set):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _ATOMS)
