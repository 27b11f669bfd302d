"""What a front end does when the daemon tells it something."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.control.conditions import EngineCondition
from genserve.control.state import StateBoard
from genserve.frontend import _FrontEnd
from genserve.frontends import settings as questions
from genserve.frontends.link import Message
from genserve.frontends.settings import FrontendSettings
from genserve.frontends.state import NUM_WORDS, StateWriter
from genserve.memory.words import SharedWords


@pytest.mark.parametrize("question", [questions.CHANGED, questions.STOP])
async def test_streams_end_with_an_engine_that_the_daemon_has_given_up(question: str) -> None:
    """Whatever it is told: a daemon that fails may end before it has told of the change."""
    engine: Any = SimpleNamespace(weight_version=0)
    board = StateBoard(engine, lambda: (), "id")
    words = SharedWords.create(NUM_WORDS, "state")
    StateWriter(board, words)
    ours, theirs = socket.socketpair()
    with ours:
        settings = FrontendSettings(os.getpid(), theirs.detach(), os.dup(words.fd), (), "127.0.0.1", 0, 1 << 20, 300.0)
        frontend = _FrontEnd(settings)
        causes: list[str] = []
        joined: Any = SimpleNamespace(declare_dead=causes.append, close=lambda: None)
        frontend._engine = joined
        answer = {questions.CHANGED: frontend._changed, questions.STOP: frontend._stop}[question]
        if question == questions.CHANGED:
            await answer(Message())
            assert causes == []
        board.enter(EngineCondition.DEAD)
        await answer(Message())
        assert causes == ["the daemon has given it up"]
        frontend.link.close()
        await frontend.close()
    words.close()
