"""Texts and chats are turned into tokens without letting one of them stand in the way of the others."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from genserve.engine.generation import ChatMessage, ChatPrompt, TextPrompt
from genserve.engine.vllm.requests.prompts import PromptCodec
from genserve.errors import InvalidFieldError, PromptTooLongError
from tests.support.models import tiny_qwen3
from tests.support.patience import STEP_S

MAX_MODEL_LEN = 2048
PADDING = 64
"""Ids of the model that no token has."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@asynccontextmanager
async def codec(
    tokenizer: Any, *, max_model_len: int = MAX_MODEL_LEN, trust_templates: bool = False
) -> AsyncIterator[PromptCodec]:
    """One for the length of a test."""
    made = PromptCodec(
        tokenizer, max_model_len, 1 << 20, vocab_size=len(tokenizer) + PADDING, trust_templates=trust_templates
    )
    try:
        yield made
    finally:
        made.close()


def chat(**template_params: object) -> ChatPrompt:
    """A chat of one message."""
    return ChatPrompt([ChatMessage("user", "hi")], template_params=template_params)


def field_of(error: "pytest.ExceptionInfo[InvalidFieldError]") -> str:
    """The field that an error names."""
    (violation,) = error.value.violations
    return violation.field


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(tokenizer: Any) -> None:
    """Also one that a template has written; a text that might fit is tokenised."""
    async with codec(tokenizer) as prompts:
        for size in (3 * MAX_MODEL_LEN, 900_000, 2_000_000):
            began_s = time.process_time()
            with pytest.raises(PromptTooLongError):
                await prompts.encode(TextPrompt("the " * (size // 4)))
            with pytest.raises(PromptTooLongError):
                await prompts.encode(ChatPrompt([ChatMessage("user", "x" * size)]))
            assert time.process_time() - began_s < 2
        fits = " t" * (MAX_MODEL_LEN - 1)  # 4094 characters: as long as a text can be that fits
        assert len(await prompts.encode(TextPrompt(fits))) == MAX_MODEL_LEN - 1


async def test_arguments_of_rendering_are_not_for_requests(tokenizer: Any) -> None:
    """Data for the template is; the template itself only where the operator allows it."""
    async with codec(tokenizer) as prompts:
        for name in ("chat_template", "tokenize", "return_tensors", "conversation", "messages", "tokenizer_kwargs"):
            with pytest.raises(InvalidFieldError) as refused:
                await prompts.encode(chat(**{name: "x"}))
            assert field_of(refused) == f"chat.template_params.{name}"
        assert await prompts.encode(chat(tools=[], enable_thinking=False)) == await prompts.encode(chat())
    async with codec(tokenizer, trust_templates=True) as prompts:
        assert await prompts.encode(chat(chat_template="a")) == await prompts.encode(TextPrompt("a"))


@pytest.mark.slow
async def test_a_template_that_runs_on_is_ended_and_stops_nobody(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the event loop, nor texts, nor the chats that come after it."""
    monkeypatch.setattr("genserve.engine.vllm.requests.prompts.RENDERING_LIMIT_S", 1.0)
    async with codec(tokenizer, max_model_len=10_000, trust_templates=True) as prompts:
        endless = [asyncio.create_task(prompts.encode(chat(chat_template=ENDLESS))) for _ in range(2)]
        assert await prompts.encode(TextPrompt("a b " * 1500))
        assert not any(task.done() for task in endless), "the text waited for a template"
        for task in endless:
            with pytest.raises(InvalidFieldError) as refused:
                await task
            assert field_of(refused) == "chat"
        following: list[int] = []
        async with asyncio.timeout(STEP_S):
            while not following:
                with suppress(InvalidFieldError):  # a busy machine may take longer than the limit of this test
                    following = await prompts.encode(chat())


@pytest.mark.slow
async def test_a_long_text_does_not_hold_up_shorter_ones(tmp_path: Path) -> None:
    """It has a thread of its own, where it takes until the shorter one is done here."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path))
    is_free = threading.Event()

    class Waiting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            assert len(text) < 100_000 or is_free.wait(STEP_S)
            return super().__call__(text, **options)

    tokenizer.__class__ = Waiting
    prompts = PromptCodec(tokenizer, 10**6, 1 << 24, vocab_size=len(tokenizer), trust_templates=False)
    finished: list[str] = []

    async def encode(name: str, text: str) -> None:
        await prompts.encode(TextPrompt(text))
        finished.append(name)
        is_free.set()

    await asyncio.gather(encode("long", "the cat " * 100_000), encode("short", "the cat " * 1000))
    assert finished == ["short", "long"]
    prompts.close()


async def test_no_more_ids_become_text_than_a_sequence_has(tokenizer: Any) -> None:
    """And only those of the vocabulary."""
    async with codec(tokenizer) as prompts:
        assert len(await prompts.decode([5] * MAX_MODEL_LEN, skip_special_tokens=False)) > 0
        for ids in ([5] * (MAX_MODEL_LEN + 1), [5, 10**6]):
            with pytest.raises(InvalidFieldError) as refused:
                await prompts.decode(ids, skip_special_tokens=False)
            assert field_of(refused) == "token_ids"


async def test_ids_that_a_model_samples_become_text_although_no_token_has_them(tokenizer: Any) -> None:
    """A vocabulary is padded: such an id is without text. One beyond the model's vocabulary is refused."""
    size = len(tokenizer)
    async with codec(tokenizer) as prompts:
        for skip_special_tokens in (False, True):
            expected = await prompts.decode([5, 6], skip_special_tokens=skip_special_tokens)
            ids = [size, 5, size + PADDING - 1, 6, size]
            assert await prompts.decode(ids, skip_special_tokens=skip_special_tokens) == expected
        assert await prompts.decode([size], skip_special_tokens=False) == ""
        with pytest.raises(InvalidFieldError) as refused:
            await prompts.decode([5, size + PADDING], skip_special_tokens=False)
        assert field_of(refused) == "token_ids"


async def test_what_a_chat_asks_of_the_template_reaches_it(tokenizer: Any) -> None:
    """Whether a turn is opened or the last message continued, and data by its name."""
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", "well")]

    async def rendered(prompt: ChatPrompt) -> str:
        return await prompts.decode(await prompts.encode(prompt), skip_special_tokens=False)

    async with codec(tokenizer, trust_templates=True) as prompts:
        plain = await rendered(ChatPrompt(messages, add_generation_prompt=False))
        opened = await rendered(ChatPrompt(messages, add_generation_prompt=True))
        continued = await rendered(ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))
        assert opened.startswith(plain) and len(opened) > len(plain)
        assert plain.startswith(continued) and continued.endswith("well")
        template = "{{ name }}: {{ messages[0].content }}"
        assert await rendered(chat(chat_template=template, name="data")) == "data: hi"
