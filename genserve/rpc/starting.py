"""What a daemon answers before its engine is there: how far it has come, and nothing else."""

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from google.protobuf.descriptor import ServiceDescriptor

from genserve.control.conditions import RULES, STARTING
from genserve.control.state import StateBoard
from genserve.rpc.handlers import method_handler
from genserve.rpc.services import ServiceTable
from genserve.rpc.status_answers import StatusAnswers

_ANSWERED = frozenset({"genserve.v1.ControlService.GetStatus", "genserve.v1.ControlService.WatchStatus"})


def add_starting(table: ServiceTable, services: Iterable[ServiceDescriptor], board: StateBoard) -> StatusAnswers:
    """Adds every method of these services. GetStatus and WatchStatus answer, and what does is returned; a watch goes on
    when the daemon serves. The others are UNAVAILABLE."""
    answers = StatusAnswers(board)
    refuse = _refusing(board)
    for service in services:
        handlers = {
            method.name: method_handler(method, getattr(answers, method.name))
            if method.full_name in _ANSWERED
            else method_handler(method, refuse, bytes)  # nobody reads the request
            for method in service.methods
        }
        table.add_registered_method_handlers(service.full_name, handlers)
    return answers


def _refusing(board: StateBoard) -> Callable[[Any, Any], Awaitable[NoReturn]]:
    async def refuse(request: Any, context: Any) -> NoReturn:
        refusal = RULES[board.phase].control or STARTING  # a call that came just before the daemon serves
        raise refusal(board.startup.described(time.time()) if board.startup is not None else "")

    return refuse
