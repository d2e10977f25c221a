"""The nodes of datasets: a class for each source and each transformation. `node.py` says what a node is."""
