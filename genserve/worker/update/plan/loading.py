"""Loads a structure: by the model's loader, or by a plan, if the tensors are like those of the loads before.

For every tensor of a checkpoint a loader walks over names, modules and tables of experts: that takes longer than the
copies. It does the same at every push of tensors with the same names, types and shapes in the same order.

A plan is what was recorded of a load. It replaces the loader when it is proven: the tensors of the next push were
loaded by both, and both have left the same. That finds loaders with a state that no attribute shows, and loaders that
write where a recorder does not see it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from genserve.worker.update.plan.fingerprint import fingerprint
from genserve.worker.update.plan.plan import Plan, Tensors
from genserve.worker.update.plan.recipe import Layout
from genserve.worker.update.plan.recorder import Recorder, memory_of
from genserve.worker.update.plan.traces import Attributes, Trace
from genserve.worker.update.structure import Structure

log = logging.getLogger(__name__)

_MAX_MISFITS: Final = 8
"""Loads in a row whose tensors were not like those before. Then no more are recorded, because that takes time."""


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

    def _attributes(self) -> Attributes:
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
