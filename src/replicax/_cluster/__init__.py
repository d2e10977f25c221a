"""Clusters: their description, the environments it is read from, and what can be wrong with it."""
