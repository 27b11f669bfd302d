"""Makes the process of an OpenAI server."""

import argparse
import json
import multiprocessing
import os
import pickle
import socket
from dataclasses import dataclass
from typing import Any

from vllm import envs

from genserve.engine.vllm.openai import python_server, rust_server
from genserve.engine.vllm.openai.choice import ServerChoice
from genserve.engine.vllm.openai.link import ServerPlace
from genserve.engine.vllm.openai.moved import moved
from genserve.engine.vllm.openai.python_server import PythonServer
from genserve.engine.vllm.openai.rust_server import RustServer
from genserve.engine.vllm.start.clients import ClientPlace

_MAX_N_VARIABLE = "VLLM_MAX_N_SEQUENCES"
_KEY_VARIABLE = "VLLM_API_KEY"  # of vLLM's servers, for one key
_NOT_FOR_RUST = frozenset(
    {"api_server_count", "data_parallel_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb"}
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What each process of a server starts with. `flags`: as `vllm serve` would have parsed them; `place`: that of
    the client of the engine that it is; `max_n`: the largest n of a request."""

    choice: ServerChoice
    flags: argparse.Namespace
    listener: socket.socket
    place: ClientPlace
    max_n: int

    def start(self, at: ServerPlace) -> Any:
        """A process of multiprocessing, which has begun to start. Call it in the main thread."""
        # Python's own way to start another interpreter hands sockets over, and tests can start it faster.
        spawn = multiprocessing.get_context("spawn")
        target, server = (
            (rust_server.run, self._rust(at)) if self.choice.binary else (python_server.run, self._python(at))
        )
        process = spawn.Process(target=target, args=(server,), name="OpenAI server", daemon=True)
        process.start()
        return process

    def _python(self, at: ServerPlace) -> PythonServer:
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

    def _rust(self, at: ServerPlace) -> RustServer:
        # internal: as vllm.v1.utils.RustFrontendProcessManager.
        keys, excluded = self.flags.api_key or [], set(_NOT_FOR_RUST)
        variables = {_MAX_N_VARIABLE: str(self.max_n)}
        if len(keys) == 1 and keys[0]:
            # Everybody on the machine can read a command line. Several keys have been on the daemon's already.
            variables[_KEY_VARIABLE] = keys[0]
            excluded.add("api_key")
        shared = moved("jsonify_non_default_args")(self.flags, exclude=excluded)
        shared |= {
            "model_tag": self.flags.model,
            "engine_ready_timeout_secs": envs.VLLM_ENGINE_READY_TIMEOUT_S,
            "http_timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        }
        num_engines = str(self.flags.data_parallel_size)
        engines = ["--engine-count", num_engines, "--data-parallel-size", num_engines]
        if self.place.stats_address is not None:
            engines += ["--coordinator-address", self.place.stats_address]
        command = [self.choice.binary, "frontend", *engines, "--args-json", json.dumps(shared, sort_keys=True)]
        return RustServer(os.getpid(), command, self.listener, at.requests.socket, at.outputs.socket, variables)
