"""Exchanges contents of live tensors on a CUDA device with those of prepared ones on the CPU, in both directions at
once.

Tensors are cut into pieces, and each piece uses two slots of the pinned ring: its live contents are copied from the
device through one, while its prepared contents are copied to the device through the other. The pieces overlap: while
one is copied from the device, the previous one is copied to it, and threads copy both between the slots and the
prepared tensors. Whatever fails, the replaced contents of a piece are in its slot or in the prepared tensor, and can be
restored. This needs no memory of the device.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from genserve.worker.update.pinned_ring import Event, PinnedRing, parts, shaped_as

LEAST_SLOTS: Final = 6
"""Minimum number of slots of a ring: a piece needs its two slots until the third one after it begins."""


class CopyStream(Protocol):
    """A CUDA stream: its operations happen later, in order."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between the device and pinned memory. Raises RuntimeError."""

    def record(self, event: Event) -> None:
        """Marks this point of the stream."""

    def wait(self, event: Event) -> None:
        """Later operations happen after the point that was marked last."""


@dataclass(slots=True)
class _Piece:
    """Part of a live tensor and of the prepared one. `down`, `up`: its slots, and the events of their last use;
    `is_overwritten`: the live contents may be others now; `is_kept`: the prepared part holds what was live."""

    live: torch.Tensor
    new: torch.Tensor
    down: tuple[torch.Tensor, Event]
    up: tuple[torch.Tensor, Event]
    filling: "list[Future[None]]" = field(default_factory=list)
    keeping: "list[Future[None]]" = field(default_factory=list)
    is_overwritten: bool = False
    is_kept: bool = False


class RingExchange:
    """Exchanges the tensors of one version. Synchronize the device before and after each call: only then are the copies
    complete."""

    def __init__(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], ring: PinnedRing, down: CopyStream, up: CopyStream
    ) -> None:
        """`pairs`: live and prepared tensors, as `can_exchange` requires. `down`, `up`: streams to the host and to the
        device. During a call only this object uses the ring."""
        self._pairs = list(pairs)
        self._ring = ring
        self._down, self._up = down, up
        half = len(ring.slots) // 2
        if len(ring.slots) < LEAST_SLOTS:
            raise ValueError(f"an exchange needs {LEAST_SLOTS} slots, the ring has {len(ring.slots)}")
        self._down_slots, self._up_slots = ring.slots[:half], ring.slots[half:]
        self._pieces: list[_Piece] = []

    def commit(self) -> None:
        """Exchanges. Raises the errors of copies; `rollback` works from any point of it."""
        pieces = self._pieces
        for live, new in self._cut():
            self._begin(live, new)
            if len(pieces) > 1:
                self._overwrite(pieces[-2])
            if len(pieces) > 2:
                self._keep(pieces[-3])
        for piece in pieces[-1:]:
            self._overwrite(piece)
        for piece in pieces[-2:]:
            self._keep(piece)
        for piece in pieces[-len(self._down_slots) :]:
            self._finish(piece)

    def rollback(self) -> None:
        """Copies back the contents that a commit replaced. All copies that it began have ended."""
        for piece in self._pieces:
            for finish in (self._filled, self._finish):
                with suppress(Exception):  # a slot has the live contents then
                    finish(piece)
        in_slots = [piece for piece in self._pieces if piece.is_overwritten and not piece.is_kept]
        for piece in in_slots:
            slot, event = piece.down
            self._up.copy(piece.live, shaped_as(slot, piece.live))
            self._up.record(event)
        for piece in in_slots:
            piece.down[1].synchronize()
            piece.is_overwritten = False
        for piece in self._pieces:
            if piece.is_overwritten:
                self._ring.to_device(piece.live, piece.new)

    def _cut(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for live, new in self._pairs:
            yield from parts(live, new, self._ring.slot_bytes)

    def _begin(self, live: torch.Tensor, new: torch.Tensor) -> None:
        """Sends the live contents to the host, and fills the slot for the device."""
        number, half = len(self._pieces), len(self._down_slots)
        piece = _Piece(live, new, self._down_slots[number % half], self._up_slots[number % half])
        if number >= half:
            self._finish(self._pieces[number - half])
            piece.up[1].synchronize()
        self._pieces.append(piece)
        slot, event = piece.down
        self._down.copy(shaped_as(slot, live), live)
        self._down.record(event)
        piece.filling = self._ring.start_copy(shaped_as(piece.up[0], new), new)

    def _overwrite(self, piece: _Piece) -> None:
        """Sends the prepared contents to the device, as soon as the live ones are on the host."""
        self._filled(piece)
        slot, event = piece.up
        self._up.wait(piece.down[1])
        piece.is_overwritten = True
        self._up.copy(piece.live, shaped_as(slot, piece.live))
        self._up.record(event)

    def _keep(self, piece: _Piece) -> None:
        """Begins to copy the live contents out of their slot, when they are on the host. The prepared contents have
        left theirs."""
        slot, event = piece.down
        event.synchronize()
        piece.keeping = self._ring.start_copy(piece.new, shaped_as(slot, piece.new))

    def _filled(self, piece: _Piece) -> None:
        """Waits until the prepared contents are in the slot."""
        self._ring.finish_copy(piece.filling)

    def _finish(self, piece: _Piece) -> None:
        """Waits until the prepared tensor has the live contents, if this has begun. Then the slot for the host is
        free."""
        if piece.keeping:
            self._ring.finish_copy(piece.keeping)
            piece.is_kept = True
