"""Conversion of Python's control flow on tensors."""
