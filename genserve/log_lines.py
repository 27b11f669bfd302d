"""The form of what genserve's modules log: that of the daemon's other lines on stderr."""

import logging
from typing import Final

PREFIX: Final = "genserve: "
LEVELS: Final = ("warning: ", "error: ")
"""What follows the prefix in a line that was logged. It explains what happens, and never why a daemon ends."""

_FORM: Final = f"{PREFIX}%(lowered)s: %(message)s"


def write_log_lines() -> None:
    """Writes what genserve's modules log to stderr, unless the user's configuration of logging does. Call it in each
    process that logs; one that is forked from it has it too."""
    logger = logging.getLogger("genserve")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORM))
    handler.addFilter(_lower)
    logger.addHandler(handler)


def _lower(record: logging.LogRecord) -> bool:
    record.lowered = record.levelname.lower()
    return True
