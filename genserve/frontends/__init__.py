"""Processes that serve GenerationService beside the daemon, each with its own global interpreter lock: the front ends.

Each one is a client of the engine by itself: requests and tokens never pass the daemon. The daemon alone pauses,
pushes, loads adapters and drains. It shares its state with them as words in memory, and asks them for the rest over a
link. `genserve.daemon.frontend` is the process.
"""
