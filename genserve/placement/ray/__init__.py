"""Replicas as actors of a Ray cluster, for `genserve up --ray` and `genserve route --ray`.

Ray runs in a process of its own (`python -m genserve.placement.ray`), which only this package starts: a call to Ray
that hangs, and a Ray that ends its process because the cluster is lost, must not take the router with them. `process`
is the router's side of it and imports no Ray, like `settings`, `names`, `resources` and `carried`.
"""
