"""Prints docs/api.md: the wire contract, from the comments of the proto files. Called by scripts/protos.

It reads a descriptor set with source info, the table of roles, the service config and the reasons of errors.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from genserve.errors import GenserveError, all_errors
from genserve.security.roles import EVERY_ROLE, METHODS, Role
from genserve.transport.timeouts import default_timeout_s, num_attempts

PACKAGE: Final = ".genserve.v1."
ORDER: Final = ("generation", "weights", "control", "fleet", "types")
WIDTH: Final = 120
_UNBROKEN: Final[dict[str, Any]] = {"break_long_words": False, "break_on_hyphens": False}

INTRODUCTION: Final = """\
# API reference

Generated from the comments in `protos/genserve/v1` by `scripts/protos`; never edited. A daemon serves
[GenerationService](#generationservice), [WeightService](#weightservice) and [ControlService](#controlservice); a router
serves [FleetService](#fleetservice), too. Both have `grpc.health.v1.Health`, server reflection (v1 and v1alpha) and
`grpc.channelz.v1.Channelz`. The package is `genserve.v1`. [stability.md](stability.md) says what may change.

- A field without `optional` that is not set has the value 0, false or empty, which means its default.
- In JSON, as [grpcurl and buf](cookbook.md) take it, names are as here or in camelCase, a Duration is `"30s"`, a
  Timestamp is RFC 3339, bytes are base64, and 64-bit numbers are strings.
- Roles are those of [security.md](security.md). They matter only if the server lists its callers.
- The deadline is that of a client's call that asks for none: see [protocol.md](protocol.md#deadlines-and-retries).
- The errors named below are in [errors.md](errors.md#reasons), with their status codes. Beside those that a call names,
  every call may end with INVALID_FIELD, MESSAGE_TOO_LARGE, RATE_LIMITED, UNAUTHENTICATED, PERMISSION_DENIED, DRAINING,
  ENGINE_DEAD, UNSUPPORTED, DEADLINE_EXCEEDED or INTERNAL.
"""


@dataclass(frozen=True)
class Reference:
    """The files of the contract, in the order of the page, and the comments by the names that they are about."""

    files: list[FileDescriptorProto]
    comments: dict[str, str]
    linked: frozenset[str]
    reasons: frozenset[str]

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """From what protoc has described."""
        described = FileDescriptorSet.FromString(path.read_bytes())
        by_name = {Path(file.name).stem: file for file in described.file if file.package == PACKAGE.strip(".")}
        files = [by_name[name] for name in ORDER]
        comments = {name: comment for file in files for name, comment in _comments(file)}
        names: list[str] = []
        for file in files:
            names += (each.name for each in file.message_type)
            names += (each.name for each in file.enum_type)
            for service in file.service:
                names += (service.name, *(method.name for method in service.method))
        assert len(set(map(str.lower, names))) == len(names), "two headings would have one anchor"
        # A name of one hump may be meant as the word that it is.
        linked = frozenset(name for name in names if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}", name))
        return cls(
            files, comments, linked, frozenset({GenserveError.reason, *(error.reason for error in all_errors())})
        )

    def text(self) -> str:
        """The page."""
        parts = [INTRODUCTION]
        for file in self.files:
            for service in file.service:
                parts += self._service(service)
        parts.append("## Messages and enums")
        for file in self.files:
            for message in file.message_type:
                parts += self._message(message)
            for enum in file.enum_type:
                parts += self._enum(enum)
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _service(self, service: ServiceDescriptorProto) -> Iterator[str]:
        yield f"## {service.name}"
        yield self._paragraph(self.comments[service.name])
        yield "\n".join(_wrapped(" · ".join(_link(f"{PACKAGE}{method.name}") for method in service.method)))
        for method in service.method:
            yield f"### {method.name}"
            request, response = _link(method.input_type), _link(method.output_type)
            sent, answered = "stream of " * method.client_streaming, "stream of " * method.server_streaming
            yield f"{sent}{request} → {answered}{response}"
            comment, _, errors = self.comments[f"{service.name}.{method.name}"].partition("\n\nErrors: ")
            yield self._paragraph(comment)
            yield "\n".join(self._facts(service.name, method, errors))

    def _facts(self, service: str, method: MethodDescriptorProto, errors: str) -> Iterator[str]:
        name = f"/{PACKAGE.strip('.')}.{service}/{method.name}"
        if (allowed := METHODS.get(name)) is None:
            raise SystemExit(f"genserve/security/roles.py has no row for {name}: who may call it?")
        names = "every role" if allowed == EVERY_ROLE else ", ".join(role.value for role in Role if role in allowed)
        timeout_s = default_timeout_s(service, method.name)
        timeout = "none" if timeout_s is None else f"{timeout_s:g} s"
        attempts = num_attempts(service, method.name)
        retried = f"; gRPC tries it up to {attempts} times if the daemon is UNAVAILABLE" if attempts > 1 else ""
        yield f"- Roles: {names}."
        yield f"- Deadline: {timeout}{retried}."
        further = sorted(self._reasons_of(method.input_type, set()) - set(self._reasons(errors)))
        if further:
            errors += ("" if errors == "" else " ") + f"See the fields of its request for {', '.join(further)}."
        if errors:
            yield from textwrap.wrap(f"- Errors: {self._linked(errors)}", WIDTH, subsequent_indent="  ", **_UNBROKEN)

    def _reasons(self, comment: str) -> list[str]:
        return [word for word in re.findall(r"\b[A-Z][A-Z_]+\b", comment) if word in self.reasons]

    def _reasons_of(self, full_name: str, seen: set[str]) -> set[str]:
        """The reasons that comments of a message name, with those of the messages in it."""
        if full_name not in self._messages or full_name in seen:
            return set()
        seen.add(full_name)
        message = self._messages[full_name]
        told = set(self._reasons(self.comments[message.name]))
        for field in message.field:
            told |= set(self._reasons(self.comments[f"{message.name}.{field.name}"]))
            told |= self._reasons_of(field.type_name, seen)
        return told

    def _message(self, message: DescriptorProto) -> Iterator[str]:
        yield f"### {message.name}"
        yield self._paragraph(self.comments[message.name])
        if not message.field:
            yield "It has no fields."
            return
        rows = ["| field | type | number | meaning |", "|---|---|---|---|"]
        maps = {f"{PACKAGE}{message.name}.{nested.name}": nested for nested in message.nested_type}
        told: set[str] = set()
        for field in message.field:
            choice = _choice(message, field)
            if choice and choice not in told:
                told.add(choice)
                comment = self._cell(self.comments[f"{message.name}.{choice}"])
                rows.append(f"| one of `{choice}` | | | {comment} |")
            comment = self._cell(self.comments[f"{message.name}.{field.name}"])
            indent = "– " if choice else ""
            rows.append(f"| {indent}`{field.name}` | {_type(field, maps)} | {field.number} | {comment} |")
        yield "\n".join(rows)

    def _enum(self, enum: EnumDescriptorProto) -> Iterator[str]:
        yield f"### {enum.name}"
        yield self._paragraph(self.comments[enum.name])
        rows = ["| value | number | meaning |", "|---|---|---|"]
        for value in enum.value:
            comment = self._cell(self.comments[f"{enum.name}.{value.name}"])
            rows.append(f"| `{value.name}` | {value.number} | {comment} |")
        yield "\n".join(rows)

    @cached_property
    def _messages(self) -> dict[str, DescriptorProto]:
        """By their full names."""
        return {PACKAGE + message.name: message for file in self.files for message in file.message_type}

    def _paragraph(self, comment: str) -> str:
        return "\n".join(_wrapped(self._linked(comment)))

    def _cell(self, comment: str) -> str:
        return self._linked(comment).replace("|", "\\|").replace("\n\n", " ")

    def _linked(self, comment: str) -> str:
        """Names of several humps lead to what they name; code stays as it is."""

        def link(match: re.Match[str]) -> str:
            return f"[{match[0]}](#{match[0].lower()})" if match[0] in self.linked else match[0]

        parts = comment.split("`")
        return "`".join(part if i % 2 else re.sub(r"\b[A-Za-z0-9]+\b", link, part) for i, part in enumerate(parts))


# Source info names a place by numbers of fields in descriptor.proto, and positions among their values.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _VALUE, _METHOD, _ONEOF = 2, 2, 2, 8


def _comments(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Those of a file, each with the name of what it describes: `Message`, `Message.field`, `Message.oneof`, `Service`,
    `Service.Method`, `Enum`, `Enum.VALUE`."""
    at = {tuple(each.path): _joined(each.leading_comments) for each in file.source_code_info.location}
    for i, service in enumerate(file.service):
        yield service.name, at[_SERVICE, i]
        for j, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", at[_SERVICE, i, _METHOD, j]
    for i, message in enumerate(file.message_type):
        yield message.name, at[_MESSAGE, i]
        for j, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", at[_MESSAGE, i, _FIELD, j]
        for j, oneof in enumerate(message.oneof_decl):
            if (_MESSAGE, i, _ONEOF, j) in at:  # protoc adds one, which is nowhere in the file, for each optional field
                yield f"{message.name}.{oneof.name}", at[_MESSAGE, i, _ONEOF, j]
    for i, enum in enumerate(file.enum_type):
        yield enum.name, at[_ENUM, i]
        for j, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", at[_ENUM, i, _VALUE, j]


def _choice(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """The oneof that a field belongs to; "" = none."""
    if field.proto3_optional or not field.HasField("oneof_index"):
        return ""
    return message.oneof_decl[field.oneof_index].name


def _joined(comment: str) -> str:
    """Paragraphs with a blank line between them, each in one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in comment.split("\n\n"))


def _wrapped(text: str) -> Iterator[str]:
    """Lines of at most WIDTH, but of a table or a heading as they are. Links and code are not broken."""
    for line in text.split("\n"):
        kept = textwrap.wrap(line, WIDTH, **_UNBROKEN)
        yield from kept or [""]


def _link(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})" if full_name.startswith(PACKAGE) else name


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if (entry := maps.get(field.type_name)) is not None:
        return f"map of {_type(entry.field[0], {})} to {_type(entry.field[1], {})}"
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = _link(field.type_name) if field.type_name else name
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


if __name__ == "__main__":
    sys.stdout.write(Reference.load(Path(sys.argv[1])).text())
