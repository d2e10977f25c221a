"""Optimizers, sharded state, micro-batches."""
