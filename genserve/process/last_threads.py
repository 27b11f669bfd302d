"""The end of a process, whatever its threads are at."""

import os
import sys
import threading
import time


def exit_within(seconds: float, status: int) -> None:
    """Has this process exit with `status` after so many seconds, unless it ends by itself before.

    Python waits at its end for the threads in which files are read, and a file on a host that is gone may never answer.
    Call it when nothing is left to be done.
    """

    def end() -> None:
        time.sleep(seconds)
        print("genserve: a thread has not ended: exits without it", file=sys.stderr, flush=True)
        os._exit(status)

    threading.Thread(target=end, name="genserve-exit", daemon=True).start()
