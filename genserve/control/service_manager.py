"""Messages of the daemon to systemd, or to another supervisor that sets $NOTIFY_SOCKET: one datagram of NAME=VALUE
lines at a time.

The protocol is that of sd_notify(3), which needs no library. Nobody may read what is sent: it is lost then.
"""

import asyncio
import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final, Self

from genserve.control.conditions import DaemonCondition, Phase
from genserve.control.state import StateBoard

_INTERVAL_S: Final = 10.0
_EXTENSION_S: Final = 60.0
"""By which a start or a shutdown may take longer from when it says that it goes on. vLLM bounds a start
(VLLM_ENGINE_READY_TIMEOUT_S), --drain-timeout a shutdown."""


class ServiceManager:
    """Tells the state of a daemon. `watchdog_s`: it is taken to hang after so long without a sign; 0 = never."""

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watches = watchdog_s > 0
        self._interval_s = min(_INTERVAL_S, watchdog_s / 3) if self._watches else _INTERVAL_S
        self._was_ready = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """The manager that has started this process, if there is one. The variables are removed: processes that this
        one starts are none of its business."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period_us, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if not address.startswith(("/", "@")):
            return None
        is_watched = period_us.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(period_us) / 1e6 if is_watched else 0.0)

    async def run(self, board: StateBoard) -> None:
        """Tells each change, and now and then that the daemon goes on. Never returns."""
        loop = asyncio.get_running_loop()
        told, again_at_s = "", 0.0
        while True:
            message = self.message(board)
            if message != told or loop.time() >= again_at_s:
                self._send(message)
                told, again_at_s = message, loop.time() + self._interval_s
            with suppress(TimeoutError):
                async with asyncio.timeout_at(again_at_s):
                    await board.wait_change()

    def message(self, board: StateBoard) -> str:
        """The lines to send now."""
        lines = [f"STATUS={status_of(board)}"]
        self._was_ready = self._was_ready or board.daemon_condition is DaemonCondition.SERVING
        if self._was_ready:
            lines.append("READY=1")
        if board.phase is Phase.DRAINING:
            lines.append("STOPPING=1")
        if board.phase in (Phase.STARTING, Phase.DRAINING):
            lines.append(f"EXTEND_TIMEOUT_USEC={_EXTENSION_S * 1e6:.0f}")
        # An engine that does not answer must not look alive because this process is: it would never be restarted.
        if self._watches and board.answers and board.phase is not Phase.DEAD:
            lines.append("WATCHDOG=1")
        return "\n".join(lines)

    def _send(self, message: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), self._address)


def status_of(board: StateBoard) -> str:
    """The phase and what there is to say of it, in one line."""
    phase = board.phase.value.lower()
    if board.startup is not None:
        return f"{phase}: {board.startup.step}"
    return phase if board.answers else f"{phase}: the engine does not answer"
