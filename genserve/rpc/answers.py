"""Responses of every service: each carries the state of the engine."""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from genserve.control.state import EngineState
from genserve.rpc.convert.values import to_state
from genserve.v1 import types_pb2


class CarriesState(Protocol):
    """A response."""

    @property
    def state(self) -> types_pb2.EngineState:
        """The state of the engine."""


P = ParamSpec("P")
R = TypeVar("R", bound=CarriesState)


class Answers:
    """Makes responses. `state` gives the state when a response is made."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    def __call__(self, response: Callable[P, R], *args: P.args, **fields: P.kwargs) -> R:
        """What `response` makes of the fields, with the state."""
        answer = response(*args, **fields)
        answer.state.CopyFrom(to_state(self._state()))
        return answer
