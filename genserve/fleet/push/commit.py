"""The second phase of a push: every replica that has it exchanges its weights."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from genserve.errors import GenserveError, PushRolledBackError
from genserve.fleet.desired import Version
from genserve.fleet.everywhere import everywhere, leaves, replica_error, write_record
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.adapters import ask_loras
from genserve.fleet.upstream import Upstream, apply_s
from genserve.forward.upstream import may_have_done
from genserve.v1 import weights_pb2

log = logging.getLogger(__name__)


async def commit_everywhere(
    fleet: Fleet, replicas: Sequence[Upstream], request: weights_pb2.CommitPushRequest, push: weights_pb2.Push
) -> weights_pb2.CommitPushResponse:
    """Commits at once on all of these replicas. From the first success on, requests go only to replicas that have
    committed; those that have failed catch up by themselves. Raises the error of one if no replica that gets requests
    has succeeded, and for an adapter, with which no replica catches up, if one has failed."""
    request.ClearField("fleet")
    if push.lora_name:
        async with fleet.lora_turns.taken(push.lora_name):
            return await _commit_lora(fleet, replicas, request, push)
    deciding = set(fleet.ready).intersection(replicas)  # one that is behind has nothing to say
    if not deciding and (not fleet.ready or push.state != weights_pb2.PUSH_STATE_APPLIED):
        deciding = set(replicas)  # all of them left the rotation just now; others may have refused what is repeated
    base_digest = "" if fleet.committed is None else fleet.committed.base_digest
    version = Version(push.weight_version, push.push_id, push.content_digest, base_digest)
    request.fleet.CopyFrom(fleet.record_with(version))
    is_repeated = fleet.is_undecided(push.push_id)  # the attempt before may still come about
    fleet.begin_commit(request.fleet, deciding)
    outcomes = _Outcomes()
    await outcomes.of(replicas, lambda each: _commit(fleet, each, request, decides=each in deciding), push)
    for upstream in outcomes.failures:
        upstream.member.doubt()
    fleet.refresh()
    serving = {each for each, answer in outcomes.answers.items() if _is_served(answer)}
    if deciding & serving:
        await write_record(fleet)  # for those that were not asked, or if there was another change meanwhile
        return outcomes.answer()
    told = deciding or (set() if outcomes.answers else set(replicas))  # others do not know why nothing came of it
    errors = [outcomes.failures[each] for each in replicas if each in told and each in outcomes.failures]
    if not is_repeated and not any(map(may_have_done, errors)):
        fleet.end_commit()
    if outcomes.failures or serving:  # one that was behind may keep a record of what did not come about
        fleet.changed()
        await write_record(fleet)
    if errors:
        raise _worst(errors)
    answer = outcomes.answer()
    if not fleet.has_served(push.push_id) and (serving or not _is_replaced(fleet, answer)):
        raise PushRolledBackError(
            f"the fleet does not serve push {push.push_id!r}: no replica that gets requests has committed it, or the "
            "fleet was rolled back. Push it again under another push_id",
            metadata={"push_id": push.push_id},
        )
    return answer  # to a repeat of a push that has been replaced since


def _is_served(answer: weights_pb2.CommitPushResponse) -> bool:
    """Whether the replica serves the push now. A repeat for a push of long ago, or for one that was undone, gets its
    first answer again, though another version is served."""
    return answer.state.push_id == answer.push.push_id


def _is_replaced(fleet: Fleet, first: weights_pb2.CommitPushResponse) -> bool:
    """Whether a push that replicas have committed before, and `first` answered so, was followed by another one. The
    fleet has a higher number then, which is not that from before the push, as after a rollback that was undone."""
    if fleet.committed is None or first.push.weight_version > fleet.committed.number:
        return False
    return fleet.committed.number != first.applied.previous_version


def _worst(errors: Sequence[GenserveError]) -> GenserveError:
    """The one to raise. A replica that did not answer may have committed: it must not look as if nothing had
    changed."""
    return next((error for error in errors if may_have_done(error)), errors[0]).again()


async def _commit_lora(
    fleet: Fleet, replicas: Sequence[Upstream], request: weights_pb2.CommitPushRequest, push: weights_pb2.Push
) -> weights_pb2.CommitPushResponse:
    """An adapter, which may come while weights are committed, and leaves their record alone."""
    outcomes = _Outcomes()
    with fleet.desired.changing_lora(push.lora_name):  # or the one before would be brought back meanwhile
        await outcomes.of(replicas, lambda each: _commit(fleet, each, request, decides=False), push)
        if not outcomes.answers:
            raise _worst(list(outcomes.failures.values()))
        failed = {upstream: error for upstream, error in outcomes.failures.items() if not leaves(upstream, error)}
        await _took_lora(fleet, push, outcomes.answers, by_all=not failed)
    fleet.refresh()  # now it is brought to replicas that lack it
    _check_all_have(push.lora_name, failed, len(outcomes.answers))
    return outcomes.answer()


class _Outcomes:
    """The outcome of a commit on each replica."""

    def __init__(self) -> None:
        self.answers: dict[Upstream, weights_pb2.CommitPushResponse] = {}
        self.failures: dict[Upstream, GenserveError] = {}
        self._told_s: list[float] = []

    async def of(
        self,
        replicas: Sequence[Upstream],
        commit: Callable[[Upstream], Awaitable[weights_pb2.CommitPushResponse]],
        push: weights_pb2.Push,
    ) -> None:
        """Asks all of them."""

        async def timed(upstream: Upstream) -> weights_pb2.CommitPushResponse:
            answer = await commit(upstream)
            self._told_s.append(time.monotonic())
            return answer

        for upstream, outcome in (await everywhere(replicas, timed)).items():
            if isinstance(outcome, GenserveError):
                log.warning("replica %s did not commit push %s: %s", upstream.address, push.push_id, outcome.message)
                self.failures[upstream] = outcome
            else:
                self.answers[upstream] = outcome
        if self.answers:
            counts = f"{len(self.answers)} of {len(replicas)} replicas"
            skew_s = max(self._told_s) - min(self._told_s)
            log.info("push %s is committed on %s, the last %.3f s after the first", push.push_id, counts, skew_s)

    def answer(self) -> weights_pb2.CommitPushResponse:
        """That of the fleet."""
        answers = list(self.answers.values())
        applied = merged([answer.applied for answer in answers if answer.HasField("applied")])
        return weights_pb2.CommitPushResponse(push=answers[0].push, applied=applied)


async def _took_lora(fleet: Fleet, push: weights_pb2.Push, replicas: Iterable[Upstream], *, by_all: bool) -> None:
    """An adapter that was pushed has taken the place of another one. Replicas that join get it, if all have it."""
    desired = fleet.desired
    await everywhere(replicas, ask_loras)  # before they are taken to lack it
    desired.loras.pop(push.lora_name, None)
    desired.pushed_loras.pop(push.lora_name, None)
    if by_all:
        desired.pushed_loras[push.lora_name] = push.push_id
    fleet.changed()
    await write_record(fleet)


def _check_all_have(lora_name: str, failures: Mapping[Upstream, GenserveError], num_loaded: int) -> None:
    """Raises the error of a replica that does not have an adapter which others have loaded: it does not catch up by
    itself, and may serve another one under this name. Its code alone may say that nothing was changed."""
    for upstream, error in failures.items():
        more = f"; other replicas have loaded adapter {lora_name!r}: push it again"
        raise replica_error(upstream, error, more, loaded_by=str(num_loaded))


async def _commit(
    fleet: Fleet, upstream: Upstream, request: weights_pb2.CommitPushRequest, *, decides: bool
) -> weights_pb2.CommitPushResponse:
    own = weights_pb2.CommitPushRequest()
    own.CopyFrom(request)
    if request.apply.pause_lease_id:
        own.apply.pause_lease_id = fleet.leases.of_replica(request.apply.pause_lease_id, upstream.address)
    answer = await upstream.ask(upstream.weights.CommitPush, own, apply_s(request.apply))
    if not answer.push.lora_name and _is_served(answer):
        version = Version.of(answer.state)
        upstream.member.serves(version)
        if answer.state.fleet_epoch == request.fleet.epoch:
            upstream.member.keeps(request.fleet)
        if decides and (fleet.committed is None or not fleet.committed.is_same(version)):
            fleet.commit(version, request.fleet.epoch)
        else:
            fleet.confirm(version, answer.state.fleet_epoch)
    return answer


def merged(each: Sequence[weights_pb2.Applied]) -> weights_pb2.Applied | None:
    """What applying a push did on all replicas: times are the longest of any replica, step by step; requests and tokens
    are the sums; versions are those of the first. None if nothing was applied."""
    if not each:
        return None
    first = each[0]
    answer = weights_pb2.Applied(
        previous_version=first.previous_version,
        active_version=first.active_version,
        requests_kept=sum(applied.requests_kept for applied in each),
        requests_aborted=sum(applied.requests_aborted for applied in each),
    )
    steps: dict[str, Duration] = {}
    for applied in each:
        for timing in applied.timings:
            known = steps.get(timing.step)
            steps[timing.step] = timing.duration if known is None else _longest((known, timing.duration))
    answer.timings.extend(weights_pb2.StepTiming(step=step, duration=duration) for step, duration in steps.items())
    told = [applied.recomputed_tokens for applied in each if applied.HasField("recomputed_tokens")]
    if told:
        answer.recomputed_tokens = sum(told)
    for field in ("paused", "longest_wait", "discard"):
        durations = [getattr(applied, field) for applied in each if applied.HasField(field)]
        if durations:
            getattr(answer, field).CopyFrom(_longest(durations))
    return answer


def _longest(durations: Iterable[Duration]) -> Duration:
    return max(durations, key=Duration.ToNanoseconds)
