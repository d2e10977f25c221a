"""The command `replicax compare`: one program under TensorFlow and under replicax, step by step.

`command.py` runs the program twice, `_replicax_recorder` records both runs, `comparison.py` compares the records and
`report.py` shows the result.
"""
