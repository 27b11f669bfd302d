"""Streams of GenerateResponse, and the generations that a client makes of them."""

from typing import Any

from genserve.v1 import generation_pb2, types_pb2


def generation_vectors() -> list[dict[str, Any]]:
    """Streams of GenerateResponse, and what their deltas sum up to."""

    def span(version: int, start: int, end: int, lora_version: int = 0) -> types_pb2.WeightSpan:
        return types_pb2.WeightSpan(version=version, start=start, end=end, lora_version=lora_version)

    def delta(
        index: int, tokens: list[int], text: str, *spans: types_pb2.WeightSpan, **more: Any
    ) -> generation_pb2.SequenceDelta:
        return generation_pb2.SequenceDelta(index=index, token_ids=tokens, text=text, weight_spans=spans, **more)

    def finish(reason: str, *spans: types_pb2.WeightSpan, **more: Any) -> generation_pb2.Finish:
        value = generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
        return generation_pb2.Finish(reason=value, weight_spans=spans, num_tokens=spans[-1].end, **more)

    def responses(*rows: list[generation_pb2.SequenceDelta]) -> list[str]:
        messages = [generation_pb2.GenerateResponse(outputs=row) for row in rows]
        messages[0].request_id = "r"
        messages[-1].usage.num_prompt_tokens = 4
        return [message.SerializeToString().hex() for message in messages]

    def logprobs(*sampled: float) -> types_pb2.Logprobs:
        return types_pb2.Logprobs(sampled=sampled, ranks=[1] * len(sampled))

    def prompt(token_ids: list[int], *sampled: float) -> str:
        """A message with a part of a prompt of three tokens."""
        part = generation_pb2.Prompt(num_tokens=3, token_ids=token_ids, logprobs=logprobs(*sampled))
        return generation_pb2.GenerateResponse(request_id="r", prompt=part).SerializeToString().hex()

    one = span(3, 0, 4)
    newer = generation_pb2.FinishReason.ValueType(99)  # which no enum value of today has
    return [
        {
            "name": "adjacent spans of one version are one",
            "responses_hex": responses(
                [delta(0, [5], "a", span(3, 0, 1))],
                [delta(0, [6, 7], "bc", span(3, 1, 3))],
                [delta(0, [8], "d", span(3, 3, 4), finish=finish("length", one))],
            ),
            "sequences": [{"token_ids": [5, 6, 7, 8], "text": "abcd", "weight_spans": [[3, 0, 4]], "finish": "length"}],
        },
        {
            "name": "of a sequence that runs, adjacent spans of one version are one",
            "responses_hex": responses(
                [delta(0, [5], "", span(3, 0, 1))],
                [delta(0, [6, 7], "", span(3, 1, 3))],
                [delta(0, [8], "", span(4, 3, 4))],
            ),
            "sequences": [
                {"token_ids": [5, 6, 7, 8], "text": "", "weight_spans": [[3, 0, 3], [4, 3, 4]], "finish": "unspecified"}
            ],
        },
        {
            "name": "a push within one message",
            "responses_hex": responses(
                [delta(0, [5], "", span(3, 0, 1))],
                [delta(0, [6, 7], "\u00e9", span(3, 1, 2), span(4, 2, 3))],
                [
                    delta(
                        0,
                        [8],
                        "!",
                        span(4, 3, 4),
                        finish=finish("eos", span(3, 0, 2), span(4, 2, 4)),
                    )
                ],
            ),
            "sequences": [
                {"token_ids": [5, 6, 7, 8], "text": "\u00e9!", "weight_spans": [[3, 0, 2], [4, 2, 4]], "finish": "eos"}
            ],
        },
        {
            "name": "the same version again after another one",
            "responses_hex": responses(
                [
                    delta(0, [5], "", span(3, 0, 1)),
                    delta(1, [9], "", span(3, 0, 1)),
                ],
                [delta(0, [6], "", span(4, 1, 2))],
                [delta(0, [7], "", span(3, 2, 3))],
            ),
            "sequences": [
                {
                    "token_ids": [5, 6, 7],
                    "text": "",
                    "weight_spans": [[3, 0, 1], [4, 1, 2], [3, 2, 3]],
                    "finish": "unspecified",
                },
                {"token_ids": [9], "text": "", "weight_spans": [[3, 0, 1]], "finish": "unspecified"},
            ],
        },
        {
            "name": "of an adapter, one version after another, as when a request goes on elsewhere",
            "responses_hex": responses(
                [delta(0, [5], "", span(3, 0, 1, 7))],
                [delta(0, [6], "", span(3, 1, 2, 7))],
                [delta(0, [7], "", span(3, 2, 3, 8))],
            ),
            "sequences": [
                {
                    "token_ids": [5, 6, 7],
                    "text": "",
                    "weight_spans": [[3, 0, 2, 7], [3, 2, 3, 8]],
                    "finish": "unspecified",
                }
            ],
        },
        {
            "name": "sequences in any order, with log-probabilities and a stop string",
            "responses_hex": responses(
                [delta(1, [1], "x", span(0, 0, 1), logprobs=logprobs(-0.5))],
                [
                    delta(0, [2], "y", span(0, 0, 1), logprobs=logprobs(-1.5)),
                    delta(
                        1,
                        [3],
                        "",
                        span(0, 1, 2),
                        logprobs=logprobs(-0.25),
                        finish=finish("stop_string", span(0, 0, 2), stop_string="END"),
                    ),
                ],
                [
                    delta(
                        0,
                        [4],
                        "",
                        span(0, 1, 2),
                        logprobs=logprobs(-2.0),
                        finish=finish("stop_token", span(0, 0, 2), stop_token_id=4),
                    )
                ],
            ),
            "sequences": [
                {
                    "token_ids": [2, 4],
                    "text": "y",
                    "weight_spans": [[0, 0, 2]],
                    "finish": "stop_token",
                    "stop_token_id": 4,
                    "logprobs": [-1.5, -2.0],
                },
                {
                    "token_ids": [1, 3],
                    "text": "x",
                    "weight_spans": [[0, 0, 2]],
                    "finish": "stop_string",
                    "stop_string": "END",
                    "logprobs": [-0.5, -0.25],
                },
            ],
        },
        {
            "name": "a prompt, and a sequence, that are too large for one message",
            "responses_hex": [
                prompt([7, 8], -0.5),
                prompt([9], -0.25),
                *responses(
                    [delta(0, [5, 6], "ab", span(3, 0, 1), span(4, 1, 2), logprobs=logprobs(-1.0, -2.0))],
                    [
                        delta(
                            0,
                            [7],
                            "c",
                            span(4, 2, 3),
                            logprobs=logprobs(-4.0),
                            finish=finish("length", span(3, 0, 1), span(4, 1, 3)),
                        )
                    ],
                ),
            ],
            "prompt": {"num_tokens": 3, "token_ids": [7, 8, 9], "logprobs": [-0.5, -0.25]},
            "sequences": [
                {
                    "token_ids": [5, 6, 7],
                    "text": "abc",
                    "weight_spans": [[3, 0, 1], [4, 1, 3]],
                    "finish": "length",
                    "logprobs": [-1.0, -2.0, -4.0],
                }
            ],
        },
        {
            "name": "a reason of a newer daemon",
            "responses_hex": responses(
                [delta(0, [5], "", one, finish=generation_pb2.Finish(reason=newer, weight_spans=[one]))]
            ),
            "sequences": [{"token_ids": [5], "text": "", "weight_spans": [[3, 0, 4]], "finish": "unknown_99"}],
        },
    ]
