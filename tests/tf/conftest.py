"""The tests of `replicax.tf`, which is imported in processes of its own alone, since it changes how arrays print."""

from replicax._base.commands import front_ends

front_ends()  # imports `replicax.tf._programs` as the command does: without `replicax.tf`
