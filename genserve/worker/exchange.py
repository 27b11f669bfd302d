"""The exchange of live weights for prepared ones, and back.

The live model keeps its modules, parameters and attention layers, which hold the KV cache and which others refer to;
what they point at changes. Where something captured addresses (CUDA graphs), contents are copied instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from genserve.worker.tree import Holding


@dataclass(slots=True)
class _Entry:
    name: str
    live: Holding
    new: Any
    old: Any = None


class Exchange:
    """A prepared version, ready to change places with the live one."""

    def __init__(
        self, live: Mapping[str, Holding], prepared: Mapping[str, Holding], *, addresses_captured: bool
    ) -> None:
        """Takes the prepared values; raises ValueError, naming what differs, unless both have the same structure.

        `prepared` may lack what is no tensor of a module: what preparing did not write is no weight.
        """
        only_prepared = sorted(prepared.keys() - live.keys())
        only_live = sorted(name for name in live.keys() - prepared.keys() if _is_tensor_of_module(live[name]))
        if only_live or only_prepared:
            raise ValueError(
                "the prepared model differs from the live one: "
                f"only live {only_live[:8]}, only prepared {only_prepared[:8]}"
            )
        self._addresses_captured = addresses_captured
        self._entries: list[_Entry] = []
        new_by_live: dict[int, int] = {}
        for name, place in live.items():
            if name not in prepared:
                continue
            new, present = _content(prepared[name].value), _content(place.value)
            if _same(new, present):
                continue  # shared by the models, such as the rotary table
            if type(present) is not type(new):
                raise ValueError(f"{name} is a {type(present).__name__} live and a {type(new).__name__} prepared")
            if isinstance(present, torch.Tensor):
                if (present.shape, present.dtype) != (new.shape, new.dtype):
                    raise ValueError(
                        f"{name} is {present.dtype}{list(present.shape)} live and {new.dtype}{list(new.shape)} prepared"
                    )
                if present.numel() > 0 and new_by_live.setdefault(id(place.value), new.data_ptr()) != new.data_ptr():
                    raise ValueError(f"{name} is tied to another tensor live and not tied prepared")
            elif addresses_captured:
                kind = "a number" if isinstance(present, float) else "a closure"
                raise ValueError(f"{name} is {kind}, which compiled code has captured; start with --enforce-eager")
            self._entries.append(_Entry(name, place, new))

    def commit(self) -> None:
        """Puts the prepared values in place and keeps the replaced ones; raises RuntimeError if one is not there then.
        Copies are not read back: the way over the device's memory would double the pause."""
        for entry in self._entries:
            content = _content(entry.live.value)
            copied = isinstance(content, torch.Tensor) and self._addresses_captured
            entry.old = content.clone() if copied else content
        for entry in self._entries:
            self._put(entry, entry.new)
        _synchronize()
        for entry in () if self._addresses_captured else self._entries:
            if not self._is(entry, entry.new):
                raise RuntimeError(f"{entry.name} did not take its new value")

    def free(self) -> None:
        """Lets go of the values that are not live, one at a time: it takes long, and other threads shall run."""
        while self._entries:
            self._entries.pop()

    def rollback(self) -> None:
        """Puts the replaced values back, for as far as a commit got; raises RuntimeError if one is not what it was."""
        for entry in self._entries:
            if entry.old is not None:
                self._put(entry, entry.old)
        _synchronize()
        for entry in self._entries:
            if entry.old is not None and not self._is(entry, entry.old):
                raise RuntimeError(f"{entry.name} could not be put back")

    def _put(self, entry: _Entry, value: Any) -> None:
        place = entry.live
        if isinstance(value, torch.Tensor) and self._addresses_captured:
            place.value.data.copy_(value, non_blocking=True)
        elif place.table == "__dict__":
            place.owner.__dict__[place.key] = value
            place.value = value
        else:
            place.value.data = value

    def _is(self, entry: _Entry, value: Any) -> bool:
        content = _content(entry.live.value)
        if not isinstance(value, torch.Tensor):
            return content is value
        if self._addresses_captured:
            return bool(torch.equal(content, value.to(content.device)))
        return isinstance(content, torch.Tensor) and content.data_ptr() == value.data_ptr()


def _content(value: Any) -> Any:
    """A tensor apart from the parameter or buffer that holds it: it outlives a change of what that points at."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _is_tensor_of_module(place: Holding) -> bool:
    return isinstance(place.value, torch.Tensor) and isinstance(place.owner, nn.Module)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(a.numel() > 0 and a.data_ptr() == b.data_ptr())
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
