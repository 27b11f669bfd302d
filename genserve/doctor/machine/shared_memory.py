"""Whether processes can share memory through /proc/PID/fd.

Workers read the daemon's arena this way, and the daemon reads the memory of trainers on its host. The second process is
`python -m` of this file: it reads the arena of the first one and provides its own.
"""

import json
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genserve.doctor.children import Children
from genserve.memory.arena import allocate_arena, map_arena

_SIZE_BYTES: Final = 1 << 16
PATTERN: Final = bytes(range(256)) * (_SIZE_BYTES // 256)
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_END_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """Errors of both directions, "" if there was none: a child reads this process's memory, and the reverse.
    `ptrace_scope` is the kernel's restriction, "" if unknown."""

    child_reads: str
    parent_reads: str
    ptrace_scope: str


async def look(children: Children) -> SharedMemoryFacts:
    """Starts a child. Raises OSError if it cannot be started, GenserveError if there is no memory."""
    arena = await allocate_arena(_SIZE_BYTES)
    try:
        arena.write(0, PATTERN)
        child = await children.start(
            sys.executable, "-m", __name__, arena.path, str(_SIZE_BYTES), stderr=PIPE, stdin=PIPE, env=os.environ
        )
        try:
            assert child.stdout is not None and child.stderr is not None
            line = await child.stdout.readline()
            if not line:
                error = (await child.stderr.read()).decode(errors="replace").strip().splitlines()[-1:]
                died = f"the child ended: {''.join(error)}"
                return SharedMemoryFacts(died, died, _ptrace_scope())
            answer = json.loads(line)
            return SharedMemoryFacts(answer["error"], _reading(answer["path"]), _ptrace_scope())
        finally:
            await children.stop(child, _END_TIMEOUT_S)
    finally:
        arena.close()


def _reading(path: str) -> str:
    """The error of reading the pattern at `path`, "" if it is there."""
    try:
        mapped = map_arena(path, _SIZE_BYTES)
    except (OSError, ValueError) as error:
        return f"{path}: {error}"
    return "" if mapped[:] == PATTERN else f"{path} contains other bytes than were written"


def _ptrace_scope() -> str:
    with suppress(OSError):
        return _YAMA.read_text().strip()
    return ""


def _child(path: str) -> None:
    """Reports how reading went and where its own memory is, and runs until it is ended."""
    own = os.memfd_create("genserve-doctor", os.MFD_CLOEXEC)
    os.write(own, PATTERN)
    print(json.dumps({"error": _reading(path), "path": f"/proc/{os.getpid()}/fd/{own}"}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _child(sys.argv[1])
