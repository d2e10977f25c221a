"""Which processes make up a cluster: how that is described, where it is read from, and what can be wrong with it."""
