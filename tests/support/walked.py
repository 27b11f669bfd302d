"""`python -m tests.support.walked LOG COMMAND...`: genserve, which notes each of its own functions that is called.

SIGUSR1 begins a walk. SIGUSR2 ends it, and writes to LOG a line of JSON for each call since: the file below the
checkout, and the qualified name. A coroutine that goes on after an await is called once more, as it costs the same.
"""

import json
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType

from genserve.cli import main

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "vllm/v1/engine/async_llm.py"
"""Where a request leaves genserve: calls of this file are noted too."""
_OURS, _STUBS = f"{ROOT}/genserve/", f"{ROOT}/genserve/v1/"


class Walk:
    """The calls since a walk began, in order."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._calls: list[CodeType] = []

    def begin(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal that begins a walk."""
        self._calls = []
        self._log.with_suffix(".begun").touch()
        sys.setprofile(self._note)

    def end(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal that ends it."""
        sys.setprofile(None)
        calls = [(code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname) for code in self._calls]
        part = self._log.with_suffix(".part")
        part.write_text("\n".join(map(json.dumps, calls)))
        part.replace(self._log)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call" and (file.startswith(_OURS) or file.endswith(ENGINE)) and not file.startswith(_STUBS):
            self._calls.append(code)


if __name__ == "__main__":
    walk = Walk(Path(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, walk.begin)
    signal.signal(signal.SIGUSR2, walk.end)
    sys.exit(main())
