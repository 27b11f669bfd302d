"""Why the engine could not start.

Each of vLLM's processes logs the exception that ends it. The process that started them learns only that they failed:
its own exception says "See root cause above". So during a start vLLM's logging configuration has an additional handler,
which writes those exceptions to a file.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from genserve.engine.vllm.start.progress import ProgressHandler
from genserve.leftovers import prefix

_LAST_WORDS = "failed to start."
_POINTS_ELSEWHERE = "root cause"
_MAX_LENGTH = 2000


class EngineStartError(RuntimeError):
    """The engine could not start. The text is one line with the reason."""


class ReportHandler(logging.Handler):
    """Writes the exception of each "... failed to start." that vLLM logs to the file `path`, in one line."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Does nothing without the file, which exists only during the start."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not record.getMessage().endswith(_LAST_WORDS) or not os.path.exists(self._path):
            return
        with open(self._path, "a", encoding="utf-8") as report:
            report.write(f"{in_one_line(error)}\n")


@contextmanager
def explained(
    logging_config: Mapping[str, Any], use: Callable[[str], None], model: str, progress_path: str = ""
) -> Iterator[None]:
    """Turns an exception within the block into an EngineStartError, which names the root cause.

    `logging_config` is what vLLM would pass to logging.config.dictConfig; `use` makes it read this from a JSON file
    instead. `model` is what --model says. `progress_path`: where a Progress listens, if one does.
    """
    with TemporaryDirectory(prefix=prefix("start")) as directory:
        report, config = Path(directory, "report"), Path(directory, "logging.json")
        report.touch()
        reporting = _with_handler(logging_config, "genserve", ReportHandler, str(report))
        if progress_path:
            reporting = _with_handler(_at_least_info(reporting), "genserve-progress", ProgressHandler, progress_path)
        config.write_text(json.dumps(reporting))
        use(str(config))
        try:
            yield
        except EngineStartError:
            raise
        except Exception as error:
            reported = report.read_text(encoding="utf-8").splitlines()
            # The first one: if a rank fails, the others fail after it because their connections end.
            causes = [line for line in reported if _POINTS_ELSEWHERE not in line]
            raise EngineStartError(naming(model, causes[0] if causes else in_one_line(error))) from error


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
    if model in reason or not reason.startswith(kind) or reason.startswith(f"{kind}[Errno"):
        return reason
    return f"--model {model}: {reason.removeprefix(kind)}"


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
