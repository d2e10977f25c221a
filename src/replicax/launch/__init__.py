"""`replicax launch`: starts the workers of a job, and acts as one with them.

`replicax docs how-to/launch` is the guide; `replicax launch --help` lists the options. `python -m replicax.launch` is
the same.
"""
