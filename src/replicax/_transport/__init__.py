"""Calls between the tasks of a cluster with parameter servers."""
