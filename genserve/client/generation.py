"""The calls of GenerationService."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Unpack

from genserve.client.channel import UNSET, ServiceCalls, Timeout
from genserve.client.many import ManyStream
from genserve.client.requests import ChatMessage, ChatOptions, GenerateOptions, PromptLike, chat, generate_request
from genserve.client.results import Delta, Generation
from genserve.client.stream import ResponseStream
from genserve.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class AbortResult:
    """Requests that were running and are ended, and ids under which nothing was running."""

    aborted_ids: list[str]
    unknown_ids: list[str]


class GenerationCalls(ServiceCalls):
    """Tokens out."""

    async def generate(
        self, prompt: PromptLike, *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generates from one prompt and returns everything at once.

        `prompt` is text, token ids, or the messages of a chat. Cancelling ends the request in the daemon. The daemon
        sends one message at the end unless `stream_interval` says otherwise. Raises a `GenserveError`; nothing of a
        request that fails or runs out of `timeout_s` is returned: use `time_budget_s` to keep what there is.
        """
        if options.get("stream_interval") is None:
            options["stream_interval"] = 0
        generation = Generation()
        async with self.stream(prompt, timeout_s=timeout_s, **options) as deltas:
            async for delta in deltas:
                generation.add(delta)
        return generation

    def stream(
        self, prompt: PromptLike, *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> ResponseStream[Delta]:
        """Generates from one prompt and gives strict deltas as they come; errors are raised while iterating.

        Closing the stream, or cancelling the task that reads it, ends the request in the daemon.
        """
        request = generate_request(prompt, options)
        timeout = self._connection.timeouts.generate_s if timeout_s is UNSET else timeout_s
        return self._connection.stream(self._connection.generation.Generate, request, timeout, Delta)

    def stream_many(self, *, timeout_s: Timeout = UNSET) -> ManyStream:
        """Opens one stream for many requests: `submit` them at any time, iterate over what they gain.

        A message of the daemon carries what all of them gained in one step of the engine, which makes many streams at
        once much cheaper than `stream` for each. `timeout_s` is the deadline of the whole stream.

            async with client.stream_many() as many:
                for prompt in prompts:
                    await many.submit(prompt, max_tokens=64)
                await many.done()
                async for item in many:
                    print(item.request_id, item.error or item.delta.text)
        """
        timeout = self._connection.timeouts.generate_s if timeout_s is UNSET else timeout_s
        call = self._connection.generation.GenerateMany(timeout=timeout, metadata=self._connection.metadata)
        return ManyStream(call, self._connection.target, self.abort)

    async def generate_as_completed(
        self, prompts: Sequence[PromptLike], *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[tuple[int, Generation], None]:
        """Generates from many prompts at once; gives (position in `prompts`, generation) as each one ends. The options
        hold for every prompt. A request that fails gives what there is of it, with its `error`.

        Closing the generator (`contextlib.aclosing`) ends what still runs. Raises what ends the whole stream.
        """
        if options.get("request_id") is not None:
            raise ValueError("request_id names one request; use stream_many to name many")
        if options.get("stream_interval") is None:
            options["stream_interval"] = 0
        async with self.stream_many(timeout_s=timeout_s) as many:
            unfinished = {many.next_id(): (position, Generation()) for position in range(len(prompts))}
            submitting = asyncio.create_task(_submit(many, list(zip(unfinished, prompts, strict=True)), options))
            try:
                async for item in many:
                    position, generation = unfinished[item.request_id]
                    if item.delta is not None:
                        generation.add(item.delta)
                    if item.is_last:
                        del unfinished[item.request_id]
                        generation.error = item.error
                        yield position, generation
                await submitting
            finally:
                submitting.cancel()
                await asyncio.wait([submitting])

    async def generate_many(
        self,
        prompts: Sequence[PromptLike],
        *,
        raise_errors: bool = True,
        timeout_s: Timeout = UNSET,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Generates from many prompts at once over one stream; the generations are in the order of the prompts.

        The options hold for every prompt. The first error of a request is raised, and ends the others; without
        `raise_errors` it is the `error` of its generation, and the others go on. Cancelling ends all of them.
        """
        results: dict[int, Generation] = {}
        async with aclosing(self.generate_as_completed(prompts, timeout_s=timeout_s, **options)) as completed:
            async for position, generation in completed:
                if generation.error is not None and raise_errors:
                    raise generation.error
                results[position] = generation
        return [results[position] for position in range(len(prompts))]

    async def abort(
        self, request_ids: Sequence[str] = (), *, all: bool = False, timeout_s: Timeout = UNSET
    ) -> AbortResult:
        """Ends the named requests of any client, or `all`; their streams finish as `aborted` and keep their tokens."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        request = generation_pb2.AbortRequest(request_ids=ids, all=all)
        response = await self._connection.unary(self._connection.generation.Abort, request, timeout_s)
        return AbortResult(list(response.aborted_ids), list(response.unknown_ids))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: Timeout = UNSET,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """The token ids that `generate` would use for text or the messages of a chat."""
        request = generation_pb2.TokenizeRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(chat(prompt, options))
        if add_special_tokens is not None:
            request.add_special_tokens = add_special_tokens
        response = await self._connection.unary(self._connection.generation.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: Timeout = UNSET
    ) -> str:
        """The text of token ids."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response = await self._connection.unary(self._connection.generation.Detokenize, request, timeout_s)
        return response.text


async def _submit(many: ManyStream, prompts: Iterable[tuple[str, PromptLike]], options: GenerateOptions) -> None:
    """Begins requests, by id; what cannot be sent ends the stream, for whoever reads it would wait for ever."""
    try:
        for request_id, prompt in prompts:
            options["request_id"] = request_id
            await many.submit(prompt, **options)
        await many.done()
    except BaseException:
        many.cancel()
        raise
