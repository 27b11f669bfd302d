"""What the daemon and each process that it spawns set of the interpreter, when this module is imported: before anything
large is."""

import atexit
import gc
import os

# Objects allocated between collections: Python's default of 700 is less than one step of the engine allocates and
# frees, and a tenth of the start goes into collections that find nothing in what vLLM imports.
gc.set_threshold(20_000)


def _end() -> None:
    """Called after all that others have registered, when everything has been said."""
    # The interpreter collects twice when it ends: with torch and vLLM this takes seconds, and at a shutdown one process
    # waits for the other.
    gc.freeze()
    # Libraries in C++ then print a line for each object that is left: the last line of a daemon tells why it has ended.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_end)
