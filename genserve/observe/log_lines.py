"""The format of what genserve's modules log, and of the daemon's other lines on stderr: text for people, or one JSON
object per line for programs, with the method, the request and the push of the running call."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from genserve.observe.last_line import ErasingHandler

PREFIX: Final = "genserve: "

LEVELS: Final = ("warning: ", "error: ")
"""What follows the prefix in a logged line. Logged lines report events, and never why a daemon ends."""

FORMATS: Final = ("text", "json")
TEXT, JSON = FORMATS
_LOGGER: Final = "genserve"
_FORM: Final = f"{PREFIX}%(lowered)s: %(message)s"

_VARIABLE: Final = "GENSERVE_LOG_FORMAT"
"""Passes the format on to processes that this one starts."""

_MAX_CHARS: Final = 256
METHOD: Final = ContextVar("method", default="")
"""Of the running call. asyncio keeps these fields per task, and copies them to the tasks that it starts."""
REQUEST_ID: Final = ContextVar("request_id", default="")
PUSH_ID: Final = ContextVar("push_id", default="")
_FIELDS: Final = (METHOD, REQUEST_ID, PUSH_ID)


class JsonFormatter(logging.Formatter):
    """A record as one line: time, level, logger, message, the fields of the running call, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json_line(record.levelname, record.name, record.getMessage(), record.created, **fields)


class _TextFormatter(logging.Formatter):
    def __init__(self, form: str = _FORM) -> None:
        super().__init__(form)

    def format(self, record: logging.LogRecord) -> str:
        record.lowered = record.levelname.lower()
        return super().format(record)


def json_line(level: str, logger: str, message: str, created_s: float, **fields: str) -> str:
    """A log line as JSON. `created_s`: Unix time."""
    time = datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "logger": logger, "message": message, **noted(), **fields}
    # Names of files need not be valid text. ASCII, because stderr escapes other characters in ways that JSON lacks.
    return json.dumps({key: value.encode(errors="backslashreplace").decode() for key, value in line.items()})


def is_json() -> bool:
    """Whether this process writes JSON."""
    return os.environ.get(_VARIABLE) == JSON


def write_log_lines(log_format: str | None = None, level: int = logging.NOTSET) -> None:
    """Writes what genserve's modules log to stderr, unless the user's configuration of logging handles it. Call it in
    each process that logs; forked processes inherit it. `log_format` is for this process and those that it starts;
    None = that of its parent. With JSON, libraries' log lines and Python's warnings are JSON too."""
    if log_format is not None:
        os.environ[_VARIABLE] = log_format
    logger = logging.getLogger(_LOGGER)
    if level:
        logger.setLevel(level)
    if is_json():
        for handler in logging.getLogger("vllm").handlers:
            handler.setFormatter(JsonFormatter())
        if logging.lastResort is not None:  # warnings of libraries: gRPC, asyncio, an exporter of spans
            logging.lastResort.setFormatter(JsonFormatter())
    if logger.hasHandlers():
        return
    handler = ErasingHandler()
    handler.setFormatter(JsonFormatter() if is_json() else _TextFormatter())
    logger.addHandler(handler)
    if is_json():
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(handler)


def as_text(line: str) -> str:
    """Converts a JSON log line of a genserve process to its text form. Returns any other line unchanged."""
    if not line.startswith("{"):
        return line
    try:
        found: Any = json.loads(line)
        logger, level, message = found["logger"], found["level"], found["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return line
    if not isinstance(logger, str) or logger.split(".")[0] != _LOGGER:
        return line
    return f"{PREFIX}{message}" if level == "INFO" else f"{PREFIX}{str(level).lower()}: {message}"


@contextmanager
def about(request_id: str) -> Iterator[None]:
    """Lines of the block name this request, one of several that its task serves."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def noted() -> dict[str, str]:
    """The known fields of the running call, shortened because ids come from clients."""
    known = {field.name: field.get() for field in _FIELDS}
    return {name: value[:_MAX_CHARS] for name, value in known.items() if value}
