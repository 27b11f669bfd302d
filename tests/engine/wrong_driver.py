"""A driver that makes a mistake: `python -m tests.engine.wrong_driver NAME`. In all else it is the one on stubs."""

import secrets
import sys
from collections.abc import Callable
from typing import Any, Final

import grpc

from clients.conformance.drivers import python_stubs as stubs
from clients.conformance.drivers import transfers
from genserve.v1 import weights_pb2

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
    stubs.LOOK_UP_TIMEOUT_S = transfers.RESUME_TIMEOUT_S = 0.0
    transfers.LONGEST_PAUSE_S = 0.01


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
    return [] if missing and missing[0][0] == 0 else missing


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

    right = transfers.crc32c
    transfers.crc32c = lambda data: Equal(right(data))


def beginning_again() -> None:
    """Pulls everything again after a break."""

    def request(self: Any) -> Any:
        self._space.clear()
        return weights_pb2.PullWeightsRequest(weight_version=self._version)

    transfers.Pulled.request = request


def of_one_version(comparing: bool) -> Callable[[], None]:
    """Takes the rest of a pull without `comparing` the number of its version, or else by that alone."""

    def change() -> None:
        right_request, right_add = transfers.Pulled.request, transfers.Pulled.add

        def request(self: Any) -> Any:
            asked = right_request(self)
            if not comparing and asked.ranges:
                asked.ClearField("weight_version")
            return asked

        def add(self: Any, message: Any) -> Any:
            if self._header is not None and message.HasField("header"):
                return None
            return right_add(self, message)

        transfers.Pulled.request, transfers.Pulled.add = request, add

    return change


def ending_early(right: Any, steps: Any, version: int | None = None) -> Result:
    """Takes the end of a stream for that of a pull."""
    pulled = transfers.Pulled(version)
    for message in steps._call(steps._weights.PullWeights, pulled.request()):
        if not message.HasField("end") and (wrong := pulled.add(message)) is not None:
            return {"error": {"reason": wrong}}
    return {"version": pulled.version, "sha256": pulled.sha256()}


def never_whole() -> None:
    """Goes on with a pull that lacks nothing but its end."""
    pulled: Any = transfers.Pulled
    right = pulled.missing_bytes.fget

    def missing_bytes(self: transfers.Pulled) -> int | None:
        num_bytes: int | None = right(self)
        return num_bytes if num_bytes is None else max(1, num_bytes)

    pulled.missing_bytes = property(missing_bytes)


def sending_a_dry_run() -> None:
    """Sends the bytes of a push that is only to be validated."""
    right = stubs.frames
    stubs.frames = lambda header, tensors, ranges: right(header, tensors, ranges or [(0, tensors.total_bytes)])


def staging(right: Any, steps: Any, **push: Any) -> Result:
    """Stages what it is to prepare."""
    if push.get("action") == "prepare":
        push["action"] = "stage"
    result: Result = right(steps, **push)
    return result


def sharing(state: str) -> Callable[..., Any]:
    """Takes what the daemon has of another attempt for its own, in this state of the push."""

    def missing(right: Any, steps: Any, header: Any, everything: transfers.Ranges) -> transfers.Ranges:
        found: transfers.Ranges = right(steps, header, everything)
        if found == everything:
            try:
                push = steps._call(steps._weights.GetPush, weights_pb2.GetPushRequest(push_id=header.push_id)).push
            except grpc.RpcError:
                return found
            if stubs.word(weights_pb2.PushState, push.state) == state:
                return [(each.start, each.end) for each in push.missing]
        return found

    return missing


def attempts_of_their_own() -> None:
    """Names another attempt on each stream."""
    right = stubs.frames

    def frames(header: Any, *rest: Any) -> Any:
        own = weights_pb2.PushHeader()
        own.CopyFrom(header)
        if own.num_streams > 1:
            own.attempt += secrets.token_hex(4)
        return right(own, *rest)

    stubs.frames = frames


def idle_streams() -> None:
    """Sends all bytes over the first stream, and none over the others."""
    stubs.split = lambda ranges, num_parts: [ranges, *([] for _ in range(num_parts - 1))]


def fewer_streams() -> None:
    """Opens one stream again when several have broken."""
    right = Steps._missing

    def missing(*given: Any) -> transfers.Ranges:
        stubs.TIMEOUT_S, stubs.split = 5.0, lambda ranges, _: [ranges]  # the daemon waits for the others
        return right(*given)

    Steps._missing = missing


def giving_back_once(right: Any, steps: Any, name: str) -> Result:
    """Forgets a lease that it has given back."""
    result: Result = right(steps, name=name)
    steps._leases[name] = "forgotten"
    return result


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
    "pulls from the beginning again": ("pull-cut-and-resumed", beginning_again),
    "pulls the rest of any version": ("pull-cut-and-next-version", of_one_version(comparing=False)),
    "pulls by the number of a version": ("pull-cut-and-same-version", of_one_version(comparing=True)),
    "pulls more than all": ("pull-without-end", never_whole),
    "pulls until the stream ends": ("pull-ended-early", lambda: of_step("pull", ending_early)),
    "sends a dry run": ("push-validated", sending_a_dry_run),
    "prepares nothing": ("push-prepared-and-committed", lambda: of_step("push", staging)),
    "shares bytes of another attempt": ("push-taken-over", lambda: of_step("_missing", sharing("receiving"))),
    "shares what another attempt applied": ("push-applied-by-other", lambda: of_step("_missing", sharing("applied"))),
    "an attempt for each stream": ("push-streams", attempts_of_their_own),
    "one stream for all bytes": ("push-streams", idle_streams),
    "resumes over one stream": ("push-streams-cut", fewer_streams),
    "gives a lease back once": ("repeated", lambda: of_step("resume", giving_back_once)),
}
"""Each with a scenario that must find it."""

if __name__ == "__main__":
    MISTAKES[sys.argv[1]][1]()
    stubs.main()
