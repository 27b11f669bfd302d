"""Processes that receive pushes, each with its own global interpreter lock. All decisions stay in the daemon.

A process receives PushWeights on its own port, and opens one stream to the daemon for each stream. It passes frames on
unchanged, except for chunks: it writes their bytes to shared memory, and sends a PushSegment instead. So the daemon
avoids the expensive part, and answers as if the client had connected to it.
"""
