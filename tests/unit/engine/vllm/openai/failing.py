"""A process in the place of an OpenAI server: it fails at once, or stays."""

import multiprocessing
import socket
import sys
import time
from argparse import Namespace
from typing import Any


def fail() -> None:
    """Ends with a status that is not 0."""
    sys.exit(3)


def stay() -> None:
    """Answers nothing, and does not end by itself."""
    time.sleep(60)


class Processes:
    """As genserve.engine.vllm.openai.launch.Launch. `targets`: what the processes do, one after the other; the last
    one for all later ones."""

    choice = "a server"
    flags = Namespace(ssl_certfile=None, ssl_cert_reqs=0)

    def __init__(self, *targets: Any) -> None:
        self._targets = list(targets)
        self.started: list[Any] = []
        self.listener = socket.create_server(("127.0.0.1", 0))

    def start(self, at: Any) -> Any:
        """A process."""
        target = self._targets.pop(0) if len(self._targets) > 1 else self._targets[0]
        process = multiprocessing.get_context("spawn").Process(target=target, daemon=True)
        process.start()
        self.started.append(process)
        return process
