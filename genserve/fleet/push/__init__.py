"""One push for all replicas: they pass it on to each other, all prepare it, and then all commit it."""
