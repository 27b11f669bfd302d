"""Three loads on which policies are compared: what is sent when, to the token. Each is the same in every run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from genserve.routing.prefix_blocks import blocks_of_tokens

KV_BLOCK = 16
"""Tokens of a block of KV cache."""
_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: `pause_s` after the turn before has ended. `kv_blocks`: what its prompt and then its output fill of
    the KV cache, equal for equal prefixes."""

    pause_s: float
    num_prompt: int
    num_output: int
    prefix_blocks: tuple[bytes, ...]
    kv_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after the other, the first at `starts_s`. `worker`: the part of the trainer that sends them; one sends
    all samples of a prompt."""

    worker: int
    session_id: str
    starts_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Conversations in the order of their beginning."""

    name: str
    conversations: tuple[Conversation, ...]


def _tokens(rng: Random, count: int) -> list[int]:
    return rng.choices(range(_VOCABULARY), k=count)


def _turn(prompt: list[int], output: list[int], pause_s: float = 0.0) -> Turn:
    blocks, chained = [], 0
    both = [*prompt, *output]
    for start in range(0, len(both) - KV_BLOCK + 1, KV_BLOCK):
        chained = hash((chained, tuple(both[start : start + KV_BLOCK])))
        blocks.append(chained)
    return Turn(pause_s, len(prompt), len(output), blocks_of_tokens(prompt), tuple(blocks))


def _output(rng: Random, typical: float, most: int) -> list[int]:
    return _tokens(rng, min(most, max(1, round(typical * math.exp(rng.gauss(0, 0.7))))))


@cache
def grpo() -> RecordedLoad:
    """A step of GRPO: 64 prompts with one system prompt, each sent eight times, all within a second."""
    rng = Random(1)
    system = _tokens(rng, 192)
    sent = []
    for _ in range(64):
        prompt = system + _tokens(rng, rng.randint(100, 500))
        sent += [_turn(prompt, _output(rng, 250, 2000)) for _ in range(8)]
    conversations = [Conversation(index // 8, "", index * 0.002, (turn,)) for index, turn in enumerate(sent)]
    return RecordedLoad("grpo", tuple(conversations))


@cache
def agents() -> RecordedLoad:
    """96 agents with one system prompt of 1,500 tokens, each with up to twelve turns and a tool call between them."""
    rng = Random(2)
    system = _tokens(rng, 1500)
    conversations = []
    for number in range(96):
        context = system + _tokens(rng, rng.randint(50, 400))
        turns = []
        for turn in range(rng.randint(4, 12)):
            output = _output(rng, 80, 600)
            turns.append(_turn(context, output, rng.uniform(0.3, 4.0) if turn else 0.0))
            context = context + output + _tokens(rng, rng.randint(50, 700))
        conversations.append(Conversation(number, f"agent-{number}", rng.uniform(0, 20), tuple(turns)))
    return RecordedLoad("agents", tuple(sorted(conversations, key=lambda each: each.starts_s)))


@cache
def hot_prefix() -> RecordedLoad:
    """2,000 requests in 40 s: four of five begin with the same 2,000 tokens, the others with one of 40 prefixes."""
    rng = Random(3)
    hot = _tokens(rng, 2000)
    cold = [_tokens(rng, 1000) for _ in range(40)]
    conversations, now_s = [], 0.0
    for number in range(2000):
        now_s += rng.expovariate(50)
        prefix = hot if rng.random() < 0.8 else rng.choice(cold)
        turn = _turn(prefix + _tokens(rng, rng.randint(20, 200)), _output(rng, 80, 400))
        conversations.append(Conversation(number, "", now_s, (turn,)))
    return RecordedLoad("hot prefix", tuple(conversations))


LOADS: tuple[Callable[[], RecordedLoad], ...] = (grpo, agents, hot_prefix)
