"""One GenerateManyResponse while it is built: what its requests have gained, in items and in columns.

An error of a request ends that request, and neither its neighbours in the message nor the call.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from genserve.engine.generation import GenerationUpdate
from genserve.engine.protocol import GenerationStream
from genserve.errors import GenserveError
from genserve.observe.log_lines import about
from genserve.rpc.convert.generation_response import to_response
from genserve.rpc.convert.token_columns import ColumnsOfStep, Slots
from genserve.rpc.status import known_error, to_message
from genserve.rpc.streams.parts import BYTES_PER_VALUE, MAX_PART_VALUES, num_values, parts_of
from genserve.v1 import generation_pb2

METHOD: Final = "GenerateMany"
# Of the values that dominate a message (tokens, alternatives, characters). A message that is not full takes one part of
# an update more at most, so none comes near the 4 MiB that clients take by default. What is left over goes with the
# next message, at once.
MAX_VALUES: Final = 1 << 17
# The cost of an item besides its values, in time: building a message of thousands of items would block the loop.
_VALUES_PER_ITEM: Final = 128
_VALUES_PER_ROW: Final = 8


@dataclass(slots=True)
class Running:
    """A request that has begun. `slots`: the numbers of its sequences in columns, None before its first item;
    `num_slots`: how many it needs, 0 if its output comes as items. `parts`: what is left of an update that is too large
    for one message, None if there was none."""

    stream: GenerationStream
    num_slots: int
    slots: list[int] | None = None
    parts: deque[GenerationUpdate] | None = None
    has_failed: bool = False

    def take(self) -> GenerationUpdate | None:
        """The next update of the stream, or the next part of one. Raises the error that ended the request."""
        if self.parts:
            return self.parts.popleft()
        self.parts = None
        return self.stream.take()

    def split(self, update: GenerationUpdate) -> GenerationUpdate:
        """The first part of an update; `take` returns the others."""
        self.parts = deque(parts_of(update))
        return self.parts.popleft()


class NextMessage:
    """Add to it until it is full, then `finish` it. `slots`: the numbers of the sequences of the call; `failed` is
    called for a request that has ended by an error."""

    def __init__(self, slots: Slots, failed: Callable[[Running], None]) -> None:
        self._slots = slots
        self._failed = failed
        self._response = generation_pb2.GenerateManyResponse()
        self._columns = ColumnsOfStep()
        self._in_columns: list[Running] = []
        self.num_values = 0
        """It is full from MAX_VALUES on."""

    def refuse(self, request_id: str, error: GenserveError) -> None:
        """Tells of a request that does not begin, before any output."""
        item = self._response.items.add(request_id=request_id, error=to_message(error))
        self.num_values += item.ByteSize() // BYTES_PER_VALUE

    # Once for each token of GenerateMany: every call in here is seen in the figures.
    def add(self, running: Running) -> None:
        """Takes what a request has gained. At most once for each request: its columns would come before its items."""
        try:
            update = running.take()
            if update is None:
                return
            if (size := num_values(update)) > MAX_PART_VALUES:
                update = running.split(update)
                size = num_values(update)
            if running.slots is not None and self._columns.add(running.slots, update):
                self._in_columns.append(running)
                self.num_values += size + _VALUES_PER_ROW * len(update.outputs)
            else:
                self._add_item(running, update)
                self.num_values += size + _VALUES_PER_ITEM
        except Exception as error:
            self._fail(running, error)

    def finish(self) -> generation_pb2.GenerateManyResponse:
        """The message."""
        for slot, error in self._columns.fill(self._response):
            running = next(each for each in self._in_columns if slot in (each.slots or ()))
            if not running.has_failed:
                self._fail(running, error)
        return self._response

    def _add_item(self, running: Running, update: GenerationUpdate) -> None:
        request_id = running.stream.request_id
        item = self._response.items.add(request_id=request_id)
        try:
            to_response(update, request_id, into=item.response)
        except BaseException:
            del self._response.items[-1]
            raise
        if running.slots is None and running.num_slots and update.usage is None:
            slots = self._slots.take(running.num_slots)
            if slots:
                running.slots = slots
                item.slots.extend(slots)
            else:
                running.num_slots = 0  # it goes on in items

    def _fail(self, running: Running, error: Exception) -> None:
        running.has_failed = True
        request_id = running.stream.request_id
        with about(request_id):
            self._response.items.add(request_id=request_id, error=to_message(known_error(error, METHOD)))
        self._failed(running)
