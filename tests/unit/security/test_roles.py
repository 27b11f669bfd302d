"""Every method of every service has its roles, and nothing else has."""

from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from genserve.rpc.reflection import V1_SERVICE_NAME
from genserve.security.roles import FIELDS, METHODS, OPENABLE, Role, methods_of
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, weights_pb2

FILES = (generation_pb2, weights_pb2, control_pb2, fleet_pb2, health_pb2, reflection_pb2, channelz_pb2)


def declared() -> set[str]:
    """The methods that the services of a daemon and a router declare."""
    services = [each for file in FILES for each in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    return methods | {f"/{V1_SERVICE_NAME}/ServerReflectionInfo"}


def test_every_method_has_its_roles() -> None:
    """A method that is added to a proto file fails here until the table says who may call it."""
    assert set(METHODS) == declared()
    assert all(METHODS.values())


def test_every_field_with_roles_of_its_own_is_there_and_takes_roles_away() -> None:
    """It may be left out by some who may call the method."""
    known = {
        f"/{service.full_name}/{method.name}": method.input_type.fields_by_name
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    for name, fields in FIELDS.items():
        assert set(fields) <= set(known[name].keys())
        assert all(roles < METHODS[name] for roles in fields.values())


def test_only_a_trainer_changes_or_reads_weights() -> None:
    changing = {name for name, roles in METHODS.items() if roles == {Role.TRAINER}}
    assert {name.rpartition("/")[2] for name in changing} == {
        "PushWeights", "LoadWeights", "CommitPush", "PullWeights",
        "InitWeightTransfer", "StartWeightUpdate", "UpdateWeights", "FinishWeightUpdate",
    }  # fmt: skip


def test_role_generate_neither_pauses_nor_pushes() -> None:
    may = {name.rpartition("/")[2] for name, roles in METHODS.items() if Role.GENERATE in roles}
    assert may.isdisjoint({"Pause", "Resume", "Sleep", "WakeUp", "PushWeights", "LoadLora", "DrainReplica"})


def test_what_a_flag_opens_is_health_and_reflection() -> None:
    opened = methods_of(OPENABLE)
    assert opened and not any("genserve" in name for name in opened)
    assert methods_of(()) == frozenset()
