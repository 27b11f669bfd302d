"""genserve: a gRPC streaming generation daemon around vLLM's AsyncLLM.

This module owns the version and nothing else: importing it costs nothing. Start at `genserve.client` to call a daemon,
at `genserve.daemon` to read how one is put together.
"""

__version__ = "0.1.0"
