"""What streams have to satisfy whose answers name no version, as those of the OpenAI server. Pure.

- *stream failed*: a stream ended with an error, or after some tokens without a reason, while the daemon lived on;
- *token of no served weights*: no weights that may have been served during the stream would have chosen this token,
  given all before it. So no token is sampled from weights that are half exchanged, or of a push that failed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.history import START_CONTENT, History, UnlabelledStream
from tests.faults.history_model import Violation, writes
from tests.faults.linearizability import Write


def served_during(history: History, stream: UnlabelledStream) -> set[str]:
    """Names of the contents that may have been served at some time of a stream."""
    pushes = [Write(START_CONTENT, 0, -math.inf, -math.inf), *writes(history, stream.life)]
    contents = history.contents(stream.life)
    last_s = stream.at_s[-1] if stream.at_s else stream.invoked_s
    return {
        contents[push.version]
        for push in pushes
        if push.from_s <= last_s
        and not any(push.due_s < later.from_s and later.due_s < stream.invoked_s for later in pushes)
    }


def unlabelled_violations(
    history: History, behind: Mapping[int, Mapping[str, Sequence[float]]], tolerance: float
) -> list[Violation]:
    """`behind`, by the stream's index and the name of the weights: for each token how far its log-probability lies
    behind the likeliest token's."""
    return [*_failures(history), *_strange_tokens(history, behind, tolerance)]


def _failures(history: History) -> Iterator[Violation]:
    died_s = dict(history.kills)
    for stream in history.unlabelled:
        lives = stream.ended_s < died_s.get(stream.life, math.inf)
        # vLLM's server gives no reason to a request that is aborted before its first token.
        if lives and not stream.finish and (stream.error or stream.tokens):
            text = f"{stream.client}: {stream.error or 'ended without a reason'}"
            yield Violation("stream failed", text, stream.life, stream.ended_s)


def _strange_tokens(
    history: History, behind: Mapping[int, Mapping[str, Sequence[float]]], tolerance: float
) -> Iterator[Violation]:
    for i, scores in behind.items():
        stream = history.unlabelled[i]
        for position, at_s in enumerate(stream.at_s):
            short = min(distances[position] for distances in scores.values())
            if short > tolerance:
                text = f"token {position} of {stream.client} is {short:.3f} behind the likeliest one of {set(scores)}"
                yield Violation("token of no served weights", text, stream.life, at_s)
                break
