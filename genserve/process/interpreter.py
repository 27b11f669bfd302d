"""What the daemon and each process that it spawns set of the interpreter, when this module is imported: before anything
large is."""

import atexit
import gc

# Objects allocated between collections: Python's default of 700 is less than one step of the engine allocates and
# frees, and a tenth of the start goes into collections that find nothing in what vLLM imports.
gc.set_threshold(20_000)
# The interpreter collects twice when it ends: with torch and vLLM this takes seconds, and at a shutdown one process
# waits for the other.
atexit.register(gc.freeze)
