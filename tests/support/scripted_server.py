"""A scripted daemon in a process of its own, for clients in other languages: `python -m tests.support.scripted_server`.

The first line on stdout is JSON with the `address` of the daemon and the one of a `proxy` in front of it. Each line on
stdin is a command, and is answered by a line of JSON:

    reset            the proxy ends all of its connections
    throttle BYTES   the proxy sends so many bytes a second to the daemon over each connection; 0 = no limit
    engine           `live`: SHA-256 of each live tensor; `running`; `closed`: the ids of requests whose call has ended;
                     `open`: those of requests that still run; `numRefused`: how many were refused; `loras`: the names
                     of adapters that requests have asked for

Prompts of text tell what the engine does. "forever": a token every few milliseconds until the request ends.
"silent": no token at all. "refuse REASON": the error with this reason. Others get `max_tokens` tokens: 0, 1, ...

`--secured DIRECTORY` writes certificates and tokens there: only TLS connections with a certificate are taken, and only
calls with a token. The first line then also has `caFile`, `certFile`, `keyFile`, and the `tokens` by their roles.
"""

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptInfo,
    SequenceDelta,
    TextPrompt,
    Usage,
    WeightSpan,
)
from genserve.errors import FieldViolation, error_for_reason
from genserve.settings.config import ServeConfig
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from tests.support.credentials import Authority, one_each
from tests.support.fault_proxy import FaultProxy, Way
from tests.support.scripted_daemon import GeneratingEngine, ScriptedStream, serving

CHECKPOINT = CheckpointIndex(
    {
        "norm": CheckpointTensor("F32", (4,), 16),
        "layers.0.weight": CheckpointTensor("BF16", (1024, 2048), 4 << 20),
        "layers.1.weight": CheckpointTensor("BF16", (1024, 2048), 4 << 20),
    }
)
_MAX_STAGING_BYTES = 100 << 20
_NUM_TOKENS = 4
_STEP_S = 0.005


class TalkingEngine(GeneratingEngine):
    """Answers requests as their prompts say."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0
        self.max_loras = 2
        self._talking: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerationRequest) -> ScriptedStream:
        text = request.prompt.text if isinstance(request.prompt, TextPrompt) else ""
        if text.startswith("refuse "):
            reason = text.removeprefix("refuse ")
            self.num_refused += 1
            violations = [FieldViolation("text", "is refused")]
            raise error_for_reason(reason)("as told", violations=violations, retry_after_s=0.5, metadata={"key": "1"})
        stream = await super().submit(request)
        num_tokens = 1 << 30 if text == "forever" else request.stop.max_tokens or _NUM_TOKENS
        if text == "silent":
            return stream
        self._talking.add(task := asyncio.create_task(self._talk(stream, num_tokens, text == "forever")))
        task.add_done_callback(self._talking.discard)
        return stream

    async def _talk(self, stream: ScriptedStream, num_tokens: int, paced: bool) -> None:
        for number in range(num_tokens):
            if stream.closed.is_set() or stream.is_aborted:
                return
            stream.put(_update(number, num_tokens, self.weight_version))
            await asyncio.sleep(_STEP_S if paced else 0)


def _update(number: int, num_tokens: int, version: int) -> GenerationUpdate:
    is_last = number == num_tokens - 1
    spans = [WeightSpan(version, 0, num_tokens)]
    finish = Finish(FinishReason.LENGTH, None, num_tokens, spans, None) if is_last else None
    delta = SequenceDelta(0, [number], f"<{number}>", None, [WeightSpan(version, number, number + 1)], finish)
    usage = Usage(2, 0, num_tokens) if is_last else None
    return GenerationUpdate(PromptInfo(2, 0, None, None) if number == 0 else None, [delta], usage)


def _carry_out(command: str, engine: TalkingEngine, proxy: FaultProxy) -> dict[str, object]:
    match command.split():
        case ["reset"]:
            proxy.reset()
            return {}
        case ["throttle", number]:
            proxy.switch(Way.TO_SERVER, bytes_per_s=float(number) or None)
            return {}
        case ["engine"]:
            return {
                "live": {name: hashlib.sha256(data).hexdigest() for name, data in engine.live.items()},
                "running": engine.running,
                "closed": [stream.request_id for stream in engine.streams if stream.closed.is_set()],
                "numRefused": engine.num_refused,
                "loras": [each.lora_name for each in engine.requests if each.lora_name],
                "open": [each.request_id for each in engine.streams if not (each.is_finished or each.closed.is_set())],
            }
        case _:
            return {"error": f"unknown command {command!r}"}


def _secured(directory: Path) -> tuple[ServeConfig, dict[str, Any]]:
    """The daemon's settings, and what a client needs."""
    authority, callers = Authority(directory), one_each(directory)
    server, own = authority.issue("127.0.0.1", "daemon.test"), authority.issue("client.test")
    config = ServeConfig(
        port=0,
        ssl_certfile=server.cert_file,
        ssl_keyfile=server.key_file,
        ssl_ca_certs=authority.ca_file,
        auth_file=callers.auth_file,
    )
    files = {"caFile": authority.ca_file, "certFile": own.cert_file, "keyFile": own.key_file}
    return config, {**files, "tokens": callers.tokens}


async def main() -> None:
    """Serves until stdin ends."""
    loop = asyncio.get_running_loop()
    config, credentials = ServeConfig(port=0), dict[str, Any]()
    if sys.argv[1:2] == ["--secured"]:
        config, credentials = _secured(Path(sys.argv[2]))
    engine = TalkingEngine()
    async with (
        serving(config, checkpoint=CHECKPOINT, max_staging_bytes=_MAX_STAGING_BYTES, engine=engine) as daemon,
        FaultProxy(daemon.address) as proxy,
    ):
        print(json.dumps({"address": daemon.address, "proxy": proxy.address, **credentials}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(_carry_out(line.strip(), engine, proxy)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
