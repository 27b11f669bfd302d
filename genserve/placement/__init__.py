"""Where the replicas of a fleet run: `genserve up` starts them as processes on this host.

Stands on top of the launcher, which starts and ends one daemon, and of the router.
"""
