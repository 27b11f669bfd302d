"""What every history of a fleet has to satisfy. Pure."""

from genserve.v1 import types_pb2
from tests.simulation.events import Events, Push, Request, Token


def violations(events: Events) -> list[str]:
    """Everything that is wrong."""
    return [*events.wrong, *_epochs(events), *_tokens(events), *_pauses(events)]


def _epochs(events: Events) -> list[str]:
    """The epochs that a replica keeps grow, and each names one record. Epoch 1 is what a router has found."""
    found, named, last = [], dict[int, tuple[object, ...]](), dict[tuple[str, int], int]()
    for kept in events.kept:
        record = types_pb2.FleetState.FromString(kept.content)
        # One of a push that was being committed may say later that it is the version: it says both with this push.
        version = (0, record.undecided_push_id) if record.undecided_push_id else (record.weight_version, record.push_id)
        told = (
            *version,
            tuple(record.asleep_tags),
            tuple(lora.lora_name for lora in record.loras),
        )
        if kept.epoch > 1 and named.setdefault(kept.epoch, told) != told:
            found.append(f"{kept.at_s:.3f} epoch {kept.epoch} names {named[kept.epoch]} and {told}")
        run = (kept.address, kept.run)
        if kept.epoch < last.get(run, 0):
            found.append(f"{kept.at_s:.3f} epoch {kept.epoch} follows {last[run]} at {kept.address}")
        last[run] = kept.epoch
    return found


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
