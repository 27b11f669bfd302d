"""Which role may call which method: the one table. A test walks every method of every service, so that none is missing.

Pure: it loads neither gRPC nor the services.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class Role(Enum):
    """What a caller is for."""

    GENERATE = "generate"
    """A rollout worker: asks for tokens, and sees the state."""
    TRAINER = "trainer"
    """Does what GENERATE does, replaces the weights, reads them, and pauses the engine for that."""
    OPERATOR = "operator"
    """Pauses, shuts daemons and routers down, manages replicas, and gives up pushes. It neither generates nor sees
    weights."""


ROLE_NAMES: Final = tuple(role.value for role in Role)
EVERY_ROLE: Final = frozenset(Role)
HEALTH: Final = "grpc.health.v1.Health"
CHANNELZ: Final = "grpc.channelz.v1.Channelz"
REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
OPENABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"health": (HEALTH,), "reflection": REFLECTION})
"""The services that need no role if a flag says so, by their names in that flag."""

_TOKENS: Final = frozenset({Role.GENERATE, Role.TRAINER})
_WEIGHTS: Final = frozenset({Role.TRAINER})
_STEER: Final = frozenset({Role.TRAINER, Role.OPERATOR})
_OPERATE: Final = frozenset({Role.OPERATOR})

_TABLE: Final[Mapping[str, Mapping[str, frozenset[Role]]]] = {
    "genserve.v1.GenerationService": {
        "Generate": _TOKENS,
        "GenerateMany": _TOKENS,
        "Abort": EVERY_ROLE,
        "Tokenize": _TOKENS,
        "Detokenize": _TOKENS,
    },
    "genserve.v1.WeightService": {
        "PushWeights": _WEIGHTS,
        "LoadWeights": _WEIGHTS,
        "CommitPush": _WEIGHTS,
        "PullWeights": _WEIGHTS,
        "InitWeightTransfer": _WEIGHTS,
        "StartWeightUpdate": _WEIGHTS,
        "UpdateWeights": _WEIGHTS,
        "FinishWeightUpdate": _WEIGHTS,
        "GetPush": _STEER,
        "DiscardPush": _STEER,
        "GetWeights": EVERY_ROLE,
    },
    "genserve.v1.ControlService": {
        "GetStatus": EVERY_ROLE,
        "WatchStatus": EVERY_ROLE,
        "GetServerInfo": EVERY_ROLE,
        "ListLoras": EVERY_ROLE,
        "Pause": _STEER,
        "RenewPause": _STEER,
        "Resume": _STEER,
        "SetFleetState": _OPERATE,
        "ResetCache": _STEER,
        "Sleep": _STEER,
        "WakeUp": _STEER,
        "LoadLora": _STEER,
        "UnloadLora": _STEER,
        "Drain": _OPERATE,
    },
    "genserve.v1.FleetService": {
        "ListReplicas": EVERY_ROLE,
        "WatchReplicas": EVERY_ROLE,
        "AddReplica": _OPERATE,
        "RemoveReplica": _OPERATE,
        "DrainReplica": _OPERATE,
    },
    HEALTH: {"Check": EVERY_ROLE, "List": EVERY_ROLE, "Watch": EVERY_ROLE},
    CHANNELZ: {
        name: _OPERATE
        for name in (
            "GetTopChannels",
            "GetServers",
            "GetServer",
            "GetServerSockets",
            "GetChannel",
            "GetSubchannel",
            "GetSocket",
        )
    },
    **{service: {"ServerReflectionInfo": EVERY_ROLE} for service in REFLECTION},
}

METHODS: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {f"/{service}/{method}": roles for service, methods in _TABLE.items() for method, roles in methods.items()}
)
"""The roles that may call a method, by its full name as gRPC writes it."""

FIELDS: Final[Mapping[str, Mapping[str, frozenset[Role]]]] = MappingProxyType(
    {
        "/genserve.v1.WeightService/GetWeights": {"include_digests": _STEER},
        "/genserve.v1.ControlService/WatchStatus": {"router": _OPERATE},
    }
)
"""Fields of requests, by method, that only these of its roles may set: they cost the engine more than the rest of the
call, or keep others out."""


def methods_of(openable: Iterable[str]) -> frozenset[str]:
    """The methods of services by their names in OPENABLE."""
    services = {service for name in openable for service in OPENABLE[name]}
    return frozenset(method for method in METHODS if method[1:].partition("/")[0] in services)
