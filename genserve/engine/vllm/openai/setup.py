"""What an OpenAI server needs before the engine starts, and the server once it has."""

import argparse
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm.engine.arg_utils import AsyncEngineArgs

from genserve.config import ServeConfig
from genserve.engine.vllm.openai.flags import server_flags
from genserve.engine.vllm.openai.launch import Launch
from genserve.engine.vllm.openai.relay import Relay
from genserve.engine.vllm.openai.server import OpenAIServer
from genserve.listening import bound_socket


@dataclass(frozen=True, slots=True)
class OpenAISetup:
    """`listener`: where it will serve; `config`: of the daemon, with this port; `flags`: those of the daemon."""

    config: ServeConfig
    flags: argparse.Namespace
    listener: socket.socket

    def server(self, relay: Relay, args: AsyncEngineArgs, say: Callable[[str], None]) -> OpenAIServer:
        """The server of an engine that was started with `args`."""
        flags = server_flags(self.flags, args, self.config)
        max_n = min(self.config.max_n, self.config.max_active_requests)
        launch = Launch(flags, self.listener, relay.place, max_n)
        return OpenAIServer(launch, relay, say)


def prepare(config: ServeConfig, flags: argparse.Namespace) -> OpenAISetup | None:
    """None without --openai-port. Raises OSError if the port is in use."""
    if config.openai_port == -1:
        return None
    listener = bound_socket(config.host, config.openai_port, "--openai-port")
    listener.listen()  # so that no other program takes the port while the engine starts
    return OpenAISetup(replace(config, openai_port=listener.getsockname()[1]), flags, listener)
