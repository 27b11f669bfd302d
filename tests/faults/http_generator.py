"""Generations over HTTP, by the daemon's OpenAI server, whose answers name no version of the weights."""

import asyncio
import random
import time
from typing import Any

import httpx
import openai

from tests.faults.history import UnlabelledStream
from tests.faults.recorder import Recorder
from tests.support.patience import slow

MODEL = "policy"


class HttpGenerator:
    """Asks for greedy tokens again and again."""

    def __init__(self, name: str, recorder: Recorder, port: int, rng: random.Random) -> None:
        self._name = name
        self._recorder = recorder
        self._url = f"http://127.0.0.1:{port}/v1"
        self._rng = rng

    async def run(self) -> None:
        """Until it is cancelled. Some requests are left in the middle."""
        rng = self._rng
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=0, timeout=60) as client:
            while True:
                prompt = [rng.randrange(3, 500) for _ in range(rng.choice((2, 5, 20, 60)))]
                reading = asyncio.create_task(self._generate(client, prompt, rng.choice((1, 3, 30, 200, 700))))
                patience_s = rng.uniform(0.0, 1.5) if rng.random() < 0.15 else None
                try:
                    await asyncio.wait({reading}, timeout=patience_s)
                finally:
                    reading.cancel()
                    await asyncio.wait({reading})
                if not reading.cancelled() and reading.result().error:
                    await slow(0.2)  # the daemon has died

    async def _generate(self, client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int) -> UnlabelledStream:
        stream = UnlabelledStream(self._name, self._recorder.life, time.monotonic(), prompt)
        self._recorder.history.unlabelled.append(stream)
        try:
            chunks = await client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0.0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            async with chunks:
                async for chunk in chunks:
                    choice: Any = chunk.choices[0]
                    token_ids = choice.token_ids or []
                    stream.tokens += token_ids
                    stream.at_s += [time.monotonic()] * len(token_ids)
                    stream.finish = choice.finish_reason or stream.finish
        except (openai.APIError, httpx.HTTPError) as error:
            stream.error = type(error).__name__
        stream.ended_s = time.monotonic()
        return stream
