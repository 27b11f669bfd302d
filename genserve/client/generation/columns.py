"""New tokens that the daemon tells in columns: each row as the delta that an item would have been."""

from collections.abc import Iterator

from genserve.client.generation.results import Delta, Logprobs, Prompt, SequenceDelta, Usage, WeightSpan
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2, types_pb2


class SequenceRow(SequenceDelta):
    """New output of one of the n sequences, all under one weight version."""

    __slots__ = ("_columns", "_span", "_start", "index", "text", "token_ids")

    index: int
    text: str
    token_ids: list[int]

    def __init__(
        self, index: int, text: str, token_ids: list[int], span: WeightSpan, columns: Logprobs | None, start: int
    ) -> None:
        """`columns` are the log-probabilities of many rows, which begin at `start` for this one."""
        self.index = index
        self.text = text
        self.token_ids = token_ids
        self._span = span
        self._columns = columns
        self._start = start

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the new tokens, when asked for."""
        if self._columns is None:
            return None
        _, first, end, _ = self._span
        return self._columns.rows(self._start, self._start + end - first)

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """Of exactly the new tokens."""
        return [self._span]

    @property
    def finish(self) -> None:
        """The last delta of a sequence is an item."""

    @property
    def message(self) -> generation_pb2.SequenceDelta:
        """The message that an item would have had."""
        message = generation_pb2.SequenceDelta(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            weight_spans=[types_pb2.WeightSpan(**self._span._asdict())],
        )
        logprobs = self.logprobs
        if logprobs is not None:
            message.logprobs.width = logprobs.width
            message.logprobs.sampled.extend(logprobs.sampled)
            message.logprobs.ranks.extend(logprobs.ranks)
            message.logprobs.token_ids.extend(logprobs.token_ids)
            message.logprobs.values.extend(logprobs.values)
        return message


class RowsDelta(Delta):
    """The rows of one request: neither its first nor its last output."""

    __slots__ = ("_rows",)

    def __init__(self, rows: list[SequenceDelta]) -> None:
        self._rows = rows

    @property
    def request_id(self) -> str:
        """It was on the first message."""
        return ""

    @property
    def prompt(self) -> Prompt | None:
        """It was on the first message."""
        return None

    @property
    def outputs(self) -> list[SequenceDelta]:
        """The sequences with new output."""
        return self._rows

    @property
    def usage(self) -> Usage | None:
        """It comes with the last message."""
        return None

    @property
    def is_last(self) -> bool:
        """The last output is an item."""
        return False

    @property
    def text(self) -> str:
        """The new text of sequence 0."""
        return "".join(row.text for row in self._rows if row.index == 0)

    @property
    def message(self) -> generation_pb2.GenerateResponse:
        """The message that an item would have had."""
        return generation_pb2.GenerateResponse(outputs=[row.message for row in self._rows])


class _Sequence:
    """Whose slot it is, and how many tokens the sequence has."""

    __slots__ = ("index", "num_tokens", "request_id")

    def __init__(self, request_id: str, index: int) -> None:
        self.request_id = request_id
        self.index = index
        self.num_tokens = 0  # until its first item says how many it has


class Sequences:
    """The sequences of one stream that rows may be about, by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, _Sequence] = {}
        self._by_request: dict[str, list[int]] = {}

    def note(self, item: generation_pb2.GenerateManyItem) -> None:
        """Takes from an item which slots its request has, and how many tokens they have."""
        request_id = item.request_id
        if item.slots:
            self._by_request[request_id] = slots = list(item.slots)
            for index, slot in enumerate(slots):
                self._by_slot[slot] = _Sequence(request_id, index)
        elif request_id not in self._by_request:
            return
        if item.HasField("error") or item.response.HasField("usage"):
            self.forget(request_id)
            return
        slots = self._by_request[request_id]
        for output in item.response.outputs:
            if output.weight_spans and output.index < len(slots):
                self._by_slot[slots[output.index]].num_tokens = output.weight_spans[-1].end

    def forget(self, request_id: str) -> None:
        """A request has ended: its slots are free."""
        for slot in self._by_request.pop(request_id, ()):
            self._by_slot.pop(slot, None)

    def deltas(self, columns: generation_pb2.TokenColumns) -> Iterator[tuple[str, Delta]]:
        """The rows, as the request's id and a delta for each request. Raises GenserveError for a slot of no request."""
        request_id = ""
        rows: list[SequenceDelta] = []
        for slot, row in self._rows(columns):
            if rows and slot.request_id != request_id:
                yield request_id, RowsDelta(rows)
                rows = []
            request_id = slot.request_id
            rows.append(row)
        if rows:
            yield request_id, RowsDelta(rows)

    def _rows(self, columns: generation_pb2.TokenColumns) -> Iterator[tuple[_Sequence, SequenceDelta]]:
        version, lora_version, token_ids = columns.weight_version, columns.lora_version, list(columns.token_ids)
        texts = columns.texts or [""] * len(columns.slots)
        counts = columns.num_tokens or [1] * len(columns.slots)
        logprobs = Logprobs.of(columns.logprobs) if columns.HasField("logprobs") else None
        if not len(columns.slots) == len(texts) == len(counts):
            raise GenserveError(f"the daemon sent {len(columns.slots)} rows, {len(texts)} texts, {len(counts)} counts")
        start = 0
        for slot, text, num_tokens in zip(columns.slots, texts, counts, strict=True):
            sequence = self._by_slot.get(slot)
            if sequence is None:
                raise GenserveError(f"the daemon sent tokens for slot {slot}, which no request has")
            end = start + num_tokens
            first = sequence.num_tokens
            sequence.num_tokens = last = first + num_tokens
            span = WeightSpan(version, first, last, lora_version)
            yield sequence, SequenceRow(sequence.index, text, token_ids[start:end], span, logprobs, start)
            start = end
