"""What every history of a fleet has to satisfy. Pure."""

from genserve.v1 import types_pb2
from tests.simulation.events import Events, Push, Request, Token


def violations(events: Events) -> list[str]:
    """Everything that is wrong."""
    return [*events.wrong, *_epochs(events), *_tokens(events), *_pauses(events)]


def _epochs(events: Events) -> list[str]:
    """The epochs that a replica keeps grow, and each names one record. Epoch 1 is what a router has found."""
    found, named, last = [], dict[int, types_pb2.FleetState](), dict[tuple[str, int], int]()
    for kept in events.kept:
        record = types_pb2.FleetState.FromString(kept.content)
        if kept.epoch > 1 and not _is_same(named.setdefault(kept.epoch, record), record):
            found.append(f"{kept.at_s:.3f} epoch {kept.epoch} names {named[kept.epoch]} and {record}")
        run = (kept.address, kept.run)
        if kept.epoch < last.get(run, 0):
            found.append(f"{kept.at_s:.3f} epoch {kept.epoch} follows {last[run]} at {kept.address}")
        last[run] = kept.epoch
    return found


def _is_same(one: types_pb2.FleetState, other: types_pb2.FleetState) -> bool:
    """Whether two records say the same of a fleet. A push that was being committed may have become its version."""
    is_decided = one.push_id == other.undecided_push_id != "" or other.push_id == one.undecided_push_id != ""
    is_version = (one.weight_version, one.push_id) == (other.weight_version, other.push_id)
    loras = [[lora.lora_name for lora in record.loras] for record in (one, other)]
    return (is_version or is_decided) and one.asleep_tags == other.asleep_tags and loras[0] == loras[1]


def _tokens(events: Events) -> list[str]:
    """Each token is of weights that the fleet may serve, and its label says which."""
    found, pushes = [], {push.content: push for push in events.pushes}
    for request in events.requests:
        for number, version in zip(request.tokens, request.versions, strict=True):
            token = events.tokens[number - 1]
            push = pushes.get(token.content)
            if version != (push.version if push is not None else 0):
                found.append(f"{token.at_s:.3f} tokens of push {token.content} are labelled {version}")
            if why := _why_not(events, request, token, push):
                found.append(f"{token.at_s:.3f} {token.address} served push {token.content}: {why}")
                break
    return found


def _why_not(events: Events, request: Request, token: Token, push: Push | None) -> str:
    if push is not None and push.alone_at:
        may_be = push.alone_at == token.address or push.push_id in events.found_ids
        return "" if may_be else f"it was pushed to {push.alone_at} alone"
    if push is not None and push.is_refused:
        return "it was refused"
    content = 0 if push is None else push.content
    over_s = 0.0 if push is None else push.over_s
    for later in events.pushes:
        if later.alone_at or later.content <= content or not over_s <= later.asked_s:
            continue
        if later.told_s <= request.asked_s and token.at_s < later.lost_s:
            return f"push {later.content} had been told before it was asked, at {request.asked_s:.3f}"
    return ""


def _pauses(events: Events) -> list[str]:
    """No token comes into being while a lease is in force that its holder was told of."""
    found = []
    for lease in events.leases:
        until_s = min(lease.until_s, lease.lost_s)
        for request in events.requests:
            for number in request.tokens:
                token = events.tokens[number - 1]
                if lease.told_s < token.at_s < until_s:
                    found.append(f"{token.at_s:.3f} {token.address} served in spite of lease {lease.lease_id}")
                    break
    return found
