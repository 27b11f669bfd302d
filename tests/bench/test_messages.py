"""Messages that peers without a definition of their own are asked with: what is written is what is read."""

from dataclasses import dataclass, field

import pytest

from bench.peers import grpc_floor, rust_server
from bench.traces import Trace


@dataclass
class Flat:
    """As vLLM's flat log-probabilities."""

    logprobs: list[float] = field(default_factory=lambda: [-0.5, -9.0, -1.5, -9.0])
    start_indices: list[int] = field(default_factory=lambda: [0, 2])


@dataclass
class Output:
    """As vLLM's output of a sequence."""

    token_ids: list[int]
    logprobs: Flat | None = None
    text: str = ""


@pytest.mark.parametrize("rich", [False, True])
def test_answers_of_the_floor_are_read_one_after_the_other(rich: bool) -> None:
    """Several in one message, each for its trace: of each token the log-probability of the sampled one."""
    outputs = [Output([5, 70_000], Flat() if rich else None, "é" if rich else ""), Output([7])]
    message = b"".join(grpc_floor.answer(number, output) for number, output in enumerate(outputs))
    traces, position = [Trace(0.0), Trace(0.0)], 0
    while position < len(message):
        _, position = grpc_floor.read(message, position, 1.0, traces)
    first, second = traces
    assert (first.token_ids, first.arrived_at) == ([5, 70_000], [1.0])
    assert (first.logprobs, first.texts) == (([-0.5, -1.5], ["é"]) if rich else ([], []))
    assert second.token_ids == [7]


def test_the_rust_front_ends_messages_have_its_field_numbers() -> None:
    """A zero that is set is sent, and fields that are not asked for are skipped."""
    messages = rust_server.messages_of_vllm()
    request = messages["GenerateRequest"](
        token_ids=messages["TokenIds"](ids=[1, 300]),
        temperature=0.0,
        stopping=messages["StoppingCriteria"](max_new_tokens=4, ignore_eos=True),
        response=messages["ResponseOptions"](output_text=False, output_token_ids=True),
    )
    packed = bytes([0x22, 5, 0x0A, 3, 1, 0xAC, 2])  # field 4: a message whose field 1 has two varints
    stopping, response = bytes([0x42, 4, 8, 4, 0x30, 1]), bytes([0x4A, 4, 0x20, 0, 0x28, 1])
    assert request.SerializeToString() == packed + bytes([0x2D, 0, 0, 0, 0]) + stopping + response
    answer = messages["GenerateResponse"].FromString(bytes([0x12, 7, 0x12, 1, 65, 0x18, 1, 0x20, 36]))
    assert (answer.outputs.text, list(answer.outputs.token_ids)) == ("A", [36])
