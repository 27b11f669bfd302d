"""A new version built next to the live one, and exchanged with it."""

from collections.abc import Iterable
from threading import Event

import torch
from torch import nn
from vllm.config import VllmConfig

from genserve.weights.arena import available_memory_bytes
from genserve.worker.audit import Constants, audit
from genserve.worker.exchange import Exchange
from genserve.worker.shadow import Shadow, cancellable
from genserve.worker.tree import holdings

MARGIN_BYTES = 512 << 20
"""Left to everything else when a place for the second model is looked for."""


class BesideUpdate:
    """Takes memory for a second model while a push is applied, on `device`; what the exchange replaced is the way
    back."""

    def __init__(self, live: nn.Module, config: VllmConfig, device: torch.device, *, addresses_captured: bool) -> None:
        """Builds the structure; while nothing is served, as for `Shadow`."""
        self._live = live
        self._addresses_captured = addresses_captured
        self._device = device
        self._shadow = Shadow(config, device)
        self._exchange: Exchange | None = None

    @property
    def fits(self) -> bool:
        """Whether there is memory for it. On a device that was found before; this is about the host."""
        return self._device.type != "cpu" or available_memory_bytes() > 1.1 * self._shadow.num_bytes + MARGIN_BYTES

    def audit(self) -> Constants:
        """Raises ValueError naming weights of the live model that an exchange would miss; what it has found to be
        constant."""
        shadow, copied = self._shadow, self._addresses_captured
        shadow.constants = audit(self._live, shadow.structure, copied=copied, known=shadow.constants)
        return shadow.constants

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds a version; may run in a background thread while the live one serves. Raises what is wrong with it, and
        PrepareCancelledError soon after `cancelled` is set."""
        self._exchange = None
        self.audit()  # again: steps may have left something on the layers since
        try:
            prepared = self._shadow.load(cancellable(tensors, cancelled))
            self._exchange = Exchange(holdings(self._live), prepared, addresses_captured=self._addresses_captured)
        finally:
            self._shadow.strip()

    def commit(self) -> None:
        """Exchanges live and prepared; only while nothing is scheduled."""
        if self._exchange is None:
            raise RuntimeError("nothing is prepared")
        self._exchange.commit()

    def rollback(self) -> None:
        """Exchanges back what a commit exchanged, for as far as it got."""
        if self._exchange is not None:
            self._exchange.rollback()

    def discard(self) -> None:
        """Frees the version that is not live; takes a while, and may run in a background thread."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.free()
