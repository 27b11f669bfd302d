"""What the daemon's flags make of an OpenAI server."""

import argparse
import socket
from dataclasses import fields
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from genserve.engine.vllm.openai import environment
from genserve.engine.vllm.openai.flags import NAMES, add_flags, check_flags, moved, prepare, server_flags
from genserve.engine.vllm.start import config as vllm_config
from genserve.settings.config import OPENAI_FLAGS, ServeConfig

CONTROL = {"enable_scale_out", "grpc_port", "lora_modules", "middleware", "tokens_only", "host", "port", "uds"}
"""vLLM's flags that open ways to the engine, or that are the daemon's."""


MODEL = str(Path(__file__).parent)
"""A directory, so that it is looked for nowhere else."""


def parsed(*given: str) -> argparse.Namespace:
    """The daemon's flags."""
    parser = vllm_config.parser("genserve serve", "")
    ServeConfig.add_flags(parser)
    add_flags(parser)
    return parser.parse_args(given)


def made(*given: str, environment: dict[str, str] | None = None) -> argparse.Namespace:
    """The server's."""
    flags = parsed("--openai-port", "0", "--model", MODEL, *given)
    args = AsyncEngineArgs.from_cli_args(flags)
    return server_flags(flags, args, ServeConfig.from_flags(vars(flags)), environment or {})


def test_the_flags_are_vllms_and_none_of_them_is_the_daemons() -> None:
    """A flag that a new vLLM renames is found here."""
    assert set(OPENAI_FLAGS) <= {each.name for each in fields(moved("FrontendArgs"))}
    assert not CONTROL & set(OPENAI_FLAGS)


def test_a_vllm_that_has_moved_them_stops_the_openai_port_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what it lacks."""
    nowhere = dict.fromkeys(NAMES, ("vllm.nowhere", "vllm.no.where"))
    monkeypatch.setattr("genserve.engine.vllm.openai.flags.MODULES", nowhere)
    flags = parsed("--model", MODEL)
    check_flags(flags, ServeConfig())
    with pytest.raises(ValueError, match=r"^--openai-port: .* vLLM has no FrontendArgs in vllm\.nowhere or vllm\.no\."):
        check_flags(flags, ServeConfig(openai_port=0))
    with pytest.raises(SystemExit):
        parsed("--api-key", "a")


def test_flags_reach_the_server() -> None:
    """Those of the OpenAI server, of the engine and of the daemon."""
    flags = made("--api-key", "a", "b", "--max-model-len", "64", "--served-model-name", "policy")
    assert (flags.api_key, flags.max_model_len, flags.served_model_name) == (["a", "b"], 64, ["policy"])
    assert (flags.model, flags.model_tag, flags.host) == (MODEL, MODEL, "127.0.0.1")
    assert made("--trust-request-chat-template").trust_request_chat_template is True
    assert made("--drain-timeout", "7").shutdown_timeout == 7


def test_the_key_may_come_from_the_environment() -> None:
    """A flag has precedence, as every user of the host can read it in the list of processes."""
    secret = {"GENSERVE_OPENAI_API_KEY": "s"}
    assert made(environment=secret).api_key == ["s"]
    assert made("--api-key", "a", environment=secret).api_key == ["a"]
    assert made().api_key is None


@pytest.mark.parametrize("keys", [["--api-key", ""], []])
def test_an_empty_key_is_none_where_callers_are_listed(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> None:
    """vLLM's server would let everybody in."""
    monkeypatch.delenv("GENSERVE_OPENAI_API_KEY", raising=False)
    listing = ServeConfig(openai_port=0, auth_file="callers.toml")
    with pytest.raises(ValueError, match="give it a key of its own"):
        check_flags(parsed("--openai-port", "0", "--model", MODEL, *keys), listing)
    check_flags(parsed("--openai-port", "0", "--model", MODEL, "--api-key", "a"), listing)


def test_no_profiler_is_offered() -> None:
    """Its routes would start it in the engine."""
    asked = ("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}')
    assert parsed(*asked).profiler_config.profiler == "torch"
    assert made(*asked).profiler_config.profiler is None


def test_variables_that_open_routes_do_not_reach_the_server() -> None:
    """All others do."""
    daemons = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HOME": "/root"}
    assert environment.of_server({**daemons, "VLLM_ENABLE_SCALE_OUT_ENDPOINTS": "1"}) == {"HOME": "/root"}


def test_a_port_in_use_is_found_before_the_engine_starts() -> None:
    """And named."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = parsed("--openai-port", str(port))
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} \\(--openai-port\\)"):
            prepare(ServeConfig.from_flags(vars(flags)), flags)


def test_nothing_is_prepared_without_the_flag() -> None:
    """No port is taken."""
    assert prepare(ServeConfig(), parsed()) is None


def test_the_server_in_rust_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than another server than the one that was meant. Without the OpenAI port the variable means nothing."""
    flags, serving = parsed("--openai-port", "0", "--model", MODEL), ServeConfig(openai_port=0)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match=r"^--openai-port: VLLM_USE_RUST_FRONTEND asks .* unset it"):
        check_flags(flags, serving)
    check_flags(parsed("--model", MODEL), ServeConfig())
    for harmless in ("0", ""):
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", harmless)
        check_flags(flags, serving)
