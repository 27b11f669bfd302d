"""A template of front ends without an engine: `python -m tests.unit.frontends.scripted_frontend FD`. The invitation of
a front end is a JSON object that says what it does: `dies_in`, a question that kills it, `hangs_in`, one that it
never answers, or `longest_wait_s`, what it answers to this question."""

import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any

from genserve.frontends import questions
from genserve.frontends.link import Link, Message
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.template import serve_template


async def serve(settings: FrontendSettings) -> None:
    """Answers until the daemon is gone, or says stop."""
    script: dict[str, Any] = {}

    async def answer(question: str, message: Message) -> Message:
        if question == questions.JOIN:
            script.update(json.loads(message.data))
        if script.get("dies_in") == question:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.get("hangs_in") == question:
            await asyncio.Event().wait()
        if question == questions.STOP:
            asyncio.get_running_loop().call_soon(link.close)
        if question == questions.ABORT:
            # It asks the daemon about all that it is asked about.
            ids = message.values["request_ids"]
            used = await link.ask(questions.USE_ADAPTER, Message({"name": "n", "request_id": ids[0]}), timeout_s=30)
            link.tell(questions.RELEASE_ADAPTER, Message({"request_id": ids[0]}))
            everywhere = await link.ask(questions.ABORT, Message({"request_ids": ids}), timeout_s=30)
            return Message({"aborted_ids": [used.values["unique_name"], everywhere.data.decode()]})
        values = {"port": settings.port or os.getpid(), "num_requests": 2, "idle": True, "num_computed_tokens": 5}
        return Message({**values, "longest_wait_s": script.get("longest_wait_s")})

    names = [value for name, value in vars(questions).items() if name.isupper() and isinstance(value, str)]
    handlers = {name: (lambda message, name=name: answer(name, message)) for name in names}
    link = Link(socket.socket(fileno=settings.link_fd), handlers)
    await link.open()
    await link.run()


def run(settings: FrontendSettings) -> int:
    """What a front end does."""
    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    serve_template(socket.socket(fileno=int(sys.argv[1])), run, os.getppid())
