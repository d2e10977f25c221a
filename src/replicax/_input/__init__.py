"""Distributed datasets: a share of each global batch on every replica's device."""
