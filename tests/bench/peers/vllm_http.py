"""vLLM's OpenAI server, /v1/completions as server-sent events; asked with aiohttp, read with msgspec.

Its prompts and answers are token ids as well (`return_token_ids`); it cannot be told to leave the text out.
"""

import sys
import time
from pathlib import Path
from typing import ClassVar

import aiohttp
import msgspec

from tests.bench import engines
from tests.bench.processes import PeerProcess, free_port
from tests.bench.traces import Trace, Work, closed_loop

_PREFIX = b"data: "


class Choice(msgspec.Struct):
    """The part of a choice that is needed."""

    token_ids: list[int] | None = None


class Completion(msgspec.Struct):
    """The part of a chunk that is needed."""

    choices: list[Choice]


class VllmHttp:
    """`python -m vllm.entrypoints.openai.api_server`."""

    peers: ClassVar[tuple[str, ...]] = ("vllm_http", "vllm_http_final")
    pid = 0
    _process: PeerProcess
    _session: aiohttp.ClientSession
    _url = ""
    _model = ""

    async def start(self, checkpoint: Path, directory: Path) -> None:
        """Starts it, and waits until /health answers."""
        port = free_port()
        self._url, self._model = f"http://127.0.0.1:{port}", str(checkpoint)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(checkpoint), *engines.flags()]
        command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
        self._process = PeerProcess("vllm_http", command, directory / "vllm_http.log", engines.ENVIRONMENT)
        self.pid = self._process.pid
        timeout = aiohttp.ClientTimeout(total=600)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        await self._process.wait_until(self._is_serving)

    async def _is_serving(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """One POST for each request."""
        decode = msgspec.json.Decoder(Completion).decode

        async def stream(number: int, prompt: list[int]) -> Trace:
            body = {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": work.max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": not work.final_only,
            }
            trace = Trace(time.monotonic())
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                if work.final_only:
                    add(trace, await answer.read())
                    return trace
                async for line in answer.content:
                    if line.startswith(_PREFIX) and not line.startswith(b"data: [DONE]"):
                        add(trace, line[len(_PREFIX) :])
            return trace

        def add(trace: Trace, data: bytes) -> None:
            for choice in decode(data).choices:
                if choice.token_ids:
                    trace.arrived_at.append(time.monotonic())
                    trace.token_ids += choice.token_ids

        return await closed_loop(work, stream)

    async def stop(self) -> None:
        """Ends it."""
        await self._session.close()
        self._process.stop()
