"""Rewriting and checking of jaxprs."""
