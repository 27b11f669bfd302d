"""Each call of the contract is served by a daemon and by a router, and made by both clients."""

import re
from pathlib import Path
from typing import Final

import pytest

from genserve.fleet.services.control import FleetControl
from genserve.fleet.services.generation import FleetGeneration
from genserve.fleet.services.replicas import FleetReplicas
from genserve.fleet.services.weights import FleetWeights
from genserve.rpc.control import ControlServicer
from genserve.rpc.generation import GenerationServicer
from genserve.rpc.weights import WeightServicer
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, weights_pb2

ROOT: Final = Path(__file__).parents[2]
CALLS: Final = {
    service.name: {method.name for method in service.methods}
    for file in (generation_pb2, weights_pb2, control_pb2, fleet_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
OF_ROUTERS: Final = {"SetFleetState"}
"""Calls that a router makes to its replicas, and no client."""
NOT_IN_TYPESCRIPT: Final = {
    *("InitWeightTransfer", "StartWeightUpdate", "UpdateWeights", "FinishWeightUpdate", "LoadWeights"),
    *CALLS["FleetService"],
}


@pytest.mark.parametrize(
    ("service", "servicer"),
    [
        ("GenerationService", GenerationServicer),
        ("WeightService", WeightServicer),
        ("ControlService", ControlServicer),
        ("GenerationService", FleetGeneration),
        ("WeightService", FleetWeights),
        ("ControlService", FleetControl),
        ("FleetService", FleetReplicas),
    ],
)
def test_servicer_implements_every_call(service: str, servicer: type) -> None:
    """A call that only the generated base class has ends with UNIMPLEMENTED."""
    ours = [each for each in servicer.__mro__ if not each.__module__.startswith("genserve.v1")]
    assert CALLS[service] <= {name for each in ours for name in vars(each)}


def test_python_client_makes_every_call() -> None:
    """The sync client has the methods of the async one: `test_sync_client`."""
    folders = [ROOT / "genserve" / name for name in ("client", "forward", "transport")]
    source = "".join(file.read_text() for each in folders for file in each.rglob("*.py"))
    assert set().union(*CALLS.values()) - set(re.findall(r"[./](\w+)\b", source)) == OF_ROUTERS


def test_typescript_client_makes_every_call_but_those_listed_here() -> None:
    """The names in its stubs begin in lower case."""
    folders = [each for each in (ROOT / "clients/typescript/src").iterdir() if each.name != "wire"]
    source = "".join(file.read_text() for each in folders for file in each.rglob("*.ts"))
    made = {name[0].upper() + name[1:] for name in re.findall(r"ServiceService\.(\w+)", source)}
    assert set().union(*CALLS.values()) - made == OF_ROUTERS | NOT_IN_TYPESCRIPT
