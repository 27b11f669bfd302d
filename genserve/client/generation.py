"""The calls of GenerationService."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from genserve.client.channel import UNSET, ServiceCalls, Timeout
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
        return self._connection.stream(self._connection.generation.Generate, request, timeout, Delta.of)

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
