"""Converts text and chats to token ids, and ids to text. Works with any Hugging Face tokenizer and imports none."""

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2.debug  # noqa: F401 (at its first error, a template would import it where it may be interrupted)

from genserve.engine.generation import ChatPrompt, TextPrompt, prompt_too_long
from genserve.engine.vllm.requests.text_bounds import text_bounds
from genserve.engine.vllm.requests.timed_threads import TimedThreads
from genserve.errors import InvalidFieldError

T = TypeVar("T")

_INLINE_CHARACTERS = 1024
"""Shorter texts are encoded on the event loop, where that takes up to half a millisecond. Every stream waits meanwhile;
passing a text to a thread takes about a tenth of it."""

_LONG_CHARACTERS = 1 << 16
"""Longer texts have their own thread, so that others do not wait for seconds."""

RENDERING_LIMIT_S = 10.0
_NUM_RENDERING_THREADS = 2

_DATA_ARGUMENTS = frozenset({"tools", "documents"})
_OTHER_ARGUMENTS = frozenset({"messages", "tokenize", "return_tensors", "return_dict", "padding", "truncation"})
"""Arguments that a tokenizer may take by **kwargs, and that are not data for a template either."""


class _TokenizerThread:
    """Threads must not share a tokenizer, so each has its own copy."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"genserve-{name}")

    async def run(self, action: Callable[[Any], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, action, self._tokenizer)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class PromptCodec:
    """Encodes and decodes without blocking the event loop for long. `max_text_length`: characters of the longest text
    that is tokenised, whatever its tokens. `vocab_size`: ids of the model, which samples also those that no token has:
    vocabularies are padded. `trust_templates`: whether requests may contain a chat template, which is a program that
    runs here."""

    def __init__(
        self, tokenizer: Any, max_model_len: int, max_text_length: int, *, vocab_size: int, trust_templates: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_text_length = max_text_length
        self._num_ids_with_text = 1 + max(tokenizer.get_vocab().values())
        self._num_ids = max(vocab_size, self._num_ids_with_text)
        self._bounds = text_bounds(tokenizer)
        self._short = _TokenizerThread(tokenizer, "tokenizer")
        self._long = _TokenizerThread(tokenizer, "long-texts")
        self._rendering = TimedThreads("templates", _NUM_RENDERING_THREADS, RENDERING_LIMIT_S)
        reserved = _OTHER_ARGUMENTS | inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self._reserved = (reserved - _DATA_ARGUMENTS) | {"chat_template"}
        if trust_templates:
            self._reserved -= {"chat_template"}

    def close(self) -> None:
        """Ends the threads."""
        self._short.close()
        self._long.close()
        self._rendering.close()

    async def encode(self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidFieldError for a chat that the template refuses, and PromptTooLongError
        for a text that cannot fit into the context."""
        if isinstance(prompt, TextPrompt):
            return await self._encode_text(prompt.text, add_special_tokens)
        # The template itself writes the special tokens.
        return await self._encode_text(await self._render(prompt), add_special_tokens=False)

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidFieldError for an id that the model does not have."""
        highest = max(token_ids, default=0)
        if highest >= self._num_ids:
            raise InvalidFieldError.of("token_ids", f"{highest} is outside the vocabulary of {self._num_ids} tokens")

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; those that no token has are without text, as in a sequence. Raises InvalidFieldError for
        more ids than a context holds, or one outside the model's vocabulary."""
        if len(token_ids) > self._max_model_len:
            raise InvalidFieldError.of("token_ids", f"has {len(token_ids)} ids; the limit is {self._max_model_len}")
        self.check_vocabulary(token_ids)
        ids = [each for each in token_ids if each < self._num_ids_with_text]
        return await self._run(4 * len(ids), lambda t: str(t.decode(ids, skip_special_tokens=skip_special_tokens)))

    async def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        def encode(tokenizer: Any) -> list[int]:
            if len(text) > _INLINE_CHARACTERS:
                self._refuse_what_cannot_fit(text)
            return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

        return await self._run(len(text), encode)

    def _refuse_what_cannot_fit(self, text: str) -> None:
        if len(text) > self._max_text_length:
            raise prompt_too_long(f"{len(text)} characters", len(text), self._max_model_len)
        if self._bounds is not None:
            at_least = int(0.999 * self._bounds.least_tokens(text))  # a sum of many floats, which may be rounded up
            if at_least > self._max_model_len:
                raise prompt_too_long(f"{at_least} tokens or more", at_least, self._max_model_len)

    async def _run(self, num_characters: int, action: Callable[[Any], T]) -> T:
        if num_characters <= _INLINE_CHARACTERS:
            return action(self._tokenizer)
        return await (self._short if num_characters <= _LONG_CHARACTERS else self._long).run(action)

    async def _render(self, prompt: ChatPrompt) -> str:
        for name in sorted(self._reserved & prompt.template_params.keys()):
            only = ": start the daemon with --trust-request-chat-template" if name == "chat_template" else ""
            raise InvalidFieldError.of(f"chat.template_params.{name}", f"may not be set by a request{only}")
        try:
            return await self._rendering.run(lambda: self._apply_template(prompt))
        except TimeoutError:
            raise InvalidFieldError.of("chat", f"was not rendered within {self._rendering.limit_s:g} s") from None

    def _apply_template(self, prompt: ChatPrompt) -> str:
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    **prompt.template_params,
                )
            )
        except Exception as error:  # a template is a program of the checkpoint and may raise anything
            raise InvalidFieldError.of("chat", f"the model's chat template raised an error: {error}") from error
