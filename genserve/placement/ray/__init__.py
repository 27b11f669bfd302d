"""Replicas as actors of a Ray cluster, for `genserve up --ray` and `genserve route --ray`.

Ray runs in a process of its own (`python -m genserve.placement.ray`), which only this package starts: a call to Ray
that hangs, and a Ray that ends its process because the cluster is lost, must not take the router with them.

The router's process: `up`, and `process`, which starts the other one. They import no Ray.
The process that talks to Ray: `__main__`, which runs `fleet` on `cluster`. `fleet` keeps each `replica` in the place
reserved for it, or finds those of another process. An `actor` runs in a worker of Ray, beside its daemon.
Both: `settings` has what the one tells the other, and the answer. Pure: `resources`.
"""
