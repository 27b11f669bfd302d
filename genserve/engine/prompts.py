"""From prompts to token ids, and back. Works on any Hugging Face tokenizer; imports none."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from genserve.engine.generation import AnyPrompt, ChatPrompt, TextPrompt, TokenPrompt
from genserve.errors import InvalidFieldError

T = TypeVar("T")

_INLINE_CHARACTERS = 4096
"""Shorter texts are encoded on the event loop: that takes less time than handing them to a thread."""


class PromptCodec:
    """Encodes and decodes without blocking the event loop for long. Tokenizers are not safe to share between threads,
    so the thread has a copy of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._thread_tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genserve-tokenizer")

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prompt: AnyPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidFieldError for a chat that the template refuses."""
        if isinstance(prompt, TokenPrompt):
            return list(prompt.ids)
        if isinstance(prompt, TextPrompt):
            return await self._run(len(prompt.text), lambda t: _encode_text(t, prompt.text, add_special_tokens))
        size = sum(len(message.content) for message in prompt.messages)
        return await self._run(size, lambda t: _encode_chat(t, prompt))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids. Raises InvalidFieldError for an id outside the vocabulary."""
        size = len(self._tokenizer)
        bad = next((i for i in token_ids if i >= size), None)
        if bad is not None:
            raise InvalidFieldError.of("token_ids", f"{bad} is outside the vocabulary of {size} tokens")
        ids = list(token_ids)
        return await self._run(4 * len(ids), lambda t: str(t.decode(ids, skip_special_tokens=skip_special_tokens)))

    async def _run(self, num_characters: int, action: Callable[[Any], T]) -> T:
        if num_characters <= _INLINE_CHARACTERS:
            return action(self._tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, action, self._thread_tokenizer)


def _encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def _encode_chat(tokenizer: Any, prompt: ChatPrompt) -> list[int]:
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.template_params,
        )
    except Exception as error:  # templates are programs of the checkpoint and may raise anything
        raise InvalidFieldError.of("chat", f"the model's chat template refused it: {error}") from error
    # The template writes the special tokens itself.
    return _encode_text(tokenizer, text, add_special_tokens=False)
