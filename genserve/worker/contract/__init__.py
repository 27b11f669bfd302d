"""What the daemon and vLLM's workers agree on: the calls between them, and what both compute alike.

Loads neither torch nor vLLM, as the daemon's side imports it too. Nothing else of `worker` is imported from outside:
it runs inside vLLM's worker processes alone.
"""
