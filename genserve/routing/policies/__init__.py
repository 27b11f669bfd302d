"""The policies, one a module. Each orders the replicas that may serve a request, or leaves the decision to the next."""
