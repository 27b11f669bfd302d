"""A driver that makes a mistake: `python -m tests.engine.wrong_driver NAME`. In all else it is the one on stubs."""

import sys
from collections.abc import Callable
from typing import Any, Final

import grpc

from clients.conformance.drivers import python_stubs as stubs

Result = dict[str, Any]
Generation, Steps = stubs.Generation, stubs.Steps


def of_sequences(change: Callable[[list[Result]], Any]) -> None:
    """Changes the sequences of every generation."""
    right = Generation.result

    def result(self: Any) -> Result:
        found: Result = right(self)
        change(found["sequences"])
        return found

    Generation.result = result


def of_options(change: Callable[[Result], Any]) -> None:
    """Changes the options of every request."""
    right = stubs.request_of
    stubs.request_of = lambda prompt, options: right(prompt, (changed := dict(options), change(changed))[0])


def of_prompts(change: Callable[[Result], Result]) -> None:
    """Changes every prompt."""
    right = stubs.request_of
    stubs.request_of = lambda prompt, options: right(change(prompt), options)


def of_step(name: str, change: Callable[..., Result]) -> None:
    """Does a step in another way: `change` is given the right one, the steps and the arguments."""
    right = getattr(Steps, name)
    setattr(Steps, name, lambda self, *args, **given: change(right, self, *args, **given))


def one_span(sequences: list[Result]) -> None:
    """Takes all tokens for those of the weights that made the first one."""
    for each in sequences:
        each["weight_spans"] = [[each["weight_spans"][0][0], 0, len(each["token_ids"])]]


def no_adapter(sequences: list[Result]) -> None:
    """Knows no versions of adapters."""
    for each in sequences:
        each["weight_spans"] = [span[:3] for span in each["weight_spans"]]


def zeros(sequences: list[Result]) -> None:
    """Finds every token certain."""
    for each in sequences:
        if "logprobs" in each:
            each["logprobs"] = [0.0] * len(each["logprobs"])


def first_one(sequences: list[Result]) -> None:
    """Finds the first sequence in place of the others."""
    sequences[:] = [sequences[0]] * len(sequences)


def ignoring_errors(right: Any, steps: Any, *args: Any, **given: Any) -> Result:
    """Prints nothing about a call that fails."""
    try:
        result: Result = right(steps, *args, **given)
        return result
    except grpc.RpcError:
        return {}


def late(right: Any, steps: Any, prompt: Result, options: Result, *_: Any) -> Result:
    """Waits on its own until the time is over, instead of telling the daemon."""
    if "timeout_ms" in options:
        return {"error": {"reason": "DEADLINE_EXCEEDED"}}
    result: Result = right(steps, prompt=prompt, options=options)
    return result


def not_cancelling(right: Any, steps: Any, *request: Any, cancel_after_tokens: int = 0, **given: Any) -> Result:
    """Says that it has."""
    result: Result = {"cancelled": True} if cancel_after_tokens else right(steps, *request, **given)
    return result


def sending_everything() -> None:
    """Resumes with all bytes."""
    right = stubs.frames
    stubs.frames = lambda header, tensors, _: right(header, tensors, [(0, tensors.total_bytes)])


def sending_twice() -> None:
    """Sends every chunk two times."""
    right = stubs.frames

    def frames(*given: Any) -> Any:
        for frame in right(*given):
            yield frame
            if frame.HasField("chunk"):
                yield frame

    stubs.frames = frames


def counting() -> None:
    """Gives a push up after five resumes, which refused connections use up within a second."""
    stubs.RESUME_TIMEOUT_S, stubs.LONGEST_PAUSE_S = 0.0, 0.01


def repeating(right: Any, steps: Any, **given: Any) -> Result:
    """Asks once more for a pause that the daemon may have granted."""
    try:
        result: Result = right(steps, **given)
        return result
    except grpc.RpcError:
        right(steps, **given)
        raise


def knowing_all() -> None:
    """Takes a value that it does not know for one that is not set."""
    right = stubs.word
    stubs.word = lambda kind, value: right(kind, value if value in kind.values() else 0)


def trusting_its_memory(right: Any, steps: Any, *given: Any) -> list[tuple[int, int]]:
    """Takes a push that the daemon does not know for one that it has whole."""
    missing: list[tuple[int, int]] = right(steps, *given)
    return [] if missing[0][0] == 0 else missing


def without_channel_option(name: str) -> Callable[[], None]:
    """Leaves gRPC's default."""

    def leave_out() -> None:
        stubs.OPTIONS[:] = [option for option in stubs.OPTIONS if option[0] != name]

    return leave_out


def first_rows() -> None:
    """Reads every row of columns as if it had one token."""
    right = stubs.add_columns

    def add_columns(slots: Any, columns: Any) -> None:
        columns.ClearField("num_tokens")
        columns.weight_version += 1
        right(slots, columns)

    stubs.add_columns = add_columns


def believing() -> None:
    """Compares no checksum of what it pulls."""

    class Equal(int):
        def __ne__(self, other: object) -> bool:
            return False

    right = stubs.crc32c
    stubs.crc32c = lambda data: Equal(right(data))


def without(name: str) -> Callable[[], None]:
    """Leaves out an option."""
    return lambda: of_options(lambda options: options.pop(name, None))


def with_field(name: str, value: Any) -> Callable[[], None]:
    """Prints the same value in every sequence."""
    return lambda: of_sequences(lambda sequences: [each.update({name: value}) for each in sequences])


MISTAKES: Final[dict[str, tuple[str, Callable[[], None]]]] = {
    "no text": ("stream", with_field("text", "")),
    "no spans": ("stream", with_field("weight_spans", [])),
    "one span": ("push-while-generating", lambda: of_sequences(one_span)),
    "no version of an adapter": ("lora", lambda: of_sequences(no_adapter)),
    "log-probabilities of 0": ("logprobs", lambda: of_sequences(zeros)),
    "the first sequence again": ("several-sequences", lambda: of_sequences(first_one)),
    "no request id": ("generate", without("request_id")),
    "no seed": ("several-sequences", without("seed")),
    "no ignore_eos": ("generate", without("ignore_eos")),
    "no temperature": ("stream", without("temperature")),
    "no stop strings": ("stop-strings", without("stop")),
    "another text": ("generate", lambda: of_prompts(lambda prompt: {"text": "x"} if "text" in prompt else prompt)),
    "another chat": (
        "generate",
        lambda: of_prompts(lambda p: {"chat": [{"role": "user", "content": "x"}]} if "chat" in p else p),
    ),
    "errors ignored": ("generate", lambda: of_step("generate", ignoring_errors)),
    "a deadline of its own": ("deadline", lambda: of_step("generate", late)),
    "cancels nothing": ("cancel", lambda: of_step("stream", not_cancelling)),
    "renews nothing": ("pause-lease", lambda: of_step("renew", lambda *_, **__: {"holder": "conformance"})),
    "resumes nothing": ("pause-lease", lambda: of_step("resume", lambda *_, **__: {"lease_expired": False})),
    "resumes a push with everything": ("push-cut-and-resumed", sending_everything),
    "sends everything twice": ("push-cut-and-resumed", sending_twice),
    "counts its resumes": ("push-through-outage", counting),
    "knows better what was sent": ("push-forgotten", lambda: of_step("_missing", trusting_its_memory)),
    "no retries": ("refused-once", without_channel_option("grpc.service_config")),
    "pauses again": ("refused-once", lambda: of_step("pause", repeating)),
    "messages of 4 MiB": ("large-answer", without_channel_option("grpc.max_receive_message_length")),
    "knows all values": ("newer-daemon", knowing_all),
    "another version in columns": ("generate-many-columns", first_rows),
    "believes what it pulls": ("pull-wrong-checksum", believing),
}
"""Each with a scenario that must find it."""

if __name__ == "__main__":
    MISTAKES[sys.argv[1]][1]()
    stubs.main()
