"""Saving, restoring and managing checkpoints."""
