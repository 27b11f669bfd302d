"""Makes the process of an OpenAI server."""

import argparse
import multiprocessing
import os
import pickle
import socket
from dataclasses import dataclass
from typing import Any

from genserve.engine.vllm.openai import python_server
from genserve.engine.vllm.openai.link import ServerPlace
from genserve.engine.vllm.openai.python_server import PythonServer
from genserve.engine.vllm.start.clients import ClientPlace

_MAX_N_VARIABLE = "VLLM_MAX_N_SEQUENCES"


@dataclass(frozen=True, slots=True)
class Launch:
    """What each process of a server starts with. `flags`: as `vllm serve` would have parsed them; `place`: that of
    the client of the engine that it is; `max_n`: the largest n of a request."""

    flags: argparse.Namespace
    listener: socket.socket
    place: ClientPlace
    max_n: int

    def start(self, at: ServerPlace) -> Any:
        """A process of multiprocessing, which has begun to start. Call it in the main thread."""
        # Python's own way to start another interpreter hands sockets over, and tests can start it faster.
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=python_server.run, args=(self._server(at),), name="OpenAI server", daemon=True)
        process.start()
        return process

    def _server(self, at: ServerPlace) -> PythonServer:
        client = {
            "input_address": at.requests.address,
            "output_address": at.outputs.address,
            "client_count": self.place.count,
            "client_index": self.place.index,
            **({} if self.place.stats_address is None else {"stats_update_address": self.place.stats_address}),
        }
        flags, variables = pickle.dumps(self.flags), {_MAX_N_VARIABLE: str(self.max_n)}
        requests, outputs = at.requests.socket, at.outputs.socket
        return PythonServer(os.getpid(), self.listener, requests, outputs, client, flags, variables)
