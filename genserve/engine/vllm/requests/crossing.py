"""The last look at a request before EngineCore gets it, whatever entrance it came through.

EngineCore decodes requests outside of any `try`: one value of a wrong type ends the thread that reads requests, for
everybody. So every request is encoded and decoded here before it is sent.
"""

import re
from typing import Final

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from genserve.engine.vllm.requests.sampling import request_field
from genserve.errors import InvalidFieldError

MAX_CACHE_SALT: Final = 1024
"""Characters."""


def bound(params: SamplingParams, max_model_len: int) -> None:
    """Reduces the numbers of tokens to the context: no sequence is longer. Model Runner V2 adds the prompt's length to
    them in 32 bits, and an overflow would end the engine."""
    params.max_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    params.min_tokens = min(params.min_tokens, params.max_tokens)


class Crossing:
    """vLLM's codec of requests."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def check(self, built: EngineCoreRequest) -> None:
        """Raises InvalidFieldError if EngineCore could not decode it."""
        # The prompt's ids are integers of the vocabulary, and there may be very many. What vLLM makes of images is its
        # own.
        small = msgspec.structs.replace(built, prompt_token_ids=[], prompt_embeds=None, mm_features=None)
        try:
            self._decoder.decode(self._encoder.encode(small))
        except Exception as error:
            found = re.search(r"at `\$\[\d+\]\.(\w+)", str(error))
            raise InvalidFieldError.of(request_field(found[1] if found else None), str(error)) from error
