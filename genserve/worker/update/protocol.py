"""The interface of a way to take new versions, as `Versions` calls it. Owns no behaviour."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import Event
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from genserve.worker.model.audit import Constants
    from genserve.worker.model.digests import Digesting

Reserving: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Allocates memory of the device that is needed at the same time, and frees it when the block ends."""


class PrepareCancelledError(Exception):
    """The push was given up while it was prepared."""


class Update(Protocol):
    """Prepares, commits and undoes versions, one at a time."""

    @property
    def can_roll_back(self) -> bool:
        """Whether `rollback` can undo a commit that has begun."""

    def audit(self) -> "Constants":
        """The tensors of the live model that no version changes. Raises ValueError naming weights of it that an
        exchange would miss."""

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds a version, or proves that it can be built, while the live one serves. Raises what is wrong with it,
        and PrepareCancelledError soon after `cancelled` is set."""

    def commit(self) -> None:
        """Makes the prepared version the live one; only while nothing is scheduled."""

    def rollback(self) -> None:
        """Undoes a complete or partial commit. Does nothing without one."""

    def release_memory(self) -> None:
        """Frees what is prepared, and the device's memory that is kept for pushes, while nothing is served."""

    def reserve_memory(self) -> None:
        """Keeps that memory again. Raises torch.OutOfMemoryError; then the next version looks for memory when it is
        prepared."""

    def discard(self) -> None:
        """Frees the prepared version, or the one that a commit replaced."""

    def draft_digests(self) -> "Digesting":
        """Reads the weights that draft, if this update exchanges them; else nothing."""


class ServedUpdate(Update, Protocol):
    """An update of the served model, beside which a model that drafts may be updated."""

    def reserve_memory(self, along: Reserving = ...) -> None:
        """As of any update, with what a push needs `along` with it."""
