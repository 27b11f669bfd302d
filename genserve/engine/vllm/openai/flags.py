"""The flags of vLLM's OpenAI server that the daemon takes too, and what a server needs before the engine starts."""

import argparse
import importlib.util
import os
import pickle
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs, get_kwargs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from genserve.net import bound_socket
from genserve.settings.config import OPENAI_FLAGS, ServeConfig

API_KEY_VARIABLE = "GENSERVE_OPENAI_API_KEY"
_RUST_VARIABLE = "VLLM_USE_RUST_FRONTEND"
# Names of vLLM's server whose modules differ between the supported versions. They are imported when they are used: a
# name that has moved again must stop the OpenAI port, not the daemon. Remove the modules of a version when it leaves
# the range of `genserve.installed_engine`. tests/engine/test_openai_internals.py imports all names.
MODULES: Final = {
    # name: its module in vLLM 0.33, its module in vLLM 0.32
    "FrontendArgs": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
}
NAMES: Final = tuple(MODULES)


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
        """The flags that `vllm serve` would have parsed, in front of an engine that was started with `args`."""
        return pickle.dumps(server_flags(self.flags, args, self.config))


def prepare(config: ServeConfig, flags: argparse.Namespace) -> OpenAISetup | None:
    """None without --openai-port. Raises OSError if the port is in use."""
    if not config.with_openai:
        return None
    listener = bound_socket(config.host, config.openai_port, "--openai-port")
    listener.listen()  # so that no other program takes the port while the engine starts
    return OpenAISetup(replace(config, openai_port=listener.getsockname()[1]), flags, listener)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags in OPENAI_FLAGS, with vLLM's help and defaults. Adds none if vLLM declares them in
    an unknown module: a daemon without the OpenAI port needs none, and `check_flags` says what is wrong."""
    try:
        declared = moved("FrontendArgs")
    except ImportError:
        return
    # internal: as FrontendArgs.add_cli_args, which adds all of them. Some would set what the daemon sets.
    kwargs = declared._customize_cli_kwargs(get_kwargs(declared))
    group = parser.add_argument_group("openai", "vLLM's OpenAI server, with --openai-port.")
    for name in OPENAI_FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", **kwargs[name])


def check_flags(flags: argparse.Namespace, config: ServeConfig) -> None:
    """Raises ValueError for flags of a server that does not run, or that it would refuse."""
    if not config.with_openai:
        default = FlexibleArgumentParser()
        add_flags(default)
        for name, value in vars(default.parse_args([])).items():
            if getattr(flags, name) != value:
                raise ValueError(f"--{name.replace('_', '-')} is for the OpenAI server: pass --openai-port too")
        return
    if os.environ.get(_RUST_VARIABLE, "0") not in ("", "0"):  # the engine would leave images to that server
        raise ValueError(
            f"--openai-port: {_RUST_VARIABLE} asks for vLLM's server in Rust, which makes none of genserve's checks: "
            "unset it, and the server in Python runs"
        )
    try:
        for name in NAMES:
            moved(name)
    except ImportError as error:
        raise ValueError(f"--openai-port: the installed vLLM is not one that it runs with: {error}") from error
    keys = [os.environ.get(API_KEY_VARIABLE)] if flags.api_key is None else flags.api_key
    if config.lists_callers and not any(keys):  # to vLLM, an empty key is none
        raise ValueError(
            f"--openai-port: HTTP knows nothing of --auth-file: give it a key of its own in ${API_KEY_VARIABLE}"
        )
    try:
        moved("validate_parsed_serve_args")(_with(flags, _defaults()))
        _check_parsers(flags)
    except (KeyError, TypeError) as error:
        raise ValueError(str(error.args[0])) from error


def _check_parsers(flags: argparse.Namespace) -> None:
    # Imported here, as vLLM's HTTP server comes with it.
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if flags.tool_parser_plugin:
        ToolParserManager.import_tool_parser(flags.tool_parser_plugin)
    if flags.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(flags.reasoning_parser_plugin)
    validate_api_server_args(flags)


def server_flags(
    flags: argparse.Namespace, args: AsyncEngineArgs, config: ServeConfig, environment: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The flags that `vllm serve` would have parsed. `flags`: of the daemon; `args`: of the engine that runs."""
    parsed = _with(flags, _defaults())
    for each in fields(args):
        if each.name != "profiler_config":  # it would open routes that start and stop a profiler
            setattr(parsed, each.name, getattr(args, each.name))
    parsed.model_tag = args.model
    parsed.host, parsed.port = config.host.strip("[]"), config.openai_port
    certificate = config.certificate
    if certificate is not None:
        parsed.ssl_certfile, parsed.ssl_keyfile = certificate.certfile, certificate.keyfile or certificate.certfile
        parsed.ssl_ca_certs = certificate.ca_certs or None
        parsed.ssl_cert_reqs = ssl.CERT_REQUIRED if certificate.requires_clients else ssl.CERT_NONE
        parsed.enable_ssl_refresh = True
    parsed.trust_request_chat_template = config.trust_request_chat_template
    parsed.shutdown_timeout = round(config.drain_timeout_s)
    if parsed.api_key is None and (key := environment.get(API_KEY_VARIABLE)):
        parsed.api_key = [key]
    return parsed


def _defaults() -> argparse.Namespace:
    """The defaults of `vllm serve`."""
    parsed: argparse.Namespace = moved("make_arg_parser")(FlexibleArgumentParser()).parse_args([])
    return parsed


def _with(flags: argparse.Namespace, parsed: argparse.Namespace) -> argparse.Namespace:
    for name in OPENAI_FLAGS:
        setattr(parsed, name, getattr(flags, name))
    return parsed


def moved(name: str) -> Any:
    """The object that vLLM calls `name`. Raises ImportError if none of its modules has it, and the errors of importing
    them."""
    for module in MODULES[name]:
        if _exists(module) and hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    raise ImportError(f"vLLM has no {name} in {' or '.join(MODULES[name])}")


def _exists(module: str) -> bool:
    # find_spec imports the package above, which an older version may lack.
    above, _, _ = module.rpartition(".")
    return above == "" or (_exists(above) and importlib.util.find_spec(module) is not None)
