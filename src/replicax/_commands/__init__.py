"""The command `replicax` and its subcommands. It starts without JAX."""

from replicax._commands.command_line import main

__all__ = ["main"]
