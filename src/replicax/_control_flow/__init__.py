"""Branches and loops of Python code as branches and loops of a program."""
