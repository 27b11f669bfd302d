"""vLLM's application in front of a client of the engine, and its HTTP server."""

import asyncio
import pickle
import socket
from collections.abc import Iterable
from typing import Any, Final

import uvicorn
from pydantic_core import SchemaValidator
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from genserve.engine.vllm.openai.asgi import BoundedBodies, VersionsHeader
from genserve.engine.vllm.openai.engine import OpenAIEngine

_ROUTES: Final = ("/v1/", "/v2/")

_FURTHER_ROUTES: Final = ("/health", "/version", "/metrics", "/tokenize", "/detokenize")
"""Routes that do not control the engine. All others are removed."""

_LISTS: Final = ("list", "tuple", "set", "frozenset")


class HttpServer(NoSignalServer):
    """vLLM's HTTP server, with an event for when it serves."""

    def __init__(self, config: uvicorn.Config, refreshes_certificate: bool) -> None:
        super().__init__(config)
        self._refreshes_certificate = refreshes_certificate
        self.is_up = asyncio.Event()
        """Set when it serves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn.Server.startup."""
        await super().startup(sockets)
        self.is_up.set()

    async def run_on(self, listener: socket.socket) -> None:
        """Serves until `finish`, and until the last answer has been sent."""
        config, refresher = self.config, None
        if self._refreshes_certificate:  # internal: as vllm.entrypoints.launchers.launcher.serve_http
            refresher = SSLCertRefresher(config.ssl, config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)
        await self.serve(sockets=[listener])
        if refresher is not None:
            refresher.stop()

    def finish(self) -> None:
        """Closes the listener, and ends when the last answer has been sent."""
        self.should_exit = True


async def http_server(engine: OpenAIEngine, pickled_flags: bytes) -> HttpServer:
    """The server of an engine. `pickled_flags`: as `vllm serve` would have parsed them."""
    flags: Any = pickle.loads(pickled_flags)
    if flags.tool_parser_plugin:
        ToolParserManager.import_tool_parser(flags.tool_parser_plugin)
    if flags.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(flags.reasoning_parser_plugin)
    llm = engine.llm
    llm.log_requests = flags.enable_log_requests
    # internal: as vllm.entrypoints.launchers.api_server.entry, where SIGTERM cuts the answers off that are being sent.
    tasks = await llm.get_supported_tasks()
    app = build_app(flags, tasks, llm.model_config)
    app.router.routes[:] = [each for each in app.router.routes if _is_served(getattr(each, "path", ""))]
    fail_fast(app.router.routes)
    await init_app_state(llm, app.state, flags, tasks)
    config = uvicorn.Config(
        BoundedBodies(VersionsHeader(app), engine.max_request_bytes),
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
    http = HttpServer(config, flags.enable_ssl_refresh)
    app.state.server = http  # vLLM ends it there if the engine has died
    return http


def _is_served(path: str) -> bool:
    return path.startswith(_ROUTES) or path in _FURTHER_ROUTES


def fail_fast(routes: Iterable[Any]) -> None:
    """Has these routes of FastAPI look at each list in a body up to its first element that is wrong.

    For every wrong element pydantic collects an error of each kind that it might have been. 30 kB took half a minute,
    in which nobody else was answered, and 11 GB."""
    for route in routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            # internal: FastAPI's adapter of this parameter of this route. Validators of models that are built already
            # would be taken as they are.
            adapter = field._type_adapter
            adapter.validator = SchemaValidator(_failing_fast(adapter.core_schema), _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """The same schema of pydantic-core, in which lists fail at once."""
    if isinstance(schema, dict):
        own = {name: _failing_fast(part) for name, part in schema.items()}
        return own | {"fail_fast": True} if schema.get("type") in _LISTS else own
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    return tuple(map(_failing_fast, schema)) if type(schema) is tuple else schema
