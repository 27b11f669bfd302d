"""A router: one endpoint for many daemons, which are its replicas.

The router keeps nothing on disk. What it has to know it is told by the replicas, and after a restart it asks them
again.
"""
