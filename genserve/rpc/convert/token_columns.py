"""Converts updates to the rows of TokenColumns, and numbers the sequences that the rows are about. The hot path of
GenerateMany: one column of a message takes all rows at once."""

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from genserve.engine.generation import GenerationUpdate, SequenceDelta
from genserve.errors import InvalidFieldError
from genserve.v1 import generation_pb2
from genserve.wire.literals import FIRST_SLOT_KEY, SLOTS_PER_CALL

MAX_FIRST_SLOT: Final = (1 << 32) - SLOTS_PER_CALL
"""A slot is a uint32."""
_MAX_DIGITS: Final = 10

_Kind = tuple[int, int, bool, int]
"""What the rows of one TokenColumns share: weight version, width of the log-probabilities (-1 = none), token ids,
version of the adapter."""


def first_slot(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Where the numbers of the sequences of a call begin, by its metadata. Raises InvalidFieldError."""
    text = next((value for key, value in metadata if key == FIRST_SLOT_KEY), "0")
    if not (isinstance(text, str) and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= MAX_FIRST_SLOT):
        raise InvalidFieldError.of(FIRST_SLOT_KEY, f"must be a number in [0, {MAX_FIRST_SLOT}]")
    return int(text)


class Slots:
    """Numbers of the sequences of one stream: as many as were ever in use at once, up to `limit`, from `first` on."""

    def __init__(self, first: int = 0, limit: int = SLOTS_PER_CALL) -> None:
        self._free: list[int] = []  # a heap
        self._freed: list[int] = []  # by the message that is being built
        self._next = first
        self._end = first + limit

    def take(self, count: int) -> list[int]:
        """Numbers for so many sequences, the smallest ones that are free. None at all if there are not so many."""
        if len(self._free) + self._end - self._next < count:
            return []
        while len(self._free) < count:
            self._free.append(self._next)  # larger than all others, so the heap stays one
            self._next += 1
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, slots: Sequence[int]) -> None:
        """Takes numbers back, for later messages."""
        self._freed += slots

    def end_message(self) -> None:
        """The message that freed slots is built."""
        for slot in self._freed:
            heapq.heappush(self._free, slot)
        self._freed.clear()


class ColumnsOfStep:
    """The rows of one message."""

    def __init__(self) -> None:
        self._by_kind: dict[_Kind, _Columns] = {}

    def add(self, slots: Sequence[int], update: GenerationUpdate) -> bool:
        """Adds a row for each sequence of the update; `slots` are those of the request, by index. Returns False, and
        adds nothing, if columns cannot say what the update says. Adds nothing either if it raises."""
        outputs = update.outputs
        if update.prompt is not None or update.usage is not None or not outputs:
            return False
        kind = _kind(outputs[0])
        if kind is None or (len(outputs) > 1 and any(_kind(delta) != kind for delta in outputs)):
            return False
        columns = self._by_kind.get(kind)
        if columns is None:
            columns = self._by_kind[kind] = _Columns()
        num_rows = len(columns.slots)
        try:
            for delta in outputs:
                columns.add(slots[delta.index], delta)
        except BaseException:
            self._by_kind[kind] = columns.between(0, num_rows, kind)
            raise
        return True

    def fill(self, response: generation_pb2.GenerateManyResponse) -> list[tuple[int, Exception]]:
        """Adds the rows to a message. Returns the slots of those that no message can have, with their errors."""
        failures: list[tuple[int, Exception]] = []
        for kind, columns in self._by_kind.items():
            try:
                columns.fill(response.columns.add(), kind)
            except Exception:
                del response.columns[-1]
                for number, slot in enumerate(columns.slots):  # which row it was: each by itself
                    try:
                        columns.between(number, number + 1, kind).fill(response.columns.add(), kind)
                    except Exception as error:
                        del response.columns[-1]
                        failures.append((slot, error))
        return failures


def _kind(delta: SequenceDelta) -> _Kind | None:
    """The kind of a row, None if it cannot be one."""
    if delta.finish is not None or len(delta.weight_spans) != 1:
        return None
    version, start, end, lora_version = delta.weight_spans[0]
    if delta.token_ids and len(delta.token_ids) != end - start:
        return None
    if delta.logprobs is None:
        return version, -1, bool(delta.token_ids), lora_version
    if len(delta.logprobs.sampled) != end - start:
        return None
    return version, delta.logprobs.width, bool(delta.token_ids), lora_version


class _Columns:
    """The rows of one kind."""

    __slots__ = ("num_tokens", "ranks", "sampled", "slots", "texts", "token_ids", "top_ids", "top_values")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.num_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.sampled: list[float] = []
        self.ranks: list[int] = []
        self.top_ids: list[int] = []
        self.top_values: list[float] = []

    def add(self, slot: int, delta: SequenceDelta) -> None:
        """Adds a row."""
        _, start, end, _ = delta.weight_spans[0]
        self.slots.append(slot)
        self.num_tokens.append(end - start)
        self.token_ids += delta.token_ids
        self.texts.append(delta.text)
        logprobs = delta.logprobs
        if logprobs is not None:
            self.sampled += logprobs.sampled
            self.ranks += logprobs.ranks
            self.top_ids += logprobs.token_ids
            self.top_values += logprobs.values

    def between(self, first: int, last: int, kind: _Kind) -> "_Columns":
        """The rows [first, last)."""
        _, width, has_token_ids, _ = kind
        start, end = sum(self.num_tokens[:first]), sum(self.num_tokens[:last])
        rows = _Columns()
        rows.slots = self.slots[first:last]
        rows.num_tokens = self.num_tokens[first:last]
        rows.texts = self.texts[first:last]
        if has_token_ids:
            rows.token_ids = self.token_ids[start:end]
        if width >= 0:
            rows.sampled = self.sampled[start:end]
            rows.ranks = self.ranks[start:end]
            rows.top_ids = self.top_ids[width * start : width * end]
            rows.top_values = self.top_values[width * start : width * end]
        return rows

    def fill(self, message: generation_pb2.TokenColumns, kind: _Kind) -> None:
        version, width, _, lora_version = kind
        message.slots.extend(self.slots)
        message.weight_version = version
        message.lora_version = lora_version
        if self.num_tokens.count(1) != len(self.num_tokens):
            message.num_tokens.extend(self.num_tokens)
        message.token_ids.extend(self.token_ids)
        if any(self.texts):
            message.texts.extend(self.texts)
        if width >= 0:
            logprobs = message.logprobs
            logprobs.width = width
            logprobs.sampled.extend(self.sampled)
            logprobs.ranks.extend(self.ranks)
            logprobs.token_ids.extend(self.top_ids)
            logprobs.values.extend(self.top_values)
