"""Loads a structure: by the model's loader, or by the plan of the load before, if the tensors are like those.

For every tensor of a checkpoint a loader walks over names, modules and tables of experts: that takes longer than the
copies. It does the same at every push of tensors with the same names, types and shapes in the same order.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch

from genserve.worker.update.plan.plan import Plan, Tensors
from genserve.worker.update.plan.recipe import Layout
from genserve.worker.update.plan.recorder import Recorder, memory_of
from genserve.worker.update.plan.traces import Attributes, Trace
from genserve.worker.update.structure import Structure

log = logging.getLogger(__name__)

_MAX_MISFITS: Final = 8
"""Plans in a row that did not fit the next push. Then no more are made, because a recording slows a load down."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A load that can be done again: its plan, what it leaves on objects, and what the loader says that it loaded."""

    plan: Plan
    traces: list[Trace]
    loaded: frozenset[str] | None


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
        """That of the load before, if there is one."""
        return None if self._known is None else self._known.plan

    def load(self, tensors: Tensors) -> frozenset[str] | None:
        """Does what the loader does with the tensors, while the structure has storage. Returns the names of what it
        loaded, as far as it says so. Raises its errors."""
        left, taken = iter(tensors), list[tuple[str, torch.Tensor]]()
        if (known := self._known) is not None:
            misfit = known.plan.replay(left, self._contents())
            if misfit is None:
                self._num_misfits = 0
                for trace in known.traces:
                    trace.leave()
                return known.loaded
            self._known, taken = None, misfit
            self._num_misfits += 1
            self._structure.allocate(self._place)
        if self._num_misfits == _MAX_MISFITS:
            self._refuse("the tensors of a push are seldom like those of the push before")
        if self.refusal:
            return _names(self._structure.model.load_weights(chain(taken, left)))
        return self._recorded(chain(taken, left))

    def _recorded(self, tensors: Tensors) -> frozenset[str] | None:
        contents = self._contents()
        attributes = Attributes([*self._owners, *(slot.parameter for slot in self._structure.slots)])
        recorder = Recorder(contents)
        with recorder.recording():
            loaded = _names(self._structure.model.load_weights(recorder.tensors(tensors)))
        try:
            plan, traces = recorder.plan(), attributes.traces()
            self._check(contents, recorder.written, loaded)
            self._known = _Known(plan, traces, loaded)
        except ValueError as error:
            self._refuse(str(error))
        return loaded

    def _contents(self) -> list[torch.Tensor]:
        return [slot.parameter.data for slot in self._structure.slots]

    def _check(self, contents: list[torch.Tensor], written: set[int], loaded: frozenset[str] | None) -> None:
        """Raises ValueError for a parameter that is another one now, or was loaded in a way that was not seen."""
        slots = self._structure.slots
        for before, now in zip(contents, self._contents(), strict=True):
            if (memory_of(before), Layout.of(before)) != (memory_of(now), Layout.of(now)):
                raise ValueError("a parameter gets other memory")
        seen = {id(slots[number].parameter) for number in written}
        for name, parameter in self._structure.model.named_parameters():
            if loaded is not None and name in loaded and parameter.numel() and id(parameter) not in seen:
                raise ValueError(f"it is not seen how {name} is loaded")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        log.info("every push is loaded by the loader of %s: %s", type(self._structure.model).__name__, why)


def _names(loaded: Iterable[str] | None) -> frozenset[str] | None:
    """Loaders that do not say what they loaded return None."""
    return None if loaded is None else frozenset(loaded)
