"""Which replica serves a request: pure functions of a request and the replicas, for a router and for clients that call
replicas themselves. What a policy remembers, its clock and its chance are passed in."""
