"""Refuses calls of those who may not make them, before their messages are read."""

import inspect
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from genserve.errors import GenserveError, PermissionDeniedError, RateLimitedError, UnauthenticatedError
from genserve.rpc.handlers import Context, Continuation, Handler, WrappedHandlers, behavior_of, refusing, with_behavior
from genserve.rpc.status import to_status
from genserve.security.access import MAX_TOKEN_CHARS, Principal, Rate, calling, tell_calling
from genserve.security.roles import FIELDS, METHODS, Role

SansOf = Callable[[Context], Iterable[str]]

_SCHEME: Final = "bearer "
_SAN_KEY: Final = "x509_subject_alternative_name"


class Callers(Protocol):
    """The callers as they are listed now."""

    @property
    def has_certificates(self) -> bool:
        """Whether certificates are listed."""

    def of_token(self, token: str) -> Principal | None:
        """The caller with this token."""

    def of_certificate(self, sans: Iterable[str]) -> Principal | None:
        """The caller with a certificate for these subject alternative names."""


def certificate_sans(context: Context) -> tuple[str, ...]:
    """The subject alternative names of the certificate that the caller's connection has presented."""
    return tuple(san.decode(errors="replace") for san in context.auth_context().get(_SAN_KEY, ()))


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets callers call what their roles allow. `open_methods`: need no role. `rates`: calls per second of all callers
    of a role together. `methods`: the roles of each method; one that is missing is for nobody. `sans_of`: the names in
    the certificate of whoever calls.

    A call with a token is decided about before its first message arrives. A certificate is known later: gRPC tells an
    interceptor nothing of the connection.
    """

    def __init__(
        self,
        callers: Callers,
        open_methods: Iterable[str],
        rates: Mapping[Role, float],
        methods: Mapping[str, frozenset[Role]] = METHODS,
        sans_of: SansOf = certificate_sans,
    ) -> None:
        self._callers = callers
        self._open = frozenset(open_methods)
        self._rates = {role: Rate(per_s) for role, per_s in rates.items()}
        self._methods = methods
        self._sans_of = sans_of
        self._checked = WrappedHandlers(self._checking)
        self._by_field = WrappedHandlers(_checking_fields)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """The handler of a method, or one that refuses."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        metadata = handler_call_details.invocation_metadata
        if method in self._open:
            tell_calling(self._known(metadata))
            return handler
        if method in FIELDS:
            handler = self._by_field.of(handler, method)
        try:
            token = bearer_token(metadata)
            if token is None and self._callers.has_certificates:
                return self._checked.of(handler, method)
            self._admit(self._of_token(token), method)
        except GenserveError as error:
            return refusing(error)
        return handler

    def _known(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Principal | None:
        """The caller of a method that needs no role, if the call has a valid token."""
        try:
            return self._of_token(bearer_token(metadata))
        except UnauthenticatedError:
            return None

    def _of_token(self, token: str | None) -> Principal:
        if token is None:
            raise UnauthenticatedError(
                "the call has no token: give the client token_file= or token=, the command --token-file, or either the "
                "variable GENSERVE_TOKEN_FILE, which send the metadata authorization: Bearer TOKEN"
            )
        principal = self._callers.of_token(token) if len(token) <= MAX_TOKEN_CHARS else None
        if principal is None:
            raise UnauthenticatedError("the token is unknown, or it has expired")
        return principal

    def _admit(self, principal: Principal, method: str) -> None:
        roles = _roles_for(principal, method.rpartition("/")[2], self._methods.get(method, frozenset()))
        rate = self._rates.get(roles[0])
        if rate is not None and (wait_s := rate.take(time.monotonic())):
            raise RateLimitedError(
                f"the callers with the role {roles[0].value} make more than {rate.per_s:g} calls per second",
                retry_after_s=wait_s,
            )
        tell_calling(principal)

    def _checking(self, handler: Handler, method: str) -> Handler:
        return _checked_handler(handler, lambda _, context: self._check(context, method))

    def _check(self, context: Context, method: str) -> None:
        principal = self._callers.of_certificate(self._sans_of(context))
        if principal is None:
            raise UnauthenticatedError("the call has no token, and its certificate is not listed")
        self._admit(principal, method)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The token in the metadata of a call; None if there is none. Raises UnauthenticatedError for another scheme."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if not values:
        return None
    value = values[0]
    if len(values) > 1 or not isinstance(value, str) or not value.lower().startswith(_SCHEME):
        raise UnauthenticatedError("the metadata authorization must be given once, as Bearer TOKEN")
    return value[len(_SCHEME) :].strip()


def _roles_for(principal: Principal, what: str, allowed: Container[Role]) -> list[Role]:
    """The roles with which somebody may do this. Raises PermissionDeniedError if there is none."""
    roles = [role for role in Role if role in principal.roles and role in allowed]
    if not roles:
        needed = " or ".join(role.value for role in Role if role in allowed)
        has = ", ".join(role.value for role in Role if role in principal.roles)
        raise PermissionDeniedError(
            f"{what} needs the role {needed}, and {principal.name} has {has}" if needed else f"{what} is for nobody",
            metadata={"caller": principal.name, "roles": has, "needed": needed},
        )
    return roles


def _checking_fields(handler: Handler, method: str) -> Handler:
    """The handler of a method of which some fields are not for all who may call it."""

    def check(request: Any, _: Context) -> None:
        for field, roles in FIELDS[method].items():
            if _is_set(request, field):
                _roles_for(_who_calls(), f"{method.rpartition('/')[2]} with {field}", roles)

    return _checked_handler(handler, check)


def _is_set(request: Any, field: str) -> bool:
    """Whether a field has another value than its default. What is no message is refused later."""
    return isinstance(request, Message) and any(each.name == field for each, _ in request.ListFields())


def _who_calls() -> Principal:
    caller = calling()
    if caller is None or caller.principal is None:
        raise UnauthenticatedError("the call has no known caller")
    return caller.principal


def _checked_handler(handler: Handler, check: Callable[[Any, Context], None]) -> Handler:
    """The handler, with a check of each call before it: of its request, or of the stream of them, and its context."""
    behavior = behavior_of(handler)

    async def admitted(request: Any, context: Context) -> None:
        try:
            check(request, context)
        except GenserveError as error:
            status = to_status(error)
        else:
            return
        await context.abort_with_status(status)

    async def checked(request: Any, context: Context) -> Any:
        await admitted(request, context)
        return await behavior(request, context)

    async def checked_stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await admitted(request, context)
        async for response in behavior(request, context):
            yield response

    return with_behavior(handler, checked_stream if inspect.isasyncgenfunction(behavior) else checked)
