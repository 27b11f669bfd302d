"""Requests of every kind, good, bad and absurd, the same ones for the same seed."""

import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.struct_pb2 import Struct

from genserve.v1 import generation_pb2
from tests.support import on_runner_v2

INTS = (0, 1, -1, 2, 7, 511, 512, 4096, 2**31 - 1, -(2**31), 100_000)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-9, 2.0, 2.5, -0.0, 1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = ("hi", "a" * 5000, "é漢😀", "\x00", "\ufeff\u200d", "<|im_end|>", "{{ 7 * 7 }}", " " * 3000, "\n", "\\d+", "]")
JSONS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        0.5,
        1e300,
        -1e300,
        2.0**31,
        2.0**53,
        2.0**63,
        2.0**64,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "1", [], [[]], [1], [-1], [[1]], [[1, 2], [3]], [600], [1.5], ["a"], [None], [2.0**40], [1] * 200),
    *({}, {"a": 1}, {"max_pattern_size": 4}, {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}),
    *({"max_pattern_size": "4"}, {"max_pattern_size": 2.0**62, "min_count": 2}, {"min_count": None}, {"json": "{}"}),
)
PARAMS = (
    *("watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
    *("spaces_between_special_tokens", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection"),
    *("routed_experts_prompt_start", "trace_decode_token_ids", "extra_args", "output_kind", "skip_clone", "nonsense"),
    *("structured_outputs", "seed", "_eos_token_id", "__class__", "flat_logprobs", "logits_processors"),
)
REGEXES = ("a+", "[0-9]{3}", r"\p{L}{3}", "(", "(a+)+b", "", r"\1", "[^\x00-\x7f]{2}", "(?=a)b", "a{1000}", ".*", "^$")
SCHEMAS = (
    *("{}", "true", "[]", "{", "null", '{"$ref": "#"}', '{"type": "nonsense"}', '{"type": "string", "pattern": "("}'),
    *('{"$ref": "#/definitions/none"}', '{"enum": []}', '{"type": "integer", "minimum": 5, "maximum": 1}'),
    *('{"allOf": [{"type": "string"}, {"type": "integer"}]}', '{"type": "array", "minItems": 100000}'),
    *('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', '{"const": NaN}'),
    json.dumps({"anyOf": [{"type": "string", "maxLength": n} for n in range(40)]}),
    "[" * 200 + "]" * 200,
)
GRAMMARS = ('root ::= "a"', "root ::= root", "root ::=", 'a ::= "b"', "start: /a+/", "root ::= [a-", "%%%", "\x00")
TAGS = (
    "{}",
    "[]",
    "{",
    '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}',
    '{"structures": []}',
)
CHOICES: tuple[list[str], ...] = (["a", "b"], [""], ["a"] * 100, ['"'], ["\\"], ["\n"], ["é漢"], ["\x00"])
ROLES = ("user", "assistant", "system", "", "nonsense", "\n")
TEMPLATE_PARAMS = (
    *("enable_thinking", "tools", "documents", "chat_template", "tokenize", "return_dict", "messages", "conversation"),
    *("eos_token", "self", "padding", "add_generation_prompt", "tokenizer_kwargs", "kwargs", "conversations"),
)


class Requests:
    """An endless supply. Each generates few tokens, if it generates any."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0

    def next(self) -> generation_pb2.GenerateRequest:
        """One with an id of its own."""
        self._number += 1
        message = generation_pb2.GenerateRequest(request_id=f"hostile-{self._number}")
        self._prompt(message)
        message.stop.max_tokens = self._random.randint(1, 8)
        for part in (self._sampling, self._stop, self._constraint, self._output, self._params, self._rest):
            if self._random.random() < 0.3:
                part(message)
        return message

    def _pick(self, values: Any) -> Any:
        return self._random.choice(values)

    def _set(self, message: Any, name: str, values: Any, chance: float = 0.2) -> None:
        if self._random.random() < chance:
            setattr(message, name, self._pick(values))

    def _extend(self, repeated: Any, values: Any, chance: float = 0.15) -> None:
        if self._random.random() < chance:
            repeated.extend(self._pick(values) for _ in range(self._pick((1, 2, 5, 300))))

    def _prompt(self, message: generation_pb2.GenerateRequest) -> None:
        kind = self._random.random()
        if kind < 0.5:
            ids = [self._random.randrange(500) for _ in range(self._pick((1, 3, 40)))]
            message.token_ids.ids.extend(ids)
            if self._random.random() < 0.1:
                message.token_ids.ids.append(self._pick((511, 512, 2**31 - 1, 2**32 - 1)))
        elif kind < 0.8:
            message.text = self._pick(TEXTS)
        elif kind < 0.97:
            message.chat.messages.add(role=self._pick(ROLES[:3]), content=self._pick(TEXTS))
            if self._random.random() < 0.2:
                message.chat.messages.add(role=self._pick(ROLES), content="x")
            self._set(message.chat, "add_generation_prompt", (True, False))
            self._set(message.chat, "continue_final_message", (True, False))
            if self._random.random() < 0.5:
                self._fill(message.chat.template_params, TEMPLATE_PARAMS)

    def _fill(self, struct: Struct, names: tuple[str, ...]) -> None:
        for _ in range(self._pick((1, 1, 2, 4))):
            struct.update({self._pick(names): self._pick(JSONS)})

    def _sampling(self, message: generation_pb2.GenerateRequest) -> None:
        sampling = message.sampling
        floats = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in floats:
            self._set(sampling, name, FLOATS, 0.1)
        if not on_runner_v2.IS_ON:  # Triton's interpreter does not run their kernel, and the engine would end
            self._set(sampling, "top_p", FLOATS, 0.1)
            self._set(sampling, "top_k", INTS, 0.1)
        self._set(sampling, "n", (*INTS, 2, 3, 16), 0.3)
        self._set(sampling, "seed", (*INTS, 2**63 - 1, -(2**63)), 0.1)
        if self._random.random() < 0.15:
            for _ in range(self._pick((1, 3))):
                sampling.logit_bias[self._pick(INTS)] = self._pick(FLOATS)
        self._extend(sampling.allowed_token_ids, (1, 2, 510, 511, *INTS))
        self._extend(sampling.bad_words, TEXTS)

    def _stop(self, message: generation_pb2.GenerateRequest) -> None:
        stop = message.stop
        self._set(stop, "max_tokens", INTS, 0.05)
        self._set(stop, "min_tokens", INTS)
        self._extend(stop.strings, TEXTS)
        self._extend(stop.token_ids, (1, 2, 511, *INTS))
        self._set(stop, "ignore_eos", (True, False))
        self._set(stop, "include_stop", (True, False))
        if self._random.random() < 0.1:
            stop.time_budget.seconds = self._pick((0, 1, -1, 10**9))
            stop.time_budget.nanos = self._pick((0, 1, -1, 2**31 - 1))

    def _constraint(self, message: generation_pb2.GenerateRequest) -> None:
        def choose() -> None:
            message.choice.choices.extend(self._pick(CHOICES))

        kinds: tuple[Callable[[], object], ...] = (
            lambda: setattr(message, "json_schema", self._pick(SCHEMAS)),
            lambda: message.json_object.SetInParent(),
            lambda: setattr(message, "regex", self._pick(REGEXES)),
            lambda: setattr(message, "grammar", self._pick(GRAMMARS)),
            lambda: setattr(message, "structural_tag", self._pick(TAGS)),
            choose,
        )
        self._pick(kinds)()

    def _output(self, message: generation_pb2.GenerateRequest) -> None:
        output = message.output
        for name in ("text", "token_ids", "skip_special_tokens", "prompt_token_ids"):
            self._set(output, name, (True, False))
        self._set(output, "logprobs", (*INTS, 1, 5, 20))
        self._set(output, "prompt_logprobs", (*INTS, 1, 5, 20))
        self._set(output, "stream_interval", (0, 1, 3, 2**32 - 1))

    def _params(self, message: generation_pb2.GenerateRequest) -> None:
        self._fill(message.engine_params, PARAMS)

    def _rest(self, message: generation_pb2.GenerateRequest) -> None:
        self._set(message, "lora_name", ("nobody", "", "\x00"))
        self._set(message, "priority", INTS, 0.5)
        self._set(message, "data_parallel_rank", (0, 1, 2**32 - 1))
        self._set(message.cache, "salt", ("", "salt", "\x00", "x" * 5000))
        self._set(message, "min_weight_version", (0, 1, 2**32 - 1), 0.05)
        self._set(message, "request_id", ("\n", "x" * 300, "é"), 0.05)
