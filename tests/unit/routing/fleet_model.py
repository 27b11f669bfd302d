"""A model of a fleet for comparing policies: replicas with a batch, a prefix cache and late reports. Pure: its time is
counted, not waited for.

A replica prefills one prompt after the other, and of each only what its prefix cache lacks. It decodes all sequences of
its batch at one speed. What does not fit into the batch waits, in order of arrival.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

from genserve.routing.chain import Chain
from genserve.routing.replica import Load, Replica, Request
from tests.unit.routing.fleets import VERSION, replica
from tests.unit.routing.recorded_loads import KV_BLOCK, Conversation, RecordedLoad, Turn

PREFILL_TOKENS_PER_S: Final = 10_000
STEP_S: Final = 0.02
MAX_NUM_SEQS: Final = 32
KV_BLOCKS: Final = 6_000
"""Of a replica's cache: 96,000 tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load came to.

    `hit_rate`: share of the prompts' tokens that were in the prefix cache. `p99_wait_s`: until the first token.
    `imbalance`: sequence-seconds of the busiest replica over their mean. `total_s`: until the last request ended.
    `num_served`: requests of each replica. `num_decided`: requests by the policy that decided.
    """

    hit_rate: float
    p99_wait_s: float
    imbalance: float
    total_s: float
    num_served: tuple[int, ...]
    num_decided: Counter[str]


def replay(
    load: RecordedLoad,
    make_chain: Callable[[int], Chain],
    num_replicas: int = 8,
    num_senders: int = 1,
    report_s: float = 1.0,
) -> Figures:
    """Sends a load through senders that know nothing of each other; a worker of the trainer always has the same one.

    `make_chain` makes the chain of the sender with this number. Each replica reports every `report_s`, one after the
    other.
    """
    return _Replay(load, [make_chain(number) for number in range(num_senders)], num_replicas, report_s).run()


@dataclass(frozen=True, slots=True)
class _Job:
    conversation: Conversation
    number: int
    sender: int
    arrived_s: float

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.number]


@dataclass(slots=True)
class _Server:
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: deque[_Job] = field(default_factory=deque)
    running: int = 0
    running_blocks: int = 0
    prefill_free_s: float = 0.0
    sequence_s: float = 0.0
    num_served: int = 0

    def num_hit(self, turn: Turn) -> int:
        """Tokens of a prompt that are cached. Its last token never is: the first output needs its logits."""
        num_blocks = 0
        for block in turn.kv_blocks[: (turn.num_prompt - 1) // KV_BLOCK]:
            if block not in self.cached:
                break
            num_blocks += 1
        return num_blocks * KV_BLOCK

    def keep(self, turn: Turn) -> None:
        """Caches a prompt and its output, in place of what was used longest ago."""
        for block in reversed(turn.kv_blocks):
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) > KV_BLOCKS:
            self.cached.popitem(last=False)


class _Replay:
    def __init__(self, load: RecordedLoad, chains: list[Chain], num_replicas: int, report_s: float) -> None:
        self._servers = [_Server() for _ in range(num_replicas)]
        self._chains = chains
        self._report_s = report_s
        members = {each.replica_id: each for each in (replica(number) for number in range(num_replicas))}
        self._numbers = {replica_id: number for number, replica_id in enumerate(members)}
        self._seen = [dict(members) for _ in chains]
        self._now_s = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waits_s: list[float] = []
        self._num_hit = self._num_prompt = 0
        self._num_left = sum(len(conversation.turns) for conversation in load.conversations)
        for conversation in load.conversations:
            self._at(conversation.starts_s, partial(self._arrive, conversation, 0))
        for replica_id, number in self._numbers.items():
            self._at(report_s * (number + 1) / num_replicas, partial(self._report, replica_id))

    def run(self) -> Figures:
        while self._num_left:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        sequence_s = [server.sequence_s for server in self._servers]
        return Figures(
            hit_rate=self._num_hit / self._num_prompt,
            p99_wait_s=sorted(self._waits_s)[int(0.99 * len(self._waits_s))],
            imbalance=max(sequence_s) * len(sequence_s) / sum(sequence_s),
            total_s=self._now_s,
            num_served=tuple(server.num_served for server in self._servers),
            num_decided=sum((Counter(chain.num_decided) for chain in self._chains), Counter()),
        )

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _report(self, replica_id: str) -> None:
        server = self._servers[self._numbers[replica_id]]
        usage = min(1.0, server.running_blocks / KV_BLOCKS)
        for seen in self._seen:
            old = seen[replica_id]
            seen[replica_id] = replace(
                old, load=Load(server.running, len(server.waiting), usage, inflight_at_report=old.inflight)
            )
        self._at(self._now_s + self._report_s, partial(self._report, replica_id))

    def _arrive(self, conversation: Conversation, number: int) -> None:
        sender = conversation.worker % len(self._chains)
        request = Request(conversation.turns[number].prefix_blocks, conversation.session_id)
        decision = self._chains[sender].route(request, self._seen[sender].values(), VERSION)
        if decision is None:
            raise RuntimeError("a fleet whose replicas are all ready took no request")
        chosen = decision.candidates[0]
        self._chains[sender].sent(request, chosen)
        self._change_inflight(sender, chosen.replica_id, 1)
        self._servers[self._numbers[chosen.replica_id]].waiting.append(_Job(conversation, number, sender, self._now_s))
        self._admit(chosen.replica_id)

    def _change_inflight(self, sender: int, replica_id: str, change: int) -> None:
        old: Replica = self._seen[sender][replica_id]
        self._seen[sender][replica_id] = replace(old, inflight=old.inflight + change)

    def _admit(self, replica_id: str) -> None:
        server = self._servers[self._numbers[replica_id]]
        while server.waiting and server.running < MAX_NUM_SEQS:
            job = server.waiting.popleft()
            num_hit = server.num_hit(job.turn)
            server.keep(job.turn)
            self._num_hit += num_hit
            self._num_prompt += job.turn.num_prompt
            prefill_s = (job.turn.num_prompt - num_hit) / PREFILL_TOKENS_PER_S
            server.prefill_free_s = max(self._now_s, server.prefill_free_s) + prefill_s
            server.running += 1
            server.running_blocks += len(job.turn.kv_blocks)
            server.num_served += 1
            self._waits_s.append(server.prefill_free_s - job.arrived_s)
            ends_s = server.prefill_free_s + job.turn.num_output * STEP_S
            self._at(ends_s, partial(self._end, replica_id, job))

    def _end(self, replica_id: str, job: _Job) -> None:
        server = self._servers[self._numbers[replica_id]]
        server.running -= 1
        server.running_blocks -= len(job.turn.kv_blocks)
        server.sequence_s += self._now_s - job.arrived_s
        self._change_inflight(job.sender, replica_id, -1)
        self._num_left -= 1
        if job.number + 1 < len(job.conversation.turns):
            pause_s = job.conversation.turns[job.number + 1].pause_s
            self._at(self._now_s + pause_s, partial(self._arrive, job.conversation, job.number + 1))
        self._admit(replica_id)
