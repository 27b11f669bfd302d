"""How much memory versions of the weights take, and whether they fit a machine."""
