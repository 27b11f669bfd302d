"""A new version that is built next to the live one, and exchanged with it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event

import torch
from torch import nn
from vllm.config import VllmConfig

from genserve.worker.model.audit import Constants, audit
from genserve.worker.model.digests import Digesting
from genserve.worker.model.step_made import MadeSince
from genserve.worker.model.tree import Holding, holdings, sizes_of
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import Buffer, ContentExchange, PointerExchange, exchange
from genserve.worker.update.protocol import Reserving
from genserve.worker.update.shadow import Cancellable, Shadow
from genserve.worker.update.structure import Structure


class BesideUpdate:
    """Builds a second model while a push is applied, on the device of the live one or on the host. The replaced
    contents are kept to undo the exchange."""

    can_roll_back = True

    def __init__(self, live: nn.Module, config: VllmConfig, device: Device, place: torch.device) -> None:
        """Builds the structure at `place`, and reserves what a push needs on the live model's device. Call it while
        nothing is served, as for `Shadow`. Raises torch.OutOfMemoryError."""
        self._live = live
        self._loaded = frozenset(holdings(live))
        self._device = device
        self._place = place
        with device.work():
            self._shadow = self._shadow_of(config, place)
            self._buffer = Buffer(self._exchanged(), device)
        self.reserve_memory()
        self._exchange: PointerExchange | ContentExchange | None = None
        self._made_since = MadeSince(live)

    @property
    def num_bytes(self) -> int:
        """Size of a version before post-processing, in bytes."""
        return self._shadow.num_bytes

    def audit(self) -> Constants:
        """Returns the constants. Raises ValueError naming weights of the live model that an exchange would miss."""
        shadow, copied = self._shadow, self._device.keeps_addresses
        shadow.constants = audit(self._live, shadow.model, copied=copied, known=shadow.constants, loaded=self._loaded)
        return shadow.constants

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds a version. May run in a background thread while the live one serves. Raises the errors of the version,
        and PrepareCancelledError soon after `cancelled` is set."""
        self._exchange = None
        self.audit()  # again, because steps may have left values on the layers since
        self._buffer.take()
        try:
            prepared = self._shadow.load(Cancellable(tensors, cancelled))
            untouched = self._shadow.untouched
            self._exchange = exchange(
                holdings(self._live),
                prepared,
                self._device,
                self._buffer,
                built_at=self._place,
                untouched=untouched,
            )
        finally:
            self._shadow.strip()
        self.audit()  # and again, because the bytes may have taken minutes to arrive
        self._made_since = MadeSince(self._live)

    def commit(self) -> None:
        """Exchanges live and prepared weights. Only while nothing is scheduled."""
        if self._exchange is None:
            raise RuntimeError("nothing is prepared")
        self._made_since.check()
        self._exchange.commit()

    def rollback(self) -> None:
        """Exchanges back as much as a commit exchanged."""
        if self._exchange is not None:
            self._exchange.rollback()

    def release_memory(self) -> None:
        """Frees the prepared version and the reserved device memory, while nothing is served."""
        self.discard()
        self._buffer.release_memory()
        self._device.release_memory()

    def reserve_memory(self, along: Reserving = nullcontext) -> None:
        """Reserves the memory again, together with `along`. Raises torch.OutOfMemoryError; then the next version looks
        for memory when it is prepared."""
        with self.reserved(), along():
            pass

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Allocates within the block what a push needs."""
        with self._device.work():
            self._buffer.take()
            if self._place.type == "cpu":
                yield
                return
            with self._shadow.reserved():
                pass
            # Weights that are quantised while they are loaded have no storage before; and post-processing may change
            # sizes.
            like_live = [torch.empty(size, dtype=torch.uint8, device=self._place) for size in sizes_of(self._live)]
            try:
                yield
            finally:
                del like_live

    def discard(self) -> None:
        """Frees the version that is not live. Takes a while, and may run in a background thread."""
        exchanged, self._exchange = self._exchange, None
        if exchanged is not None:
            exchanged.free()

    def draft_digests(self) -> Digesting:
        """None: what drafts has an update of its own."""
        yield from ()
        return {}

    def _shadow_of(self, config: VllmConfig, place: torch.device) -> Shadow:
        return Shadow(Structure.build(self._live, config, place), place, self._device.loading)

    def _exchanged(self) -> dict[str, Holding]:
        """The holdings of the live model that this update exchanges."""
        return holdings(self._live)
