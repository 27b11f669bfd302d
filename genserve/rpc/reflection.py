"""Server reflection, so that grpcurl and similar tools need no proto files."""

from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1_SERVICE_NAME = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Registers reflection of these services, and of itself, under both names that clients use.

    The messages of v1 are those of v1alpha byte for byte; only the name differs, and the package has no stubs for it.
    """
    servicer = reflection.aio.ReflectionServicer([*service_names, reflection.SERVICE_NAME])
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
            for name in (reflection.SERVICE_NAME, V1_SERVICE_NAME)
        ]
    )
