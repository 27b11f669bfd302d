"""Server reflection, so that grpcurl and similar tools need no proto files."""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from genserve.rpc.handlers import Context
from genserve.rpc.watchers import Watchers

V1_SERVICE_NAME: Final = "grpc.reflection.v1.ServerReflection"
MAX_STREAMS: Final = 64
"""Of rollout workers; `watchers.budgets` has those of others."""


class Reflection:
    """Tells what services there are, to so many callers at a time: each holds memory, and needs no role."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._servicer = reflection.aio.ReflectionServicer([*service_names, reflection.SERVICE_NAME])
        self._streams = Watchers("reflection", "end some, because a tool needs one for a moment", MAX_STREAMS)

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Context
    ) -> None:
        """Answers questions about services."""
        with self._streams.joined():
            # Any, because its stubs do not know generators.
            answering: Any = self._servicer.ServerReflectionInfo(requests, context)
            async with aclosing(answering) as answers:
                async for answer in answers:
                    await context.write(answer)


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Registers reflection of these services, and of itself, under both names that clients use.

    The messages of v1 are those of v1alpha byte for byte; only the name differs, and the package has no stubs for it.
    """
    method = grpc.stream_stream_rpc_method_handler(
        Reflection(service_names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, V1_SERVICE_NAME):
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": method})
