"""Code that runs inside vLLM's worker processes, called through `collective_rpc`.

Prepares a new version of the weights beside the live one and exchanges the two. Never raises into vLLM's executor: an
error is part of the acknowledgement, because an exception on one rank would leave the other ranks' replies to be read
by the next call.
"""
