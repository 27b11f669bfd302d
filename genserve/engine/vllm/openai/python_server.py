"""The process of vLLM's OpenAI server in Python.

Nothing of vLLM is imported before the environment is as it must be, and this process ends with the daemon.
"""

import asyncio
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from genserve.engine.vllm.openai.environment import allow_connections, of_server
from genserve.worker.contract.lifetime import end_with_process

_ROUTES: Final = ("/v1/", "/v2/")
_FURTHER_ROUTES: Final = ("/health", "/version", "/metrics", "/tokenize", "/detokenize")
"""What does not control the engine. All else is taken out."""


@dataclass(frozen=True, slots=True)
class PythonServer:
    """`listener`: of HTTP; `requests` and `outputs`: where it joins the engine; `client`: what else vLLM's clients are
    told; `flags`: as `vllm serve` would have parsed them, pickled; `variables`: of its environment, besides the
    daemon's."""

    daemon_pid: int
    listener: socket.socket
    requests: socket.socket
    outputs: socket.socket
    client: Mapping[str, Any]
    flags: bytes
    variables: Mapping[str, str] = field(default_factory=dict)


def run(server: PythonServer) -> None:
    """Serves until SIGTERM; then until the requests that run have been answered."""
    end_with_process(server.daemon_pid)
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the daemon, which ends this process
    allow_connections()
    environment = of_server(os.environ) | dict(server.variables)
    os.environ.clear()
    os.environ.update(environment)
    import uvloop
    from vllm.utils.system_utils import set_process_title

    set_process_title("APIServer")
    uvloop.run(_serve(server))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end would run finalizers of vLLM's whose modules are gone by then


async def _serve(server: PythonServer) -> None:
    import uvicorn
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from genserve.engine.vllm.openai.checked import CheckedEngine
    from genserve.engine.vllm.openai.versions import VersionsHeader

    flags = pickle.loads(server.flags)
    if flags.tool_parser_plugin:
        ToolParserManager.import_tool_parser(flags.tool_parser_plugin)
    if flags.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(flags.reasoning_parser_plugin)
    client = {**server.client, "input_listener": server.requests, "output_listener": server.outputs}
    # internal: as vllm.entrypoints.launchers.api_server.entry, where SIGTERM cuts the answers off that are being sent.
    async with build_async_engine_client(flags, client_config=client) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(flags, tasks, engine.model_config)
        app.router.routes[:] = [each for each in app.router.routes if _is_served(getattr(each, "path", ""))]
        await init_app_state(CheckedEngine(engine), app.state, flags, tasks)
        config = uvicorn.Config(
            VersionsHeader(app),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            ssl_keyfile=flags.ssl_keyfile,
            ssl_certfile=flags.ssl_certfile,
            ssl_ca_certs=flags.ssl_ca_certs,
            ssl_cert_reqs=flags.ssl_cert_reqs,
            ssl_ciphers=flags.ssl_ciphers,
            h11_max_incomplete_event_size=flags.h11_max_incomplete_event_size,
        )
        config.load()
        http = NoSignalServer(config)
        if flags.enable_ssl_refresh:  # internal: as vllm.entrypoints.launchers.launcher.serve_http
            refresher = SSLCertRefresher(config.ssl, config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)
        app.state.server = http  # vLLM ends it there if the engine has died
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _finish, http)
        await http.serve(sockets=[server.listener])
        if flags.enable_ssl_refresh:
            refresher.stop()


def _is_served(path: str) -> bool:
    return path.startswith(_ROUTES) or path in _FURTHER_ROUTES


def _finish(http: Any) -> None:
    """Closes the listener, and ends when the last answer has been sent."""
    http.should_exit = True
