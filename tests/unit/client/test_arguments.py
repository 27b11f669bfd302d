"""What a call is given and protobuf cannot hold is refused by name, before anything is sent. Nothing is split into
letters. Every argument of every call is tried with every kind of wrong value."""

import asyncio
import inspect
import reprlib
from collections.abc import Iterator
from typing import Any, Final, get_args

import pytest

from genserve.client import ApplyOptions, AsyncClient, Client, LoadOptions, PushOptions, SendOptions
from genserve.client.generation.options import ChatOptions, GenerateOptions, generate_request, generate_requests
from genserve.errors import DeadlineError, InvalidFieldError
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon
from tests.support.silent_daemon import silent_daemon
from tests.unit.client.call_table import ARGUMENTS, OPTIONS, public_calls, timeouts

TIMEOUT_S: Final = 0.2
NESTED: list[Any] = []
for _ in range(2000):
    NESTED = [NESTED]
VALUES: Final[tuple[Any, ...]] = (
    object(), 1 << 80, 3_000_000_000, -1, 1.5, float("nan"), float("inf"), "", "x", b"\xff", "\udc80",
    [], [object()], ["\udc80"], [1 << 80], ["x", "y"], {"a": object()}, {"a": NESTED}, {5: "x"}, True,
)  # fmt: skip
# Weights are not of protobuf: what is wrong with them is a TypeError, OSError or CheckpointFileError, as documented.
# `progress` is called, and a timeout of any size may be asked for.
NOT_TRIED: Final = {"weights", "tensors", "progress", "timeout_s"}


UNPACKED: Final[dict[str, type]] = {
    "generate": GenerateOptions,
    "push_weights": PushOptions,
    "push_lora": SendOptions,
    "load_weights": LoadOptions,
    "commit_push": ApplyOptions,
    "tokenize": ChatOptions,
}
"""Calls whose options are those of a TypedDict; others that share one are not tried again."""


def attempts() -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """Method, argument, and how to call it with a wrong value of that argument."""
    for name in sorted(public_calls(AsyncClient) - {"close", "stream_many"}):
        parameters = list(inspect.signature(getattr(AsyncClient, name)).parameters.values())[1:]
        for position, parameter in enumerate(parameters):
            if parameter.name in NOT_TRIED or parameter.kind is parameter.VAR_KEYWORD:
                continue
            for value in VALUES:
                arguments, options = list(ARGUMENTS[name]), dict(OPTIONS.get(name, {}))
                if position < len(arguments):
                    arguments[position] = value
                else:
                    options[parameter.name] = value
                yield name, parameter.name, arguments, options
    for name, kind in UNPACKED.items():
        for option in kind.__annotations__.keys() - NOT_TRIED:
            for value in VALUES:
                yield name, option, list(ARGUMENTS[name]), {**OPTIONS.get(name, {}), option: value}


def test_every_option_of_every_call_is_declared() -> None:
    """Those that take keyword arguments by a TypedDict are tried by its names."""
    found = {}
    for name in public_calls(AsyncClient):
        for parameter in inspect.signature(getattr(AsyncClient, name)).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                (found[name],) = get_args(parameter.annotation)
    assert found == {**UNPACKED, **dict.fromkeys(("generate_many", "generate_as_completed", "stream"), GenerateOptions)}


@pytest.mark.parametrize("name", ["generate", "push_weights", "push_lora", "load_weights", "commit_push"])
async def test_an_option_that_does_not_exist_is_a_type_error(name: str) -> None:
    """As of any function."""
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=r"\bchunk_byte\b"):
            await getattr(client, name)(*ARGUMENTS[name], **{**OPTIONS.get(name, {}), "chunk_byte": 5})


async def test_every_wrong_argument_of_every_call_is_refused_by_name() -> None:
    """Or it is taken, and the call ends at its deadline; it never raises an error that names nothing."""
    wrong: list[str] = []
    at_once = asyncio.Semaphore(300)

    async def attempt(name: str, argument: str, arguments: list[Any], options: dict[str, Any]) -> None:
        async with at_once:
            try:
                result = getattr(client, name)(*arguments, **{"timeout_s": TIMEOUT_S, **options})
                if hasattr(result, "__anext__"):
                    await anext(result, None)
                elif inspect.isawaitable(result):
                    await result
                else:
                    async with result:
                        pass
            except DeadlineError:
                pass
            except InvalidFieldError as error:
                if argument.removesuffix("_s") not in error.message or not error.violations:
                    wrong.append(f"{name}({argument}={reprlib.repr(options.get(argument))}) is not named: {error}")
            except Exception as error:
                wrong.append(f"{name}({argument}={reprlib.repr(options.get(argument))}): {error!r:.100}")

    async with (
        silent_daemon() as daemon,
        AsyncClient(daemon.target, timeouts=timeouts(TIMEOUT_S)) as client,
        asyncio.TaskGroup() as group,
    ):
        for each in attempts():
            group.create_task(attempt(*each))
    assert wrong == []


@pytest.mark.parametrize("timeout_s", [object(), "1", float("nan"), [1]])
async def test_a_timeout_that_is_no_time_is_refused_by_every_call(daemon: ScriptedDaemon, timeout_s: Any) -> None:
    """By both clients."""
    with Client(daemon.target) as client:
        for name in public_calls(Client) - {"close"}:
            with refuses(InvalidFieldError, says="timeout"):
                await asyncio.to_thread(
                    getattr(client, name), *ARGUMENTS[name], **{**OPTIONS.get(name, {}), "timeout_s": timeout_s}
                )


async def test_a_timeout_of_a_century_is_none(daemon: ScriptedDaemon) -> None:
    """gRPC would count from it into the past."""
    async with AsyncClient(daemon.target) as client:
        for timeout_s in (float("inf"), 1e10, 1e300):
            assert (await client.generate("x", timeout_s=timeout_s)).text == "Once upon a time"
            assert daemon.remaining_s is None


def test_a_stop_string_may_come_alone() -> None:
    """As with vLLM."""
    assert generate_request("x", {"stop": "end"}).stop.strings == ["end"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bad_words", "abc"),
        ("choice", "abc"),
        ("stop", b"abc"),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", b"12"),
        ("choice", {"a": 1}),
        ("logit_bias", [1, 2]),
        ("n", 3_000_000_000),
        ("seed", 1 << 64),
        ("engine_params", "abc"),
    ],
)
def test_an_option_that_is_no_sequence_or_too_large_is_refused(option: str, value: Any) -> None:
    """Letters and bytes are not taken one by one."""
    with refuses(InvalidFieldError, says=option):
        generate_request("x", {option: value})  # type: ignore[misc]


@pytest.mark.parametrize("prompt", [b"abc", 5, None, {"role": "user", "content": "x"}, ["a", "b"], [1.5], {1, 2}])
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    """Bytes are not token ids, and one message is no chat."""
    with refuses(InvalidFieldError, says="prompt"):
        generate_request(prompt, {})


@pytest.mark.parametrize("prompts", ["hello", b"hello", {"a": 1}, 5])
async def test_many_prompts_are_not_one_text(prompts: Any) -> None:
    """`generate_many("hello")` would be five prompts."""
    with refuses(InvalidFieldError, field="prompts"):
        generate_requests(prompts, {})
    async with AsyncClient("127.0.0.1:1") as client:
        with refuses(InvalidFieldError, field="prompts"):
            await client.generate_many(prompts)
        with refuses(InvalidFieldError, field="prompts"):
            client.generate_as_completed(prompts)
    with refuses(InvalidFieldError, says="prompts[0]"):
        generate_requests([1, 2, 3], {})  # type: ignore[list-item]


async def test_one_id_to_abort_may_come_alone(daemon: ScriptedDaemon) -> None:
    """It is not split into letters."""
    async with AsyncClient(daemon.target) as client:
        assert (await client.abort("abc")).aborted_ids == ["abc"]
        with refuses(InvalidFieldError, field="request_ids"):
            await client.abort(b"abc")  # type: ignore[arg-type]
        with refuses(InvalidFieldError, says="token_ids"):
            await client.detokenize("123")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"token": "a\nb"}, "token"),
        ({"token": "é"}, "token"),
        ({"metadata": {"a b": "c"}}, "metadata"),
        ({"metadata": {"x-run": "é"}}, "metadata.x-run"),
        ({"metadata": {"x-run": b"c"}}, "metadata.x-run"),
    ],
)
def test_metadata_that_cannot_be_sent_is_refused_when_the_client_is_made(settings: dict[str, Any], field: str) -> None:
    """By the name that the caller gave it. And a token is not shown."""
    with refuses(InvalidFieldError, field=field) as raised:
        AsyncClient("127.0.0.1:1", **settings)
    assert "é" not in str(raised.value)


@pytest.mark.parametrize("target", ["", "\udc80", "a\nb"])
def test_an_address_that_is_none_is_refused(target: str) -> None:
    """By name."""
    with refuses(InvalidFieldError, field="target"):
        AsyncClient(target)
