"""What an OpenAI server needs before the engine starts."""

import argparse
import pickle
import socket
from dataclasses import dataclass, replace

from vllm.engine.arg_utils import AsyncEngineArgs

from genserve.engine.vllm.openai.flags import server_flags
from genserve.net.listening import bound_socket
from genserve.settings.config import ServeConfig


@dataclass(frozen=True, slots=True)
class OpenAISetup:
    """`listener`: where it will serve; `config`: of the daemon, with this port; `flags`: those of the daemon."""

    config: ServeConfig
    flags: argparse.Namespace
    listener: socket.socket

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self.config.certificate is None else "https"

    def pickled_flags(self, args: AsyncEngineArgs) -> bytes:
        """What `vllm serve` would have parsed, in front of an engine that was started with `args`."""
        return pickle.dumps(server_flags(self.flags, args, self.config))


def prepare(config: ServeConfig, flags: argparse.Namespace) -> OpenAISetup | None:
    """None without --openai-port. Raises OSError if the port is in use."""
    if not config.with_openai:
        return None
    listener = bound_socket(config.host, config.openai_port, "--openai-port")
    listener.listen()  # so that no other program takes the port while the engine starts
    return OpenAISetup(replace(config, openai_port=listener.getsockname()[1]), flags, listener)
