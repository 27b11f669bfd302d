"""Processes that receive pushes with a Python lock of their own; all decisions stay in the daemon.

A process takes PushWeights on a port of its own and opens a stream to the daemon for each one that it gets. Frames go
through as they are, except for chunks: their bytes are put into shared memory, and a PushSegment goes on. So the daemon
is spared what costs, and answers as if the client had come to it.
"""
