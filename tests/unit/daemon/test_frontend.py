"""What a front end does when the daemon tells it something."""

import asyncio
import os
import socket

import pytest

from genserve.control.conditions import EngineCondition
from genserve.control.state import StateBoard
from genserve.daemon import frontend
from genserve.engine.vllm.clients.frontend import FrontendEngine
from genserve.frontends import questions
from genserve.frontends.link import Link, Message
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.state import NUM_WORDS, StateWriter
from genserve.memory.words import SharedWords
from genserve.security.access_list import AccessSource
from genserve.settings.config import ServeConfig
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import GeneratingEngine


class JoinedEngine(GeneratingEngine):
    """As a front end has it. `causes`: for which it was declared dead."""

    is_traced = False

    def __init__(self) -> None:
        super().__init__()
        self.causes: list[str] = []

    def declare_dead(self, cause: str) -> None:
        self.causes.append(cause)

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("question", [questions.CHANGED, questions.STOP])
async def test_streams_end_with_an_engine_that_the_daemon_has_given_up(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is told: a daemon that fails may end before it has told of the change."""
    joined = JoinedEngine()
    board = StateBoard(joined, lambda: (), "id")
    words = SharedWords.create(NUM_WORDS, "state")
    StateWriter(board, words)

    async def join(*_: object) -> JoinedEngine:
        return joined

    monkeypatch.setattr(FrontendEngine, "join", join)
    for of_the_process in ("write_log_lines", "freeze_objects"):
        monkeypatch.setattr(frontend, of_the_process, lambda: None)
    ours, theirs = socket.socketpair()
    settings = FrontendSettings(os.getpid(), theirs.detach(), os.dup(words.fd), (), 0)
    serving = asyncio.create_task(frontend.serve(ServeConfig(), AccessSource(), settings))
    daemon = Link(ours, {})
    await daemon.open()
    reading = asyncio.create_task(daemon.run())
    await daemon.ask(questions.JOIN, Message(), timeout_s=STEP_S)
    if question == questions.CHANGED:
        await daemon.ask(question, Message(), timeout_s=STEP_S)
        assert joined.causes == []
    joined.cause_of_death = "EngineCore was ended by SIGKILL"
    board.enter(EngineCondition.DEAD)
    await daemon.ask(question, Message(), timeout_s=STEP_S)
    assert joined.causes == ["EngineCore was ended by SIGKILL"]
    daemon.close()
    await asyncio.wait_for(asyncio.gather(serving, reading), STEP_S)
    words.close()
