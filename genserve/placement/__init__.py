"""Where the replicas of a fleet run: `genserve up` starts them as processes on this host, or on a Ray cluster.

Stands on top of the launcher, which starts and ends one daemon, and of the router.
"""
