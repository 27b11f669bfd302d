"""vLLM's OpenAI server in Python."""

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

from bench import engines
from bench.peers.http_calls import HttpCalls
from bench.processes import PeerProcess
from bench.traces import Trace, Work
from tests.support.ports import free_port


class VllmHttp:
    """`python -m vllm.entrypoints.openai.api_server`."""

    peers: ClassVar[tuple[str, ...]] = ("vllm_http", "vllm_http_bare", "vllm_http_tokens", "vllm_http_final")
    without_text: ClassVar[tuple[str, ...]] = ("vllm_http_tokens",)
    is_own_client: ClassVar[bool] = False
    pid = 0
    _process: PeerProcess
    _calls: HttpCalls

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts it, and waits until /health answers."""
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(checkpoint), *engines.flags(), *flags, "--enable-scale-out"]
        command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
        self._process = PeerProcess("vllm_http", command, directory / "vllm_http.log", engines.ENVIRONMENT)
        stack.callback(self._process.stop)
        self.pid = self._process.pid
        self._calls = HttpCalls(port, str(checkpoint))
        stack.push_async_callback(self._calls.close)
        await self._process.wait_until(self._calls.is_serving)

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """One POST for each request."""
        return await self._calls.generate(peer, work)
