"""Reducing and gathering over replicas and processes."""
