"""Loads a structure: by the model's loader, or by a plan, if the tensors are like those of the loads before.

For every tensor of a checkpoint a loader walks over names, modules and tables of experts: that takes longer than the
copies. It does the same at every push of tensors with the same names, types and shapes in the same order.

A plan is what was recorded of a load. It replaces the loader when it is proven: the tensors of the next push were
loaded by both, and both have left the same. That finds loaders with a state that no attribute shows, and loaders that
write where a recorder does not see it.
"""

import copy
import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from genserve.worker.update.plan.plan import Layout, Plan, Tensors
from genserve.worker.update.plan.recorder import Recorder, memory_of
from genserve.worker.update.structure import Structure

log = logging.getLogger(__name__)

_MAX_MISFITS: Final = 8
"""Loads in a row whose tensors were not like those before. Then no more are recorded, because that takes time."""

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
# Objects of these packages are looked into where a container has them; as attributes of a module they are parts.
_ENTERED = ("vllm.model_executor.", "vllm.models.", "vllm.v1.attention.")
_ABSENT = object()
_ROW_BYTES: Final = 1 << 15
_WORD_BYTES: Final = 8


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


@dataclass(frozen=True, slots=True)
class _Known:
    """A load that can be done again: its plan, what it leaves on objects, and what the loader says that it loaded."""

    plan: Plan
    traces: list[Trace]
    loaded: frozenset[str] | None
    is_proven: bool = False


class PlannedLoading:
    """Loads versions into one structure, one at a time."""

    def __init__(self, structure: Structure, place: torch.device, around: Iterable[Any] = ()) -> None:
        """`place`: where the structure's storage is; `around`: modules and parts of others that the loader may
        change."""
        self._structure = structure
        self._place = place
        own = [owner for owner, _ in [*structure.modules, *structure.parts]]
        self._owners = list({id(owner): owner for owner in [*own, *around]}.values())
        self._known: _Known | None = None
        self._num_misfits = 0
        self.refusal = ""
        """Why the model's loader loads every version, "" if there is no reason."""

    @property
    def plan(self) -> Plan | None:
        """The plan that loads the next version, if its tensors are like those of the last one."""
        return self._known.plan if self._known is not None and self._known.is_proven else None

    def load(self, tensors: Tensors, *, in_pause: bool = False) -> frozenset[str] | None:
        """Does what the loader does with the tensors, while the structure has storage. Returns the names of what it
        loaded, as far as it says so. Raises its errors. It may iterate over the tensors twice. `in_pause`: requests
        wait, so nothing is recorded or proven."""
        known = self._known
        if known is not None and (known.is_proven or not in_pause):
            if known.plan.replay(tensors, self._contents()):
                return self._replayed(known) if known.is_proven else self._compared(known, tensors)
            self._misfit()
            self._empty()
        return self._loaded(tensors) if self.refusal or in_pause else self._recorded(tensors)

    def _replayed(self, known: _Known) -> frozenset[str] | None:
        for trace in known.traces:
            trace.leave()
        return known.loaded

    def _compared(self, known: _Known, tensors: Tensors) -> frozenset[str] | None:
        """Proves a plan that was just replayed: the loader loads the same tensors."""
        replayed = [fingerprint(each) for each in self._contents()]
        self._empty()
        contents, attributes = self._contents(), self._attributes()
        loaded = self._loaded(tensors)
        try:
            self._check_memory(contents)
            found = (loaded, [trace.note for trace in attributes.traces()], [fingerprint(each) for each in contents])
        except ValueError as error:
            self._refuse(str(error))
            return loaded
        if found == (known.loaded, [trace.note for trace in known.traces], replayed):
            self._known, self._num_misfits = replace(known, is_proven=True), 0
        else:
            self._refuse("it does not always do what was seen")
        return loaded

    def _recorded(self, tensors: Tensors) -> frozenset[str] | None:
        contents, attributes = self._contents(), self._attributes()
        recorder = Recorder(contents)
        with recorder.recording():
            loaded = self._loaded(recorder.tensors(tensors))
        try:
            plan, traces = recorder.plan(), attributes.traces()
            self._check_memory(contents)
            self._check_seen(recorder.written, loaded)
            self._known = _Known(plan, traces, loaded)
        except ValueError as error:
            self._refuse(str(error))
        return loaded

    def _loaded(self, tensors: Tensors) -> frozenset[str] | None:
        """By the loader. Loaders that do not say what they loaded return None."""
        loaded = self._structure.model.load_weights(tensors)
        return None if loaded is None else frozenset(loaded)

    def _empty(self) -> None:
        """Back to what the parameters hold before a load. Frees first: a GPU may have no room for one of them twice."""
        for slot in self._structure.slots:
            slot.free(self._place)
        self._structure.allocate(self._place)

    def _contents(self) -> list[torch.Tensor]:
        return [slot.parameter.data for slot in self._structure.slots]

    def _attributes(self) -> "Attributes":
        return Attributes([*self._owners, *(slot.parameter for slot in self._structure.slots)])

    def _check_memory(self, contents: list[torch.Tensor]) -> None:
        """Raises ValueError if a parameter has other memory than before the load."""
        for before, now in zip(contents, self._contents(), strict=True):
            if (memory_of(before), Layout.of(before)) != (memory_of(now), Layout.of(now)):
                raise ValueError("a parameter gets other memory")

    def _check_seen(self, written: set[int], loaded: frozenset[str] | None) -> None:
        """Raises ValueError for a parameter that was loaded in a way that was not seen."""
        slots = self._structure.slots
        seen = {id(slots[number].parameter) for number in written}
        for name, parameter in self._structure.model.named_parameters():
            if loaded is not None and name in loaded and parameter.numel() and id(parameter) not in seen:
                raise ValueError(f"it is not seen how {name} is loaded")

    def _misfit(self) -> None:
        self._known = None
        self._num_misfits += 1
        if self._num_misfits == _MAX_MISFITS:
            self._refuse("the tensors of a push are seldom like those of the push before")

    def _refuse(self, why: str) -> None:
        self._known, self.refusal = None, why
        log.info("every push is loaded by the loader of %s: %s", type(self._structure.model).__name__, why)


class Attributes:
    """The attributes of objects, as they were when this was made."""

    def __init__(self, owners: Iterable[Any]) -> None:
        """`owners`: those objects, each once."""
        self._kept: list[Any] = []  # while they are there, no other object gets the id of one of them
        self._before = [(owner, self._noted_of(owner)) for owner in owners]

    def traces(self) -> list[Trace]:
        """The changes since. Raises ValueError naming an attribute whose value is not plain, or is gone."""
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


def fingerprint(tensor: torch.Tensor) -> bytes:
    """The same for the same bytes. For others, and for elements that lie elsewhere, it is another one, but for an
    unlikely chance: it tells the sums of the words of each row and of each column of the memory, seen as a table."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    num_rows = data.numel() // _ROW_BYTES
    end = num_rows * _ROW_BYTES
    table = data[:end].view(torch.int64).view(num_rows, _ROW_BYTES // _WORD_BYTES)
    found = hashlib.sha256()
    for part in (table.sum(0), table.sum(1), data[end:]):
        found.update(part.cpu().numpy())
    return found.digest()
