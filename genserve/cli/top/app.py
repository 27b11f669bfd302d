"""The terminal of `genserve top`: draws frames and reads keys. `screen` has the state, `feed` makes the calls."""

import asyncio
import contextlib
import signal
import time
from datetime import datetime
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import Static

from genserve.cli.top.feed import Feed, Pace
from genserve.cli.top.frame import frame
from genserve.cli.top.keys import pressed
from genserve.cli.top.lines import Line, Tone
from genserve.cli.top.screen import Screen
from genserve.client import AsyncClient

INTERRUPTED: Final = 130
_REDRAW_S: Final = 0.25
_SAMPLE_S: Final = 1.0
_STYLES: Final = {
    Tone.PLAIN: "",
    Tone.DIM: "grey58",
    Tone.STRONG: "bold",
    Tone.TITLE: "cyan",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
    Tone.GRAPH: "bright_blue",
}
_ENDS: Final = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 143, signal.SIGHUP: 129}


class TopApp(App[None]):
    """One widget, redrawn every `_REDRAW_S` seconds and after each key."""

    CSS = "Screen { background: $background; overflow: hidden; } #frame { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [Binding("ctrl+c", "interrupt", "Quit", priority=True)]

    def __init__(self, client: AsyncClient, screen: Screen, pace: Pace) -> None:
        super().__init__()
        self.state = screen
        self.feed = Feed(client, screen, pace)
        self._frame = Static(id="frame")

    def compose(self) -> ComposeResult:
        """The one widget."""
        yield self._frame

    def on_mount(self) -> None:
        """Starts the feed and the timers. Signals exit like a key does, so that the terminal is restored."""
        loop = asyncio.get_running_loop()
        for number, status in _ENDS.items():
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread, as in tests
                loop.add_signal_handler(number, partial(self.exit, return_code=status))
        self.run_worker(self.feed.run(), exit_on_error=True)
        self.set_interval(_REDRAW_S, self.draw)
        self.set_interval(_SAMPLE_S, self._sample)
        self.draw()

    def _sample(self) -> None:
        self.state.sample(time.monotonic())

    def draw(self) -> None:
        """Draws the present state."""
        width, height = self.size
        lines = frame(self.state, width, height, time.monotonic())
        self._frame.update(as_text(lines))

    def on_resize(self) -> None:
        """Redraws at the new size."""
        self.draw()

    async def on_key(self, event: events.Key) -> None:
        """Quits, saves the screen, or carries out what the key means."""
        if self.state.question is None and event.key == "q":
            self.exit()
        elif self.state.question is None and event.key == "s":
            self._save()
        elif (action := pressed(self.state, event.key, time.monotonic())) is not None:
            self.run_worker(self.feed.carry_out(action))
        self.draw()

    def action_interrupt(self) -> None:
        """Exits with the status of other commands after Ctrl-C."""
        self.exit(return_code=INTERRUPTED)

    def _save(self) -> None:
        """Saves the screen as SVG in the working directory."""
        name = f"genserve-top-{datetime.now():%Y%m%d-%H%M%S}.svg"
        try:
            self.save_screenshot(name, path=".")
        except OSError as error:
            self.state.note(f"{name} cannot be written: {error}", Tone.BAD, time.monotonic())
        else:
            self.state.note(f"saved {name}", Tone.GOOD, time.monotonic())


def as_text(lines: list[Line]) -> Text:
    """Lines in the colors of their tones."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for number, spans in enumerate(lines):
        if number > 0:
            text.append("\n")
        for span in spans:
            text.append(span.text, _STYLES[span.tone])
    return text
