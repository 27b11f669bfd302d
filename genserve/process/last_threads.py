"""The end of a process, whatever its threads are at."""

import os
import threading
import time

from genserve.observe.notices import say


def exit_within(seconds: float, status: int, failure: str = "") -> None:
    """Has this process exit with `status` after so many seconds, unless it ends by itself before; `failure` is the last
    that it says then.

    Python waits at its end for the threads in which files are read, and a file on a host that is gone may never answer.
    Call it when nothing is left to be done.
    """

    def end() -> None:
        time.sleep(seconds)
        try:
            say("a thread that reads files has not ended: exits without it")
            if failure:
                say(failure)
        finally:  # stderr may be closed
            os._exit(status)

    threading.Thread(target=end, name="genserve-exit", daemon=True).start()
