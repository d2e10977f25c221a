"""`replicax launch` and `rx.launch`: start the workers of a job, and act as one with them.

`replicax docs how-to/launch` is the guide; `replicax launch --help` lists the options. `python -m replicax.launch` is
the same command.
"""
