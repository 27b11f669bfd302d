"""Why the engine could not start, and why it has died.

Each of vLLM's processes logs the exception that ends it. The process that started them learns only that they failed:
its own exception says "See root cause above". So vLLM's logging configuration has an additional handler, which writes
those exceptions to a file for as long as the engine runs.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from genserve.engine.vllm.start.progress import ProgressHandler
from genserve.process.leftovers import prefix

# internal: what vLLM 0.32 logs with the exception, or of the process, that ends an engine. A test in tests/unit/engine/
# vllm/start/test_failure.py fails if vLLM's sources do not have one of them any more.
FAILED_TO_START = "failed to start."
"""EngineCore or a worker: its exception ends the start."""
FATAL = "EngineCore encountered a fatal error."
RAISED = "WorkerProc hit an exception."
"""A worker lives on; EngineCore may end because of it, with its text."""
DIED = "died unexpectedly"
"""A worker. There is no exception to report."""
_POINTS_ELSEWHERE = ("root cause", "Executor failed.")
_OF_WORKER = re.compile("Worker failed with error '(.*?)(?:', please check|$)")
_MAX_LENGTH = 2000
_MAX_REPORT_BYTES = 256 << 10


class EngineStartError(RuntimeError):
    """The engine could not start. The text is one line with the reason."""


class EngineConfigError(EngineStartError):
    """It never will with these flags and this model."""


@contextmanager
def configuring(model: str) -> Iterator[None]:
    """Turns what is refused within the block into an EngineConfigError: before any process of the engine starts.
    `model` is what --model says. What a hub says of its files may be otherwise the next time, but not that there is no
    such model."""
    try:
        yield
    except EngineStartError as error:
        raise EngineConfigError(str(error)) from error
    except (OSError, ValueError) as error:
        is_final = os.path.exists(model) if isinstance(error, ValueError) else _has_no_repository(error)
        if not is_final:
            raise
        raise EngineConfigError(naming(model, in_one_line(error))) from error


class ReportHandler(logging.Handler):
    """Writes to the file `path` what ends an engine: a line for each record, "+" before the words of a process that
    ends and "-" before those of one that does not."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Does nothing without the file, which exists as long as the daemon has the engine."""
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and message.endswith((FAILED_TO_START, FATAL, RAISED)):
            line = f"{'-' if message.endswith(RAISED) else '+'}{in_one_line(error)}\n"
        elif error is None and DIED in message:
            line = f"+{' '.join(message.split())}\n"
        else:
            return
        with suppress(OSError):  # the process that ends has more to do than to tell why
            report = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                # What vLLM survives, such as a wake-up without memory, may be repeated for days.
                if os.fstat(report).st_size > _MAX_REPORT_BYTES:
                    os.ftruncate(report, 0)
                os.write(report, line.encode())
            finally:
                os.close(report)


class Report:
    """The reasons that the engine's processes have written down at their ends, until `close`."""

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix=prefix("start"))
        self.directory = Path(self._directory.name)
        self.path = self.directory / "report"
        """Where handlers write."""
        self.path.touch()

    def cause(self) -> str:
        """The words of the process that ended first; "" if none has told. If a rank fails, the others fail after it,
        because their connections end."""
        ends, survived = self._read()
        return next(filter(None, (_root_of(line, survived) for line in ends)), "")

    def explained(self, found: str) -> str:
        """The cause of the engine's death; `found` is the error that showed it."""
        return self.cause() or _root_of(found, self._read()[1]) or found

    def _read(self) -> tuple[list[str], list[str]]:
        """The reasons of processes that ended, and the messages of those that lived on."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:  # whoever cleans up temporary files has removed it
            return [], []
        ends, survived = ([line[1:] for line in lines if line.startswith(mark)] for mark in "+-")
        return ends, survived

    def close(self) -> None:
        """Removes the file: what is logged later concerns nobody."""
        self._directory.cleanup()


def _root_of(line: str, survived: Sequence[str]) -> str:
    """What a process said at its end, or what the worker said that it means; "" if it only points elsewhere."""
    if not any(each in line for each in _POINTS_ELSEWHERE):
        return line
    if (told := _OF_WORKER.search(line)) is None:
        return ""
    words = told[1]
    return next((each for each in reversed(survived) if words in each), words)


@contextmanager
def explained(
    logging_config: Mapping[str, Any],
    use: Callable[[str], None],
    model: str,
    report: Report,
    progress_path: str = "",
) -> Iterator[None]:
    """Turns an exception within the block into an EngineStartError, which names the root cause.

    `logging_config` is what vLLM would pass to logging.config.dictConfig; `use` makes it read this from a JSON file
    instead. `model` is what --model says. `report` gets what ends the processes, also after the block.
    `progress_path`: where a Progress listens, if one does.
    """
    config = report.directory / "logging.json"
    reporting = _with_handler(logging_config, "genserve", ReportHandler, str(report.path))
    if progress_path:
        reporting = _with_handler(_at_least_info(reporting), "genserve-progress", ProgressHandler, progress_path)
    config.write_text(json.dumps(reporting))
    use(str(config))
    try:
        yield
    except EngineStartError:
        raise
    except Exception as error:
        raise EngineStartError(naming(model, report.cause() or in_one_line(error))) from error


def in_one_line(error: BaseException) -> str:
    """The class and text of an error, or pydantic's messages without repetitions. ValueError is omitted: its text is
    for users, and its name tells them nothing."""
    if callable(details := getattr(error, "errors", None)):
        # pydantic puts the class of an exception of a check before its text.
        text = "; ".join(re.sub("^(Value error|Assertion failed), ", "", each["msg"]) for each in details())
    elif not str(error):
        text = type(error).__name__
    else:
        text = str(error) if type(error) in (ValueError, EngineStartError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_LENGTH]


def naming(model: str, reason: str) -> str:
    """The reason in one line, with the model if it is about files that cannot be loaded: transformers and the hub raise
    OSError without a number for these, and do not always say whose files they are."""
    kind = f"{OSError.__name__}: "
    if not reason.startswith(kind) or reason.startswith(f"{kind}[Errno"):
        return reason
    words = reason.removeprefix(kind)
    return words if model in words else f"--model {model}: {words}"


def _has_no_repository(error: BaseException | None) -> bool:
    """Whether the hub has no model of this name, none for this user, or can have none."""
    while error is not None:
        if isinstance(error, RepositoryNotFoundError | HFValidationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _with_handler(base: Mapping[str, Any], name: str, kind: type[logging.Handler], path: str) -> dict[str, Any]:
    logger = base["loggers"]["vllm"]
    handler = {"class": f"{kind.__module__}.{kind.__name__}", "path": path}
    return {
        **base,
        "handlers": {**base["handlers"], name: handler},
        "loggers": {**base["loggers"], "vllm": {**logger, "handlers": [*logger["handlers"], name]}},
    }


def _at_least_info(base: Mapping[str, Any]) -> dict[str, Any]:
    """The logger lets INFO pass, to handlers with levels of their own."""
    logger = base["loggers"]["vllm"]
    level = logger["level"] if logging.getLevelNamesMapping()[logger["level"]] <= logging.INFO else "INFO"
    return {**base, "loggers": {**base["loggers"], "vllm": {**logger, "level": level}}}
