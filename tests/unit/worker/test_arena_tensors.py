"""The tensors of a push, also while its bytes arrive."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

import numpy as np
import pytest
import torch

from genserve.memory.arena import Arena, Arrival
from genserve.worker.arena_tensors import ArenaTensors
from genserve.worker.contract.calls import Prepare
from genserve.worker.update.protocol import PrepareCancelledError
from tests.support.patience import wait_until

PLACES = [("a", "U8", [4], 0, 4), ("empty", "U8", [0], 4, 0), ("b", "U8", [4], 4, 4)]


def prepared(arena: Arena, arrival: Arrival | None) -> Prepare:
    return Prepare("n", arena.path, arena.size_bytes, PLACES, {}, "" if arrival is None else arrival.path)


class Cancelled(Event):
    """Set when somebody has waited for it so many times; `num_waits`: how often somebody has."""

    def __init__(self, after_waits: float = math.inf) -> None:
        super().__init__()
        self.num_waits = 0
        self._after_waits = after_waits

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        if self.num_waits >= self._after_waits:
            self.set()
        return super().wait(timeout)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.allocate(8)
    yield arena
    arena.close()


def test_a_tensor_is_there_when_its_last_byte_is(arena: Arena) -> None:
    """And not before: the thread waits for it, out of the memory that is reserved for pushes."""
    arrival, waits = Arrival(), list[str]()

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    taken: list[tuple[str, list[int]]] = []
    cancelled = Cancelled()

    def take() -> None:
        for name, tensor in ArenaTensors(prepared(arena, arrival), arena.path, cancelled, waiting):
            taken.append((name, tensor.tolist()))

    thread = Thread(target=take)
    thread.start()
    wait_until(lambda: waits == ["begins"])
    for num_bytes, expected, has_waited in ((3, 0, 1), (4, 2, 3), (7, 2, 3)):
        arena.write(0, np.arange(1, num_bytes + 1, dtype=np.uint8).data)
        arrival.tell(num_bytes)
        wait_until(lambda has_waited=has_waited: len(waits) >= has_waited)  # type: ignore[misc]
        looked = cancelled.num_waits
        wait_until(lambda looked=looked: cancelled.num_waits > looked + 1)  # type: ignore[misc]
        assert len(taken) == expected
    arena.write(7, b"\x08")
    arrival.tell(8)
    thread.join(30)
    assert taken == [("a", [1, 2, 3, 4]), ("empty", []), ("b", [5, 6, 7, 8])]
    assert waits == ["begins", "ends"] * 2
    arrival.close()


def test_a_push_that_is_given_up_ends_the_wait(arena: Arena) -> None:
    """Its bytes may never come."""
    arrival = Arrival()
    tensors = iter(ArenaTensors(prepared(arena, arrival), arena.path, Cancelled(after_waits=3), nullcontext))
    with pytest.raises(PrepareCancelledError):
        next(tensors)
    arrival.close()


def test_bytes_that_are_all_there_are_not_waited_for(arena: Arena) -> None:
    """Without an arrival, as for a version that is applied again."""
    found = dict(ArenaTensors(prepared(arena, None), arena.path, Event(), pytest.fail))  # type: ignore[arg-type]
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "a": torch.Size([4]), "empty": torch.Size([0]), "b": torch.Size([4]),
    }  # fmt: skip
