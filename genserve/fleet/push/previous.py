"""Which replica has what the fleet has served before: their disks differ after canaries, and where one was away."""

import uuid
from collections import Counter

from genserve.errors import GenserveError
from genserve.fleet.deadlines import ASK_S
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.upstream import Upstream
from genserve.v1 import weights_pb2


async def reader_of_previous(fleet: Fleet, request: weights_pb2.LoadWeightsRequest) -> Upstream | None:
    """The replica to read the version before from: one that has the fleet's, and if this router has not seen that or
    nobody has kept it, one that has what most of them have. None if no replica is ready; raises the error of one if
    none has any."""
    asked = weights_pb2.LoadWeightsRequest()
    asked.CopyFrom(request)
    asked.push_id, asked.action = uuid.uuid4().hex, weights_pb2.PUSH_ACTION_VALIDATE
    asked.ClearField("apply")
    outcomes = await everywhere(fleet.ready, lambda each: each.ask(each.weights.LoadWeights, asked, ASK_S))
    found = {
        upstream: outcome.push.weight_version
        for upstream, outcome in outcomes.items()
        if not isinstance(outcome, GenserveError)
    }
    if not found:
        for outcome in outcomes.values():
            if isinstance(outcome, GenserveError):
                raise outcome.again()
        return None
    counts = Counter(found.values())
    before = None if fleet.previous is None else fleet.previous.number
    return max(found, key=lambda upstream: (found[upstream] == before, counts[found[upstream]]))
