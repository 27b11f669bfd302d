"""The exchange of live weights for prepared ones, and back.

The live model keeps its modules, parameters and attention layers, which hold the KV cache and to which others refer.
Only what they point at changes. Where addresses must not change (CUDA graphs, kernels, vLLM's sleep), the contents are
exchanged instead: tensor by tensor through a buffer of the largest one's size, or through pinned memory
(`ring_exchange`) if the prepared ones are on the CPU. A commit allocates nothing. After it the prepared tensors hold
the previous contents, so it can be undone.

The device of a tensor is part of what is compared. Layers on a GPU keep some tensors in the host's memory, such as
copies of the scales of keys and values. These are exchanged there, in the same way.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from genserve.worker.model import step_made
from genserve.worker.model.tree import Holding
from genserve.worker.update.device import Device

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Entry:
    """A place of the live model, and its new value. `old` is its previous value, once it has been replaced."""

    name: str
    live: Holding
    new: Any
    old: Any = None


def exchange(
    live: Mapping[str, Holding],
    prepared: Mapping[str, Holding],
    device: Device,
    buffer: "Buffer | None" = None,
    *,
    built_at: torch.device | None = None,
    untouched: Collection[str] = (),
) -> "PointerExchange | ContentExchange":
    """The exchange of a prepared version with the live one, of the kind that the device needs.

    `built_at`: where the version was built, None = on the live model's device. `untouched`: names of what preparing
    found and did not write; `prepared` lacks them. Raises ValueError, naming what differs, unless both have the same
    structure on the same devices; `step_made` judges what steps have made on the live model since.
    """
    entries = matched(live, prepared, untouched, copied=device.keeps_addresses)
    for entry in entries:
        _refuse_other_device(entry, device.device, device.device if built_at is None else built_at)
    return ContentExchange(entries, device, buffer) if device.keeps_addresses else PointerExchange(entries)


def matched(
    live: Mapping[str, Holding],
    prepared: Mapping[str, Holding],
    untouched: Collection[str] = (),
    *,
    copied: bool = False,
) -> list[Entry]:
    """The entries to change. `copied`: contents are exchanged, and not references. Raises ValueError for a difference
    in structure, and for what steps have made and a push may not leave as it is."""
    only_prepared = sorted(prepared.keys() - live.keys())
    if only_prepared:
        raise ValueError(f"the prepared model differs from the live one: only prepared {only_prepared[:8]}")
    only_live = {name: live[name] for name in live.keys() - prepared.keys() - set(untouched)}
    step_made.check_listed(only_live, live, copied=copied)
    entries: list[Entry] = []
    new_by_live: dict[int, int] = {}
    for name, place in live.items():
        if name not in prepared:
            continue
        new, present = content(prepared[name].value), content(place.value)
        if _same(new, present) or step_made.is_weight_free(place.owner, place.key, place.value):
            continue  # shared by the models, such as the rotary table, or made again by a step
        if type(present) is not type(new):
            raise ValueError(f"{name} is a {type(present).__name__} live and a {type(new).__name__} prepared")
        if isinstance(present, torch.Tensor):
            if present.numel() == 0 and new.numel() == 0:
                continue  # what is left of a weight that was packed; its type is arbitrary
            if (present.shape, present.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"{name} is {present.dtype}{list(present.shape)} live and {new.dtype}{list(new.shape)} prepared"
                )
            if new_by_live.setdefault(id(place.value), new.data_ptr()) != new.data_ptr():
                raise ValueError(f"{name} is tied to another tensor in the live model but not in the prepared one")
        entries.append(Entry(name, place, new))
    computed = sorted(name for name, place in only_live.items() if step_made.is_from_numbers(place.owner, place.key))
    changed = [entry.name for entry in entries if isinstance(entry.new, float)]
    if computed and changed:
        raise ValueError(f"{changed[0]} changes, and a step has computed {computed[0]} from such numbers, for good")
    return entries


def _refuse_other_device(entry: Entry, model_device: torch.device, built_at: torch.device) -> None:
    """Raises ValueError for a tensor that is not where vLLM's own loading puts it: what is on the model's device must
    have been built at `built_at`, and what a layer keeps on the host, on the host."""
    live = content(entry.live.value)
    if not isinstance(live, torch.Tensor):
        return
    if live.device not in (model_device, _CPU):
        raise ValueError(f"{entry.name} is on {live.device}, and the model on {model_device}")
    expected = built_at if live.device == model_device else _CPU
    if entry.new.device != expected:
        raise ValueError(
            f"{entry.name} is on {live.device} live and on {entry.new.device} prepared: {expected} was expected"
        )


class PointerExchange:
    """After a commit the live model's parameters and attributes point at the prepared tensors. Nothing is copied."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def commit(self) -> None:
        """Puts the prepared values in place and keeps the previous ones. Raises RuntimeError if a value did not stay in
        place."""
        for entry in self._entries:
            entry.old = content(entry.live.value)
        for entry in self._entries:
            self._put(entry, entry.new)
        for entry in self._entries:
            if not _is(entry, entry.new):
                raise RuntimeError(f"{entry.name} did not take its new value")

    overwrite = commit
    """For a commit that nobody will undo."""

    def rollback(self) -> None:
        """Puts back the values that a commit replaced. Raises RuntimeError if one is not the previous one."""
        for entry in self._entries:
            if entry.old is not None:
                self._put(entry, entry.old)
        for entry in self._entries:
            if entry.old is not None and not _is(entry, entry.old):
                raise RuntimeError(f"{entry.name} could not be put back")

    def free(self) -> None:
        """Frees the values that are not live, one at a time, because it takes long and other threads must run."""
        while self._entries:
            self._entries.pop()

    def _put(self, entry: Entry, value: Any) -> None:
        place = entry.live
        if place.table == "__dict__":
            place.owner.__dict__[place.key] = value
            place.value = value
        else:
            place.value.data = value


class Buffer:
    """Memory through which contents are exchanged: on each device that has tensors of the live model, as much as the
    largest one takes there."""

    def __init__(self, live: Mapping[str, Holding], device: Device) -> None:
        """Allocates the memory, if the device needs it."""
        self._sizes: dict[torch.device, int] = {}
        self._bytes: dict[torch.device, torch.Tensor] = {}
        for place in live.values() if device.keeps_addresses else ():
            if isinstance(place.value, torch.Tensor):
                at = place.value.device
                self._sizes[at] = max(self._sizes.get(at, 0), place.value.nbytes)
        self.take()

    def take(self) -> None:
        """Allocates the memory, unless it is allocated."""
        for at, size in self._sizes.items():
            if at not in self._bytes:
                self._bytes[at] = torch.empty(size, dtype=torch.uint8, device=at)

    def release_memory(self) -> None:
        """Frees it, until it is taken again."""
        self._bytes = {}

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a part of it may have the tensor's contents."""
        return int(tensor.nbytes) <= self._sizes.get(tensor.device, 0)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A part of it with the tensor's shape, type and device."""
        return self._bytes[tensor.device][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class Pair:
    """A live tensor, and the one whose contents it takes."""

    name: str
    live: torch.Tensor
    new: torch.Tensor


class ContentExchange:
    """The live tensors stay at their addresses. A prepared one, on the same device or on the host, gets the live
    contents. Tensors that the live model keeps on the host are exchanged there, unless both are equal: most of them are
    constants that each load writes again.

    Copies are not read back, because this would double the pause. The device reports a failed copy when it is
    synchronized.
    """

    def __init__(self, entries: list[Entry], device: Device, buffer: "Buffer | None") -> None:
        """`buffer` is only needed without `overwrite`. Raises ValueError for values whose change captured code would
        not see."""
        self._pairs = [pair for pair in pairs(entries) if pair.live.device == device.device or not _equal(pair)]
        self._device = device
        # Large tensors on the host do not use the buffer.
        by_ring = [pair for pair in self._pairs if device.can_exchange(pair.live, pair.new)]
        self._by_buffer = [pair for pair in self._pairs if not device.can_exchange(pair.live, pair.new)]
        self._ring_exchange = device.ring_exchange((pair.live, pair.new) for pair in by_ring) if by_ring else None
        self._buffer = buffer
        self._num_exchanged = 0
        self._undo: Callable[[], None] | None = None  # of the exchange in progress
        for pair in self._pairs:
            if buffer is not None and not buffer.fits(pair.live):
                raise ValueError(f"{pair.name} is larger than any tensor that the model had at the start")

    def commit(self) -> None:
        """Exchanges the contents. Raises RuntimeError if the device refuses. `rollback` works from any point of it."""
        self._device.synchronize()  # the work of steps and of the preparation
        if self._ring_exchange is not None:
            self._ring_exchange.commit()
        for pair in self._by_buffer:
            self._exchange(pair)
            self._num_exchanged += 1
        self._device.synchronize()

    def overwrite(self) -> None:
        """A commit that cannot be undone: the live contents are lost."""
        self._device.synchronize()
        for pair in self._pairs:
            self._device.copy(pair.live, pair.new)
        self._device.synchronize()

    def rollback(self) -> None:
        """Copies back the contents that a commit replaced."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        while self._num_exchanged:
            pair = self._by_buffer[self._num_exchanged - 1]
            self._device.copy(pair.live, pair.new)
            self._num_exchanged -= 1
        if self._ring_exchange is not None:
            self._device.synchronize()
            self._ring_exchange.rollback()
        self._device.synchronize()

    def free(self) -> None:
        """Frees the values that are not live, one at a time."""
        self._ring_exchange = None
        self._by_buffer = []
        while self._pairs:
            self._pairs.pop()

    def _exchange(self, pair: Pair) -> None:
        assert self._buffer is not None
        held = self._buffer.like(pair.live)
        self._device.copy(held, pair.live)
        self._undo = lambda: self._device.copy(pair.live, held)
        self._device.copy(pair.live, pair.new)
        self._device.copy(pair.new, held)
        self._undo = None


def pairs(entries: list[Entry]) -> list[Pair]:
    """The tensors to copy, each byte of live memory once: tied tensors and views of another one change with it. Raises
    ValueError for memory that is shared in another way, and for a value that is not a tensor."""
    found: list[Pair] = []
    by_storage: dict[int, list[Pair]] = {}
    for entry in entries:
        present = content(entry.live.value)
        if not isinstance(present, torch.Tensor):
            kind = "a number" if isinstance(present, float) else f"a {type(present).__name__}"
            raise ValueError(f"{entry.name} is {kind}, which code on the device has captured: restart the daemon")
        if any(size > 1 and stride == 0 for size, stride in zip(present.shape, present.stride(), strict=True)):
            raise ValueError(f"{entry.name} has several elements at one address and cannot be copied to")
        if present.numel():
            by_storage.setdefault(present.untyped_storage().data_ptr(), []).append(Pair(entry.name, present, entry.new))
    for sharing in by_storage.values():
        kept: list[Pair] = []
        for pair in sorted(sharing, key=lambda each: -_extent(each.live)):
            if not any(_covers(larger, pair) for larger in kept):
                kept.append(pair)
        found += kept
    return found


def _equal(pair: Pair) -> bool:
    """Whether all bits of a pair on the host are equal."""
    live, new = (each.contiguous().view(-1).view(torch.uint8) for each in (pair.live, pair.new))
    return bool(torch.equal(live, new))


def _covers(larger: Pair, pair: Pair) -> bool:
    """Whether a pair changes with one that is as large or larger. Raises ValueError if it would change only in part."""
    offset = pair.live.data_ptr() - larger.live.data_ptr()
    if offset >= _extent(larger.live) or offset + _extent(pair.live) <= 0:
        return False
    is_equal = offset == 0 and (pair.live.shape, pair.live.stride()) == (larger.live.shape, larger.live.stride())
    is_inside = _extent(larger.live) == larger.live.nbytes and 0 <= offset <= _extent(larger.live) - _extent(pair.live)
    is_shared_alike = (
        pair.new.data_ptr() - larger.new.data_ptr() == offset
        and larger.new.stride() == larger.live.stride()
        and pair.new.stride() == pair.live.stride()
    )
    if not (is_equal or is_inside) or not is_shared_alike:
        raise ValueError(f"{pair.name} shares memory with {larger.name} live, and not so prepared")
    return True


def _extent(tensor: torch.Tensor) -> int:
    """The number of bytes from its first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)


def content(value: Any) -> Any:
    """A tensor separate from the parameter or buffer that holds it: it survives when that points elsewhere."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is(entry: Entry, value: Any) -> bool:
    present = content(entry.live.value)
    if not isinstance(value, torch.Tensor):
        return present is value
    return isinstance(present, torch.Tensor) and present.data_ptr() == value.data_ptr()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(a.numel() > 0 and a.data_ptr() == b.data_ptr())
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
