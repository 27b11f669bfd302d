"""The form of what genserve's modules log: that of the daemon's other lines on stderr. As text for people, or as one
JSON object on a line for programs, with what the running call is about, which asyncio keeps for each task."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

PREFIX: Final = "genserve: "

LEVELS: Final = ("warning: ", "error: ")
"""What follows the prefix in a line that was logged. It explains what happens, and never why a daemon ends."""

FORMATS: Final = ("text", "json")
TEXT, JSON = FORMATS
_LOGGER: Final = "genserve"
_FORM: Final = f"{PREFIX}%(lowered)s: %(message)s"

_VARIABLE: Final = "GENSERVE_LOG_FORMAT"
"""Tells the form to processes that this one starts."""

_MAX_CHARS: Final = 256
METHOD: Final = ContextVar("method", default="")
"""Of the running call. asyncio keeps these fields for each task, and for the tasks that it starts."""
REQUEST_ID: Final = ContextVar("request_id", default="")
PUSH_ID: Final = ContextVar("push_id", default="")
_FIELDS: Final = (METHOD, REQUEST_ID, PUSH_ID)


class JsonFormatter(logging.Formatter):
    """A record as one line: time, level, logger and message, what the running call is about, and the traceback."""

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
    """A line in JSON; `created_s` in seconds of the epoch."""
    time = datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "logger": logger, "message": message, **noted(), **fields}
    # The names of files need not be text. In ASCII, because stderr escapes what it cannot write as JSON does not.
    return json.dumps({key: value.encode(errors="backslashreplace").decode() for key, value in line.items()})


def is_json() -> bool:
    """Whether this process writes JSON."""
    return os.environ.get(_VARIABLE) == JSON


def write_log_lines(log_format: str | None = None, level: int = logging.NOTSET) -> None:
    """Writes what genserve's modules log to stderr, unless the user's configuration of logging does. Call it in each
    process that logs; one that is forked from it has it too. The form is that of this process and of those that it
    starts, None = as the one that started it. As JSON, lines of libraries and Python's warnings have it too."""
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
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if is_json() else _TextFormatter())
    logger.addHandler(handler)
    if is_json():
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(handler)


def as_text(line: str) -> str:
    """A line that a process of genserve has written as JSON, as it would have been as text; any other line as it is."""
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
    """The block is about one request of several that its task serves."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def noted() -> dict[str, str]:
    """The fields that are known, shortened: ids come from clients."""
    known = {field.name: field.get() for field in _FIELDS}
    return {name: value[:_MAX_CHARS] for name, value in known.items() if value}
