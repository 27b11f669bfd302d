"""Code that runs inside vLLM's worker processes, called through `collective_rpc`; and in `contract` what the daemon
has to know of it.

Prepares a new version of the weights beside the live one and exchanges the two. Never raises into vLLM's executor: an
error is part of the acknowledgement, because after an exception on one rank the next call would read the replies of
the other ranks to this one.
"""
